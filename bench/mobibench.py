#!/usr/bin/env python3
"""MobiBench's traces (Facebook, Twitter) on the link:
by bytes, beside whole pages with read-modify-write.

A TRACE is MobiGen's output, plain or as .zst (mobigen.facebook.zst). The bench is that of
bench/bass.py: the same namespaces, relay and stacks. Needs root, and the zstd program for .zst.

The traces are calls of a file system, in bytes. They become requests of a device as follows.
- Calls of all threads in one order, by their time, as MobiBench's own replay has it; one at a time,
  each as soon as the one before is answered. The pauses of the trace are left out.
- Each file is a row of pages of its own: from a page's start on, as long as the furthest byte that
  a call reaches. `open` of a path in quotation marks finds the file again; other paths have lost
  their names, and each open of one is a new file. `write` and `read` go on where the last one of
  that descriptor ended.
- `write` and `pwrite` of n bytes are one write of n bytes there, `read` and `pread` one read.
  `fsync` and `fdatasync` are a flush of the whole device. All other calls are left out, and nothing
  stands for the file system's own metadata and journal.
- All files are there in full before, and none is cached (BASS, section 5.2).
Not here: both stacks and their target (`bench/bass.py`).
"""

import itertools
import json
import subprocess
import tempfile
from pathlib import Path
from statistics import median

import bass
from bass import PAGE_BYTES, STACKS
from harness import Rounds, Wires, cli, page, turns

# BASS, section 5.2 and figure 14: latency of all writes, per cent less than with whole pages.
PAPER = {("facebook", True): 33, ("twitter", True): 40, ("facebook", False): 47,
         ("twitter", False): 77}
SECTION = """\
{traces}

BASS replays two traces of an Android device (section 5.2), and so does `bench/mobibench.py`. \
They are calls
of a file system, in bytes. Each file becomes a row of pages of the device, \
`write` and `pwrite` of n bytes
become one write of n bytes, `read` and `pread` one read, \
`fsync` and `fdatasync` a flush of the whole device;
a file system's own metadata and journal have no stand-in. \
One call at a time in the order of the trace,
without its pauses; no page is cached at first, and all files are there in full, \
as in the paper. Many writes
have under 16 bytes and go to pseudo-files of Android, which MobiBench made files.

A file system that knows where a file ends would not read a page behind the end, \
and most pages of these
traces are first written there: on a device, and in the paper, where files were made before, \
they are read.

Medians of {flags.rounds} rounds in turn, {flags.delay_us} us of delay there and back.
Mean, median and 99th percentile of one write in microseconds, sums in milliseconds.

{figures}
Less by bytes than by pages:

{less}"""


def calls(path):
    """(file, kind, offset, bytes) of each call, in order."""
    if path.suffix == ".zst":
        text = subprocess.run(["zstd", "-dc", path], check=True, capture_output=True).stdout
    else:
        text = path.read_bytes()
    lines = [line.split() for line in text.decode("latin1").splitlines() if line.strip()]
    lines.sort(key=lambda words: int(words[1]))
    named, open_files, files = {}, {}, itertools.count()
    for words in lines:
        call = words[2]
        if call == "open":
            file = named[words[3]] if words[3] in named else next(files)
            if words[3].startswith('"'):
                named[words[3]] = file
            open_files.setdefault(words[5], []).append([file, 0])
        elif call == "close" and open_files.get(words[3]):
            open_files[words[3]].pop(0)
        elif call in ("write", "read", "pwrite", "pread", "fsync", "fdatasync"):
            handles = open_files.setdefault(words[3], [])
            if not handles:
                handles.append([next(files), 0])
            handle = handles[0]
            if call.endswith("sync"):
                yield handle[0], "flush", 0, 0
                continue
            placed = call.startswith("p")
            offset, count = (int(words[4]), int(words[5])) if placed else (handle[1], int(words[4]))
            if count > 0:
                yield handle[0], call.removeprefix("p"), offset, count
                handle[1] += 0 if placed else count


