"""The golden packets of crates/driver/vectors: encoded and decoded as they are there.
crates/driver/tests/vectors/samples.rs has the same values."""

import unittest
from pathlib import Path

from sawmill import wire
from sawmill.chunk import ENTRY, FLAG_WRITE, SECTOR_BYTES, Chunk
from sawmill.options import Effective
from sawmill.wire import AGAIN, ANSWER, COMMAND, FUA, NO_UNMAP, Command, Control, ControlFacts, Kind

DRIVER = Path(__file__).parents[3] / "crates/driver"

WELCOME = {
    "protocol": 1, "name": "disk1", "generation": 2, "again": True, "mode": "batch",
    "size": 4 << 40, "blocksize": 512, "hw_queues": 2, "collision_area_size": 4096,
    "write_chunk_size": 4096, "metadata_bytes": 256,
}  # fmt: skip

CONTROLS = {
    "v1-hello": (
        Control.HELLO,
        {
            "protocol": 1, "program": "/usr/local/bin/wörk", "replace": True, "mode": "batch",
            "size": 4 << 40, "hw_queues": 2,
        },
    ),
    "v1-welcome": (Control.WELCOME, WELCOME),
    "v1-queue": (
        Control.QUEUE,
        {"queue": 1, "memory_bytes": 32 << 20, "read_memory_bytes": 16 << 20},
    ),
    "v1-attached": (Control.ATTACHED, {}),
    "v1-refused": (Control.REFUSED, {"errno": 16, "message": "disk1 has a driver"}),
    "v1-finish": (Control.FINISH, {"reason": "replaced"}),
    "v1-leave-ended": (Control.LEAVE, {"outcome": "ended"}),
    "v1-leave-failed": (
        Control.LEAVE,
        {"outcome": "failed", "message": "no backup:\nthe disk\0is full"},
    ),
    "v1-ask": (Control.ASK, {"ask": "status"}),
    "v1-answer": (
        Control.ANSWER,
        {"errno": 0, "message": "", "name": "disk1", "state": "running"},
    ),
}  # fmt: skip

# Packets with a duplicate name. Only hosts send them: nothing here encodes them.
DOORS = ControlFacts(
    [
        ("door", "nbd nbd+unix:///disk1?socket=/run/sawmill/disk1.sock"),
        ("door", "ublk /dev/ublkb0"),
    ]
)


def command(kind, number=0, address=0, length=0, offset=0, flags=0):
    """A command other than a chunk."""
    return Command(kind, flags, number, address, length, offset, 0, 0, 0)


READ = command(Kind.READ, 0x0102030405060708, 0x0A0B0C0D0E00, 0x1200, 0x21000)
WRITE = command(Kind.WRITE, 0x1112131415161718, 0x1A1B1C1D1E00, 0x600, 0x3000)
FLUSH = command(Kind.FLUSH, 0xF1F2F3F4F5F6F7F8)
DISCARD = command(Kind.DISCARD, 0x2122232425262728, 0x2A2B2C2D2E00, 0x304050600)
ZEROES = command(Kind.WRITE_ZEROES, 0x3132333435363738, 0x2A2B2C2D2E00, 0x304050600)
CHUNK = Command(
    kind=Kind.CHUNK,
    flags=AGAIN,
    number=0x4142434445464748,
    address=0,
    length=2304,
    offset=0x2000,
    entries=3,
    horizon=0x5152535455565758,
    floor=0x6162636465666768,
)

COMMANDS = {
    "v1-read": [READ],
    "v1-write-fua": [WRITE._replace(flags=FUA)],
    "v1-flush": [FLUSH],
    "v1-discard": [DISCARD],
    "v1-write-zeroes": [ZEROES],
    "v1-keep-space": [ZEROES._replace(flags=NO_UNMAP)],
    "v1-chunk-again": [CHUNK],
    "v1-end": [command(Kind.END)],
    "v1-two": [WRITE._replace(flags=AGAIN), FLUSH],
}

ANSWERS = {
    "v1-done": [(0x0102030405060708, 0, 0)],
    "v1-no-space": [(0x1112131415161718, 28, 0)],
    "v1-two": [(0x0102030405060708, 0, 0), (0xF1F2F3F4F5F6F7F8, 110, 0)],
}

BORDER = 0x10203040000  # between two collision areas
# Address, length, write_number, and the byte that the data repeat.
ENTRIES = [
    (BORDER - 512, 512, 0x0102030405060708, b"\xa1"),
    (BORDER, 1024, 0x1112131415161718, b"\xb2"),
    (BORDER + 512, 512, 0x111213141516171A, b"\xc3"),
]


def lines(facts):
    """These facts as a reader decodes them: one line of text each."""
    texts = (str(int(v)) if isinstance(v, bool) else str(v) for v in facts.values())
    return ControlFacts(zip(facts, (text.replace("\n", " ").replace("\0", " ") for text in texts)))


@unittest.skipUnless(DRIVER.is_dir(), f"the golden packets are in {DRIVER}, which is not here")
class Golden(unittest.TestCase):
    def packets(self, folder, names):
        """The golden packets of a folder, which has exactly those of these names."""
        files = sorted((DRIVER / "vectors" / folder).glob("*.bin"))
        self.assertEqual([file.stem for file in files], sorted(names))
        return {file.stem: file.read_bytes() for file in files}

    def test_control_packets_are_the_golden_ones(self):
        packets = self.packets("control", [*CONTROLS, "v1-doors"])
        self.assertEqual(wire.decode(packets.pop("v1-doors")), (Control.DOORS, DOORS))
        for name, packet in packets.items():
            with self.subTest(name):
                kind, facts = CONTROLS[name]
                self.assertEqual(wire.encode(kind, facts), packet)
                self.assertEqual(wire.decode(packet), (kind, lines(facts)))

    def test_commands_are_the_golden_ones(self):
        for name, packet in self.packets("command", COMMANDS).items():
            with self.subTest(name):
                encoded = b"".join(COMMAND.pack(*command) for command in COMMANDS[name])
                self.assertEqual(encoded, packet)
                self.assertEqual(list(wire.commands(packet)), COMMANDS[name])

    def test_answers_are_the_golden_ones(self):
        for name, packet in self.packets("answer", ANSWERS).items():
            with self.subTest(name):
                encoded = b"".join(ANSWER.pack(*answer) for answer in ANSWERS[name])
                self.assertEqual(encoded, packet)

    def test_a_write_chunk_is_the_golden_one(self):
        (packet,) = self.packets("write_chunk", ["v1-overlap"]).values()
        options = Effective.of(lines(WELCOME))
        heads, data = b"", b""
        for address, length, write_number, byte in ENTRIES:
            sectors = (address // SECTOR_BYTES, length // SECTOR_BYTES)
            heads += ENTRY.pack(*sectors, write_number, FLAG_WRITE)
            data += byte * length
        metadata = heads.ljust(options.metadata_bytes, b"\xee")
        self.assertEqual((metadata + data).ljust(options.chunk_bytes, b"\xee"), packet)
        self.assertEqual(CHUNK.length, len(metadata + data))
        chunk = Chunk(memoryview(packet), CHUNK, options)
        found = [(*entry[:3], bytes(entry.data)) for entry in chunk.entries()]
        expected = [(*entry[:3], entry[3] * entry[1]) for entry in ENTRIES]
        self.assertEqual(found, expected)
        self.assertEqual((chunk.horizon, chunk.floor), (CHUNK.horizon, CHUNK.floor))
        self.assertTrue(chunk.again)


if __name__ == "__main__":
    unittest.main()
