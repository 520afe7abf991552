#!/usr/bin/python3
"""What many volumes and the past cost: a thousand clones of one image, a hundred journals on one
disk, a clone of a great map, snapshots beside writers.

    bench/clones.py                    all parts; writes docs/measurements/clones.md
    bench/clones.py --only thousand    clones of one image, each of which reads its beginning
    bench/clones.py --only journals    syncs of many journals beside those of one
    bench/clones.py --only great       a clone of 1 TiB with a million extents
    bench/clones.py --only stall       how a snapshot slows a writer

Needs fio and python3-libnbd. SAWMILL_BINARY is measured, else target/release/sawmill. Not here:
what garbage of the past costs (`bench/collection.py`).
"""

import hashlib
import os
import time
from collections import Counter
from pathlib import Path
from statistics import median

from harness import (
    EXAMPLES, GIB, KIB, MIB, Rounds, Sawmill, Unfit, cli, fio, in_parts, machine, page, run, log)

EXTENTS = 1_000_000
# Clones made by a command each.
ALONE = 10
# Small, because each of a thousand volumes has its own.
SEGMENT = "1M"
SERVE = ["--journal-bytes", "16M", "--staging-bytes", "4M", "--cache-bytes", "2G"]


def digest(uri, length):
    """Reads the beginning of an export."""
    # Only Debian's own Python has it, and only one part needs it.
    import nbd
    handle, found = nbd.NBD(), hashlib.blake2b()
    handle.connect_uri(uri)
    for at in range(0, length, MIB):
        found.update(handle.pread(MIB, at))
    handle.shutdown()
    return found.digest()


THOUSAND = """\
## {clones} clones of an image of {image_mib} MiB

Every byte of the image is data. One command makes the clones, one process serves them, and each \
reads its first {boot_mib} MiB, compared with the base's. Segments of {segment}, so that a journal \
of 16 MiB does for each. Threads: {threads}.

{table}"""


def thousand(place, flags):
    base = Sawmill(place, flags.binary, name="thousand")
    base.make(f"{flags.image}M", "--segment-bytes", SEGMENT)
    length = flags.boot * MIB
    log(f"writing an image of {flags.image} MiB")
    with base.running():
        fio.once("write", base)
        base.settle()
        expected = digest(base.ready["uri"], length)
    found = {"clones": flags.clones, "image_mib": flags.image, "boot_mib": flags.boot,
             "base_store_bytes": machine.bytes_below(base.store_folder())}
    log(f"making {flags.clones} clones")
    clones, took_ms = Sawmill(place, flags.binary, SERVE, name="thousand"), []
    for number in range(ALONE):
        before = time.monotonic()
        base.sawmill("clone", base.volume, f"alone-{number}")
        took_ms.append((time.monotonic() - before) * 1000)
    clones.volumes = [f"clone-{number:04}" for number in range(flags.clones)]
    clones.journal = clones.folder / "journals"
    clones.journal.mkdir()
    before = time.monotonic()
    base.sawmill("clone", base.volume, *clones.volumes)
    found |= {"clone_s": time.monotonic() - before, "alone_ms": took_ms,
              "clone_store_bytes": machine.bytes_below(base.store_folder())
              - found["base_store_bytes"]}
    # The clones do not use the base's cache.
    for path in (base.cache, base.cache.with_suffix(".index")):
        path.unlink(missing_ok=True)
    opening = time.monotonic()
    with clones.running():
        found["opened_s"] = time.monotonic() - opening
        found["opened_bytes"] = clones.processes[0].status("VmRSS") * KIB
        found["threads"] = threads(clones.processes[0].pid)
        before = clones.status()["stores"][0]["get"]
        reading = time.monotonic()
        for number, name in enumerate(clones.volumes, 1):
            if digest(clones.uris[name], length) != expected:
                raise Unfit(f"{name} does not begin as its base does")
            if number % 100 == 0:
                log(f"{number} have read their first {flags.boot} MiB")
        found["read_s"] = time.monotonic() - reading
        status = clones.status()
        after = status["stores"][0]["get"]
        found |= {"resident_bytes": clones.processes[0].status("VmRSS") * KIB,
                  "cache": status["cache"], "fetched_bytes": after["bytes_in"] - before["bytes_in"],
                  "gets": after["requests"] - before["requests"]}
        closing = time.monotonic()
    found["closed_s"] = time.monotonic() - closing
    return found, THOUSAND.format(**found, segment=SEGMENT, table=thousand_table(found))


