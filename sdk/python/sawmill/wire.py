"""The bytes between a host and a driver: control packets, commands, answers.
Defined in docs/format/driver.md.

Invariants: nothing that the host sends is trusted, and invalid input is a ProtocolError; a packet
arrives whole or not at all; descriptors of a refused packet are closed.

Not here: what follows from a packet (host_connection.py, work.py).
"""

import enum
import os
import socket
import struct
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from .errors import HostGone, ProtocolError

PROTOCOL = 1
PACKET_BYTES_MAX = 65_536
DESCRIPTORS_MAX = 4
NUMBER_DIGITS_MAX = 20

COMMAND = struct.Struct("<IIQQQQQQQ")
ANSWER = struct.Struct("<QiI")
KIND = struct.Struct("<I")

FUA, NO_UNMAP, AGAIN = 1, 2, 4

SPACES = str.maketrans("\n\0", "  ")  # what a value cannot contain, and its replacement


class Control(enum.IntEnum):
    """The kind of a control packet."""

    HELLO = 1
    WELCOME = 2
    QUEUE = 3
    ATTACHED = 4
    REFUSED = 5
    DOORS = 6
    FINISH = 7
    LEAVE = 8
    ASK = 9
    ANSWER = 10


class Kind(enum.IntEnum):
    """The kind of a command."""

    READ = 1
    WRITE = 2
    FLUSH = 3
    DISCARD = 4
    WRITE_ZEROES = 5
    CHUNK = 6
    END = 7


class Command(NamedTuple):
    """A command for a driver; the table of the protocol describes each field."""

    kind: int
    flags: int
    number: int
    address: int
    length: int
    offset: int
    entries: int
    horizon: int
    floor: int

    def __str__(self) -> str:
        name = Kind(self.kind).name if self.kind in iter(Kind) else f"kind {self.kind}"
        return f"{name} {self.number} of {self.length} bytes at {self.address}"


class ControlFacts(list[tuple[str, str]]):
    """The lines `name=value` of a control packet, in their order.
    A name may occur more than once."""

    def get(self, name: str) -> str | None:
        """The first value of this name."""
        return next((value for found, value in self if found == name), None)

    def all(self, name: str) -> list[str]:
        """All values of this name."""
        return [value for found, value in self if found == name]

    def number(self, name: str) -> int:
        """The first value of this name, a number of zero or more."""
        value = self.get(name)
        # The digits are counted: beyond a few thousand, Python raises an error of its own.
        is_number = value is not None and value.isascii() and value.isdigit()
        if value is None or not is_number or len(value) > NUMBER_DIGITS_MAX:
            raise ProtocolError(f"the host sent {name}={value}, which is not a number of 64 bits")
        return int(value)


def encode(kind: Control, facts: Mapping[str, object]) -> bytes:
    """A control packet as bytes. Values keep to one line of text; a truth value is 0 or 1."""
    lines = []
    for name, value in facts.items():
        text = str(int(value)) if isinstance(value, bool) else str(value)
        lines.append(f"{name}={text.translate(SPACES)}\n")
    return KIND.pack(kind) + "".join(lines).encode()


def decode(packet: bytes) -> tuple[Control, ControlFacts]:
    """A control packet of bytes."""
    if len(packet) < KIND.size:
        raise ProtocolError(f"a control packet of {len(packet)} bytes")
    (number,) = KIND.unpack_from(packet)
    if number not in iter(Control):
        raise ProtocolError(f"a control packet of unknown kind {number}")
    try:
        text = packet[KIND.size :].decode()
    except UnicodeDecodeError:
        raise ProtocolError("a control packet that is not text") from None
    facts = ControlFacts()
    for line in text.split("\n"):
        name, separator, value = line.partition("=")
        if separator:
            facts.append((name, value))
        elif line:
            raise ProtocolError(f"a control packet with the line {line!r}")
    return Control(number), facts


def buffer() -> bytearray:
    """Room for any packet, and for one that is too long."""
    return bytearray(PACKET_BYTES_MAX + 1)


def commands(packet: memoryview | bytes) -> Iterator[Command]:
    """The commands of a packet."""
    if len(packet) > PACKET_BYTES_MAX:
        raise ProtocolError("a packet that is too long")
    if len(packet) == 0 or len(packet) % COMMAND.size:
        raise ProtocolError(f"a packet of {len(packet)} bytes holds no whole commands")
    return map(Command._make, COMMAND.iter_unpack(packet))


def receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    """Waits for the next control packet; returns it with its descriptors. Without bytes:
    the host has closed."""
    room = socket.CMSG_SPACE(DESCRIPTORS_MAX * 4)
    try:
        packet, ancillary, flags, _ = connection.recvmsg(
            PACKET_BYTES_MAX, room, socket.MSG_CMSG_CLOEXEC
        )
    except ConnectionResetError:
        return b"", []
    descriptors: list[int] = []
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            whole = len(data) - len(data) % 4
            descriptors.extend(struct.unpack(f"{whole // 4}i", data[:whole]))
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        for descriptor in descriptors:
            os.close(descriptor)
        raise ProtocolError("a packet that is too long")
    return packet, descriptors


def send(connection: socket.socket, packet: bytes) -> None:
    """Sends one packet; waits until there is room."""
    try:
        connection.send(packet, socket.MSG_NOSIGNAL)
    except OSError as error:
        raise HostGone(f"the host is gone: {error.strerror}") from None
