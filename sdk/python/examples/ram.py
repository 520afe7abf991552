#!/usr/bin/env python3
"""ram [SIZE]: a disk in the memory of this process. A process that replaces it
begins with zeroes; for users that must not see that, add `recoverable = False` to the class."""

import mmap
import sys

import sawmill


class Ram(sawmill.Device):
    """Memory that is allocated where it was written."""

    def __init__(self, size: str):
        self.size = sawmill.size_bytes(size)
        self.bytes = mmap.mmap(-1, self.size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def read(self, offset, buffer):
        buffer[:] = self.bytes[offset : offset + len(buffer)]

    def write(self, offset, data, fua):
        self.bytes[offset : offset + len(data)] = data

    def discard(self, offset, length):
        self.write_zeroes(offset, length, False)

    def write_zeroes(self, offset, length, no_unmap):
        # Pages that lie entirely inside go back to the system, and read as zeroes.
        first = min(-(-offset // mmap.PAGESIZE) * mmap.PAGESIZE, offset + length)
        end = max((offset + length) // mmap.PAGESIZE * mmap.PAGESIZE, first)
        self.bytes[offset:first] = bytes(first - offset)
        self.bytes[end : offset + length] = bytes(offset + length - end)
        if first < end:
            self.bytes.madvise(mmap.MADV_DONTNEED, first, end - first)


if __name__ == "__main__":
    sawmill.serve(Ram(sys.argv[1] if len(sys.argv) > 1 else "1G"), "ram")
