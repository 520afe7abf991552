"""Write chunks: what a device gets, what is refused, and that late writes are ignored."""

import errno
import random
import threading
import unittest
import unittest.mock

import sawmill
from mock_host import DEFAULTS
from sawmill import wire
from sawmill.chunk import ENTRY, FLAG_WRITE, Chunk
from sawmill.options import Effective
from sawmill.wire import Kind, Command
from test_plain import Case, Ram

METADATA_BYTES = DEFAULTS["metadata_bytes"]
AREA_BYTES = 4096
SECTOR = 512


def chunk_of(writes, flag=FLAG_WRITE):
    """The bytes of a chunk: (address, write_number, data)."""
    entries = b"".join(
        ENTRY.pack(at // SECTOR, len(data) // SECTOR, number, flag) for at, number, data in writes
    )
    # What follows the last entry is not zeroed.
    return entries.ljust(METADATA_BYTES, b"\xee") + b"".join(data for _, _, data in writes)


def hand_out(queue, writes, offset=0, flag=FLAG_WRITE, **more):
    raw = chunk_of(writes, flag)
    queue.memory[offset : offset + len(raw)] = raw
    return queue.send(Kind.CHUNK, 0, len(raw), offset=offset, **{"entries": len(writes), **more})


class ChunkDisk:
    """A device for chunks."""

    size, mode = "1M", "batch"

    def __init__(self):
        self.received = []

    def read(self, offset, buffer):
        buffer[:] = offset.to_bytes(8, "little") * (len(buffer) // 8)

    def write_chunk(self, chunk):
        self.received += [(*entry[:3], bytes(entry.data)) for entry in chunk.entries()]
        self.raw, self.metadata_bytes = bytes(chunk.raw), chunk.metadata_bytes

    def flush(self):
        self.received.append("flush")


class Chunks(Case):
    def test_a_device_gets_the_entries_of_a_chunk_and_its_bytes(self):
        device = ChunkDisk()
        handle, host = self.start(device)
        self.assertEqual(host.hello["mode"], "batch")
        hand_out(host.writes[0], [(512, 1, b"a" * 512), (8192, 3, b"b" * 4096)], offset=65536)
        self.assertEqual(host.writes[0].answer(), (1, 0))
        self.assertEqual(device.received, [(512, 512, 1, b"a" * 512), (8192, 4096, 3, b"b" * 4096)])
        # Parsed as in listing 4.6 of the thesis.
        self.assertEqual(int.from_bytes(device.raw[32:40], "little") * 512, 8192)
        self.assertEqual(device.raw[device.metadata_bytes :], b"a" * 512 + b"b" * 4096)
        self.assertEqual(host.reads[0].read(512, 512), (512).to_bytes(8, "little") * 64)
        host.finish()
        self.assertTrue(handle.wait())

    def test_a_chunk_that_could_not_be_stored_is_answered_with_its_errno(self):
        class Full(ChunkDisk):
            def write_chunk(self, chunk):
                raise OSError(errno.ENOSPC, "full")

        _, host = self.start(Full())
        number = hand_out(host.writes[0], [(0, 1, b"a" * 512)])
        self.assertEqual(host.writes[0].answer(), (number, errno.ENOSPC))
        host.finish()

    def test_a_flush_follows_the_chunks_before_it_though_they_are_not_answered(self):
        command, entered, go_on = [], threading.Event(), threading.Event()

        class Slow(ChunkDisk):
            def write_chunk(self, chunk):
                entered.set()
                go_on.wait()
                command.append("chunk")

            def flush(self):
                command.append("flush")

        _, host = self.start(Slow(), driver={"threads": 3})
        queue = host.writes[0]
        for n in range(2):
            hand_out(queue, [(0, n + 1, b"a" * 512)], offset=n << 16)
        flush = queue.send(Kind.FLUSH)
        entered.wait()
        go_on.set()
        answers = [queue.answer() for _ in range(3)]
        self.assertEqual((answers[-1], command), ((flush, 0), ["chunk", "chunk", "flush"]))
        host.finish()

    def test_a_device_without_flush_has_its_chunks_flushed_when_they_are_answered(self):
        _, host = self.start(Ram(), driver={"mode": "batch"}, host={"can_flush": 0})
        self.assertNotIn("can_flush", host.hello)
        self.assertEqual(host.writes[0].does(Kind.FLUSH), 0)
        host.finish()

    def test_a_chunk_that_makes_no_sense_ends_the_connection(self):
        good = [(0, 1, b"a" * 512)]
        for text, writes, more in (
            (
                "CHUNK 1 of .* more than it has room for",
                good,
                {"entries": METADATA_BYTES // 32 + 1},
            ),
            ("more than it has room for", good, {"entries": 1 << 63}),
            ("outside of the queue's memory", good, {"offset": (1 << 20) - METADATA_BYTES}),
            ("flag 3", good, {"flag": 3}),
            ("invalid entry: sector 0, sectors 0", [(0, 1, b"")], {}),
            ("sector 2048", [(1 << 20, 1, b"a" * 512)], {}),
            ("sector 7, sectors 2", [(3584, 1, b"a" * 1024)], {}),
            ("sector 1, sectors 1", good + [(512, 2, b"")], {"broken": True}),
        ):
            handle, host = self.start(ChunkDisk())
            queue, broken = host.writes[0], more.pop("broken", False)
            offset = more.pop("offset", 0)
            if broken:
                raw = bytearray(chunk_of(good))
                raw[32:64] = ENTRY.pack(1, 1, 2, FLAG_WRITE)
                queue.memory[: len(raw)] = bytes(raw)
                queue.send(Kind.CHUNK, 0, len(raw), entries=2)
            elif offset:
                queue.send(Kind.CHUNK, 0, METADATA_BYTES + 512, offset=offset, entries=1)
            else:
                hand_out(queue, writes, **more)
            with self.assertRaisesRegex(sawmill.ProtocolError, text):
                handle.wait()
            host.vanish()

    def test_a_device_for_chunks_alone_is_none_for_plain_commands(self):
        with self.assertRaisesRegex(TypeError, 'set mode="batch"'):
            sawmill.start(ChunkDisk(), mode="plain")


class Resolvers(Case):
    """Writes that are distributed to queues and arrive in any order,
    compared with what a disk would hold."""

    def random_writes(self, dice, writes_count, areas):
        """Writes in their order with their numbers, and the disk after them."""
        disk, numbers, writes = bytearray(areas * AREA_BYTES), [0] * areas, []
        for n in range(writes_count):
            area = dice.randrange(areas)
            first = dice.randrange(8)
            sectors = dice.randrange(1, 9 - first)
            numbers[area] += 1
            at, data = area * AREA_BYTES + first * SECTOR, n.to_bytes(4, "little") * (sectors * 128)
            disk[at : at + len(data)] = data
            writes.append((at, numbers[area], data))
        return writes, disk

    def chunks_of(self, dice, writes, queues):
        """Chunks with horizons, as a host closes them: (ordinal, horizon, writes)."""
        open_chunks, closed, ordinals = {}, [], 0
        for write in writes:
            queue = dice.randrange(queues)
            if queue not in open_chunks:
                ordinals += 1
                open_chunks[queue] = (ordinals, [])
            open_chunks[queue][1].append(write)
            if dice.random() < 0.3:
                ordinal, held = open_chunks.pop(queue)
                closed.append((ordinal, ordinals, held))
        closed += [(ordinal, ordinals, held) for ordinal, held in open_chunks.values()]
        return closed

    def trial(self, seed, late=True):
        dice = random.Random(seed)
        areas = dice.randrange(1, 5)
        writes, disk = self.random_writes(dice, dice.randrange(1, 120), areas)
        chunks = self.chunks_of(dice, writes, dice.randrange(1, 5))
        facts, size = wire.ControlFacts(), len(disk)
        options = Effective(True, size, 512, AREA_BYTES, 1 << 20, METADATA_BYTES, facts)
        # Some arrive almost in order, some in any order.
        window = dice.choice([2, 3, 5, len(chunks)])
        chunks.sort(key=lambda chunk: chunk[0] + dice.random() * window)
        resolver, result = sawmill.Resolver(), bytearray(len(disk))
        waiting = {ordinal for ordinal, _, _ in chunks}

        def write(address, data):
            result[address : address + len(data)] = data

        for ordinal, horizon, held in chunks:
            raw = chunk_of(held)
            floor = min(waiting)
            command = Command(Kind.CHUNK, 0, 1, 0, len(raw), 0, len(held), horizon, floor)
            resolver.apply(Chunk(memoryview(raw), command, options), write)
            waiting.discard(ordinal)
        return result == disk, resolver

    def test_chunks_in_any_command_end_as_the_writes_did(self):
        for seed in range(400):
            same, _ = self.trial(seed)
            self.assertTrue(same, f"seed {seed}")

    def test_the_test_finds_a_resolver_that_does_not_look_at_numbers(self):
        with unittest.mock.patch(
            "sawmill.resolver.free", lambda applied, start, end, _: [(start, end)]
        ):
            self.assertFalse(all(self.trial(seed)[0] for seed in range(50)))

    def test_the_test_finds_a_resolver_that_forgets_too_soon(self):
        apply = sawmill.Resolver.apply

        def hasty(resolver, chunk, write):
            chunk.floor = chunk.horizon + 1
            apply(resolver, chunk, write)

        with unittest.mock.patch.object(sawmill.Resolver, "apply", hasty):
            self.assertFalse(all(self.trial(seed)[0] for seed in range(50)))

    def test_what_nothing_older_can_follow_is_forgotten(self):
        facts = wire.ControlFacts()
        options = Effective(True, 1 << 20, 512, AREA_BYTES, 1 << 20, METADATA_BYTES, facts)
        resolver = sawmill.Resolver()
        for n in range(1, 200):
            raw = chunk_of([(n % 64 * AREA_BYTES, n, b"x" * 512)])
            command = Command(Kind.CHUNK, 0, n, 0, len(raw), 0, 1, n, n)
            resolver.apply(Chunk(memoryview(raw), command, options), lambda address, data: None)
            self.assertLessEqual(resolver.remembered(), 2)

    def test_an_ordinary_device_served_in_batches_ends_as_the_writes_did(self):
        for seed in range(10):
            dice = random.Random(seed)
            writes, disk = self.random_writes(dice, 100, 4)
            chunks = self.chunks_of(dice, writes, 2)
            dice.shuffle(chunks)
            device = Ram()
            handle, host = self.start(
                device, driver={"mode": "batch", "threads": 3, "hw_queues": 2}
            )
            self.assertEqual(host.hello["mode"], "batch")
            for n in range(0, len(chunks), 8):
                some = chunks[n : n + 8]
                for place, (_, horizon, held) in enumerate(some):
                    queue = host.writes[place % 2]
                    hand_out(queue, held, offset=place * 65536, horizon=horizon)
                for place in range(len(some)):
                    self.assertEqual(host.writes[place % 2].answer()[1], 0)
            host.finish()
            handle.wait()
            self.assertEqual(device.bytes[: len(disk)], disk)


if __name__ == "__main__":
    unittest.main()
