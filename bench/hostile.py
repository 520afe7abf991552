#!/usr/bin/env python3
"""Hostile neighbors at the NBD door and at the admin page:
what they cost a legitimate client, and memory.

A thousand connections of another user of this machine (as root; otherwise of our own), a quarter
each of: half-open (the handshake is not finished), idle (finished, then silent), greedy (64 reads
of 2 MiB asked for, no reply taken), garbage (64 random bytes instead of a handshake). Whoever is
cut off comes again 5 seconds later. fio is the legitimate client: 4 KiB, half reads and half writes
at random, 16 in flight. Each round measures it without hostile connections and with them, in turns;
ratios are taken within a round. Not here: hostile packets of a link (`bench/hostile_link.py`).
"""

import contextlib
import json
import os
import random
import resource
import selectors
import socket
import struct
import sys
import threading
import time
import urllib.parse
from datetime import date
from pathlib import Path

from harness import (
    GIB, KIB, MIB, Process, Rounds, Sawmill, cli, fio, page, log, temporary_place, turns)

NOBODY, AGAIN_S = 65534, 5.0
KINDS = ("half-open", "idle", "greedy", "garbage")
READS = b"".join(struct.pack(">IHHQQI", 0x25609513, 0, 0, number, 0, 2 * MIB)
                 for number in range(64))
HANDSHAKE = struct.pack(">IQII", 3, 0x49484156454F5054, 1, 4) + b"disk"
WAIT = b"GET /wait?safety=stored&volume=disk HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Hostile:
    """One connection that comes again and again."""

    def __init__(self, address, kind):
        self.address, self.kind = address, kind
        self.socket, self.again, self.ends = None, 0.0, 0

    def come(self, selector):
        self.socket = socket.socket()
        self.socket.setblocking(False)
        self.socket.connect_ex(self.address)
        self.greeted = False
        # What waits is asked for when it is connected.
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self.kind == "wait" else 0)
        selector.register(self.socket, wanted, self)

    def look(self, selector, events):
        try:
            if events & selectors.EVENT_WRITE:
                self.socket.send(WAIT)
                selector.modify(self.socket, selectors.EVENT_READ, self)
                return
            # Of a greedy one the greeting and some of the export's description are
            # all that is ever taken.
            if not self.socket.recv(152 if self.kind != "wait" else 4096):
                raise ConnectionError
            if not self.greeted:
                self.greeted = True
                if self.kind == "garbage":
                    self.socket.send(random.randbytes(64))
                elif self.kind in ("idle", "greedy"):
                    self.socket.send(HANDSHAKE + (READS if self.kind == "greedy" else b""))
                if self.kind == "greedy":
                    # It listens no more, but notices its end by its next visit.
                    selector.unregister(self.socket)
        except BlockingIOError:
            pass
        except OSError:
            self.leave(selector)

    def leave(self, selector):
        with contextlib.suppress(KeyError, ValueError):
            selector.unregister(self.socket)
        self.socket.close()
        self.socket, self.again, self.ends = None, time.monotonic() + AGAIN_S, self.ends + 1

    def is_gone(self):
        """Whether a connection that nobody listens on has ended."""
        return self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != 1


