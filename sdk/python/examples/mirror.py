#!/usr/bin/env python3
"""mirror A B: two files or devices of one size. A holds the bytes, B each byte XOR 0xFF; a read
checks that they agree."""

import errno
import os
import sys

import sawmill

INVERSE = bytes(byte ^ 0xFF for byte in range(256))


class Mirror(sawmill.Device):
    """A write is answered when both have it, a flush when both have flushed."""

    def __init__(self, one: str, other: str):
        self.one, self.other = (os.open(path, os.O_RDWR) for path in (one, other))
        self.size, size = (os.lseek(file, 0, os.SEEK_END) for file in (self.one, self.other))
        if self.size != size:
            sys.exit(
                f"{one} has {self.size} bytes, {other} has {size}: "
                "a mirror has two sides of one size"
            )

    def read(self, offset, buffer):
        done = os.preadv(self.one, [buffer], offset)
        if os.pread(self.other, len(buffer), offset).translate(INVERSE) != buffer:
            raise OSError(
                errno.EIO, f"the sides do not agree within {len(buffer)} bytes at {offset}"
            )
        return done

    def write(self, offset, data, fua):
        inverse = bytes(data).translate(INVERSE)
        return min(os.pwrite(self.one, data, offset), os.pwrite(self.other, inverse, offset))

    def flush(self):
        os.fdatasync(self.one)
        os.fdatasync(self.other)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: mirror A B")
    sawmill.serve(Mirror(*sys.argv[1:]), "mirror")
