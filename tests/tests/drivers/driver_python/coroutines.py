"""A disk in memory whose methods are coroutines, or with the argument `batch` one
that takes chunks."""

import asyncio
import sys

import sawmill


class Ram:
    """Each request gives way to others before it is done."""

    size = "16M"

    def __init__(self):
        self.bytes = bytearray(16 << 20)

    async def read(self, offset, buffer):
        await asyncio.sleep(0)
        buffer[:] = self.bytes[offset : offset + len(buffer)]

    async def write(self, offset, data, fua):
        await asyncio.sleep(0)
        self.bytes[offset : offset + len(data)] = data

    async def flush(self):
        await asyncio.sleep(0)


class Chunked(Ram):
    """Chunks of several queues, in any order."""

    mode, hw_queues, write = "batch", 3, None

    def __init__(self):
        super().__init__()
        self.resolver = sawmill.Resolver()

    async def write_chunk(self, chunk):
        await asyncio.sleep(0)
        self.resolver.apply(chunk, lambda address, data: self.store(address, data))

    def store(self, address, data):
        self.bytes[address : address + len(data)] = data


if __name__ == "__main__":
    asyncio.run(sawmill.serve_async(Chunked() if "batch" in sys.argv else Ram()))
