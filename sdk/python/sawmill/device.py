"""What a device is: an object with methods. Those that it has decide what it can do.

A subclass of `Device` overrides what it wants; any other object with methods of these names does as
well. Methods may be coroutines with `serve_async`. They are called by several threads at once if
there are several queues or threads. When a method returns, the request is answered: not earlier,
and never twice.

What a method raises is the request's outcome: an OSError with an errno that one, anything else EIO,
with the traceback in the log of "sawmill". What users see of an errno depends on the door:
docs/guide/doors.md. The driver goes on.
"""

import inspect
from collections.abc import Awaitable

from . import options
from .chunk import Chunk
from .options import Effective

METHODS = ("attached", "read", "write", "flush", "discard", "write_zeroes", "write_chunk")


class Device:
    """See the head of this file. Offsets and lengths are bytes, and multiples of the block size
    unless the device is `byte_granular`. Buffers are shared memory: they are only good until the
    method returns."""

    def attached(self, options: Effective) -> None:
        """This driver alone has the device from now on:
        read here what a former driver may have left."""

    def read(self, offset: int, buffer: memoryview) -> int | None | Awaitable[int | None]:
        """Fills the whole buffer; where nothing was written, with zeroes. May return how many bytes
        it filled: fewer than the buffer holds are an I/O error."""
        raise NotImplementedError

    def write(self, offset: int, data: memoryview, fua: bool) -> int | None | Awaitable[int | None]:
        """Stores the data; with `fua` (only if `can_fua` is asked for) durably. Without this method
        and without `write_chunk` the device is read-only. May return how many bytes it stored:
        fewer are an I/O error."""
        raise NotImplementedError

    def flush(self) -> None | Awaitable[None]:
        """Makes durable what was written before. Without this method what `write`
        has stored must be durable."""
        raise NotImplementedError

    def discard(self, offset: int, length: int) -> None | Awaitable[None]:
        """The range is not needed any more."""
        raise NotImplementedError

    def write_zeroes(self, offset: int, length: int, no_unmap: bool) -> None | Awaitable[None]:
        """Makes the range read as zeroes; with `no_unmap` its space stays allocated."""
        raise NotImplementedError

    def write_chunk(self, chunk: Chunk) -> None | Awaitable[None]:
        """In batch mode, instead of `write`: stores a whole chunk."""
        raise NotImplementedError


def has(device: object, method: str) -> bool:
    """Whether a device can do this: has the method, and not just the one of `Device`."""
    found = getattr(device, method, None)
    return callable(found) and getattr(type(device), method, None) is not getattr(Device, method)


def asked(
    device: object, arguments: dict[str, object], *, coroutines: bool = False
) -> dict[str, object]:
    """The options that a device asks for: those told, and those that its methods decide."""
    if not has(device, "read"):
        raise TypeError(f"{type(device).__name__} has no method `read`")
    found = options.asked(device, arguments)
    batch = found.get("mode", "plain") == "batch"
    if has(device, "write_chunk") and not batch and not has(device, "write"):
        raise TypeError(f"{type(device).__name__} has `write_chunk` alone: say mode=\"batch\"")
    in_batches = batch and not has(device, "write_chunk")
    for name in METHODS if not coroutines else ("write",) if in_batches else ():
        if inspect.iscoroutinefunction(getattr(device, name, None)) and has(device, name):
            told = "is a coroutine: that wants serve_async, and plain mode"
            raise TypeError(f"{type(device).__name__}.{name} {told}")
    writes = has(device, "write") or (batch and has(device, "write_chunk"))
    able = {
        # A batching device has a volatile cache whatever its driver says.
        **({} if batch else {"can_flush": has(device, "flush")}),
        "can_discard": writes and has(device, "discard"),
        "can_write_zeroes": writes and has(device, "write_zeroes"),
    }
    if not writes:
        if found.get("read_only") == 0:
            raise TypeError(f"{type(device).__name__} has no method to write: it is read_only")
        found["read_only"] = 1
    for name, can in able.items():
        if found.setdefault(name, int(can)) and not can:
            raise TypeError(f"{name} is asked for, and {type(device).__name__} has no such method")
    return found
