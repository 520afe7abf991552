"""Whoever keeps a disk and shows it on a Unix socket, and one cell measured at it.

A server is prepared once, then started and ended around every cell, so that what it puts off is
done (and its CPU time counted) before the next one runs. Not here: which servers there are
(`sawmill.py`, `suite/`).
"""

import contextlib
import socket
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from harness import fio
from harness.busy import Busy
from harness.machine import GIB, Unfit, forget_cached, missing, wait_until
from harness.process import Process
from harness.threads import Threads


class Place(NamedTuple):
    """Where a run keeps things: a folder on the disk that is measured, and one in memory, with a
    short path that fits sockets."""

    folder: Path = Path()
    memory: Path = Path()
    size_bytes: int = 0


@contextlib.contextmanager
def temporary_place(work, size_bytes=0):
    """A place in `work` and in memory that is gone afterwards."""
    keep = {"prefix": "bench-", "ignore_cleanup_errors": True}
    work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=work.resolve(), **keep) as folder, \
            tempfile.TemporaryDirectory(dir="/dev/shm", **keep) as memory:
        yield Place(Path(folder), Path(memory), size_bytes)


def in_parts(flags, parts, size_bytes):
    """Measures the chosen parts, each in a place of its own:
    figures by part, and the sections they make."""
    found, sections = {}, []
    for name in flags.only:
        with temporary_place(flags.work, size_bytes) as place:
            found[name], section = parts[name](place, flags)
        sections.append(section)
    return found, sections


def listens(path):
    """Whether somebody answers at a socket."""
    with socket.socket(socket.AF_UNIX) as door:
        return door.connect_ex(str(path)) == 0


def difference(before, after):
    return {name: after[name] - before[name] for name in after if name in before}


class Server:
    """Subclasses `start` it: `processes` then holds what runs, `target` is fio's way to it."""

    name = title = ""
    # The program it needs.
    program = ""
    # Whether it has what was written to it, and whether it still has it after a restart.
    keeps = lasts = True
    # Whether `counters` can be read only when it has ended, or while it runs.
    counts_at_end = False

    def __init__(self, place, name=None):
        self.place, self.size_bytes, self.name = place, place.size_bytes, name or self.name
        self.folder, self.socket = place.folder / self.name, place.memory / f"{self.name}.sock"
        self.processes, self.target = [], None

    def missing(self):
        """Why it cannot take part; the empty text if it can."""
        return missing(self.program) if self.program else ""

    def prepare(self):
        """Makes its disk and writes every block of it, if it can take part."""
        if why := self.missing():
            raise Unfit(why)
        self.folder.mkdir(parents=True)
        self.make()
        if self.keeps and self.lasts:
            with self.running():
                fio.once("write", self)

    def make(self):
        """Makes what the disk lives in."""

    def chill(self):
        """Empties every cache, while it is not running."""
        forget_cached(self.folder)

    def end(self):
        """Ends it; everything put off is done."""
        for process in self.processes:
            process.end()
        self.socket.unlink(missing_ok=True)

    def spawn(self, *words, **more):
        self.processes.append(Process(*words, log=self.folder / "log", **more))
        return self.processes[-1]

    def listening(self, *words):
        """Starts a program and waits until the socket answers, which is the target then."""
        process = self.spawn(*words)
        wait_until(f"{self.name} listens", lambda: process.check() or listens(self.socket))
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

    def cell(self, workload, seconds):
        """Measures one workload; `None` where it has no meaning."""
        if workload.cold:
            if not (self.keeps and self.lasts):
                return None
            self.chill()
        with self.running():
            if self.keeps and not self.lasts:
                fio.once("write", self)
            if workload.warm:
                fio.once("read", self)
            cpu_before_s = sum(process.cpu_s() for process in self.processes)
            kernel_before_s = sum(process.kernel_s() for process in self.processes)
            before, busy = self.counters(), Busy(self.folder)
            with Threads(self.processes) as threads:
                cell = workload.measure(self, seconds)
            since, shares = time.monotonic(), busy.found(cell["seconds"])
            shares |= threads.busiest()
            if workload.writes:
                self.settle()
            after = {} if self.counts_at_end else self.counters()
            peak_bytes = sum(process.peak_bytes() for process in self.processes)
        more = {"settle_s": time.monotonic() - since, **shares,
                "counted": difference(before, self.counters() if self.counts_at_end else after)}
        if self.processes:
            cpu_s = sum(process.cpu_total_s for process in self.processes) - cpu_before_s
            kernel_s = sum(process.kernel_total_s for process in self.processes) - kernel_before_s
            moved_gib = max(cell["bytes"] / GIB, 1e-9)
            more |= {"cpu_s_per_gib": cpu_s / moved_gib, "kernel_s_per_gib": kernel_s / moved_gib}
            more["peak_bytes"] = peak_bytes
        return {**cell, "more": more}
