#!/usr/bin/python3
"""Aims of performance beside what a run found: docs/performance.md, and whether a change costs
speed.

    bench/performance.py            measures the aims (17 minutes); writes docs/performance.md, and
                                    every sample below docs/measurements/raw
    bench/performance.py --words    writes the page from these samples again
    bench/performance.py --check    measures again; fails if a ratio lies below nine tenths of the
                                    committed one (`make bench-check`)

Only ratios within a run are compared: they survive another machine. Not here: how a figure comes
about (`run.py`, bench/README.md).
"""

import json
import subprocess
import sys
from dataclasses import dataclass

from harness import MIB, ROOT, cli, log, machine, page
from harness.page import MEASUREMENTS, RAW, kept, table, text_of
from suite.contest import WORKLOADS
from suite.report import Results

PAGE = ROOT / "docs/performance.md"
KEPT = MEASUREMENTS / "raw/performance.json"
TITLES = {workload.name: workload.title for workload in WORKLOADS}
JOBS = {workload.name: workload.jobs for workload in WORKLOADS}
LIMITS = {"twice": "the disk", "cores": "no disk", "serial": "sync after protocol"}
# What is busy for this share of the time is named.
BUSY = 0.9
# A ratio below this share of the committed one is a loss, if the run's spread allows to see it.
LOSS = 0.9


@dataclass(frozen=True)
class Aim:
    """A ratio to reach, and CPU to keep below."""

    workload: str
    base: str
    ratio: float
    cpu_s_per_gib: float = 0
    server: str = "sawmill"
    # What bounds it where the aim is not met: the contestant "twice"; the cores, as Sawmill with
    # everything in memory has them ("cores"); or a request of the disk after two round trips of
    # the protocol ("serial").
    limit: str = ""


AIMS = [
    Aim("randwrite-4k", "nbdkit-null", 0.90, limit="cores"),
    Aim("randwrite-4k-4", "nbdkit-null", 0.90, limit="cores"),
    Aim("randwrite-16k", "nbdkit-null", 0.85, 0.8, limit="twice"),
    Aim("seqwrite-64k", "raw", 0.45, 0.5, limit="twice"),
    Aim("seqwrite-1m", "raw", 0.45, 0.5, limit="twice"),
    Aim("seqwrite-64k", "raw", 0.8, server="sawmill-memory", limit="cores"),
    Aim("seqwrite-1m", "raw", 0.8, server="sawmill-memory", limit="cores"),
    Aim("fsync-4k", "raw", 0.95, limit="serial"),
    Aim("fsync-4k-8", "raw", 1.5, limit="serial"),
    Aim("mixed-8k", "nbdkit-file", 1.3, limit="cores"),
    Aim("write-4k-1", "nbdkit-null", 0.90),
    Aim("read-4k-1", "nbdkit-null", 0.90),
]
SERVERS = ["raw", "nbdkit-null", "nbdkit-file", "twice", "sawmill", "sawmill-memory",
           "sawmill-no-disk"]


def limit_rate(results, aim):
    """Requests a second that the limit allows, by the medians of the run."""
    rates = {name: results.median(name, aim.workload, "iops")
             for name in ("raw", "nbdkit-null", "twice", "sawmill-no-disk")
             if name in results.servers}
    if aim.limit == "twice":
        return rates.get("twice")
    if aim.limit == "cores":
        return rates.get("sawmill-no-disk")
    if aim.limit == "serial" and rates.get("raw") and rates.get("nbdkit-null"):
        return 1 / (1 / rates["raw"] + 1 / rates["nbdkit-null"])
    return None


def title_of(aim):
    where = ", the store in memory" if aim.server == "sawmill-memory" else ""
    return TITLES[aim.workload] + where


def more_of(results, name, aim, key):
    return results.median(name, aim.workload, lambda cell: cell["more"].get(key))


