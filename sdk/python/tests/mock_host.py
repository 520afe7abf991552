"""A small host for tests: sends what a test wants, valid or not.

`MockHost` listens; `welcome` does the handshake with the next driver, and returns that driver's
`AttachedDriver`, which sends commands and reads answers. Reads and writes go through the queue's
memory as with a real host.
"""

import mmap
import os
import socket
import tempfile
from pathlib import Path

from sawmill import wire
from sawmill.wire import ANSWER, COMMAND, Control, Kind

DEFAULTS = {
    "mode": "plain", "size": 1 << 20, "blocksize": 512, "hw_queues": 1, "queue_depth": 64,
    "read_only": 0, "collision_area_size": 4096, "write_chunk_size": 65536, "metadata_bytes": 4096,
}  # fmt: skip
MEMORY_BYTES = 1 << 20


class MockHost:
    """Listens at `path`."""

    def __init__(self):
        self._folder = tempfile.TemporaryDirectory()
        self.path = Path(self._folder.name) / "driver"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(self.path))
        self._listener.listen()

    def accept(self):
        """The next driver, with its HELLO."""
        control, _ = self._listener.accept()
        kind, facts = wire.decode(control.recv(wire.PACKET_BYTES_MAX))
        assert kind == Control.HELLO, kind
        return control, dict(facts)

    def welcome(self, doors=("nbd nbd+unix:///?socket=/somewhere",), **options):
        """Welcomes the next driver with these options in effect,
        besides its own and the defaults."""
        control, hello = self.accept()
        own = {
            name: value
            for name, value in hello.items()
            if name not in ("protocol", "program", "replace")
        }
        facts = {"protocol": 1, "name": "disk", "generation": 1, **DEFAULTS, **own, **options}
        control.send(wire.encode(Control.WELCOME, facts))
        attached = AttachedDriver(control, hello, facts)
        for _ in range(int(facts["hw_queues"])):
            attached.add_queue()
        attached.send_message(Control.ATTACHED)
        lines = "".join(f"door={door}\n" for door in doors)
        control.send(wire.KIND.pack(Control.DOORS) + lines.encode())
        return attached

    def close(self):
        self._listener.close()
        self._folder.cleanup()


class Queue:
    """The host's end of a socket and its memory."""

    def __init__(self):
        self.socket, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(60)
        self.descriptor = os.memfd_create("queue")
        os.ftruncate(self.descriptor, MEMORY_BYTES)
        self.memory = mmap.mmap(self.descriptor, MEMORY_BYTES)
        self._number = 0

    def send(
        self,
        kind,
        address=0,
        length=0,
        flags=0,
        offset=0,
        entries=0,
        horizon=0,
        floor=0,
        number=None,
    ):
        """Sends a command; returns its number."""
        if number is None:
            self._number += 1
            number = self._number
        command = (kind, flags, number, address, length, offset, entries, horizon, floor)
        self.socket.send(COMMAND.pack(*command))
        return number

    def answer(self):
        """The next answer: number and errno."""
        answers = list(ANSWER.iter_unpack(self.socket.recv(wire.PACKET_BYTES_MAX)))
        assert len(answers) == 1, answers
        return answers[0][:2]

    def does(self, kind, address=0, length=0, **more):
        """Sends a command, and returns the errno of its answer."""
        number = self.send(kind, address, length, **more)
        answered, errno = self.answer()
        assert answered == number, (answered, number)
        return errno

    def write(self, address, data, offset=0, flags=0):
        self.memory[offset : offset + len(data)] = data
        return self.does(Kind.WRITE, address, len(data), offset=offset, flags=flags)

    def read(self, address, length, offset=0):
        errno = self.does(Kind.READ, address, length, offset=offset)
        assert errno == 0, os.strerror(errno)
        return self.memory[offset : offset + length]

    def close(self):
        self.socket.close()
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1

    def is_closed(self):
        """Waits for the driver's next action on this socket, which must be to close it."""
        try:
            return self.socket.recv(64) == b""
        except ConnectionResetError:
            return True


class AttachedDriver:
    """A driver that is attached. `queues`; in batch mode `writes` and `reads`."""

    def __init__(self, control, hello, facts):
        self.control, self.hello, self.facts = control, hello, facts
        self.control.settimeout(60)
        self.batch = facts["mode"] == "batch"
        self.queues, self.writes, self.reads = [], [], []

    def add_queue(self, **facts):
        number = len(self.writes if self.batch else self.queues)
        new_queues = [Queue(), Queue()] if self.batch else [Queue()]
        facts_of_queue = {
            "queue": number,
            "memory_bytes": MEMORY_BYTES,
            "read_memory_bytes": MEMORY_BYTES,
            **facts,
        }
        pairs = ((queue.theirs.fileno(), queue.descriptor) for queue in new_queues)
        descriptors = [descriptor for pair in pairs for descriptor in pair]
        socket.send_fds(self.control, [wire.encode(Control.QUEUE, facts_of_queue)], descriptors)
        for queue in new_queues:
            queue.theirs.close()
        if self.batch:
            self.writes.append(new_queues[0])
            self.reads.append(new_queues[1])
        else:
            self.queues += new_queues

    def send_message(self, kind, **facts):
        self.control.send(wire.encode(kind, facts))

    def receive_message(self):
        """The next packet of the driver; None if it has closed the connection."""
        packet = self.control.recv(wire.PACKET_BYTES_MAX)
        return wire.decode(packet) if packet else None

    def all(self):
        return self.queues + self.writes + self.reads

    def finish(self, reason="ended"):
        """Ends the driver cleanly, and waits until it is gone."""
        self.send_message(Control.FINISH, reason=reason)
        for queue in self.all():
            queue.send(Kind.END, number=0)
        assert all(queue.is_closed() for queue in self.all())
        assert self.receive_message() is None
        self.vanish()

    def vanish(self):
        """Disappears like a host that is killed."""
        for each in self.all():
            each.close()
        self.control.close()
