"""A disk in memory whose methods raise at some addresses: a full disk at 4096, a bug at 8192."""

import errno

import sawmill


class Faulty(sawmill.Device):
    """Errors are the request's alone."""

    size = "1M"

    def __init__(self):
        self.bytes = bytearray(1 << 20)

    def read(self, offset, buffer):
        if offset == 8192:
            raise KeyError("a bug")
        buffer[:] = self.bytes[offset : offset + len(buffer)]

    def write(self, offset, data, fua):
        if offset == 4096:
            raise OSError(errno.ENOSPC, "full")
        self.bytes[offset : offset + len(data)] = data


if __name__ == "__main__":
    sawmill.serve(Faulty())
