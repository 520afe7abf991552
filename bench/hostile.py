#!/usr/bin/env python3
"""Hostile neighbours at the NBD door and at the admin page: what they cost a legitimate client, and memory.

A thousand connections of another user of this machine (as root; otherwise of our own), a quarter each of:
half-open (the handshake is not finished), idle (finished, then silent), greedy (64 reads of 2 MiB asked
for, no reply taken), garbage (64 random bytes instead of a handshake). Whoever is cut off comes again 5
seconds later. fio is the legitimate client: 4 KiB, half reads and half writes at random, 16 in flight. Each
round measures it without hostile connections and with them, in turns; ratios are taken within a round.
"""

import argparse
import json
import os
import random
import resource
import selectors
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from datetime import date
from pathlib import Path

MIB = 1 << 20
NOBODY = 65534
AGAIN_S = 5.0
KINDS = ("half-open", "idle", "greedy", "garbage")
READS = b"".join(
    struct.pack(">IHHQQI", 0x25609513, 0, 0, number, 0, 2 * MIB) for number in range(64))
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
        selector.register(self.socket, selectors.EVENT_READ, self)
        if self.kind == "wait":
            # Sent when it is connected.
            selector.modify(self.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, self)

    def look(self, selector, events):
        try:
            if events & selectors.EVENT_WRITE:
                self.socket.send(WAIT)
                selector.modify(self.socket, selectors.EVENT_READ, self)
                return
            # Of a greedy one the greeting and some of the export's description are all that is ever taken.
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
        try:
            selector.unregister(self.socket)
        except (KeyError, ValueError):
            pass
        self.socket.close()
        self.socket, self.again, self.ends = None, time.monotonic() + AGAIN_S, self.ends + 1

    def is_gone(self):
        """Whether a connection that nobody listens on has ended."""
        state = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
        return state != 1


def attack(host, port, count, kinds):
    """Runs for ever; says once a second how many are connected and how many have been cut off."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    selector = selectors.DefaultSelector()
    all_of_them = [Hostile((host, port), kinds[at % len(kinds)]) for at in range(count)]
    told = 0.0
    while True:
        now = time.monotonic()
        for one in all_of_them:
            if one.socket is None and now >= one.again:
                one.come(selector)
        for key, events in selector.select(0.05):
            key.data.look(selector, events)
        if now - told >= 1:
            told = now
            for one in all_of_them:
                if one.kind == "greedy" and one.socket is not None and one.greeted and one.is_gone():
                    one.leave(selector)
            connected = {kind: sum(one.socket is not None for one in all_of_them if one.kind == kind)
                         for kind in kinds}
            ends = sum(one.ends for one in all_of_them)
            print(json.dumps({"connected": connected, "ends": ends}), flush=True)


class Attack:
    """The hostile process, until the end of a `with`."""

    def __init__(self, address, count, kinds):
        command = [sys.executable, "-", "--attack", f"{address[0]}:{address[1]}", str(count), *kinds]
        self.child = subprocess.Popen(
            command, stdin=Path(__file__).open(), stdout=subprocess.PIPE, text=True)
        self.said = {}
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self):
        for line in self.child.stdout:
            self.said = json.loads(line)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.child.kill()
        self.child.wait()


class Server:
    def __init__(self, binary, folder, options):
        self.folder, self.binary = folder, binary
        self.environment = {**os.environ, "SAWMILL_STORE": f"file://{folder}/store", "SAWMILL_LOG": "warn",
                            "XDG_STATE_HOME": f"{folder}/state", "XDG_RUNTIME_DIR": f"{folder}"}
        self.run("create", "disk", "--size", "1G")
        self.log = (folder / "log").open("w")
        self.child = subprocess.Popen(
            [binary, "serve", "disk", "--json", "--nbd", "tcp:127.0.0.1:0", "--admin", "127.0.0.1:0",
             "--cache-bytes", "0", *options],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self.log, text=True,
            env=self.environment)
        self.ready = json.loads(self.child.stdout.readline())
        self.peak, self.watching = 0, True
        threading.Thread(target=self.watch, daemon=True).start()

    def run(self, *words):
        return subprocess.run([self.binary, *words], env=self.environment, check=True, capture_output=True,
                              text=True, timeout=120).stdout

    def address(self, url):
        found = urllib.parse.urlsplit(url)
        return found.hostname, found.port

    def resident(self):
        for line in Path(f"/proc/{self.child.pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) << 10
        return 0

    def watch(self):
        while self.watching:
            try:
                self.peak = max(self.peak, self.resident())
            except OSError:
                return
            time.sleep(0.02)

    def status(self):
        return json.loads(self.run("info", "disk", "--json"))

    def fio(self, seconds):
        """Requests a second of the legitimate client."""
        command = ["fio", "--name=client", "--ioengine=nbd", f"--uri={self.ready['uri']}", "--rw=randrw",
                   "--bs=4k", "--iodepth=16", "--size=256M", f"--runtime={seconds}", "--time_based",
                   "--norandommap", "--output-format=json"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=self.folder,
                              timeout=seconds + 120)
        job = json.loads(done.stdout[done.stdout.index("{"):])["jobs"][0]
        return job["read"]["iops"] + job["write"]["iops"]

    def stop(self):
        self.watching = False
        self.child.send_signal(signal.SIGTERM)
        try:
            self.child.wait(120)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()


def measure(binary, options, target, count, rounds, seconds, settle):
    kinds = KINDS if target == "nbd" else ("half-open", "half-open", "half-open", "wait")
    with tempfile.TemporaryDirectory(prefix="sawmill-hostile-") as folder:
        os.chmod(folder, 0o755)
        server = Server(binary, Path(folder), options)
        try:
            server.fio(2)
            alone_peak = peak = 0
            without, beside, order_ms, failed = [], [], [], 0
            address = server.address(server.ready["uri" if target == "nbd" else "admin"])
            for at in range(rounds):
                # Which comes first changes from round to round.
                for is_attacked in (False, True) if at % 2 == 0 else (True, False):
                    server.peak = 0
                    if not is_attacked:
                        without.append(server.fio(seconds))
                        alone_peak = max(alone_peak, server.peak)
                        continue
                    with Attack(address, count, kinds) as hostile:
                        time.sleep(settle)
                        try:
                            beside.append(server.fio(seconds))
                        except subprocess.SubprocessError:
                            beside.append(0.0)
                            failed += 1
                        began = time.monotonic()
                        try:
                            server.run("door", "list", "disk")
                            order_ms.append((time.monotonic() - began) * 1000)
                        except subprocess.SubprocessError:
                            order_ms.append(float("inf"))
                        peak = max(peak, server.peak)
                        print(f"  {target} round {at}: without {without[-1] if without else 0:.0f}, beside "
                              f"{beside[-1]:.0f}, {hostile.said}, at most {server.peak >> 20} MiB",
                              file=sys.stderr, flush=True)
            lines = sum(1 for _ in (Path(folder) / "log").open())
        finally:
            server.stop()
    ratios = [with_them / alone for with_them, alone in zip(beside, without)]
    return {"target": target, "alone_peak": alone_peak, "peak": peak, "without": statistics.median(without),
            "beside": statistics.median(beside), "ratio": statistics.median(ratios), "failed": failed,
            "order_ms": statistics.median(order_ms), "log_lines": lines}


COLUMNS = ("where", "fio alone, requests/s", "beside them", "ratio", "fio failed", "memory with fio alone",
           "beside them, at most", "limit of NBD memory", "`door list` beside them", "lines of log")
TAIL = """
The aim: the hostile take no more memory than the limit, and fio does at least 0.8 of what it does alone.
What the hostile process itself takes of the processors is in the ratio. Memory is the server's own
(`RssAnon`): the shared memory that holds the newest writes, as large as it was told to be, is not in it.

