#!/usr/bin/env python3
"""A link under load and trouble for a long time: what grows, what leaks, what is lost.

Two network namespaces with two veth pairs between them, removed at the end. In one a target with
four disks in memory; in the other a process with two connections, one over two UDP links and one by
TCP, both sealed. Each uses two of the disks: sixteen threads read, write, write packed, discard,
zero and flush their own regions and know every byte of them; a connection has 8 places, so that
requests wait for them.

A cycle is a dozen seconds of load, with trouble in most of them (a pair of interfaces pulled, all
of them, for longer than the target waits for silent peers; one made so narrow that it loses frames;
all of the target but its disks made anew; the connections made anew), and a rest: no requests, all
links joined again. At rest both processes are looked at: resident memory, bytes that are allocated,
open descriptors, threads, places. Medians of the second tenth of the rests are compared with those
of the last tenth. Any answer that is not what was written, any error, and any rest that does not
come within a minute fails the soak, as does growth beyond the tolerances at the head of this file.

Needs `cargo build --release -p sawmill-link --example link_soak`; --binary names another copy of
it. Not here: who asks and remembers (`crates/link/examples/link_soak`).
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from statistics import median

from harness import EXAMPLES, MIB, Unfit, Wires, cli, page

DISKS, DISK_BYTES, PAIRS = "a,b,c,d", 8 * MIB, 2
CYCLE_S, SILENCE_S = 12, 20
# (what, its unit, share that it may grow, and at least so much). The allocator of the C library
# keeps what threads that come and go leave behind, in an arena for each of many: resident memory
# moves by itself, less with one arena; what is allocated does not.
WATCHED = {
    "rss_kib": ("resident memory", "KiB", 0.05, 4096),
    "bytes_in_use": ("allocated at rest", "bytes", 0, 65536),
    "descriptors": ("open descriptors", "", 0, 0),
    "threads": ("threads", "", 0, 0),
}
KINDS = ("reads", "writes", "packed", "discards", "zeroes", "flushes")


def ask(process, line):
    """A line to one of the two processes, a line of JSON from it."""
    process.send(line)
    return process.read_event()


def look(process):
    """The kernel's counters of it."""
    return {"rss_kib": process.status("VmRSS"), "threads": process.status("Threads"),
            "descriptors": len(os.listdir(f"/proc/{process.pid}/fd"))}


class Trouble:
    """The faults of a cycle, chosen by chance."""

    def __init__(self, wires, target, seed):
        self.wires, self.target, self.dice = wires, target, random.Random(seed)
        self.counts = dict.fromkeys(("one pulled", "all pulled", "silence", "one narrow",
                                     "target anew"), 0)

    def cause(self):
        """Causes some trouble; everything is repaired at its end."""
        dice, fate = self.dice, self.dice.random()
        time.sleep(dice.uniform(0.5, 2))
        if fate < 0.35:
            for _ in range(dice.randint(1, 3)):
                self.pull("one pulled", [dice.randrange(PAIRS)], dice.uniform(0.1, 2))
        elif fate < 0.45:
            self.pull("all pulled", range(PAIRS), dice.uniform(0.2, 3))
        elif fate < 0.49:
            self.pull("silence", range(PAIRS), SILENCE_S + 5)
        elif fate < 0.64:
            self.counts["one narrow"] += 1
            index = dice.randrange(PAIRS)
            self.wires.narrow(index, dice.choice((5, 20, 80)))
            time.sleep(dice.uniform(1, 6))
            self.wires.widen(index)
        elif fate < 0.85:
            for _ in range(dice.randint(1, 2)):
                self.counts["target anew"] += 1
                ask(self.target, "restart")
                time.sleep(dice.uniform(0.5, 2))

    def pull(self, what, pairs, seconds):
        self.counts[what] += 1
        self.wires.pull(pairs, seconds)
        time.sleep(self.dice.uniform(0.2, 1))


def soak(flags):
    """(samples, counts of trouble); raises when something is not as it must be."""
    with Wires(PAIRS) as wires:
        udp, tcp = wires.addresses("udp"), "tcp:10.96.0.1"
        disks = ["--exports", DISKS, "--bytes", DISK_BYTES]
        how = {"wait": lambda process: process.read_line(),
               "env": os.environ | {"MALLOC_ARENA_MAX": "1"}}
        with wires.ready(0, flags.binary, "target", "--listen", f"{udp},{tcp}", *disks,
                         "--silence-s", SILENCE_S, **how) as target, \
                wires.ready(1, flags.binary, "load", "--udp", udp, "--tcp", tcp, *disks,
                            "--rate", flags.rate, "--seed", flags.seed, **how) as load:
            return cycles(flags, Trouble(wires, target, flags.seed), target, load)


