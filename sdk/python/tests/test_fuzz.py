"""Any bytes before the decoders: they return, or raise ProtocolError.

The bytes are the seeds of crates/fuzz, the golden packets, and changed copies of both, which are
the same in each run. Not here: sockets and the end of a connection (test_violations.py)."""

import os
import random
import struct
import time
import unittest

from sawmill import wire
from sawmill.chunk import ENTRY, FLAG_WRITE, Chunk
from sawmill.errors import ProtocolError
from sawmill.options import Effective
from sawmill.resolver import Resolver
from sawmill.host_connection import refusal
from sawmill.wire import Command, Control, Kind
from sawmill.work import METHODS, Memory, Worker
from test_plain import Able
from test_vectors import DRIVER

CORPUS = DRIVER.parent / "fuzz/corpus"
CHANGES_PER_SEED = 200
SECONDS_MAX = 5
MEMORY_BYTES = 1 << 16
EDGES = [0, 1, 511, 4096, 1 << 16, (1 << 32) - 1, 1 << 54, 1 << 63, (1 << 64) - 1]
LONG_NUMBER = wire.KIND.pack(Control.WELCOME) + b"mode=plain\nsize=" + b"9" * 5000 + b"\n"


def seeds(target, more):
    """The corpus of a target, more inputs, and changed copies of all of them."""
    inputs = [path.read_bytes() for path in sorted((CORPUS / target).iterdir())] + more
    dice = random.Random(1)
    yield from inputs
    for input_ in inputs:
        for _ in range(CHANGES_PER_SEED):
            raw = bytearray(input_)
            for _ in range(dice.randrange(1, 5)):
                change(raw, dice.choice(inputs), dice)
            yield bytes(raw)


def change(raw, other, dice):
    """Flips a bit, sets a byte or a number, cuts, repeats a stretch, or splices in another
    input."""
    if not raw:
        raw += other
        return
    at = dice.randrange(len(raw))
    match dice.randrange(6):
        case 0:
            raw[at] ^= 1 << dice.randrange(8)
        case 1:
            raw[at] = dice.randrange(256)
        case 2:
            number = struct.pack("<Q", dice.choice(EDGES))[: 1 << dice.randrange(4)]
            raw[at : at + len(number)] = number[: len(raw) - at]
        case 3:
            del raw[at:]
        case 4:
            raw[at:at] = raw[at // 2 : at]
        case 5:
            raw[at:] = other[at:]


def golden(folder):
    return [path.read_bytes() for path in sorted((DRIVER / "vectors" / folder).glob("*.bin"))]


class Fuzz(unittest.TestCase):
    def each(self, target, more, *decoders):
        """Calls each decoder with each input."""
        for raw in seeds(target, more):
            for decode in decoders:
                start = time.monotonic()
                try:
                    decode(raw)
                except ProtocolError:
                    pass
                except BaseException as error:
                    raise AssertionError(f"{decode.__name__}({raw!r})") from error
                self.assertLess(time.monotonic() - start, SECONDS_MAX, raw)

    def test_no_control_packet_raises_anything_but_a_protocol_error(self):
        def control(raw):
            kind, facts = wire.decode(raw)
            # Names come once there, and values have no zero bytes: those are encoded as spaces.
            if len({name for name, _ in facts}) == len(facts) and b"\0" not in raw[4:]:
                self.assertEqual(wire.decode(wire.encode(kind, dict(facts))), (kind, facts))

        def welcome(raw):
            options = Effective.of(wire.decode(raw)[1])
            self.assertGreaterEqual(options.size, 0)

        def refused(raw):
            refusal(wire.decode(raw)[1])

        more = [*golden("control"), LONG_NUMBER]
        self.each("driver_packet", more, control, welcome, refused)

    def test_no_command_raises_anything_but_a_protocol_error(self):
        descriptor = os.memfd_create("memory")
        os.truncate(descriptor, MEMORY_BYTES)
        memory = Memory(descriptor, MEMORY_BYTES, writable=True)
        options = Effective(True, 1 << 20, 512, 4096, 4096, 256, wire.ControlFacts())
        device = Able()
        device.write_chunk = device.write
        worker = Worker(device, options, memory, set(METHODS))

        def commands(raw):
            for command in wire.commands(raw):
                self.assertIn(str(command.number), str(command))
                call = worker.call(command)
                if command.kind == Kind.READ:
                    self.assertEqual(len(call.part), command.length)
                call.done(None)

        self.each("driver_packet", golden("command"), commands)

    def test_no_chunk_raises_anything_but_a_protocol_error(self):
        def chunk(raw):
            count, raw = (raw[0], bytearray(raw[1:])) if raw else (0, bytearray())
            metadata_bytes = min(count * ENTRY.size, len(raw))
            check(raw, count, metadata_bytes)

        def mended_chunk(raw):
            """With flags, places and lengths such that several entries have data."""
            count, raw = (raw[0], bytearray(raw[1:])) if raw else (0, bytearray())
            metadata_bytes = min(count * ENTRY.size, len(raw))
            for at in range(0, metadata_bytes - ENTRY.size + 1, ENTRY.size):
                sector, sectors, number, _ = ENTRY.unpack_from(raw, at)
                ENTRY.pack_into(raw, at, sector % 2048, 1 + sectors % 2, number, FLAG_WRITE)
            check(raw, count, metadata_bytes)

        def check(raw, count, metadata_bytes):
            options = Effective(True, 1 << 20, 512, 4096, 4096, metadata_bytes, wire.ControlFacts())
            command = Command(Kind.CHUNK, 0, 1, 0, len(raw), 0, count, 1, 1)
            decoded = Chunk(memoryview(raw), command, options)
            entries = list(decoded.entries())
            self.assertEqual(len(entries), count)
            self.assertTrue(all(len(entry.data) == entry.length for entry in entries))
            Resolver().apply(decoded, lambda address, data: None)

        more = [b"\3" + raw for raw in golden("write_chunk")]
        self.each("driver_chunk", more, chunk, mended_chunk)
