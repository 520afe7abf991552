#!/usr/bin/env python3
"""BASS's workloads on the link: small writes by bytes, beside whole pages with read-modify-write.

    bench/bass.py [--writes 20000] [--rounds 3] [--whole-writes 50000] [--close-rounds 15]
                  [--delay-us 200] [--only WORKLOAD:BYTES] [--page FILE]

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
PAGE_BYTES = 4096
NAMES = ("bass-a", "bass-b")


WORDS = """\
*random*: pages in random order, each once. *holes*: the front of each page, in order. *cached*: the pages
were read before. *read-after*: each page is read after all
writes, the worst case. Wire bytes are both directions, with Ethernet, IP, UDP, seals, replies and
acknowledgements. Processor time is the initiator's alone; *times* is the median of the rounds' quotients.

Where pages are whole, or all are read after, both do the same, and other programs on the machine show most:
there are more rounds. Both caches get requests as a door makes them.

BASS's own figures (section 5.1; theirs: kernel 3.2, iSCSI on 10 Gb/s Ethernet, an SSD): 27,000 writes/s by
bytes and 3,000 by pages (random, 512 B to 2 KiB), 27,000 and 5,000 (holes); with the target's disk in memory
60,000 and 5,500; 57 % more for cached writes of 256 B; whole pages the same. Their initiator is the kernel's
page cache under ext4.
"""
# What bench/mobibench.py makes of the page.
TRACES = "## MobiBench's traces"


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


def build():
    run("cargo", "build", "--quiet", "--release", "-p", "sawmill-link", "--example", "bass", cwd=REPOSITORY)


def one(wire, delay_us, words):
    """What one load told, and its wire bytes, on a target of its own. `words`: the load, without address."""
    relay = ("relay", "10.77.0.1:9701", "127.0.0.1:9700", delay_us // 2)
    run("ip", "-n", NAMES[0], "link", "set", "lo", "up")
    with Helper("target", "udp:127.0.0.1:9700", SIZE_BYTES), Helper(*relay):
        words = [words[0], "udp:10.77.0.1:9701", *words[1:]]
        words = ["ip", "netns", "exec", NAMES[1], BASS, *[str(word) for word in words]]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as load:
            assert load.stdout.readline() == "ready\n"
            before = wire.bytes()
            load.stdin.write("go\n")
            load.stdin.flush()
            told = json.loads(load.stdout.readline())
        assert load.returncode == 0
        told["wire_bytes"] = wire.bytes() - before
        return told


def measure(wire, arguments, workload, size):
    """Medians of both stacks, round by round in turn; who is first changes each round."""
    writes, rounds = arguments.writes, arguments.rounds
    # Where both do the same, what is to be seen is small.
    if size == PAGE_BYTES:
        writes, rounds = arguments.whole_writes, arguments.close_rounds
    elif workload == "read-after":
        rounds = arguments.close_rounds
    told = {"bytes": [], "pages": []}
    for number in range(rounds):
        for stack in sorted(told, reverse=number % 2 == 1):
            told[stack].append(one(wire, arguments.delay_us, ["load", stack, workload, size, writes]))
    row = {"workload": workload, "bytes_per_write": size, "writes": writes, "rounds": rounds}
    for stack, runs in told.items():
        row[stack] = {
            "writes_per_s": writes / statistics.median(run["seconds"] for run in runs),
            "processor_us": statistics.median(run["processor_s"] for run in runs) / writes * 1e6,
            "wire_bytes": statistics.median(run["wire_bytes"] for run in runs) / writes,
        }
    row["times"] = statistics.median(
        pages["seconds"] / mine["seconds"] for mine, pages in zip(told["bytes"], told["pages"]))
    fastest = {stack: min(run["seconds"] for run in runs) for stack, runs in told.items()}
    row["times_fastest"] = fastest["pages"] / fastest["bytes"]
    row["times_processor"] = statistics.median(
        pages["processor_s"] / mine["processor_s"] for mine, pages in zip(told["bytes"], told["pages"]))
    return row


LOCK = """\
## One lock

The cache has one lock. Threads that keep 16 requests under way (two writes and a read, random pages) over
memory that answers at once, no link: one thread, two on one cache, two with a cache each. Requests a second
of all, medians of {rounds} rounds in turn; `bass lock` (crates/link/examples/bass).

| bytes a request | one thread | two, one cache | two caches |
|---|---|---|---|
"""


def lock_section(rounds):
    cases = ((1, 1), (2, 1), (2, 2))
    text = LOCK.format(rounds=rounds)
    for size in (512, 4096, 16384):
        told = {case: [] for case in cases}
        for _ in range(rounds):
            for case in cases:
                told[case].append(json.loads(run(BASS, "lock", *case, size, 300000))["requests_per_s"])
        medians = [f"{statistics.median(told[case]):,.0f}" for case in cases]
        text += f"| {size} | {' | '.join(medians)} |\n"
    return text


def page_of(rows, arguments):
    lines = [
        "# Small writes across the link", "",
        "BASS's micro-benchmarks (SoCC'16, section 5.1) on the link: writes of a few bytes to pages that are",
        "not cached, through the byte-granular cache, and through a cache of whole pages that reads a page",
        "before it changes it and flushes pages whole. Same connection, same target (a disk in memory),",
        "sealed, one request at a time; the time ends when everything is flushed. Medians of rounds in turn,",
        f"{arguments.delay_us} us of delay there and back, MTU 9000, two cores shared with other programs.",
        "Made by `bench/bass.py`.", "",
        "| workload | bytes a write | writes, rounds | writes/s by bytes | by pages | times "
        "| processor, us a write | by pages | wire bytes a write | by pages |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        mine, pages = row["bytes"], row["pages"]
        lines.append(
            f"| {row['workload']} | {row['bytes_per_write']} | {row['writes']}, {row['rounds']} | "
            f"{mine['writes_per_s']:,.0f} | {pages['writes_per_s']:,.0f} | {row['times']:.2f} | "
            f"{mine['processor_us']:.1f} | {pages['processor_us']:.1f} | "
            f"{mine['wire_bytes']:,.0f} | {pages['wire_bytes']:,.0f} |")
    lines += ["", *WORDS.splitlines(), ""]
    return "\n".join(lines)


def save(rows, arguments):
    old = arguments.page.read_text() if arguments.page.exists() else ""
    _, there, traces = old.partition(TRACES)
    text = page_of(rows, arguments) + "\n" + lock_section(arguments.rounds)
    arguments.page.write_text(text + (f"\n{there}{traces}" if there else ""))


def main():
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("--writes", type=int, default=20000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--whole-writes", type=int, default=50000, help="writes where pages are whole")
    parser.add_argument("--close-rounds", type=int, default=15, help="rounds where both should be the same")
    parser.add_argument("--delay-us", type=int, default=200)
    parser.add_argument("--only", help="a workload and its bytes a write: holes:4096")
    parser.add_argument("--page", type=pathlib.Path)
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("bench/bass.py: it makes network namespaces: run it as root")
    build()
    plan = [(workload, size) for workload in ("random", "holes") for size in (512, 1024, 2048, 4096)]
    plan += [("cached", 256), ("cached", 2048), ("read-after", 512), ("read-after", 2048)]
    plan = [one for one in plan if arguments.only in (None, f"{one[0]}:{one[1]}")]
    rows = []
    with Wire() as wire:
        for workload, size in plan:
            rows.append(measure(wire, arguments, workload, size))
            print(json.dumps(rows[-1]), flush=True)
    if arguments.page and not arguments.only:
        save(rows, arguments)


if __name__ == "__main__":
    main()
