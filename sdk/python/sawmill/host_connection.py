"""A driver's connection with its host: the handshake, the queues with their sockets and memory,
and the end.

Invariants: every received descriptor has an owner or is closed; the first reason for a failure is
the one that is reported.

Not here: commands (work.py), threads (threads.py), coroutines (tasks.py),
how a host is found or started (host.py).
"""

import logging
import os
import socket
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from . import wire
from .errors import HostGone, NoHost, ProtocolError, Refused
from .options import Effective
from .wire import Control, ControlFacts, Kind
from .work import ChunkAdapter, Memory, Worker, has

log = logging.getLogger("sawmill")

PLAIN = {Kind.READ, Kind.WRITE, Kind.FLUSH, Kind.DISCARD, Kind.WRITE_ZEROES}
BATCH_WRITES = {Kind.CHUNK, Kind.FLUSH, Kind.DISCARD, Kind.WRITE_ZEROES}
BATCH_READS = {Kind.READ}


class Door(NamedTuple):
    """Where the device can be used: "nbd" and "nbd+unix:///?socket=/run/disk",
    "ublk" and "/dev/ublkb0"."""

    kind: str
    address: str

    def __str__(self) -> str:
        return self.address


@dataclass
class Lane:
    """A socket on which commands arrive, and the worker that executes them."""

    socket: socket.socket
    worker: Worker
    in_order: bool  # a flush covers what came before on this socket, answered or not
    name: str


@dataclass
class HostConnection:
    """A driver that is attached. `name`: of the device; `generation`: drivers so far."""

    control: socket.socket
    name: str
    generation: int
    again: bool
    options: Effective
    lanes: list[Lane] = field(default_factory=list)
    doors: list[Door] = field(default_factory=list)
    reason: str | None = None
    error: BaseException | None = None
    gone: HostGone = field(default_factory=lambda: HostGone("the host is gone"))
    _left: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def handle_message(self, packet: bytes) -> Control:
        """Handles a control packet that arrived after ATTACHED."""
        kind, facts = wire.decode(packet)
        if kind == Control.DOORS:
            lines = (door.partition(" ") for door in facts.all("door"))
            self.doors = [Door(kind, address) for kind, _, address in lines]
        elif kind == Control.FINISH:
            self.reason = facts.get("reason") or "ended"
        elif kind == Control.REFUSED:
            raise refusal(facts)
        else:
            raise ProtocolError(f"a packet {kind.name} after ATTACHED is unexpected")
        return kind

    def leave(self, failure: str | None = None) -> None:
        """Asks the host to end the device: when everything is answered, or immediately as failed.
        Only the first call counts."""
        with self._lock:
            if self._left:
                return
            self._left = True
        facts = (
            {"outcome": "ended"} if failure is None else {"outcome": "failed", "message": failure}
        )
        try:
            wire.send(self.control, wire.encode(Control.LEAVE, facts))
        except HostGone:
            log.debug("the host is already gone: LEAVE not sent")

    def fail(self, error: BaseException) -> None:
        """Ends the connection for this reason, and wakes everything that waits for the host."""
        with self._lock:
            self.error = self.error or error
        for each in [self.control, *(lane.socket for lane in self.lanes)]:
            shut(each)

    def note_silence(self) -> None:
        """The host sends nothing any more. Queues can still end cleanly after a FINISH;
        without it they cannot."""
        if self.reason is None:
            self.fail(self.gone)

    def outcome(self, in_order: bool) -> str:
        """How it ended, `in_order` if all queues did:
        "ended", "replaced", or "" and there is an `error`."""
        if in_order and self.error is self.gone:
            self.error = None
        return "" if self.error or not in_order else self.reason or "ended"

    def close(self) -> None:
        """Closes all sockets. Memory is freed by its last user."""
        for lane in self.lanes:
            lane.socket.close()
        self.control.close()


