"""Write a block device in Python; Sawmill shows it:
as /dev/ublkbN, over NBD, as a file, to virtual machines.

    import sawmill

    class Ram(sawmill.Device):
        size = "64M"
        def __init__(self):
            self.bytes = bytearray(64 << 20)
        def read(self, offset, buffer):
            buffer[:] = self.bytes[offset : offset + len(buffer)]
        def write(self, offset, data, fua):
            self.bytes[offset : offset + len(data)] = data

    sawmill.serve(Ram(), "ram")

`serve` waits until the device ends, `start` returns a handle, `serve_async` is for coroutines. See
`Device` for the methods, `Options` for the options, `Chunk` and `Resolver` for batch mode.
docs/guide/driver-python.md is the guide.
"""

from .chunk import Chunk, ChunkEntry
from .device import Device
from .errors import HostGone, NoHost, ProtocolError, Refused, SawmillError
from .front import rerun, serve, serve_async, start
from .options import Effective, Options, size_bytes
from .resolver import Resolver
from .host_connection import Door
from .threads import Handle

__version__ = "0.1.0"
__all__ = [
    "Chunk",
    "ChunkEntry",
    "Device",
    "Door",
    "Effective",
    "Handle",
    "HostGone",
    "NoHost",
    "Options",
    "ProtocolError",
    "Refused",
    "Resolver",
    "SawmillError",
    "rerun",
    "serve",
    "serve_async",
    "size_bytes",
    "start",
]