def row(results, aim):
    ours = results.median(aim.server, aim.workload, "iops")
    ratios = {base: results.ratio(aim.server, base, aim.workload, "iops")
              for base in ("raw", "nbdkit-null", "nbdkit-file")}
    cpu_s = more_of(results, aim.server, aim, "cpu_s_per_gib")
    limit = limit_rate(results, aim)
    reached = ratios[aim.base]
    is_cheap = not aim.cpu_s_per_gib or (cpu_s or 0) <= aim.cpu_s_per_gib
    is_met = reached is not None and reached >= aim.ratio and is_cheap
    wanted = f"≥ {aim.ratio:.2f} × {aim.base}" + (
        f", ≤ {aim.cpu_s_per_gib} s/GiB" if aim.cpu_s_per_gib else "")
    return [title_of(aim), text_of(ours),
            *(spread(results, aim, base) for base in ratios),
            wanted, kept(is_met), text_of(limit and ours and ours / limit, ".2f"),
            "–" if is_met else out_of_reach(results, aim, limit)]


def out_of_reach(results, aim, limit):
    """What keeps an aim out of reach here. What is exceeded is no limit."""
    reached = results.ratio(aim.server, aim.base, aim.workload, "iops")
    base = results.median(aim.base, aim.workload, "iops")
    cores = results.document["machine"]["cores"]
    at_most = {"the cores": with_all_cores(results, aim, cores),
               "one thread": with_all_of_a_thread(results, aim),
               LIMITS.get(aim.limit): limit and base and limit / base}
    below = [f"{name} ({ratio:.2f})" for name, ratio in at_most.items()
             if name and ratio and reached and reached <= ratio < aim.ratio]
    if (reached or 0) < aim.ratio and not below:
        below = ["nothing shown"]
    cpu_s, kernel_s = (more_of(results, aim.server, aim, key)
                       for key in ("cpu_s_per_gib", "kernel_s_per_gib"))
    if aim.cpu_s_per_gib and (cpu_s or 0) > aim.cpu_s_per_gib:
        is_shown = (kernel_s or 0) > aim.cpu_s_per_gib
        below.append(f"the kernel's time ({kernel_s:.2f} s/GiB)" if is_shown
                     else "nothing shown for the time")
    return ", ".join(below)


def spread(results, aim, base):
    return page.spread(results.ratios(aim.server, base, aim.workload, "iops"))


def cost(results, aim):
    """CPU and memory of each server, for one row."""
    servers = [aim.server, "nbdkit-null", "nbdkit-file"]
    peaks = [more_of(results, name, aim, "peak_bytes") for name in servers]
    return [title_of(aim), text_of(more_of(results, aim.server, aim, "kernel_s_per_gib"), ".2f"),
            *(text_of(more_of(results, name, aim, "cpu_s_per_gib"), ".2f")
              for name in (*servers, "twice")),
            *(text_of(more_of(results, name, aim, "cores_busy"), ".2f") for name in servers),
            *(text_of(peak and peak / MIB) for peak in peaks)]


def busy(results, aim, cores):
    """What was busy how long, and which of it nearly all the time."""
    def share(key):
        return more_of(results, aim.server, aim, key)
    jobs = JOBS[aim.workload]
    all_busy = {"all cores": (share("cores_busy"), cores), "the disk": (share("disk_busy"), 1)}
    if jobs < cores:
        all_busy["the client"] = (share("clients_busy"), jobs)
    if jobs == 1:
        all_busy["one thread"] = (sum(share or 0 for share in busiest_thread(results, aim)), 1)
    limits = [name for name, (value, most) in all_busy.items() if (value or 0) >= BUSY * most]
    return [title_of(aim),
            *(text_of(share(key), ".2f") for key in ("cores_busy", "cores_awaited", "clients_busy",
                                                     "disk_busy")),
            *(text_of(rate and rate / 1e6) for rate in (disk_bytes_s(results, aim.server, aim),
                                                        disk_bytes_s(results, "twice", aim))),
            text_of(more_of(results, "sawmill-no-disk", aim, "cores_busy"), ".2f"),
            *(text_of(value, ".2f") for value in (*busiest_thread(results, aim),
                                                  with_all_cores(results, aim, cores))),
            ", ".join(limits) or "–"]