def cycles(flags, trouble, target, load):
    samples, began, attached, ends = [], time.monotonic(), 0, False
    while not ends:
        if len(samples) % 10 == 9:
            attached += 1
            ask(load, "attach")
        load.send(f"run {CYCLE_S}")
        trouble.cause()
        load.read_line()
        lasted_s = time.monotonic() - began
        ends = lasted_s >= flags.seconds or flags.is_ending
        if ends:
            ask(load, "verify")
        load_status, target_status = ask(load, "rest"), ask(target, "rest")
        if (load_status["mismatches"] or load_status["errors"] or load_status["pending"]
                or load_status["places"] != load_status["places_free"]):
            raise Unfit(f"after {lasted_s:.0f} s: {load_status}")
        samples.append({"at_s": round(lasted_s, 1), "load": {**load_status, **look(load)},
                        "target": {**target_status, **look(target)}})
        if flags.samples:
            flags.samples.write_text(json.dumps(samples, indent=1) + "\n")
        cli.log(f"{lasted_s:.0f} s: {json.dumps(samples[-1])}")
    return samples, {**trouble.counts, "connections anew": attached}


def growth(samples):
    """Rows (end, what, unit, second tenth, last tenth, limit, kept)."""
    tenth = max(1, len(samples) // 10)
    rows = []
    for end in ("target", "load"):
        for name, (words, unit, share, least) in WATCHED.items():
            early, late = (median(sample[end][name] for sample in part)
                           for part in (samples[tenth:2 * tenth] or samples, samples[-tenth:]))
            most = early + max(early * share, least)
            rows.append((end, words, unit, early, late, most, late <= most))
    left = {sample["target"]["connections"] for sample in samples}
    rows.append(("target", "connections, at any rest", "", 2, max(left), 2, left == {2}))
    return rows


PAGE = """\
{before}<!-- bench/soak.py writes from here -->

`bench/soak.py --seconds {flags.seconds:g} --rate {flags.rate} --seed {flags.seed}`; method: \
see the head of the script. {at_s:,.0f} s, {rests} rests; load average {busy:.1f} at the end.

{requests:,} requests ({kinds}), {gb:.1f} GB; {last[mismatches]} answers that were not what was \
written, {last[errors]} errors, {missing} places missing at any rest. Trouble: {troubles}. The \
longest request of a cycle took {middle_ms:,.0f} ms in the median, {longest_ms:,.0f} ms at most.

{table}
{after}"""


def page_of(flags, samples, trouble, rows):
    last, longest_ms = (samples[-1]["load"],
                        [sample["load"]["longest_us"] / 1000 for sample in samples])
    cells = [[end, words, *(f"{number:,.0f} {unit}".strip() for number in numbers), page.kept(kept)]
             for end, words, unit, *numbers, kept in rows]
    before, after = page.around(flags.page, "<!-- bench/soak.py writes from here -->",
                                "<!-- to here -->")
    return PAGE.format(
        before=before, after=after, flags=flags, at_s=samples[-1]["at_s"], rests=len(samples),
        last=last, busy=os.getloadavg()[0], requests=sum(last[kind] for kind in KINDS),
        gb=last["bytes"] / 1e9, missing=last["places"] - last["places_free"],
        middle_ms=median(longest_ms), longest_ms=max(longest_ms),
        kinds=", ".join(f"{last[kind]:,} {kind}" for kind in KINDS),
        troubles=", ".join(f"{what} {count}" for what, count in trouble.items()),
        table=page.table(["end", "what", "second tenth", "last tenth", "limit", "kept"], cells,
                         range(2, 5)))


@cli.script
def main():
    flags = cli.parse(__doc__, ("--rate", 2000, "requests a second, of all threads together"),
                      ("--seed", 1), ("--samples", Path, "where each rest's numbers go"),
                      seconds=3600.0, binary=EXAMPLES / "link_soak", root=True)
    flags.is_ending = False
    # On SIGTERM it rests once more and reports its results.
    signal.signal(signal.SIGTERM, lambda *_: setattr(flags, "is_ending", True))
    samples, trouble = soak(flags)
    rows = growth(samples)
    page.write(flags.page, page_of(flags, samples, trouble, rows),
               {"rests": samples, "trouble": trouble})
    if not all(row[-1] for row in rows):
        sys.exit("something grew")
