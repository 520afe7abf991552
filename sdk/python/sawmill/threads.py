"""Threads that execute commands, and the handle of the device that they serve.

Invariants: an answer is sent after the method has returned, once. On END a lane answers what it
has, then closes. When the device has ended no method runs any more, whatever the reason.

Not here: what a command means (work.py), the same with coroutines (tasks.py).
"""

import atexit
import threading
from collections import deque
from typing import Self

from . import wire
from .errors import HostGone, SawmillError
from .host import Host
from .host_connection import Door, HostConnection, Lane, shut
from .wire import Kind, Command


class Inbox:
    """The commands of a lane, one at a time for any free thread."""

    def __init__(self, lane: Lane, threads: int):
        self.lane, self.threads, self.is_ended = lane, threads, False
        self._waiting: deque[Command] = deque()
        self._taking = threading.Lock()
        # Commands that threads have, by their turn: what came before a flush is done before it.
        self._turn = 0
        self._open: set[int] = set()
        self._done = threading.Condition()
        self._buffer = wire.buffer()

    def take(self) -> tuple[int, Command] | None:
        """Waits for the next command; returns it with its turn, None after END."""
        with self._taking:
            while not self._waiting:
                if self.is_ended:
                    return None
                length = self._received()
                self._waiting.extend(wire.commands(memoryview(self._buffer)[:length]))
            command = self._waiting.popleft()
            if command.kind == Kind.END:
                self._waiting.clear()
                self.is_ended = True
                return None
            with self._done:
                self._turn += 1
                self._open.add(self._turn)
                return self._turn, command

    def wait_for_those_before(self, turn: int) -> None:
        """Waits until this is the oldest command that a thread has."""
        with self._done:
            self._done.wait_for(lambda: min(self._open) == turn)

    def done(self, turn: int) -> None:
        """A thread has answered its command, or given up."""
        with self._done:
            self._open.discard(turn)
            self._done.notify_all()

    def note_thread_end(self) -> None:
        """The last thread of the lane closes it."""
        with self._taking:
            self.threads -= 1
            if self.threads == 0:
                shut(self.lane.socket)

    def _received(self) -> int:
        try:
            length = self.lane.socket.recv_into(self._buffer)
        except OSError as error:
            raise HostGone(f"the host is gone: {error.strerror}") from None
        if length == 0:
            raise HostGone("the host is gone: it closed a queue without END")
        return length


def carry_out(connection: HostConnection, inbox: Inbox) -> None:
    """A thread's life."""
    lane = inbox.lane
    try:
        while (task := inbox.take()) is not None:
            turn, command = task
            try:
                call = lane.worker.call(command)
                if lane.in_order and command.kind == Kind.FLUSH:
                    inbox.wait_for_those_before(turn)
                try:
                    answer = call.done(call())
                except BaseException as error:  # noqa: BLE001 - a method may raise what it likes
                    answer = call.failed(error)
                wire.send(lane.socket, answer)
            finally:
                inbox.done(turn)
    except BaseException as error:  # noqa: BLE001 - reported to those that wait for the device
        connection.fail(error)
    finally:
        inbox.note_thread_end()


class Handle:
    """A device that is served by threads of this process.
    It ends when its `with` block or the program ends.

    name, doors, options    of the device
    outcome                 "ended" or "replaced" (another driver has it now), when it is over
    """

    def __init__(self, connection: HostConnection, host: Host | None, threads: int):
        self._connection, self._host = connection, host
        self.name, self.options, self.outcome = connection.name, connection.options, ""
        self._opened, self._over = threading.Event(), threading.Event()
        self._inboxes = [Inbox(lane, threads) for lane in connection.lanes]
        self._threads = [
            threading.Thread(
                target=carry_out, args=(connection, inbox), name=inbox.lane.name, daemon=True
            )
            for inbox in self._inboxes
            for _ in range(threads)
        ]
        for thread in self._threads:
            thread.start()
        self._listener = threading.Thread(target=self._listen, name="sawmill-control", daemon=True)
        self._listener.start()
        threading.Thread(target=self._await_end, name="sawmill-end", daemon=True).start()
        atexit.register(self._at_exit)

    @property
    def doors(self) -> list[Door]:
        """Where the device can be used."""
        return self._connection.doors

    def leave(self) -> None:
        """Asks for the end of the device without waiting for it."""
        self._connection.leave()

    def stop(self) -> None:
        """Ends the device: its users are gone or get errors, everything is answered,
        the doors are closed."""
        self.leave()
        self.wait()

    def fail(self, message: str) -> None:
        """Ends the device immediately: requests fail, and its host reports why."""
        self._connection.leave(message)
        self._over.wait()

    def give_up(self) -> None:
        """Leaves the device as if this program had died:
        another driver may take it, unless the host is ours."""
        atexit.unregister(self._at_exit)
        self._connection.fail(SawmillError("given up"))
        if self._host:
            self._host.give_up()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for the end of the device; False after `timeout` seconds. Raises HostGone and
        ProtocolError."""
        if not self._over.wait(timeout):
            return False
        if self._connection.error:
            raise self._connection.error
        return True

    def opened(self) -> Self:
        """Waits until the doors are open."""
        try:
            self._opened.wait()
        except BaseException:
            self.leave()
            raise
        if not self._connection.doors:
            self.wait()
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        state = self.outcome or (
            "gone" if self._over.is_set() else "on " + ", ".join(map(str, self.doors))
        )
        return f"<device {self.name}, {self.options.size} bytes, {state}>"

    def _listen(self) -> None:
        """Handles the host's messages until there are no more."""
        try:
            while packet := wire.receive(self._connection.control)[0]:
                self._connection.handle_message(packet)
                if self._connection.doors:
                    self._opened.set()
        except BaseException as error:  # noqa: BLE001 - reported to those that wait for the device
            self._connection.fail(error)
        self._connection.note_silence()

    def _await_end(self) -> None:
        for thread in self._threads:
            thread.join()
        connection = self._connection
        # Messages that the host has already sent are still handled.
        shut(connection.control)
        self._listener.join()
        self.outcome = connection.outcome(all(inbox.is_ended for inbox in self._inboxes))
        connection.close()
        if self._host and self.outcome != "replaced":
            connection.error = self._host.wait_end(self.outcome == "ended") or connection.error
        atexit.unregister(self._at_exit)
        self._over.set()
        self._opened.set()

    def _at_exit(self) -> None:
        self.leave()
        self._over.wait()