def steps(path, flushes):
    """The lines for `bass replay`."""
    all_calls = list(calls(path))
    ends = {}
    for file, _, offset, count in all_calls:
        ends[file] = max(ends.get(file, 0), offset + count)
    place, starts = 0, {}
    for file in sorted(ends):
        starts[file] = place
        place += -(-ends[file] // PAGE_BYTES) * PAGE_BYTES
    for file, kind, offset, count in all_calls:
        if kind != "flush":
            yield f"{kind[0]} {starts[file] + offset} {count}\n"
        elif flushes:
            yield "f\n"


def measure(wires, flags, found, trace, flushes):
    """Both stacks round by round in turn: of each the round with the median of the writes' sum.
    `found` gets all rounds."""
    row = {"trace": trace.name.split(".")[1], "flushes": flushes}
    cell = tuple(row.values())
    with tempfile.NamedTemporaryFile("w", suffix=".steps") as file:
        file.writelines(steps(trace, flushes))
        file.flush()
        for number, _, stack in turns(flags.rounds, [cell], STACKS):
            found.keep(number, cell, stack,
                       bass.one(wires, flags.delay_us, "replay", stack, file.name))
    row["tiny"] = sum(kind == "write" and count < 16 for _, kind, _, count in calls(trace))
    for stack in STACKS:
        runs = sorted(found.found(stack, cell, dict), key=lambda run: run["writes"]["sum_us"])
        row[stack] = runs[len(runs) // 2] | {
            "flush_us": median(run["flushes"]["sum_us"] for run in runs),
            "read_us": median(run["reads"]["sum_us"] for run in runs)}
    return row


def less(mine, theirs):
    return f"{100 * (1 - mine / theirs):.0f} %" if theirs else "-"


HEAD = ["trace", "fsync", "stack", "writes", "under 16 B", "mean", "median", "99 %",
        "sum of writes", "of fsyncs", "of reads", "read below, KB", "wire, KB"]
LESS_HEAD = ["trace", "fsync", "latency of writes", "writes and fsyncs", "all",
             "BASS's own: latency of writes", "bytes on the wire"]


def section(rows, flags):
    """The part of docs/measurements/bass.md that this makes."""
    cells, changes = [], []
    for row in rows:
        known = [row["trace"], "as traced" if row["flushes"] else "left out"]
        for stack in STACKS:
            run, writes = row[stack], row[stack]["writes"]
            sums = (writes["sum_us"], run["flush_us"], run["read_us"])
            cells.append([*known, stack, f"{writes['count']:,}", f"{row['tiny']:,}",
                          *(f"{writes[key]:.1f}" for key in ("mean_us", "median_us", "p99_us")),
                          *(f"{sum_us / 1e3:,.1f}" for sum_us in sums),
                          *(f"{run[key] / 1e3:,.0f}" for key in ("fetched_bytes", "wire_bytes"))])
        writes = [row[stack]["writes"]["sum_us"] for stack in STACKS]
        flushed = [us + row[stack]["flush_us"] for us, stack in zip(writes, STACKS)]
        everything = [us + row[stack]["read_us"] for us, stack in zip(flushed, STACKS)]
        changes.append([*known, less(*writes), less(*flushed), less(*everything),
                        f"{PAPER.get((row['trace'], row['flushes']), '-')} %",
                        less(*(row[stack]["wire_bytes"] for stack in STACKS))])
    return SECTION.format(traces=bass.TRACES, flags=flags, figures=page.table(HEAD, cells),
                          less=page.table(LESS_HEAD, changes))


@cli.script
def main():
    flags = cli.parse(__doc__, ("traces", Path), ("--delay-us", 200), rounds=5, root=True)
    bass.build()
    rows, found = [], Rounds()
    with Wires() as wires:
        for flushes in (True, False):
            for trace in flags.traces:
                rows.append(measure(wires, flags, found, trace, flushes))
                print(json.dumps(rows[-1]), flush=True)
    if flags.page:
        before, _ = page.around(flags.page, begin=bass.TRACES)
        page.write(flags.page, section(rows, flags), found.rows("trace", "with_flushes"),
                   name="mobibench", before=f"{before.rstrip()}\n\n")
