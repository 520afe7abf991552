"""The front of the library: serve a device, with threads or coroutines,
anew or in place of another driver.

Not here: what a device is (device.py).
"""

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from . import host, tasks
from .device import requested, has
from .host import SOCKET_VARIABLE, Host
from .host_connection import Door, HostConnection, attach
from .threads import Handle


def start(
    device: Any,
    name: str | None = None,
    doors: Iterable[str] = (),
    *,
    replace: bool = False,
    threads: int = 1,
    **options: Any,
) -> Handle:
    """Serves a device in the background, and returns when its doors are open.

    device    an object with methods, see `Device`
    name      of the device; the host chooses one if none is given
    doors     where to show it: "ublk", "nbd=unix:/path", "nbd=tcp:host:port", "fuse=/folder",
              "loop=/folder", "vhost-user=/path". None: /dev/ublkbN for root where there is ublk,
              else NBD on a Unix socket
    replace   take over the running device `name` from its driver, which may have died
    threads   for each queue; with more than one, the device's methods run concurrently
    options   see `Options`

    A program that `sawmill run` has started serves the device of that host, whose command line
    determines name and doors. Raises NoHost, Refused, TypeError and ValueError for options.
    """
    if threads < 1:
        raise ValueError("a device needs a thread")
    connection, started = connect(device, name, list(doors), replace, options)
    try:
        if has(device, "attached"):
            device.attached(connection.options)
    except BaseException:
        connection.close()
        if started:
            started.give_up()
        raise
    return Handle(connection, started, threads).opened()


def announce(doors: list[Door]) -> None:
    """Prints where the device is, unless our host does."""
    if SOCKET_VARIABLE not in os.environ:
        print(*doors, sep="\n", flush=True)


def serve(
    device: Any,
    name: str | None = None,
    doors: Iterable[str] = (),
    *,
    opened: Callable[[list[Door]], object] | None = announce,
    **arguments: Any,
) -> str:
    """Serves a device until it has ended, or another driver has replaced this one:
    "ended" or "replaced". Arguments as `start`.

    `opened` is called with the doors when they are open; the default prints them.

    In the main thread, SIGINT (Ctrl-C) and SIGTERM end the device cleanly; the second one gives
    up. Raises also HostGone and ProtocolError.
    """
    with signals() as end_on_signal:
        handle = start(device, name, doors, **arguments)
        end_on_signal(handle)
        try:
            if opened:
                opened(handle.doors)
            handle.wait()
        except KeyboardInterrupt:
            handle.give_up()
            raise
    return handle.outcome


def rerun(device: Any, name: str, **arguments: Any) -> str:
    """Serves a running device in place of its driver, which answers its commands and ends."""
    return serve(device, name, replace=True, **arguments)


async def serve_async(
    device: Any,
    name: str | None = None,
    doors: Iterable[str] = (),
    *,
    replace: bool = False,
    opened: Callable[[list[Door]], object] | None = announce,
    **options: Any,
) -> str:
    """As `serve`, in the running event loop. Methods may be coroutines: all requests that the
    host sends run concurrently. Cancelling ends the device cleanly."""
    connection, started = await asyncio.to_thread(
        connect, device, name, list(doors), replace, options, True
    )
    return await tasks.serve(connection, device, started, opened)


def connect(
    device: Any,
    name: str | None,
    doors: list[str],
    replace: bool,
    options: dict[str, Any],
    coroutines: bool = False,
) -> tuple[HostConnection, Host | None]:
    """A connection with the existing host, else with a new one."""
    requested_options = requested(device, options, coroutines=coroutines)
    if path := os.environ.get(SOCKET_VARIABLE):
        return attach(path, device, requested_options, replace=replace), None
    if replace:
        if name is None:
            raise TypeError("give the name of the device to take over")
        return attach(host.running(name), device, requested_options, replace=True), None
    started = Host(name, doors)
    try:
        return attach(started.socket, device, requested_options, replace=False), started
    except BaseException:
        started.give_up()
        raise


@contextmanager
def signals() -> Iterator[Any]:
    """While this lasts, signals end the device that is passed to the function that this yields."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda handle: None
        return
    device: list[Handle] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if device:
            device[0].leave()
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            raise SystemExit(128 + number)

    try:
        for number in before:
            signal.signal(number, end)
        yield device.append
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
