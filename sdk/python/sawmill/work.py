"""From a command to a method of the device, and from its outcome to an answer.

Invariants: a command is checked before the device sees it; an exception of a method is an answer, a
violation by the host is a ProtocolError. No method gets memory outside of that of the queue.

Not here: when and on which thread methods are called (threads.py, tasks.py).
"""

import errno
import logging
import mmap
import os
from collections.abc import Callable
from typing import Any

from .chunk import Chunk
from .device import has
from .errors import ProtocolError
from .options import Effective
from .resolver import Resolver
from .wire import ANSWER, FUA, NO_UNMAP, Kind, Command

log = logging.getLogger("sawmill")

ERRNO_MAX = 4095
METHODS = {
    Kind.READ: "read",
    Kind.WRITE: "write",
    Kind.FLUSH: "flush",
    Kind.DISCARD: "discard",
    Kind.WRITE_ZEROES: "write_zeroes",
    Kind.CHUNK: "write_chunk",
}


class Memory:
    """A piece of shared memory that the host has sent. Takes the descriptor, whatever happens."""

    def __init__(self, descriptor: int, length: int, *, writable: bool):
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        try:
            # Access beyond the end of the file would kill the process.
            if not 0 < length <= os.fstat(descriptor).st_size:
                raise ProtocolError(
                    f"the host announced {length} bytes of memory and sent another size"
                )
            self._map = mmap.mmap(descriptor, length, mmap.MAP_SHARED, access)
        except (OSError, OverflowError) as error:
            problem = f"the host's shared memory of {length} bytes cannot be used: {error}"
            raise ProtocolError(problem) from None
        finally:
            os.close(descriptor)
        self.bytes = memoryview(self._map)

    def part(self, command: Command) -> memoryview:
        """The bytes of a command."""
        end = command.offset + command.length
        if end > len(self.bytes):
            raise ProtocolError(f"{command} lies outside of the queue's memory")
        return self.bytes[command.offset : end]


class Call:
    """A command as a method of the device with its arguments: `call()` returns its result."""

    __slots__ = ("arguments", "method", "command", "part")

    def __init__(
        self, command: Command, method: Callable[..., Any], part: memoryview | None, *arguments: Any
    ):
        self.command, self.method, self.part, self.arguments = command, method, part, arguments

    def __call__(self) -> Any:
        return self.method(*self.arguments)

    def done(self, result: Any) -> bytes:
        """The answer when the method has returned this."""
        length = self.command.length
        counts = self.command.kind in (Kind.READ, Kind.WRITE) and type(result) is int
        if counts and result != length:
            return self.failed(
                ValueError(f"`{self.method.__name__}` transferred {result} of {length} bytes")
            )
        self._release()
        return ANSWER.pack(self.command.number, 0, 0)

    def failed(self, error: BaseException) -> bytes:
        """The answer when the method has raised this."""
        number = error.errno if isinstance(error, OSError) else None
        if not isinstance(number, int) or not 0 < number <= ERRNO_MAX:
            log.error("%s failed: the request gets EIO", self.command, exc_info=error)
            number = errno.EIO
        # The traceback's frames hold parts of the memory.
        error.__traceback__ = None
        self._release()
        return ANSWER.pack(self.command.number, number, 0)

    def _release(self) -> None:
        """From here on the bytes belong to the host: a method that kept them gets a ValueError,
        not the bytes of another request."""
        if self.part is not None:
            try:
                self.part.release()
            except BufferError:
                log.warning(
                    "%s: the device has kept its memory, which others use now", self.command
                )


class Worker:
    """Executes the commands of one socket on a device."""

    def __init__(self, device: object, options: Effective, memory: Memory, allowed: set[Kind]):
        self._options, self._memory = options, memory
        self._size, self._allowed = options.size, allowed
        self._methods = {
            kind: getattr(device, METHODS[kind]) for kind in allowed if has(device, METHODS[kind])
        }
        if Kind.FLUSH in allowed and (options.batch or options.facts.get("can_flush") != "0"):
            # The host may send flushes to a device without a cache too.
            self._methods.setdefault(Kind.FLUSH, flush_nothing)

    def call(self, command: Command) -> Call:
        """The call for a command."""
        kind, address, length = command.kind, command.address, command.length
        method = self._methods.get(kind)
        if method is None:
            raise ProtocolError(f"{command} is not supported by this driver on this queue")
        if kind != Kind.CHUNK and address + length > self._size:
            raise ProtocolError(f"{command} reaches past the end of the device at {self._size}")
        if kind == Kind.READ:
            part = self._memory.part(command)
            return Call(command, method, part, address, part)
        if kind == Kind.WRITE:
            part = self._memory.part(command).toreadonly()
            return Call(command, method, part, address, part, bool(command.flags & FUA))
        if kind == Kind.CHUNK:
            part = self._memory.part(command).toreadonly()
            return Call(command, method, part, Chunk(part, command, self._options))
        if kind == Kind.WRITE_ZEROES:
            return Call(command, method, None, address, length, bool(command.flags & NO_UNMAP))
        if kind == Kind.DISCARD:
            return Call(command, method, None, address, length)
        return Call(command, method, None)


def flush_nothing() -> None:
    """A flush of a device without a cache."""


class ChunkAdapter:
    """Adapts an ordinary device to chunks: it gets only the newest writes."""

    def __init__(self, device: Any):
        self._resolver = Resolver()
        self._write = device.write
        for name in ("attached", "read", "flush", "discard", "write_zeroes"):
            if has(device, name):
                setattr(self, name, getattr(device, name))

    def write_chunk(self, chunk: Chunk) -> None:
        """Writes the parts of the chunk that are not late."""
        self._resolver.apply(
            chunk, lambda address, data: check_whole(self._write(address, data, False), len(data))
        )


def check_whole(result: object, length: int) -> None:
    """Fails a write that reports fewer bytes."""
    if type(result) is int and result != length:
        raise ValueError(f"`write` transferred {result} of {length} bytes")