def threads(pid):
    """The threads of a process by name."""
    names = Counter(path.read_text().strip() for path in Path(f"/proc/{pid}/task").glob("*/comm"))
    return ", ".join(f"{count} {name}" for name, count in sorted(names.items()))


def thousand_table(found):
    boot, clone_s, count = found["boot_mib"], found["clone_s"], found["clones"]
    base, clones, fetched = (f"{found[f'{name}_bytes'] / MIB:,.1f}"
                             for name in ("base_store", "clone_store", "fetched"))
    return page.table(["", ""], [
        ("to make them, s (each, ms)", f"{clone_s:.1f} ({1000 * clone_s / count:.1f})"),
        (f"to make one by a command of its own, ms (median of {ALONE})",
         f"{median(found['alone_ms']):.0f}"),
        ("to open them all, s (each, ms)",
         f"{found['opened_s']:.1f} ({1000 * found['opened_s'] / count:.1f})"),
        (f"to read {found['clones'] * boot / 1024:,.0f} GiB through them, s",
         f"{found['read_s']:.1f}"),
        ("all of that, s", f"{clone_s + found['opened_s'] + found['read_s']:.1f}"),
        ("the base in the store, MiB", base), ("the clones in the store, MiB", clones),
        ("the read cache, MiB", f"{found['cache']['bytes'] / MIB:,.1f}"),
        ("fetched from the store, MiB", fetched),
        (f"fetched / the base's first {boot} MiB", f"{found['fetched_bytes'] / (boot * MIB):.2f}"),
        ("requests for it", f"{found['gets']:,}"),
        ("memory of the process when all are open, MiB (each, KiB)",
         f"{found['opened_bytes'] / MIB:,.0f} ({found['opened_bytes'] / KIB / count:,.0f})"),
        ("the same after the reads, MiB", f"{found['resident_bytes'] / MIB:,.0f}")], True)


JOURNALS = """\
## {many} journals on one disk

The same load on one volume and on {many}: {many} connections, each of which writes 4 KiB and \
flushes, one after the other, for {seconds} s. Medians of {rounds} rounds, interleaved.

{table}"""


def journals(place, flags):
    """Each volume syncs a journal of its own; the disk sees them all."""
    rounds = Rounds()
    servers = {1: Sawmill(place, flags.binary, SERVE, name="one"),
               flags.journals: Sawmill(place, flags.binary, SERVE, name="many")}
    for count, server in servers.items():
        server.folder.mkdir(parents=True)
        server.volumes = [f"disk-{number:03}" for number in range(count)]
        server.journal = server.folder / "journals"
        server.journal.mkdir()
        for name in server.volumes:
            server.sawmill("create", name, "--size", "64M", "--segment-bytes", SEGMENT)
    for number in range(flags.rounds):
        for count, server in servers.items():
            rounds.keep(number, None, str(count), synced(server, flags))
            log(f"round {number + 1}, {count}: {rounds.median(str(count), None, 'writes_per_s')}")
    rows = [[label, *(f"{rounds.median(str(count), None, key):,.{digits}f}" for count in servers)]
            for label, key, digits in (
        ("writes and flushes a second", "writes_per_s", 0),
        ("syncs of journals a second", "syncs_per_s", 0),
        ("writes for each sync", "writes_per_sync", 1),
        ("latency of a flush, ms: median", "flush_ms", 2), ("99 %", "flush_99_ms", 2),
        ("CPU of the server for each write, µs", "cpu_us", 1))]
    table = page.table(["", "1 volume", f"{flags.journals} volumes"], rows, True)
    return rounds.rows(), JOURNALS.format(many=flags.journals, seconds=5, rounds=flags.rounds,
                                          table=table)


def synced(server, flags):
    """One round of small synced writes through as many connections."""
    with server.running():
        uris = list(server.uris.values())
        job = ["--group_reporting"]
        for number in range(flags.journals):
            target = fio.nbd(uris[number % len(uris)])
            job += fio.words(target, "randwrite", "4k", 1, "64m", "--fsync=1", "--randrepeat=0",
                             seconds=5, name=f"load-{number}")
        before, cpu_before = journal_syncs(server), cpu_s(server.processes[0].pid)
        found = fio.call(job, server.folder)
        syncs = journal_syncs(server) - before
        used_s = cpu_s(server.processes[0].pid) - cpu_before
    write, seconds = found["write"], found["write"]["runtime"] / 1000
    flush = found["sync"]["lat_ns"]
    return {"writes_per_s": write["iops"], "syncs_per_s": syncs / seconds,
            "writes_per_sync": write["total_ios"] / max(syncs, 1),
            "flush_ms": flush["percentile"]["50.000000"] / 1e6,
            "flush_99_ms": flush["percentile"]["99.000000"] / 1e6,
            "cpu_us": used_s / write["total_ios"] * 1e6}