def busiest_thread(results, aim):
    """The shares of its time in which the busiest thread computed and waited for a core."""
    return [more_of(results, aim.server, aim, key)
            for key in ("thread_computes", "thread_awaits")]


def with_all_of_a_thread(results, aim):
    """The ratio of the aim if the busiest thread had never slept, at the same cost of a request and
    with the same waits for a core. With several clients, others may do its work."""
    reached = results.ratio(aim.server, aim.base, aim.workload, "iops")
    shares = busiest_thread(results, aim)
    if not reached or None in shares or not sum(shares) or JOBS[aim.workload] > 1:
        return None
    return reached / sum(shares)


def with_all_cores(results, aim, cores):
    """The ratio of the aim if all cores were busy, at the same cost of a request."""
    reached = results.ratio(aim.server, aim.base, aim.workload, "iops")
    busy_cores = more_of(results, aim.server, aim, "cores_busy")
    return reached and busy_cores and reached * cores / busy_cores


def disk_bytes_s(results, name, aim):
    """What the disk read and wrote a second for a contestant."""
    def moved(cell):
        more = cell["more"]
        return more.get("disk_read_bytes_s", 0) + more.get("disk_written_bytes_s", 0) or None
    return results.median(name, aim.workload, moved)


def write_page(page_path):
    document = json.loads(KEPT.read_text())
    results = Results(document)
    aims = [aim for aim in AIMS if aim.server in results.servers]
    head = ["work", "requests/s", "÷ raw", "÷ null", "÷ file", "aim", "met", "÷ limit",
            "a limit below the aim"]
    costs = ["the kernel's s/GiB", *(f"{what}{whose}"
             for what in ("CPU s/GiB", "cores busy", "MiB at most")
             for whose in ("", ", null", ", file"))]
    costs.insert(4, "CPU s/GiB, twice")
    work_and_busy = ["work", "cores busy", "a core awaited", "clients", "disk", "MB/s of the disk",
                     "MB/s, twice", "cores busy, no disk", "a thread computes", "and awaits a core",
                     "ratio, all cores", "busy all the time"]
    where, settings = document["machine"], document["settings"]
    cores = where["cores"]
    text = (
        "# Performance: aims, and what a run found\n\n"
        f"Generated by `bench/performance.py` on {document['date']}, on the code of "
        f"{document['commit']}, on {cores} cores of {where['cpu']}; "
        "[every sample](measurements/raw/performance.json).\n\n"
        "Sawmill's journal and its store, a folder, are on one disk, but for the rows that say "
        "otherwise. Clients are fio over one Unix socket each. *raw* is fio with io_uring and "
        "O_DIRECT on a file of that disk, *null* is nbdkit's null, which keeps nothing, *file* is "
        f"nbdkit's file. Rates are medians of {len(results.rounds)} rounds of "
        f"{settings['runtime_s']} s in turn. A ratio is taken in each round: the median, and the "
        "smallest and the largest.\n\n"
        f"{table(head, [row(results, aim) for aim in aims], range(1, 5))}\n"
        "*÷ limit* compares with what bounds the work on this machine. Where the ratio of an aim "
        "is not met, the last column names the limits that are below it, each with the ratio that "
        "it allows: *the cores* as in *ratio, all cores* below, *one thread* likewise if the "
        "busiest thread had never slept, the others as follows. A connection looks for its next "
        "request before it sleeps. That counts as computing, so where looks are many, the cores "
        "and one thread allow more than stands here. Where processor time is above its "
        "aim, *the kernel's time* is named if that alone is: it is what the bytes cost on their "
        "way through a socket and twice to the disk, with the switches between threads.\n\n"
        "- Large writes: the contestant *twice* writes each byte to a ring and to a new file of "
        "8 MiB, syncs the file, its name and the deletion of what was overwritten, with no "
        "protocol, checksum or map.\n"
        "- Small and mixed writes, and the store in memory: Sawmill with journal, cache and store "
        "in memory (the contestant *no disk*). It waits for no disk, but its cores copy what a "
        "disk takes by itself, so Sawmill may be above it: then the disk is not the limit.\n"
        "- Writes with a sync: the disk's write and sync one after the other with the protocol's "
        "two round trips, as raw and null take them. Above 1, they overlap. "
        "[Where a flush takes its time](measurements/flush.md).\n\n"
        "## What it costs\n\n"
        "Processor time of the server until everything is stored, and the part of it in the "
        "kernel. *null* receives each byte and *twice* writes each twice: together, and without a "
        "copy or a checksum, the least that is known. How many "
        f"cores of the machine's {cores} were busy while the client worked, with the "
        "client itself; and the most memory that the server had, staging memory included.\n\n"
        f"{table(['work', *costs], [cost(results, aim) for aim in aims], True)}\n"
        "## What was busy\n\n"
        "Sawmill's rows: cores that were busy, of all; the share of the time in which somebody "
        "waited for a core; cores that the clients took; the share of the time in which the disk "
        "had something to do; what it read and wrote then, and for *twice*; the cores that are "
        "busy with *no disk*; the shares of its time in which the busiest thread computed and "
        "waited for a core; and the ratio that the aim is about, if all cores were busy at "
        "the same cost of a request: below the aim, the cores are the limit. What was busy for "
        f"{BUSY} of the time is named: of a disk that always has something to do, the bytes beside "
        "those of *twice* say how much more it may take at once. The client's start and end count "
        "too, so a share may be a little above 1.\n\n"
        f"{table(work_and_busy, [busy(results, aim, cores) for aim in aims], range(1, 11))}"
        "\n## Other tables\n\n"
        "Each has its command in its first lines: "
        f"{', '.join(others())}. How figures come about: [bench/README.md](../bench/README.md).\n")
    page_path.write_text(text)
    log(f"wrote {page_path}")


