#!/usr/bin/env python3
"""Where the time of a flush goes: 4 KiB writes, each with a sync, on ever more of the path.

    bench/flush.py --page docs/measurements/flush.md    as root: two minutes and a half

One and eight clients of fio with queue depth 1. Differences between contestants say what a part
costs: the disk; the protocol, at a door that does nothing; the engine, in flush mode `weak`, where
no flush waits; the hop to the journal's thread, with a journal in memory, which is written and
synced in no time; and FUSE and a loop device in the place of NBD.

Not here: what bounds other loads (`run.py`).
"""

import os
from pathlib import Path
from statistics import median

from harness import (
    MIB, Rounds, Sawmill, Server, cli, difference, fio, log, page, run, temporary_place, turns)
from suite.contest import PEERS, Peer

JOBS = (1, 8)
WAYS = {
    "raw": "io_uring, O_DIRECT on a file, fsync",
    "raw-fdatasync": "the same, fdatasync",
    "raw-dsync": "the same, O_DSYNC: write and sync are one call",
    "raw-journal": "pwrite of 8 KiB in order, fdatasync: what Sawmill's journal does",
    "nbdkit-null": "NBD to nbdkit null: protocol and client alone",
    "weak": "NBD to Sawmill, `--flush weak`: no flush waits",
    "memory": "NBD to Sawmill, its journal in memory",
    "sawmill": "NBD to Sawmill",
    "fuse": "io_uring on the file of Sawmill's FUSE door",
    "loop": "io_uring on the loop device on that file",
    "raw-loop": "io_uring on a loop device on a file",
}


