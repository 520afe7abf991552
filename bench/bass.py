#!/usr/bin/env python3
"""BASS's workloads on the link: small writes by bytes, beside whole pages with read-modify-write.

Two network namespaces with a veth pair, MTU 9000. A target with a disk in memory in one, the load
in the other, by UDP, sealed, through a relay that delays packets (half of --delay-us each way;
kernels without netem can do that too). Both stacks run on the same link in turn; medians of
--rounds. Bytes on the wire are those of the interface's own counters, both directions, Ethernet
headers included. Needs root. Not here: both ends (`crates/link/examples/bass`).
"""

import json

from harness import EXAMPLES, GIB, Rounds, Wires, cli, machine, page, run, turns

BASS = EXAMPLES / "bass"
PAGE_BYTES = 4096
STACKS = ("bytes", "pages")
PLAN = {f"{workload}:{size}": (workload, size) for workload, sizes in (
    ("random", (512, 1024, 2048, 4096)), ("holes", (512, 1024, 2048, 4096)),
    ("cached", (256, 2048)), ("read-after", (512, 2048))) for size in sizes}
PAGE = """\
# Small writes across the link

BASS's micro-benchmarks (SoCC'16, section 5.1) on the link: writes of a few bytes to pages that are
not cached, through the byte-granular cache, and through a cache of whole pages that reads a page
before it changes it and flushes pages whole. Same connection, same target (a disk in memory),
sealed, one request at a time; the time ends when everything is flushed. Medians of rounds in turn,
{flags.delay_us} us of delay there and back, MTU 9000, two cores shared with other programs.
Made by `bench/bass.py`.

{table}
*random*: pages in random order, each once. *holes*: the front of each page, in order. \
*cached*: the pages
were read before. *read-after*: each page is read after all
writes, the worst case. Wire bytes are both directions, with Ethernet, IP, UDP, seals, replies and
acknowledgements. Processor time is the initiator's alone; \
*times* is the median of the rounds' quotients.

Where pages are whole, or all are read after, both do the same, \
and other programs on the machine show most:
there are more rounds. Both caches get requests as a door makes them.

BASS's own figures (section 5.1; theirs: kernel 3.2, iSCSI on 10 Gb/s Ethernet, an SSD): \
27,000 writes/s by
bytes and 3,000 by pages (random, 512 B to 2 KiB), 27,000 and 5,000 (holes); \
with the target's disk in memory
60,000 and 5,500; 57 % more for cached writes of 256 B; whole pages the same. \
Their initiator is the kernel's
page cache under ext4.

## One lock

The cache has one lock, and copies without it. Threads that keep 16 requests under way (random \
pages) over
memory that answers at once, no link: one thread, two on one cache, two with a cache each. \
Requests a second
of all, medians of {flags.rounds} rounds in turn; `bass lock` (crates/link/examples/bass).

{lock}"""
# Threads and caches.
LOCK_CASES = {"one thread": (1, 1), "two, one cache": (2, 1), "two caches": (2, 2)}
LOCK_SIZES = (512, 4096, 16384)
# With write-backs below, or only of pages that are cached and may stay dirty.
LOCK_MIXES = {"two writes, a read": (), "cached reads": ("reads",), "cached writes": ("writes",)}
# The part of the page that bench/mobibench.py writes.
TRACES = "## MobiBench's traces"


def build():
    machine.build("sawmill-link", "--example", "bass")


def one(wires, delay_us, command, *words):
    """The report of one load and its wire bytes, on a target of its own."""
    near, far = "10.96.0.1:9701", "127.0.0.1:9700"
    with wires.ready(0, BASS, "target", f"udp:{far}", GIB), \
            wires.ready(0, BASS, "relay", near, far, delay_us // 2), \
            wires.ready(1, BASS, command, f"udp:{near}", *words) as load:
        before = wires.bytes()
        load.send("go")
        report = load.read_event(3600)
        load.end_well(sign=None)
        return {**report, "wire_bytes": wires.bytes() - before}


def measure(wires, flags, found, workload, size):
    """Medians of both stacks, which take turns in each round; `found` gets the rounds."""
    writes, rounds = flags.writes, flags.rounds
    # Where both stacks do the same, differences are small.
    if size == PAGE_BYTES:
        writes, rounds = flags.whole_writes, flags.close_rounds
    elif workload == "read-after":
        rounds = flags.close_rounds
    cell = workload, size
    for number, _, stack in turns(rounds, [cell], STACKS):
        found.keep(number, cell, stack, one(wires, flags.delay_us, "load", stack, *cell, writes))
    row = {"workload": workload, "bytes_per_write": size, "writes": writes, "rounds": rounds}
    for stack in STACKS:
        seconds, processor_s, wire_bytes = (
            found.median(stack, cell, key) for key in ("seconds", "processor_s", "wire_bytes"))
        row[stack] = {"writes_per_s": writes / seconds, "processor_us": processor_s / writes * 1e6,
                      "wire_bytes": wire_bytes / writes}
    mine, pages = (min(found.found(stack, cell, "seconds")) for stack in STACKS)
    return row | {"times": found.ratio("pages", "bytes", cell, "seconds"),
                  "times_fastest": pages / mine,
                  "times_processor": found.ratio("pages", "bytes", cell, "processor_s")}


def one_lock(rounds):
    found = Rounds()
    cells = [(size, mix) for mix in LOCK_MIXES for size in LOCK_SIZES]
    for number, cell, case in turns(rounds, cells, LOCK_CASES):
        size, mix = cell
        report = run(BASS, "lock", *LOCK_CASES[case], size, 300000, *LOCK_MIXES[mix])
        found.keep(number, cell, case, json.loads(report))
    return found


def lock_table(found):
    rows = [[mix, size, *(f"{found.median(case, (size, mix), 'requests_per_s'):,.0f}"
                          for case in LOCK_CASES)]
            for mix in LOCK_MIXES for size in LOCK_SIZES]
    return page.table(["requests", "bytes a request", *LOCK_CASES], rows)


def table_of(rows):
    cells = []
    for row in rows:
        rates, processor, wire = (
            [f"{row[stack][key]:{form}}" for stack in STACKS] for key, form in (
                ("writes_per_s", ",.0f"), ("processor_us", ".1f"), ("wire_bytes", ",.0f")))
        cells.append([row["workload"], row["bytes_per_write"], f"{row['writes']}, {row['rounds']}",
                      *rates, f"{row['times']:.2f}", *processor, *wire])
    return page.table([
        "workload", "bytes a write", "writes, rounds", "writes/s by bytes", "by pages", "times",
        "processor, us a write", "by pages", "wire bytes a write", "by pages"], cells)


@cli.script
def main():
    flags = cli.parse(__doc__, ("--writes", 20000),
                      ("--whole-writes", 50000, "writes where pages are whole"),
                      ("--close-rounds", 15, "rounds where both should be the same"),
                      ("--delay-us", 200), rounds=3, only={"workloads": list(PLAN)}, root=True)
    build()
    rows, found = [], Rounds()
    with Wires() as wires:
        for name in flags.only:
            rows.append(measure(wires, flags, found, *PLAN[name]))
            print(json.dumps(rows[-1]), flush=True)
    if flags.page and flags.whole:
        _, traces = page.around(flags.page, end=TRACES)
        lock = one_lock(flags.rounds)
        page.write(
            flags.page, PAGE.format(flags=flags, table=table_of(rows), lock=lock_table(lock)),
            {"link": found.rows("workload", "bytes_per_write"),
             "lock": lock.rows("bytes_per_request")}, after=traces and "\n" + traces)
