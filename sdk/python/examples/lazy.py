#!/usr/bin/env python3
"""lazy URL FILE: a disk copied from a web server as it is read; FILE.map has a byte per part."""

import os
import sys
import threading
from urllib.request import Request, urlopen

import sawmill

PART_BYTES = 1 << 16


class Lazy(sawmill.Device):
    """Each part is fetched whole, once. Its byte in the map is set once FILE holds it safely."""

    def __init__(self, url: str, to: str):
        self.lock = threading.Lock()
        self.ask = lambda **how: urlopen(Request(url, **how), timeout=60)
        with self.ask(method="HEAD") as answer:
            self.size = int(answer.headers["Content-Length"]) // 512 * 512
        self.file, self.map = (os.open(p, os.O_RDWR | os.O_CREAT, 0o600) for p in (to, to + ".map"))
        os.truncate(self.file, self.size)
        os.truncate(self.map, -(-self.size // PART_BYTES))

    def attached(self, options):
        # Not earlier: a driver that this one replaces may have changed it until now.
        self.here = bytearray(os.pread(self.map, -(-self.size // PART_BYTES), 0))

    def fetch(self, offset, length):
        with self.lock:
            for part in range(offset // PART_BYTES, (offset + length - 1) // PART_BYTES + 1):
                start, end = part * PART_BYTES, min((part + 1) * PART_BYTES, self.size)
                if not self.here[part]:
                    with self.ask(headers={"Range": f"bytes={start}-{end - 1}"}) as answer:
                        data = answer.read()
                    if answer.status != 206 or os.pwrite(self.file, data, start) != end - start:
                        raise ValueError(
                            f"the server sent {len(data)} bytes for {end - start} at {start}")
                    os.fdatasync(self.file)
                    self.here[part] = os.pwrite(self.map, b"\1", part)

    def read(self, offset, buffer):
        self.fetch(offset, len(buffer))
        return os.preadv(self.file, [buffer], offset)

    def write(self, offset, data, fua):
        self.fetch(offset, len(data))
        return os.pwrite(self.file, data, offset)

    def flush(self):
        os.fdatasync(self.file)
        os.fdatasync(self.map)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: lazy URL FILE")
    sawmill.serve(Lazy(*sys.argv[1:]), "lazy")
