"""A device is an object with methods. The methods that it has determine what it supports.

A subclass of `Device` overrides the methods that it needs; any other object with methods of these
names works too. With `serve_async`, methods may be coroutines. Several threads call methods at once
if there are several queues or threads. The request is answered when the method returns: not
earlier, and never twice.

An exception of a method is the request's outcome. An OSError with an errno fails it with that
errno; what users see of it depends on the door (docs/guide/doors.md). Anything else is an I/O
error, with the traceback in the log of "sawmill". The driver continues.
"""

import inspect
from collections.abc import Awaitable

from . import options
from .chunk import Chunk
from .options import Effective

METHODS = ("attached", "read", "write", "flush", "discard", "write_zeroes", "write_chunk")


class Device:
    """A block device; a subclass overrides the methods that it supports. Offsets and lengths are
    bytes, and multiples of the block size unless the device is `byte_granular`. Buffers are shared
    memory, valid only until the method returns."""

    def attached(self, options: Effective) -> None:
        """From now on only this driver has the device:
        read here what a former driver may have left."""

    def read(self, offset: int, buffer: memoryview) -> int | None | Awaitable[int | None]:
        """Fills the whole buffer, with zeroes where nothing was written. May return the number of
        bytes that it filled: fewer than the buffer holds are an I/O error."""
        raise NotImplementedError

    def write(self, offset: int, data: memoryview, fua: bool) -> int | None | Awaitable[int | None]:
        """Stores the data; with `fua` (only if `can_fua` is requested) durably. Without this method
        and without `write_chunk` the device is read-only. May return the number of bytes that it
        stored: fewer are an I/O error."""
        raise NotImplementedError

    def flush(self) -> None | Awaitable[None]:
        """Makes durable what was written before. Without this method, a write must be durable
        when `write` returns."""
        raise NotImplementedError

    def discard(self, offset: int, length: int) -> None | Awaitable[None]:
        """Releases a range that is not needed any more."""
        raise NotImplementedError

    def write_zeroes(self, offset: int, length: int, no_unmap: bool) -> None | Awaitable[None]:
        """Makes the range read as zeroes; with `no_unmap` its space stays allocated."""
        raise NotImplementedError

    def write_chunk(self, chunk: Chunk) -> None | Awaitable[None]:
        """In batch mode, instead of `write`: stores a whole chunk."""
        raise NotImplementedError


def has(device: object, method: str) -> bool:
    """Whether a device supports this: it has the method, and not just the one of `Device`."""
    function = getattr(device, method, None)
    return callable(function) and getattr(type(device), method, None) is not getattr(Device, method)


def requested(
    device: object, arguments: dict[str, object], *, coroutines: bool = False
) -> dict[str, object]:
    """The options that a device requests: those given, and those that its methods determine."""
    if not has(device, "read"):
        raise TypeError(f"{type(device).__name__} has no method `read`")
    requested_options = options.requested(device, arguments)
    batch = requested_options.get("mode", "plain") == "batch"
    if has(device, "write_chunk") and not batch and not has(device, "write"):
        raise TypeError(f"{type(device).__name__} has only `write_chunk`: set mode=\"batch\"")
    in_batches = batch and not has(device, "write_chunk")
    for name in METHODS if not coroutines else ("write",) if in_batches else ():
        if inspect.iscoroutinefunction(getattr(device, name, None)) and has(device, name):
            problem = "is a coroutine: that needs serve_async, and plain mode"
            raise TypeError(f"{type(device).__name__}.{name} {problem}")
    writes = has(device, "write") or (batch and has(device, "write_chunk"))
    able = {
        # A batching device has a volatile cache, whatever its driver declares.
        **({} if batch else {"can_flush": has(device, "flush")}),
        "can_discard": writes and has(device, "discard"),
        "can_write_zeroes": writes and has(device, "write_zeroes"),
    }
    if not writes:
        if requested_options.get("read_only") == 0:
            raise TypeError(f"{type(device).__name__} has no method to write: it is read_only")
        requested_options["read_only"] = 1
    for name, can in able.items():
        if requested_options.setdefault(name, int(can)) and not can:
            raise TypeError(f"{name} is requested, but {type(device).__name__} has no such method")
    return requested_options
