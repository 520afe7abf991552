#!/usr/bin/env python3
"""BASS's workloads on the link: small writes by bytes, beside whole pages with read-modify-write.

    bench/bass.py [--writes 20000] [--rounds 3] [--delay-us 200] [--page FILE]

Two network namespaces with a veth pair, MTU 9000. A target with a disk in memory in one, the load in the
other, by UDP, sealed, through a relay that delays packets (half of --delay-us each way; kernels without netem
can do that too). Both stacks run on the same link in turn; medians of --rounds. Bytes on the wire are those
of the interface's own counters, both directions, Ethernet headers included. Needs root.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
BASS = REPOSITORY / "target/release/examples/bass"
SIZE_BYTES = 1 << 30
NAMES = ("bass-a", "bass-b")


WORDS = """\
*random*: pages in random order, each once. *holes*: the front of each page, in order. *cached*: the pages
were read before. *read-after*: each page is read after all
writes, the worst case. Wire bytes are both directions, with Ethernet, IP, UDP, seals, replies and
acknowledgements.

BASS's own figures (theirs: kernel 3.2, iSCSI on 10 Gb/s Ethernet, an SSD): 27,000 writes/s by bytes and
3,000 by pages (random, 512 B to 2 KiB), 27,000 and 5,000 (holes); with the target's disk in memory 60,000 and
5,500; 57 % more for cached writes of 256 B; whole pages the same. Their initiator is the kernel's page cache
under ext4.
"""


def run(*words, **more):
    words = [str(word) for word in words]
    return subprocess.run(words, check=True, capture_output=True, text=True, **more).stdout


class Wire:
    """Two namespaces with a cable between them."""

    def __enter__(self):
        self.__exit__()
        for name in NAMES:
            run("ip", "netns", "add", name)
        peer = ("peer", "name", "wire", "netns", NAMES[1])
        run("ip", "link", "add", "wire", "mtu", 9000, "netns", NAMES[0], "type", "veth", *peer)
        for number, name in enumerate(NAMES, 1):
            run("ip", "-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "wire")
            run("ip", "-n", name, "link", "set", "wire", "mtu", 9000, "up")
        return self

    def __exit__(self, *_):
        for name in NAMES:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def bytes(self):
        show = run("ip", "-n", NAMES[1], "-s", "-j", "link", "show", "wire")
        stats = json.loads(show)[0]["stats64"]
        return stats["tx"]["bytes"] + stats["rx"]["bytes"]


class Helper:
    """A target or a relay: lives until its standard input ends."""

    def __init__(self, *words):
        words = ["ip", "netns", "exec", NAMES[0], BASS, *[str(word) for word in words]]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self):
        assert self.process.stdout.readline() == "ready\n"
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        self.process.wait()


def one(wire, arguments, stack, workload, size):
    """Seconds and wire bytes of one load, on a target of its own."""
    relay = ("relay", "10.77.0.1:9701", "127.0.0.1:9700", arguments.delay_us // 2)
    run("ip", "-n", NAMES[0], "link", "set", "lo", "up")
    with Helper("target", "udp:127.0.0.1:9700", SIZE_BYTES), Helper(*relay):
        words = ["load", "udp:10.77.0.1:9701", stack, workload, size, arguments.writes]
        words = ["ip", "netns", "exec", NAMES[1], BASS, *[str(word) for word in words]]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as load:
            assert load.stdout.readline() == "begins\n"
            before = wire.bytes()
            told = json.loads(load.stdout.readline())
        assert load.returncode == 0
        told["wire_bytes"] = wire.bytes() - before
        return told


def measure(wire, arguments, workload, size):
    """Medians of both stacks, round by round in turn."""
    told = {"bytes": [], "pages": []}
    for _ in range(arguments.rounds):
        for stack, runs in told.items():
            runs.append(one(wire, arguments, stack, workload, size))
    writes = arguments.writes
    row = {"workload": workload, "bytes_per_write": size}
    for stack, runs in told.items():
        row[stack] = {
            "writes_per_s": writes / statistics.median(run["seconds"] for run in runs),
            "wire_bytes": statistics.median(run["wire_bytes"] for run in runs) / writes,
        }
    row["times"] = statistics.median(
        pages["seconds"] / mine["seconds"] for mine, pages in zip(told["bytes"], told["pages"]))
    return row


def page_of(rows, arguments):
    lines = [
        "# Small writes across the link", "",
        "BASS's micro-benchmarks (SoCC'16, section 5.1) on the link: writes of a few bytes to pages that are",
        "not cached, through the byte-granular cache, and through a cache of whole pages that reads a page",
        "before it changes it and flushes pages whole. Same connection, same target (a disk in memory),",
        "sealed, one request at a time; the time ends when everything is flushed.",
        f"{arguments.writes} writes, medians of {arguments.rounds} runs in turn, {arguments.delay_us} us of",
        "delay there and back, MTU 9000, two shared cores. Made by `bench/bass.py`.", "",
        "| workload | bytes a write | writes/s by bytes | writes/s by pages | times "
        "| wire bytes a write, by bytes | by pages |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        mine, pages = row["bytes"], row["pages"]
        lines.append(
            f"| {row['workload']} | {row['bytes_per_write']} | {mine['writes_per_s']:,.0f} | "
            f"{pages['writes_per_s']:,.0f} | {row['times']:.2f} | {mine['wire_bytes']:,.0f} | "
            f"{pages['wire_bytes']:,.0f} |")
    lines += ["", *WORDS.splitlines(), ""]
    return "\n".join(lines)


def main():
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("--writes", type=int, default=20000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--delay-us", type=int, default=200)
    parser.add_argument("--page", type=pathlib.Path)
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("bench/bass.py: it makes network namespaces: run it as root")
    run("cargo", "build", "--quiet", "--release", "-p", "sawmill-link", "--example", "bass", cwd=REPOSITORY)
    plan = [(workload, size) for workload in ("random", "holes") for size in (512, 1024, 2048, 4096)]
    plan += [("cached", 256), ("cached", 2048), ("read-after", 512), ("read-after", 2048)]
    rows = []
    with Wire() as wire:
        for workload, size in plan:
            rows.append(measure(wire, arguments, workload, size))
            print(json.dumps(rows[-1]), flush=True)
    if arguments.page:
        arguments.page.write_text(page_of(rows, arguments))


if __name__ == "__main__":
    main()