class Raw(Server):
    """A file, written before."""

    def make(self):
        self.disk = self.folder / "disk"
        zeroes = bytes(MIB)
        with self.disk.open("wb") as file:
            for _ in range(self.size_bytes // MIB):
                file.write(zeroes)
            os.fsync(file.fileno())

    def start(self):
        self.target = fio.direct(self.disk, "io_uring")


class RawLoop(Raw):
    def start(self):
        self.node = run("losetup", "--find", "--show", "--direct-io=on", "--sector-size", 4096,
                        self.disk).strip()
        self.target = fio.direct(self.node, "io_uring")

    def end(self):
        run("losetup", "-d", self.node)

    abandon = end


class Ours(Sawmill):
    """`flush`: its mode; `journal`: another place for it; `door`: the words of another door."""

    def __init__(self, place, binary, name, flush="logged", journal=None, door=""):
        super().__init__(place, binary, ["--cache-bytes", "0"], name=name)
        self.flush, self.door = flush, door
        self.journal = journal or self.journal

    def make(self, *_):
        super().make(None, "--flush", self.flush)

    def start(self):
        if not self.door:
            return super().start()
        mountpoint = self.place.memory / f"{self.name}.fuse"
        mountpoint.mkdir(exist_ok=True)
        self.serve("--fuse", mountpoint, *(["--loop"] if self.door == "loop" else []), "--admin",
                   "127.0.0.1:0", "--journal", self.journal, "--staging", self.place.memory)
        path = self.ready["uri"] if self.door == "loop" else mountpoint / self.volume
        self.target = fio.direct(path, "io_uring")

    def counters(self):
        volume = self.volume_status()["counters"]
        tasks = Path(f"/proc/{self.processes[0].pid}/task").glob("*/status")
        switches = sum(int(line.split()[1]) for task in tasks
                       for line in task.read_text().splitlines() if line.startswith("voluntary"))
        return {"flushes": volume["flushes"], "journal_syncs": volume["journal_syncs"],
                "switches": switches}


def contestants(place, flags):
    null, = (peer for peer in PEERS if peer[0] == "nbdkit-null")
    binary, memory = flags.binary, place.memory / "journal"
    raws = [Raw(place, name) for name in WAYS if name.startswith("raw") and name != "raw-loop"]
    return [*raws, Peer(place, *null), Ours(place, binary, "weak", flush="weak"),
            Ours(place, binary, "memory", journal=memory), Ours(place, binary, "sawmill"),
            Ours(place, binary, "fuse", door="fuse"), Ours(place, binary, "loop", door="loop"),
            RawLoop(place, "raw-loop")]


def measure(server, jobs, seconds):
    more = {"raw-fdatasync": ["--fdatasync=1"], "raw-dsync": ["--sync=dsync"],
            # A record's header and the padding that a flush needs make a second block of it.
            "raw-journal": ["--fdatasync=1", "--rw=write", "--bs=8k", "--ioengine=psync"]}
    words = fio.words(server.target, "randwrite", "4k", 1, server.size_bytes, "--norandommap",
                      "--group_reporting", f"--numjobs={jobs}",
                      *more.get(server.name, ["--fsync=1"]), seconds=seconds)
    before, cpu_before_s = server.counters(), sum(one.cpu_s() for one in server.processes)
    job = fio.call(words, server.folder)
    cpu_s = sum(one.cpu_s() for one in server.processes) - cpu_before_s
    counted = difference(before, server.counters())
    write, done = job["write"], job["write"]["total_ios"]
    waits = {"write_us": write["clat_ns"]["mean"] / 1e3,
             "sync_us": job["sync"]["lat_ns"].get("mean", 0) / 1e3}
    return {"iops": write["iops"], **waits, "whole_us": jobs * 1e6 / write["iops"],
            "cpu_us": cpu_s * 1e6 / done, "syncs": counted.get("journal_syncs", 0) / done,
            "switches": counted.get("switches", 0) / done}


def rows(found, jobs):
    for name, title in WAYS.items():
        rates = found.found(name, jobs, "iops")
        if not rates:
            continue
        figures = [found.median(name, jobs, key) for key in
                   ("whole_us", "write_us", "sync_us", "cpu_us", "syncs", "switches")]
        yield [title, f"{found.median(name, jobs, 'iops'):,.0f} "
                      f"[{min(rates):,.0f} to {max(rates):,.0f}]",
               f"{found.ratio(name, 'raw', jobs, 'iops'):.2f}",
               *(f"{figure:,.0f}" for figure in figures[:3]),
               f"{figures[3]:,.0f}" if figures[3] else "–",
               *(f"{figure:.2f}" if any(figures[4:]) else "–" for figure in figures[4:])]


def clients(jobs):
    return f"{jobs} client{'s' if jobs > 1 else ''}"


def shares(found):
    """What each part of the way adds to a pair, by differences within a round."""
    def text(jobs, plus, minus=()):
        # The journal has one thread, whoever flushes.
        rounds = zip(*(found.of(name, 1 if name == "raw-journal" else jobs, "whole_us")
                       for name in (*plus, *minus)))
        sums = [sum(each[:len(plus)]) - sum(each[len(plus):]) for each in rounds
                if None not in each]
        return page.text_of(median(sums) if sums else None)
    for title, *parts in (
            ("protocol and client", ["nbdkit-null"]), ("+ engine", ["weak"], ["nbdkit-null"]),
            ("+ hop to the journal's thread", ["memory"], ["weak"]),
            ("+ the journal's disk, alone", ["raw-journal"]),
            ("the median of their sums", ["memory", "raw-journal"]), ("Sawmill", ["sawmill"]),
            ("FUSE in the place of NBD", ["fuse"], ["sawmill"]),
            ("+ a loop device on it", ["loop"], ["fuse"])):
        yield [title, *(text(jobs, *parts) for jobs in JOBS)]


@cli.script
def main():
    flags = cli.parse(__doc__, ("--size", 256, "MiB of each disk"), rounds=3, seconds=2,
                      only={"contestants": list(WAYS)}, binary=cli.SAWMILL, work=cli.TARGET,
                      root=True)
    found = Rounds()
    with temporary_place(flags.work, flags.size * MIB) as place:
        servers = [one for one in contestants(place, flags) if one.name in flags.only]
        for server in servers:
            log(f"preparing {server.name}")
            server.prepare()
        for number, jobs, server in turns(flags.rounds, JOBS, servers):
            with server.running():
                found.keep(number, jobs, server.name, measure(server, jobs, flags.seconds))
    head = ["", "writes with a sync, a second", "÷ raw", "a pair, µs", "write, µs", "sync, µs",
            "CPU of the server, µs", "syncs of the journal", "switches"]
    parts = [f"## {clients(jobs)}\n\n"
             f"{page.table(head, rows(found, jobs), True)}" for jobs in JOBS]
    text = ("# Where the time of a flush goes\n\n"
            "4 KiB random writes, each followed by a sync, on disks of "
            f"{flags.size} MiB whose blocks were written before; medians of {flags.rounds} rounds "
            f"of {flags.seconds} s in turn, in brackets the slowest and the fastest, the ratio "
            "within a round. *A pair* is the mean time of a write with its sync, and what fio does "
            "in between. For each pair: the CPU of the server, the syncs of its journal, and how "
            "often one of its threads went to sleep.\n\n" + "\n".join(parts)
            + "\n## What each part adds to a pair, µs\n\nDifferences within a round, and their "
            "medians, which need not add up; the disk's part is that of one thread. Where parts "
            "overlap, the total is below the sum: the journal's disk is written and synced early, "
            "while the client gets the write's answer and sends its flush; and flushes share "
            "syncs. Where threads wait for a core, it is above.\n\n"
            + page.table(["", *map(clients, JOBS)], shares(found), True))
    page.write(flags.page, text, found.rows("jobs"))