FUSE, ublk and vhost-user have no such neighbours: a mount and a device node are opened through the kernel,
which bounds what is in flight, and a vhost-user socket takes one connection, of its owner or root.
"""


def page(rows, arguments, limit):
    lines = [
        "# Hostile neighbours", "",
        f"Written by `bench/hostile.py` on {date.today()}: {arguments.connections} hostile connections at",
        f"a time, medians of {arguments.rounds} rounds of {arguments.seconds} s, {os.cpu_count()} cores",
        "shared by server, fio and the hostile process. See the head of the script for who is hostile in",
        "which way. At the admin page",
        "three quarters send nothing, and the rest wait for the volume.", "",
        "| " + " | ".join(COLUMNS) + " |", "|---" + "|---:" * (len(COLUMNS) - 1) + "|"]
    for label, row in rows:
        shown = "none" if row["order_ms"] == float("inf") else f"{row['order_ms']:.0f} ms"
        bound = "none" if label.endswith("before") else f"{limit >> 20} MiB"
        cells = (label, f"{row['without']:,.0f}", f"{row['beside']:,.0f}", f"{row['ratio']:.2f}",
                 row["failed"], f"{row['alone_peak'] >> 20} MiB", f"{row['peak'] >> 20} MiB", bound, shown,
                 row["log_lines"])
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n" + TAIL


def main():
    if sys.argv[1:2] == ["--attack"]:
        host, port = sys.argv[2].rsplit(":", 1)
        attack(host, int(port), int(sys.argv[3]), tuple(sys.argv[4:]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=8)
    parser.add_argument("--settle", type=int, default=4, help="seconds from the attack's begin to fio's")
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument("--limit-mib", type=int, default=512)
    parser.add_argument("--binary", default="target/release/sawmill")
    parser.add_argument("--beside", help="another version without the limit, for a row of its own")
    parser.add_argument("--page", type=Path)
    arguments = parser.parse_args()
    limit = arguments.limit_mib * MIB
    rows = []
    if arguments.beside:
        found = measure(arguments.beside, [], "nbd", arguments.connections, 1, arguments.seconds,
                        arguments.settle)
        rows.append(("NBD, the version before", found))
    for target, label in (("nbd", "NBD"), ("admin", "admin page")):
        options = ["--nbd-memory-max", f"{arguments.limit_mib}M"]
        found = measure(arguments.binary, options, target, arguments.connections, arguments.rounds,
                        arguments.seconds, arguments.settle)
        rows.append((label, found))
    text = page(rows, arguments, limit)
    print(text)
    if arguments.page:
        arguments.page.write_text(text)


if __name__ == "__main__":
    main()
