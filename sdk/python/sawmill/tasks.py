"""Commands executed by coroutines: one task for each, all in one event loop.
The counterpart of threads.py.

Invariants: those of threads.py. A method that is not a coroutine function runs in the loop
and blocks it.

Not here: what a command means (work.py).
"""

import asyncio
import inspect
import logging
import signal
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from . import wire
from .device import has
from .errors import HostGone
from .host import Host
from .host_connection import Door, HostConnection, Lane, shut
from .wire import Kind, Command
from .work import Call

log = logging.getLogger("sawmill")

Opened = Callable[[list[Door]], object] | None


async def settled(result: Any) -> Any:
    """The result of a method, coroutine or not."""
    return await result if inspect.isawaitable(result) else result


async def packet_of(loop: asyncio.AbstractEventLoop, lane: Lane, buffer: bytearray) -> memoryview:
    """The next packet of commands."""
    try:
        length = await loop.sock_recv_into(lane.socket, buffer)
    except OSError as error:
        raise HostGone(f"the host is gone: {error.strerror}") from None
    if length == 0:
        raise HostGone("the host is gone: it closed a queue without END")
    return memoryview(buffer)[:length]


class Server:
    """The tasks of one lane."""

    def __init__(self, lane: Lane):
        self.lane, self.is_ended = lane, False
        self._tasks: set[asyncio.Task[None]] = set()
        self._sending = asyncio.Lock()

    async def run(self) -> None:
        """Runs until END, and until everything is answered."""
        loop, buffer = asyncio.get_running_loop(), wire.buffer()
        self.lane.socket.setblocking(False)
        try:
            async with asyncio.TaskGroup() as group:
                while not self.is_ended:
                    for command in wire.commands(await packet_of(loop, self.lane, buffer)):
                        if command.kind == Kind.END:
                            self.is_ended = True
                            break
                        self._take(group, command)
        except BaseExceptionGroup as many:
            raise many.exceptions[0] from None
        shut(self.lane.socket)

    def _take(self, group: asyncio.TaskGroup, command: Command) -> None:
        call = self.lane.worker.call(command)
        in_order = self.lane.in_order and command.kind == Kind.FLUSH
        task = group.create_task(self._carry_out(call, list(self._tasks) if in_order else []))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry_out(self, call: Call, before: list[asyncio.Task[None]]) -> None:
        if before:
            await asyncio.wait(before)
        try:
            answer = call.done(await settled(call()))
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - a method may raise what it likes
            answer = call.failed(error)
        # One at a time: a loop has one writer for a socket.
        async with self._sending:
            try:
                await asyncio.get_running_loop().sock_sendall(self.lane.socket, answer)
            except OSError as error:
                raise HostGone(f"the host is gone: {error.strerror}") from None


async def listen(connection: HostConnection, opened: Opened) -> None:
    """Handles the host's messages until there are no more."""
    while packet := (await asyncio.to_thread(wire.receive, connection.control))[0]:
        if connection.handle_message(packet) == wire.Control.DOORS and opened:
            await settled(opened(connection.doors))


async def serve(connection: HostConnection, device: Any, host: Host | None, opened: Opened) -> str:
    """Serves until the device has ended: "ended" or "replaced"."""
    loop = asyncio.get_running_loop()
    work = asyncio.ensure_future(life(connection, device, opened))
    # A canceled task ends cleanly, and so does SIGINT; SIGTERM too, unless the program handles it.
    is_ours = threading.current_thread() is threading.main_thread()
    is_ours = is_ours and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if is_ours:
        loop.add_signal_handler(signal.SIGTERM, connection.leave)
    try:
        outcome = await asyncio.shield(work)
    except asyncio.CancelledError:
        connection.leave()
        await work
        raise
    finally:
        connection.close()
        if is_ours:
            loop.remove_signal_handler(signal.SIGTERM)
    if host and outcome != "replaced":
        ended = await asyncio.to_thread(host.wait_end, outcome == "ended")
        connection.error = ended or connection.error
    if connection.error:
        raise connection.error
    return outcome


async def life(connection: HostConnection, device: Any, opened: Opened) -> str:
    """Runs all lanes and the control connection concurrently: the first failure ends the rest."""

    async def reporting_failure(work: Awaitable[None]) -> None:
        try:
            await work
        except BaseException as error:  # noqa: BLE001 - reported to those that wait for the device
            connection.fail(error)

    async def receive_messages() -> None:
        await reporting_failure(listen(connection, opened))
        connection.note_silence()

    if has(device, "attached"):
        await settled(device.attached(connection.options))
    servers = [Server(lane) for lane in connection.lanes]
    control = asyncio.ensure_future(receive_messages())
    await asyncio.gather(*(reporting_failure(server.run()) for server in servers))
    shut(connection.control)
    await control
    return connection.outcome(all(server.is_ended for server in servers))
