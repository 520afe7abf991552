#!/usr/bin/env python3
"""null [SIZE]: reads zeroes, forgets what is written. It shows the cost of a driver by itself."""

import sys

import sawmill


class Null(sawmill.Device):
    """A device without content, of any size."""

    def __init__(self, size: str):
        self.size = size
        self.zeroes = memoryview(bytes(1 << 20))

    def read(self, offset, buffer):
        for start in range(0, len(buffer), len(self.zeroes)):
            part = buffer[start : start + len(self.zeroes)]
            part[:] = self.zeroes[: len(part)]

    def write(self, offset, data, fua):
        pass

    def discard(self, offset, length):
        pass

    def write_zeroes(self, offset, length, no_unmap):
        pass


if __name__ == "__main__":
    sawmill.serve(Null(sys.argv[1] if len(sys.argv) > 1 else "1G"), "null")