def journal_syncs(server):
    return sum(volume["counters"]["journal_syncs"] for volume in server.status()["volumes"])


def cpu_s(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def great(place, flags):
    """The time of a clone is that of the command; reading the checkpoint is in it,
    and reported beside it."""
    volume = Sawmill(place, flags.binary, name="great")
    volume.folder.mkdir(parents=True)
    run(EXAMPLES / "bench_volume", "map", volume.folder, EXTENTS, 16)
    cloned_ms, read_ms = [], []
    for number in range(flags.rounds):
        started = time.monotonic()
        # The cost of any command that reads the map.
        volume.sawmill("inspect", "recovery", "map")
        middle = time.monotonic()
        volume.sawmill("clone", "map", f"clone-{number}")
        read_ms.append((middle - started) * 1000)
        cloned_ms.append((time.monotonic() - middle) * 1000)
        log(f"round {number + 1}: inspect {read_ms[-1]:.0f} ms, clone {cloned_ms[-1]:.0f} ms")
    clone, look = median(cloned_ms), median(read_ms)
    return {"extents": EXTENTS, "clone_ms": cloned_ms, "inspect_ms": read_ms}, (
        f"## A clone of 1 TiB with {EXTENTS:,} extents\n\n`sawmill clone` takes {clone:.0f} ms, "
        "`sawmill inspect recovery`, which reads the same map and writes nothing, "
        f"{look:.0f} ms: {clone - look:.0f} ms are the clone's own (medians of {flags.rounds}).\n")


def stall(place, flags):
    """Latency of every write of a run, those under a snapshot beside all others."""
    volume = Sawmill(place, flags.binary, name="stall")
    volume.make(GIB)
    more = ("--rate_iops=2000", f"--write_lat_log={volume.folder}/stall", "--log_unix_epoch=1")
    with volume.running():
        job = fio.words(volume.target, "randwrite", "4k", 1, "1g", *more,
                        seconds=3 * flags.snapshots + 4)
        windows = []
        with fio.Load(job, volume.folder) as load:
            time.sleep(2)
            for number in range(flags.snapshots):
                started = time.time()
                volume.sawmill("snapshot", "create", volume.volume, f"snap-{number}")
                windows.append((started * 1000, time.time() * 1000))
                # The same time without a snapshot, for the noise of the machine.
                time.sleep(2)
            load.jobs(3600)
    times = fio.latencies(volume.folder)
    found = {
        "longest_ms": [max((took for at, took in times if begin <= at <= end + took), default=0)
                       for begin, end in windows],
        "between_ms": [max((took for at, took in times if end + 500 <= at <= end + 1500), default=0)
                       for _, end in windows],
        "took_ms": [end - begin for begin, end in windows]}
    rows = [[what, f"{median(found[key]):{form}}", f"{max(found[key]):{form}}"]
            for what, key, form in (
        ("while a snapshot is made", "longest_ms", ".1f"), ("without", "between_ms", ".1f"),
        ("the command", "took_ms", ".0f"))]
    return {"snapshots": flags.snapshots, "writes": len(times), **found}, (
        f"## What a writer feels of a snapshot\n\n{flags.snapshots} snapshots beside 2,000 writes "
        "of 4 KiB a second, queue depth 1. The longest write while a snapshot was made, and in a "
        f"second without one:\n\n{page.table(['', 'median, ms', 'longest, ms'], rows, True)}")


@cli.script
def main():
    parts = {"thousand": thousand, "journals": journals, "great": great, "stall": stall}
    flags = cli.parse(
        __doc__, ("--clones", 1000, "how many"), ("--image", 10240, "MiB of the image"),
        ("--boot", 50, "MiB that each clone reads"), ("--journals", 100, "on one disk"),
        ("--snapshots", 20, "beside a writer"),
        rounds=7, only={"parts": list(parts)}, binary=cli.SAWMILL, work=cli.TARGET,
        page=page.MEASUREMENTS / "clones.md")
    found, sections = in_parts(flags, parts, flags.image * MIB)
    head = f"# Clones and snapshots\n\n{page.written_by('bench/clones.py', machine.describe())}"
    page.write(flags.page, "\n".join([head, *sections]), found)
