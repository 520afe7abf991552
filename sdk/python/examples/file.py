#!/usr/bin/env python3
"""file PATH [SIZE]: a file or a block device, passed through.
With SIZE the file is created, or grows."""

import os
import sys

import sawmill


class File(sawmill.Device):
    """An answered write is in the file; a flush makes it durable."""

    def __init__(self, path: str, size: str | None):
        self.file = os.open(path, os.O_RDWR | (os.O_CREAT if size else 0), 0o600)
        if size and os.lseek(self.file, 0, os.SEEK_END) < sawmill.size_bytes(size):
            os.truncate(self.file, sawmill.size_bytes(size))
        self.size = os.lseek(self.file, 0, os.SEEK_END)

    def read(self, offset, buffer):
        return os.preadv(self.file, [buffer], offset)

    def write(self, offset, data, fua):
        return os.pwrite(self.file, data, offset)

    def flush(self):
        os.fdatasync(self.file)


if __name__ == "__main__":
    if not 2 <= len(sys.argv) <= 3:
        sys.exit("usage: file PATH [SIZE]")
    sawmill.serve(File(sys.argv[1], (sys.argv + [None])[2]), "file")
