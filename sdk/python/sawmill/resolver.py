"""Late writes are ignored (BUSE thesis, section 4.3.2): chunks of several queues are applied in any
order, by several threads, and every byte ends with what was written last.

Invariants: two writes of one collision area are never applied at the same time; a byte is never
written with an older number after a newer one. Applied writes are remembered as long as an
older one may still arrive.

Not here: where numbers, horizons and floors come from (the host; docs/format/write_chunk.md).
"""

import heapq
import threading
from collections.abc import Callable

from .chunk import Chunk

SHARDS = 64

Range = tuple[int, int]


class Resolver:
    """One per device, for all of its queues and threads."""

    def __init__(self) -> None:
        self._locks = [threading.Lock() for _ in range(SHARDS)]
        # The remembered writes of each area: write_number -> (start, end).
        self._areas: list[dict[int, dict[int, Range]]] = [{} for _ in range(SHARDS)]
        self._lock = threading.Lock()
        self._floor = 0
        # What to forget when the floor has passed the horizon of its chunk.
        self._chunks: list[tuple[int, int, list[tuple[int, int]]]] = []
        self._applied = 0

    def apply(self, chunk: Chunk, write: Callable[[int, memoryview], object]) -> None:
        """Applies those parts of a chunk that nothing newer has written: `write` gets the address
        of each, and its bytes. An exception of `write` is passed on; what was not written then
        counts as not applied."""
        written: list[tuple[int, int]] = []
        try:
            for address, length, write_number, data in chunk.entries():
                area = address // chunk.area_bytes
                with self._locks[area % SHARDS]:
                    applied = self._areas[area % SHARDS].setdefault(area, {})
                    for start, end in free(applied, address, address + length, write_number):
                        write(start, data[start - address : end - address])
                    remember(applied, address, address + length, write_number)
                written.append((area, write_number))
        finally:
            self._forget(chunk, written)

    def remembered(self) -> int:
        """The number of remembered writes, for tests and diagnosis."""
        return sum(len(applied) for areas in self._areas for applied in areas.values())

    def _forget(self, chunk: Chunk, written: list[tuple[int, int]]) -> None:
        old = []
        with self._lock:
            self._applied += 1
            heapq.heappush(self._chunks, (chunk.horizon, self._applied, written))
            self._floor = max(self._floor, chunk.floor)
            while self._chunks and self._chunks[0][0] < self._floor:
                old.append(heapq.heappop(self._chunks)[2])
        for area, write_number in (pair for pairs in old for pair in pairs):
            with self._locks[area % SHARDS]:
                areas = self._areas[area % SHARDS]
                applied = areas.get(area, {})
                applied.pop(write_number, None)
                if not applied:
                    areas.pop(area, None)


def free(applied: dict[int, Range], start: int, end: int, write_number: int) -> list[Range]:
    """The parts of a range that no newer write has written."""
    left = [(start, end)]
    for other, (from_, to) in applied.items():
        if other > write_number and from_ < end and start < to:
            parts = (part for s, e in left for part in ((s, min(e, from_)), (max(s, to), e)))
            left = [(s, e) for s, e in parts if s < e]
    return left


def remember(applied: dict[int, Range], start: int, end: int, write_number: int) -> None:
    """Remembers a write, and drops older ones inside it, which no longer matter."""
    inside = [n for n, (s, e) in applied.items() if n < write_number and start <= s and e <= end]
    for number in inside:
        del applied[number]
    applied[write_number] = (start, end)
