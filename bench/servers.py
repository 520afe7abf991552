"""The contestants: each keeps a disk of the same size and shows it on a Unix socket.

A contestant is prepared once, then started and ended around every cell, so that what it puts off is done (and
its CPU time counted) before the next one runs. Not here: Sawmill (`sawmill.py`), S3 (`s3.py`).
"""

import contextlib
import shutil
import socket
import tempfile
import time
from pathlib import Path

import fio
from machine import Process, Unfit, forget_cached, wait_until

MIB = 1 << 20


class Place:
    """Where a run keeps things: a folder on the disk that is measured, and one in memory, with a short path
    that fits sockets."""

    def __init__(self, folder, memory, size_bytes):
        self.folder = Path(folder)
        self.memory = Path(memory)
        self.size_bytes = size_bytes


@contextlib.contextmanager
def temporary_place(size_bytes):
    """A place in `target/` and in memory that is gone afterwards."""
    target = Path(__file__).resolve().parent.parent / "target"
    keep = {"prefix": "bench-", "ignore_cleanup_errors": True}
    with tempfile.TemporaryDirectory(dir=target, **keep) as folder, \
            tempfile.TemporaryDirectory(dir="/dev/shm", **keep) as memory:
        yield Place(folder, memory, size_bytes)


class Server:
    """A contestant. Subclasses say how to start it; `processes` then holds what runs."""

    name = title = ""
    # The program it needs.
    program = ""
    # Whether it has what was written to it, and whether it still has it after a restart.
    keeps = lasts = True
    # Whether `counters` can be read only when it has ended, or while it runs.
    counts_at_end = False

    def __init__(self, place, name=None):
        self.place = place
        self.name = name or self.name
        self.size_bytes = place.size_bytes
        self.folder = place.folder / self.name
        self.socket = place.memory / f"{self.name}.sock"
        self.processes = []
        self.target = None

    def missing(self):
        """Why it cannot take part; the empty text if it can."""
        if self.program and not shutil.which(self.program):
            return f"{self.program} is not installed"
        return ""

    def prepare(self):
        """Makes its disk and writes every block of it."""
        self.folder.mkdir(parents=True)
        self.make()
        if self.keeps and self.lasts:
            with self.running():
                fio.fill(self.target, self.size_bytes, self.folder)

    def make(self):
        """Makes what the disk lives in."""

    def start(self):
        """Starts it, sets `processes` and `target`."""
        raise NotImplementedError

    def chill(self):
        """Empties every cache, while it is not running."""
        forget_cached(self.folder)

    def end(self):
        """Ends it; everything put off is done."""
        for process in self.processes:
            process.end()
        self.socket.unlink(missing_ok=True)

    def spawn(self, command, env=None, pipe=False):
        process = Process(command, self.folder / "log", env, pipe)
        self.processes.append(process)
        return process

    def listening(self, process):
        """Waits until the socket answers, then makes it the target."""
        def answers():
            process.check()
            with socket.socket(socket.AF_UNIX) as door:
                return door.connect_ex(str(self.socket)) == 0
        wait_until(f"{self.name} listens", answers)
        self.target = fio.nbd(f"nbd+unix:///?socket={self.socket}")

    def settle(self):
        """Waits until what was written is where it is to stay, as far as that can be waited for."""

    def counters(self):
        """Store requests and the like, as far as it counts them."""
        return {}

    def abandon(self):
        """Ends it after something went wrong."""
        for process in self.processes:
            process.end(seconds=20)

    @contextlib.contextmanager
    def running(self):
        self.processes = []
        try:
            self.start()
            yield self
        except BaseException:
            self.abandon()
            raise
        self.end()

    def cell(self, workload, runtime_s):
        """Measures one workload; `None` where it has no meaning."""
        if workload.cold:
            if not (self.keeps and self.lasts):
                return None
            self.chill()
        with self.running():
            if self.keeps and not self.lasts:
                fio.fill(self.target, self.size_bytes, self.folder)
            if workload.warm:
                fio.read_through(self.target, self.size_bytes, self.folder)
            cpu_before = sum(process.cpu_s() for process in self.processes)
            before = self.counters()
            cell = fio.measure(self.target, workload, self.size_bytes, self.folder, runtime_s)
            since = time.monotonic()
            if workload.writes:
                self.settle()
            after = {} if self.counts_at_end else self.counters()
        cell.more["settle_s"] = time.monotonic() - since
        cell.more["counted"] = difference(before, self.counters() if self.counts_at_end else after)
        if self.processes:
            cpu_s = sum(process.cpu_total_s for process in self.processes) - cpu_before
            cell.more["cpu_s_per_gib"] = cpu_s / max(cell.bytes / 2**30, 1e-9)
        return cell


def difference(before, after):
    return {name: after[name] - before[name] for name in after if name in before}


class Raw(Server):
    """The limit: a file, without any server."""

    name, title = "raw", "raw file, io_uring O_DIRECT"

    def make(self):
        self.file = self.folder / "disk"
        with self.file.open("wb") as file:
            file.truncate(self.size_bytes)

    def start(self):
        self.target = fio.raw(self.file)


class NbdkitNull(Server):
    name, title, program, keeps = "nbdkit-null", "nbdkit null", "nbdkit", False

    def start(self):
        size = self.size_bytes
        self.listening(self.spawn(["nbdkit", "-f", "-U", self.socket, "null", f"size={size}"]))


class NbdkitMemory(Server):
    name, title, program, lasts = "nbdkit-memory", "nbdkit memory", "nbdkit", False

    def start(self):
        size = self.size_bytes
        self.listening(self.spawn(["nbdkit", "-f", "-U", self.socket, "memory", str(size)]))


class NbdkitFile(Raw):
    name, title, program = "nbdkit-file", "nbdkit file (page cache)", "nbdkit"

    def start(self):
        self.listening(self.spawn(["nbdkit", "-f", "-U", self.socket, "file", self.file]))


class QemuNone(Raw):
    name, title, program = "qemu-none", "qemu-nbd raw, cache=none", "qemu-nbd"
    cache = ("--cache=none", "--aio=native")

    def start(self):
        command = ["qemu-nbd", "-t", "-f", "raw", *self.cache, "-k", self.socket, self.file]
        self.listening(self.spawn(command))


class QemuWriteback(QemuNone):
    name, title = "qemu-writeback", "qemu-nbd raw, writeback"
    cache = ("--cache=writeback",)


def prepare_all(servers, say):
    """Prepares those that can take part; returns them, and why the others cannot."""
    ready, absent = [], {}
    for server in servers:
        why = server.missing()
        if not why:
            say(f"preparing {server.name}")
            try:
                server.prepare()
            except (Unfit, OSError) as error:
                why = str(error)
        if why:
            absent[server.name] = why
            say(f"without {server.name}: {why}")
        else:
            ready.append(server)
    return ready, absent
