"""A write chunk: many writes in one piece of shared memory. Defined in docs/format/write_chunk.md.

Invariant: a chunk is checked as a whole before a device sees it. An invalid chunk is the host's
fault, and ends the connection.

Not here: which of two writes is newer (resolver.py).
"""

import struct
from collections.abc import Iterator
from typing import NamedTuple

from .errors import ProtocolError
from .options import Effective
from .wire import AGAIN, Command

ENTRY = struct.Struct("<QQQQ")
SECTOR_BYTES = 512
FLAG_WRITE = 1


class ChunkEntry(NamedTuple):
    """One write, or the part of it that lies in one collision area."""

    address: int
    length: int
    write_number: int
    data: memoryview


class Chunk:
    """The argument of `write_chunk`. Its memory is valid only until that returns.

    raw           the chunk's bytes: `metadata_bytes` with entries of 32 bytes, then their data
    count         the number of entries
    metadata_bytes, area_bytes    of every chunk of this device
    horizon, floor                how long to remember what was written (resolver.py)
    again         a former driver had it
    """

    def __init__(self, raw: memoryview, command: Command, options: Effective):
        self.raw = raw
        self.count = command.entries
        self.metadata_bytes = options.metadata_bytes
        self.area_bytes = options.area_bytes
        self.horizon, self.floor = command.horizon, command.floor
        self.again = bool(command.flags & AGAIN)
        self._entries = self._checked(command, options.size)

    def entries(self) -> Iterator[ChunkEntry]:
        """The writes of the chunk, in order."""
        raw, at = self.raw, self.metadata_bytes
        for address, length, write_number in self._entries:
            yield ChunkEntry(address, length, write_number, raw[at : at + length])
            at += length

    def _checked(self, command: Command, size_bytes: int) -> list[tuple[int, int, int]]:
        end = self.count * ENTRY.size
        if end > self.metadata_bytes or self.metadata_bytes > len(self.raw):
            raise ProtocolError(f"{command} has {self.count} entries: more than it has room for")
        room = len(self.raw) - self.metadata_bytes
        found = []
        for sector, sectors, write_number, flag in ENTRY.iter_unpack(self.raw[:end]):
            address, length = sector * SECTOR_BYTES, sectors * SECTOR_BYTES
            room -= length
            in_one_area = address // self.area_bytes == (address + length - 1) // self.area_bytes
            in_place = room >= 0 and address + length <= size_bytes
            if flag != FLAG_WRITE or length == 0 or not in_one_area or not in_place:
                entry = f"sector {sector}, sectors {sectors}, flag {flag}"
                raise ProtocolError(f"{command} has an invalid entry: {entry}")
            found.append((address, length, write_number))
        return found