def shut(connection: socket.socket) -> None:
    """Wakes threads that wait at either end."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        log.debug("closed already")


def attach(
    path: str | Path, device: object, requested: dict[str, object], *, replace: bool
) -> HostConnection:
    """Connects a device to the host that listens there; returns when commands can arrive."""
    control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        try:
            control.connect(str(path))
        except OSError as error:
            raise NoHost(f"no host listens at {path}: {error.strerror or error}") from None
        return handshake(control, device, requested, replace=replace)
    except BaseException:
        control.close()
        raise


def handshake(
    control: socket.socket, device: object, requested: dict[str, object], *, replace: bool
) -> HostConnection:
    """Carries out the handshake."""
    program = Path(sys.argv[0]).name or "python"
    hello = {
        "protocol": wire.PROTOCOL,
        "program": program,
        **({"replace": 1} if replace else {}),
        **requested,
    }
    wire.send(control, wire.encode(Control.HELLO, hello))
    _, facts, _ = receive_expected(control, Control.WELCOME)
    if facts.number("protocol") != wire.PROTOCOL:
        raise ProtocolError(
            f"the host speaks protocol {facts.get('protocol')}, this is {wire.PROTOCOL}"
        )
    options = Effective.of(facts)
    name, again = facts.get("name") or "", facts.get("again") == "1"
    connection = HostConnection(control, name, facts.number("generation"), again, options)
    if options.batch and not has(device, "write_chunk") and has(device, "write"):
        device = ChunkAdapter(device)
    try:
        while True:
            kind, facts, descriptors = receive_expected(control, Control.QUEUE, Control.ATTACHED)
            if kind == Control.ATTACHED:
                break
            connection.lanes += lanes(device, options, facts, descriptors, len(connection.lanes))
        if not connection.lanes:
            raise ProtocolError("a device without queues")
    except BaseException:
        connection.close()
        raise
    return connection


def receive_expected(
    control: socket.socket, *kinds: Control
) -> tuple[Control, ControlFacts, list[int]]:
    """The next packet, which must be one of these."""
    packet, descriptors = wire.receive(control)
    try:
        if not packet:
            raise HostGone("the host closed the connection before the driver was attached")
        kind, facts = wire.decode(packet)
        if kind == Control.REFUSED:
            raise refusal(facts)
        if kind not in kinds:
            raise ProtocolError(f"received packet {kind.name}, expected {kinds[0].name}")
        if descriptors and kind != Control.QUEUE:
            raise ProtocolError(f"a packet {kind.name} with descriptors")
        return kind, facts, descriptors
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise


def refusal(facts: ControlFacts) -> Refused:
    return Refused(facts.number("errno"), facts.get("message") or "the host gives no reason")


def lanes(
    device: object, options: Effective, facts: ControlFacts, descriptors: list[int], before: int
) -> list[Lane]:
    """The sockets of a queue. Takes its descriptors, whatever happens."""
    kinds = [("w", "memory_bytes", BATCH_WRITES), ("r", "read_memory_bytes", BATCH_READS)]
    kinds = kinds if options.batch else [("", "memory_bytes", PLAIN)]
    new_lanes: list[Lane] = []
    try:
        number = facts.number("queue")
        if len(descriptors) != 2 * len(kinds) or number != before // len(kinds):
            raise ProtocolError(
                f"queue {number} came out of turn, or with {len(descriptors)} descriptors"
            )
        for suffix, size, allowed in kinds:
            length = facts.number(size)
            memory = Memory(descriptors.pop(1), length, writable=Kind.READ in allowed)
            connection = socket.socket(
                socket.AF_UNIX, socket.SOCK_SEQPACKET, fileno=descriptors.pop(0)
            )
            worker = Worker(device, options, memory, allowed)
            new_lanes.append(Lane(connection, worker, options.batch, f"sawmill-{number}{suffix}"))
        return new_lanes
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        for lane in new_lanes:
            lane.socket.close()
        raise