def others():
    pages = sorted((ROOT / "docs/measurements").glob("*.md"))
    return [f"[{each.stem.replace('_', ' ')}](measurements/{each.name})" for each in pages]


def measured(flags):
    only = [aim.workload for aim in AIMS] + SERVERS
    words = [word for name in only for word in ("--only", name)]
    before = set(RAW.glob("*.json"))
    subprocess.run([ROOT / "bench/run.py", *words, "--rounds", str(flags.rounds), "--seconds",
                    str(flags.seconds)], check=True)
    return max(set(RAW.glob("*.json")) - before)


def check(flags):
    """Compares a new run's ratios with the committed ones; the number of losses."""
    if not KEPT.exists():
        sys.exit(f"performance.py: {KEPT} is missing; `bench/performance.py` makes it")
    committed = Results(json.loads(KEPT.read_text()))
    found = Results(json.loads(measured(flags).read_text()))
    rows, losses = [], 0
    for aim in AIMS:
        ratios = [results.ratio(aim.server, aim.base, aim.workload, "iops")
                  for results in (committed, found)]
        if None in ratios:
            continue
        is_kept = ratios[1] >= LOSS * ratios[0] or ratios[1] >= aim.ratio
        losses += not is_kept
        rows.append([title_of(aim), f"÷ {aim.base}",
                     *(f"{ratio:.2f}" for ratio in ratios), kept(is_kept)])
    print(table(["work", "ratio", "committed", "now", "kept"], rows, (2, 3)))
    return losses


@cli.script
def main():
    flags = cli.parse(__doc__, ("--check", False, "measure again, and compare"),
                      ("--words", False, "measure nothing: only write the page"),
                      rounds=3, seconds=5, page=PAGE)
    if flags.check:
        return min(check(flags), 1)
    if not flags.words:
        document = json.loads(measured(flags).read_text())
        page.write_raw(KEPT.stem, {"commit": machine.commit(), **document}, KEPT.parent)
    write_page(flags.page)
    return 0
