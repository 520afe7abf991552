#!/usr/bin/env python3
"""MobiBench's traces (Facebook, Twitter) on the link: by bytes, beside whole pages with read-modify-write.

    bench/mobibench.py TRACE... [--rounds 5] [--delay-us 200] [--page FILE]

A TRACE is MobiGen's output, plain or as .zst (mobigen.facebook.zst). The bench is that of bench/bass.py: the
same namespaces, relay and stacks. Needs root, and the zstd program for .zst.

The traces are calls of a file system, in bytes. They become requests of a device as follows.
- Calls of all threads in one order, by their time, as MobiBench's own replay has it; one at a time, each as
  soon as the one before is answered. The pauses of the trace are left out.
- Each file is a row of pages of its own: from a page's start on, as long as the furthest byte that a call
  reaches. `open` of a path in quotation marks finds the file again; other paths have lost their names, and
  each open of one is a new file. `write` and `read` go on where the last one of that descriptor ended.
- `write` and `pwrite` of n bytes are one write of n bytes there, `read` and `pread` one read. `fsync` and
  `fdatasync` are a flush of the whole device. All other calls are left out, and nothing stands for the file
  system's own metadata and journal.
- All files are there in full before, and none is cached (BASS, section 5.2).
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

import bass

PAGE_BYTES = 4096
# BASS, section 5.2 and figure 14: latency of all writes, per cent less than with whole pages.
PAPER = {("facebook", True): 33, ("twitter", True): 40, ("facebook", False): 47, ("twitter", False): 77}
LETTERS = {"flush": "f", "write": "w", "read": "r"}
WORDS = """\
BASS replays two traces of an Android device (section 5.2), and so does `bench/mobibench.py`. They are calls
of a file system, in bytes. Each file becomes a row of pages of the device, `write` and `pwrite` of n bytes
become one write of n bytes, `read` and `pread` one read, `fsync` and `fdatasync` a flush of the whole device;
a file system's own metadata and journal have no stand-in. One call at a time in the order of the trace,
without its pauses; no page is cached at first, and all files are there in full, as in the paper. Many writes
have under 16 bytes and go to pseudo-files of Android, which MobiBench made files.

A file system that knows where a file ends would not read a page behind the end, and most pages of these
traces are first written there: on a device, and in the paper, where files were made before, they are read.
"""


def calls(path):
    """(file, kind, offset, bytes) of each call, in order."""
    if path.suffix == ".zst":
        text = subprocess.run(["zstd", "-dc", path], check=True, capture_output=True).stdout
    else:
        text = path.read_bytes()
    lines = [line.split() for line in text.decode("latin1").splitlines() if line.strip()]
    lines.sort(key=lambda words: int(words[1]))
    named, open_files, files = {}, {}, 0
    for words in lines:
        call = words[2]
        if call == "open":
            file = named.get(words[3]) if words[3].startswith('"') else None
            if file is None:
                file, files = files, files + 1
                if words[3].startswith('"'):
                    named[words[3]] = file
            open_files.setdefault(words[5], []).append([file, 0])
        elif call == "close" and open_files.get(words[3]):
            open_files[words[3]].pop(0)
        elif call in ("write", "read", "pwrite", "pread", "fsync", "fdatasync"):
            if not open_files.get(words[3]):
                open_files[words[3]] = [[files, 0]]
                files += 1
            handle = open_files[words[3]][0]
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
        if kind == "flush":
            if flushes:
                yield "f\n"
        else:
            yield f"{LETTERS[kind]} {starts[file] + offset} {count}\n"


def measure(wire, arguments, trace, flushes):
    """Both stacks round by round in turn: of each the round with the median of the writes' sum."""
    told = {"bytes": [], "pages": []}
    with tempfile.NamedTemporaryFile("w", suffix=".steps") as file:
        file.writelines(steps(trace, flushes))
        file.flush()
        for _ in range(arguments.rounds):
            for stack, runs in told.items():
                runs.append(bass.one(wire, arguments.delay_us, ["replay", stack, file.name]))
    tiny = sum(kind == "write" and count < 16 for _, kind, _, count in calls(trace))
    row = {"trace": trace.name.split(".")[1], "flushes": flushes, "tiny": tiny}
    for stack, runs in told.items():
        runs.sort(key=lambda run: run["writes"]["sum_us"])
        row[stack] = runs[len(runs) // 2]
        row[stack]["flush_us"] = statistics.median(run["flushes"]["sum_us"] for run in runs)
        row[stack]["read_us"] = statistics.median(run["reads"]["sum_us"] for run in runs)
    return row


def less(mine, theirs):
    return f"{100 * (1 - mine / theirs):.0f} %" if theirs else "-"


def section(rows, arguments):
    """The part of docs/measurements/bass.md that this makes."""
    lines = [
        bass.TRACES, "",
        *WORDS.splitlines(), "",
        f"Medians of {arguments.rounds} rounds in turn, {arguments.delay_us} us of delay there and back.",
        "Mean, median and 99th percentile of one write in microseconds, sums in milliseconds.", "",
        "| trace | fsync | stack | writes | under 16 B | mean | median | 99 % | sum of writes | of fsyncs "
        "| of reads | read below, KB | wire, KB |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        for stack in ("bytes", "pages"):
            run = row[stack]
            writes = run["writes"]
            lines.append(
                f"| {row['trace']} | {'as traced' if row['flushes'] else 'left out'} | {stack} | "
                f"{writes['count']:,} | {row['tiny']:,} | "
                f"{writes['mean_us']:.1f} | {writes['median_us']:.1f} | {writes['p99_us']:.1f} | "
                f"{writes['sum_us'] / 1e3:,.1f} | {run['flush_us'] / 1e3:,.1f} | "
                f"{run['read_us'] / 1e3:,.1f} | {run['fetched_bytes'] / 1e3:,.0f} | "
                f"{run['wire_bytes'] / 1e3:,.0f} |")
    lines += [
        "", "Less by bytes than by pages:", "",
        "| trace | fsync | latency of writes | writes and fsyncs | all | BASS's own: latency of writes "
        "| bytes on the wire |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        mine, pages = row["bytes"], row["pages"]
        changes = [run["writes"]["sum_us"] + run["flush_us"] for run in (mine, pages)]
        everything = [change + run["read_us"] for change, run in zip(changes, (mine, pages))]
        lines.append(
            f"| {row['trace']} | {'as traced' if row['flushes'] else 'left out'} | "
            f"{less(mine['writes']['sum_us'], pages['writes']['sum_us'])} | {less(*changes)} | "
            f"{less(*everything)} | "
            f"{PAPER.get((row['trace'], row['flushes']), '-')} % | "
            f"{less(mine['wire_bytes'], pages['wire_bytes'])} |")
    return "\n".join([*lines, ""])


def main():
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("traces", nargs="+", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--delay-us", type=int, default=200)
    parser.add_argument("--page", type=pathlib.Path, help="puts the tables into that page")
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("bench/mobibench.py: it makes network namespaces: run it as root")
    bass.build()
    rows = []
    with bass.Wire() as wire:
        for flushes in (True, False):
            for trace in arguments.traces:
                rows.append(measure(wire, arguments, trace, flushes))
                print(json.dumps(rows[-1]), flush=True)
    if arguments.page:
        before = arguments.page.read_text().partition(bass.TRACES)[0].rstrip()
        arguments.page.write_text(f"{before}\n\n{section(rows, arguments)}")


if __name__ == "__main__":
    main()