def attack(address, count, kinds):
    """Runs forever; says once a second how many are connected and how many have been cut off."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    selector = selectors.DefaultSelector()
    all_of_them = [Hostile(address, kinds[at % len(kinds)]) for at in range(count)]
    reported_at = 0.0
    while True:
        now = time.monotonic()
        for one in all_of_them:
            if one.socket is None and now >= one.again:
                one.come(selector)
        for key, events in selector.select(0.05):
            key.data.look(selector, events)
        if now - reported_at >= 1:
            reported_at = now
            for one in all_of_them:
                if (one.kind == "greedy" and one.socket is not None and one.greeted
                        and one.is_gone()):
                    one.leave(selector)
            connected = {kind: sum(one.socket is not None for one in all_of_them
                                   if one.kind == kind) for kind in kinds}
            ends = sum(one.ends for one in all_of_them)
            print(json.dumps({"connected": connected, "ends": ends}), flush=True)


class Attack(Process):
    """The hostile process, until the end of a `with`."""

    def __init__(self, address, count, kinds):
        super().__init__(sys.executable, __file__, "--attack", *address, count, *kinds, talks=True)
        self.report = {}
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self):
        for line in self.child.stdout:
            self.report = json.loads(line)


class Watched(Sawmill):
    """A volume at a TCP port; the most memory of its own that it was seen with."""

    def start(self):
        self.serve("--nbd", "tcp:127.0.0.1:0", "--admin", "127.0.0.1:0", "--journal", self.journal,
                   "--cache-bytes", "0")
        self.peak = 0
        threading.Thread(target=self.watch, args=self.processes, daemon=True).start()

    def watch(self, process):
        with contextlib.suppress(OSError, KeyError):
            while True:
                self.peak = max(self.peak, process.status("RssAnon") * KIB)
                time.sleep(0.02)

    def client(self, seconds):
        """Requests a second of the legitimate client."""
        job = fio.call(fio.words(self.target, "randrw", "4k", 16, "256M", "--norandommap",
                                 seconds=seconds),
                       self.folder, seconds + 120)
        return job["read"]["iops"] + job["write"]["iops"]

    def attacked(self, seconds):
        """The client's rate and the time of a command beside hostile ones;
        without success 0 and none."""
        found = {"requests_per_s": 0.0, "order_ms": None}
        with contextlib.suppress(OSError):
            found["requests_per_s"] = self.client(seconds)
        began = time.monotonic()
        with contextlib.suppress(OSError):
            self.sawmill("door", "list", self.volume, timeout=120)
            found["order_ms"] = (time.monotonic() - began) * 1000
        return found


def measure(found, where, binary, options, target, rounds, flags):
    """A row of the table; `found` gets the rounds."""
    kinds = KINDS if target == "nbd" else ("half-open", "half-open", "half-open", "wait")
    with temporary_place(flags.work, GIB) as place:
        server = Watched(place, binary, options)
        server.make()
        with server.running():
            server.client(2)
            url = urllib.parse.urlsplit(server.ready["uri" if target == "nbd" else "admin"])
            for number, _, kind in turns(rounds, [where], ("alone", "beside")):
                server.peak = 0
                if kind == "alone":
                    row = {"requests_per_s": server.client(flags.seconds)}
                    condition = "without them"
                else:
                    with Attack((url.hostname, url.port), flags.connections, kinds) as attack:
                        time.sleep(flags.settle)
                        row, condition = server.attacked(flags.seconds), f"beside {attack.report}"
                found.keep(number, where, kind, row | {"peak_bytes": server.peak})
                log(f"{target}: {row['requests_per_s']:.0f} {condition}, "
                    f"{server.peak // MIB} MiB at most")
        lines = len((server.folder / "log").read_text().splitlines())
    rate = "requests_per_s"
    alone, beside = (found.median(kind, where, rate) for kind in ("alone", "beside"))
    peaks = [max(found.found(kind, where, "peak_bytes")) >> 20 for kind in ("alone", "beside")]
    order_ms = found.median("beside", where, lambda row: row["order_ms"] or float("inf"))
    return [where, f"{alone:,.0f}", f"{beside:,.0f}",
            f"{found.ratio('beside', 'alone', where, rate):.2f}",
            found.found("beside", where, rate).count(0), *(f"{peak} MiB" for peak in peaks),
            f"{flags.limit_mib} MiB" if options else "none",
            "none" if order_ms == float("inf") else f"{order_ms:.0f} ms", lines]


COLUMNS = ("where", "fio alone, requests/s", "beside them", "ratio", "fio failed",
           "memory with fio alone", "beside them, at most", "limit of NBD memory",
           "`door list` beside them", "lines of log")
PAGE = """\
# Hostile neighbors

Written by `bench/hostile.py` on {date}: {flags.connections} hostile connections at
a time, medians of {flags.rounds} rounds of {flags.seconds} s, {cores} cores
shared by server, fio and the hostile process. See the head of the script for who is hostile in
which way. At the admin page three quarters send nothing, and the rest wait for the volume.

{table}
The aim: the hostile take no more memory than the limit, \
and fio does at least 0.8 of what it does alone.
What the hostile process itself takes of the processors is in the ratio. Memory is the server's own
(`RssAnon`): the shared memory that holds the newest writes, as large as its option says, \
is not in it.

FUSE, ublk and vhost-user have no such neighbors: a mount and a device node are opened \
through the kernel,
which bounds what is in flight, and a vhost-user socket takes one connection, of its owner or root.
"""


@cli.script
def main():
    if sys.argv[1:2] == ["--attack"]:
        host, port, count, *kinds = sys.argv[2:]
        attack((host, int(port)), int(count), kinds)
    flags = cli.parse(
        __doc__, ("--settle", 4, "seconds from the attack's begin to fio's"),
        ("--connections", 1000), ("--limit-mib", 512),
        ("--beside", Path, "another version without the limit, for a row of its own"), rounds=5,
        seconds=8, only={"targets": ["nbd", "admin"]}, binary=cli.SAWMILL, work=cli.TEMPORARY)
    rows, found, options = [], Rounds(), ["--nbd-memory-max", f"{flags.limit_mib}M"]
    if flags.beside:
        rows.append(measure(found, "NBD, the version before", flags.beside.resolve(), [], "nbd", 1,
                            flags))
    for target in flags.only:
        where = {"nbd": "NBD", "admin": "admin page"}[target]
        rows.append(measure(found, where, flags.binary, options, target, flags.rounds, flags))
    page.write(flags.page, PAGE.format(date=date.today(), flags=flags, cores=os.cpu_count(),
                                       table=page.table(COLUMNS, rows, True)),
               {"rounds": found.rows("where"), "log_lines": {row[0]: row[-1] for row in rows}})
