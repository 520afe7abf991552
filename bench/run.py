#!/usr/bin/python3
"""Measures Sawmill beside its peers and the limits of the machine, in one run.

    bench/run.py                         everything; an hour. Writes bench/results/DATE.md
    bench/run.py --quick                 everything on a small scale, to check that it works:
                                         its numbers mean nothing
    bench/run.py --only randwrite-4k     one workload, contestant or part (see --list); repeatable

Raw numbers lie beside the page. How each number comes about: bench/README.md. Not here: how a
contestant is measured and what the page says (`suite/`).
"""

import datetime
import os
import shlex
import shutil
import sys
from pathlib import Path

from harness import (
    EXAMPLES, MIB, ROOT, Place, Rounds, Sawmill, cli, difference, machine, page, run, log,
    temporary_place, turns)
from suite import opening, report
from suite.contest import COST, PEERS, WORKLOADS, AllInMemory, Peer, StoreInMemory
from suite.s3 import Minio, S3backer
from suite.twice import Twice


def parse_flags():
    flags = cli.parse(
        __doc__,
        ("--size", 1024, "MiB of each disk"),
        ("--quick", False, "one round of 1 s on small disks"),
        ("--long", False, "watch the idle volume for 5 minutes"),
        ("--minio", Path, "MinIO (.prepared/bin/minio, else from PATH)"),
        ("--binary", Path, "measure this sawmill; examples lie beside it or are built"),
        ("--before", Path, "measure an older sawmill too, and no peers: what has a change cost?"),
        rounds=3, seconds=10, work=cli.TARGET, only=names)
    if flags.quick:
        flags.rounds, flags.seconds, flags.size = 1, 1, 128
    if flags.size < 64:
        sys.exit("run.py: --size is at least 64")
    return flags


def names(flags):
    return {"workloads": [workload.name for workload in WORKLOADS],
            "servers": [server.name
                        for server in contestants(flags, Place(), Minio(Place(), None))],
            "parts": ["cost", "recovery", "memory", "journal"]}


def ours(binary, place, minio, mark=""):
    """Sawmill on both stores; a mark distinguishes two builds."""
    both = [Sawmill(place, binary, name=f"sawmill{mark}"),
            Sawmill(place, binary, name=f"sawmill-s3{mark}", s3=minio)]
    both[1].title = "**Sawmill** on MinIO"
    for server in both:
        server.title += mark.replace("-", ", ")
    return both


def contestants(flags, place, minio):
    if flags.before:
        return (ours(flags.before.resolve(), place, minio, "-before")
                + ours(flags.binary, place, minio))
    peers = [Peer(place, *peer) for peer in PEERS]
    return [*peers, Twice(place), *ours(flags.binary, place, minio),
            StoreInMemory(place, flags.binary), AllInMemory(place, flags.binary),
            S3backer(place, minio)]


def chosen_of(flags):
    """By kind. A name of one kind leaves the other kinds whole, except that parts stand alone."""
    known = names(flags)
    chosen = {kind: [name for name in every if name in flags.only] for kind, every in known.items()}
    if chosen["workloads"] and not chosen["servers"]:
        chosen["servers"] = known["servers"]
    if chosen["servers"] and not chosen["workloads"] and not chosen["parts"]:
        chosen["workloads"] = known["workloads"]
    return chosen


def build(flags):
    """Sets the binary, where none was named; the folder of the examples."""
    if not flags.binary:
        flags.binary = cli.BUILT
        machine.build("sawmill")
    elif (flags.binary.parent / "examples/bench_volume").exists():
        return flags.binary.parent / "examples"
    machine.build("sawmill-volume", "--example", "bench_volume")
    machine.build("sawmill-sys", "--example", "journal_candidates")
    return EXAMPLES


def cells(flags, chosen, place, minio, document):
    """Prepares those that can take part, and measures them in turn;
    a failure ends its contestant alone."""
    ready, absent, failed, found = [], {}, document["failed"], Rounds(document["cells"])
    for server in contestants(flags, place, minio):
        if server.name in chosen["servers"]:
            try:
                log(f"preparing {server.name}")
                server.prepare()
                ready.append(server)
            except OSError as error:
                absent[server.name] = str(error)
                log(f"without {server.name}: {error}")
    document |= {"absent": absent, "servers": {server.name: server.title for server in ready}}
    workloads = [workload for workload in WORKLOADS if workload.name in chosen["workloads"]]
    for number, workload, server in turns(flags.rounds, workloads, ready):
        if server.name in failed:
            continue
        try:
            if cell := server.cell(workload, flags.seconds):
                found.keep(number, workload.name, server.name, cell)
                log(f"{workload.name}, {server.name}: {cell['iops']:,.0f}/s")
        except Exception as error:
            failed[server.name] = f"{workload.name}: {error}"
            log(f"{server.name} failed: {error}")


def cost(flags, chosen, place, minio):
    """Writes every block of a fresh volume once, in random order; what that costs at the store."""
    found = {}
    for server in ours(flags.binary, place, minio, "-cost"):
        name = server.name.removesuffix("-cost")
        if server.missing() or (chosen["servers"] and name not in chosen["servers"]):
            continue
        log(f"what writes cost at the store of {name}")
        server.make()
        before_bytes = machine.bytes_below(server.store_folder())
        with server.running():
            before = server.counters()
            cell = COST.measure(server)
            server.settle()
            counted = difference(before, server.counters())
        found[name] = {
            "writes": cell["requests"], "written_bytes": cell["bytes"],
            "counted_until_stored": counted,
            # Includes the last checkpoint, which the close writes.
            "store_bytes_after_close": machine.bytes_below(server.store_folder()) - before_bytes,
            "iops": cell["iops"]}
    return found


def measure(flags, examples, chosen, place, document, minio):
    if chosen["workloads"]:
        cells(flags, chosen, place, minio, document)
    idle_s = 300 if flags.long else 2 if flags.quick else 10
    extents, segments, turn_ms = (1_000_000, 200, 200) if flags.quick else (10_000_000, 2000, 2000)
    parts = {
        "cost": lambda: cost(flags, chosen, place, minio),
        "recovery": lambda: opening.recovery(place, flags.binary, examples, segments),
        "memory": lambda: opening.memory(place, flags.binary, examples, extents, idle_s),
        "journal": lambda: run(examples / "journal_candidates", place.folder, turn_ms),
    }
    for part in chosen["parts"]:
        log(f"{part}:")
        try:
            document[part] = parts[part]()
        # Whatever it is, half an hour of other figures must not go with it.
        except Exception as error:
            document["failed"][part] = str(error)
            log(f"{part} failed: {error}")


@cli.script
def main():
    flags = parse_flags()
    chosen, examples = chosen_of(flags), build(flags)
    programs = {"sawmill": flags.binary, "fio": "fio", "nbdkit": "nbdkit", "qemu": "qemu-nbd",
                "s3backer": "s3backer"}
    document = {
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["bench/run.py", *sys.argv[1:]]),
        "machine": machine.describe(flags.work), "load": [os.getloadavg()[0]],
        "versions": {name: machine.version(program) for name, program in programs.items()},
        "settings": {"rounds": flags.rounds, "runtime_s": flags.seconds,
                     "size_bytes": flags.size * MIB},
        "workloads": chosen["workloads"], "servers": {}, "absent": {}, "failed": {}, "cells": [],
        "cost": {}, "recovery": None, "memory": None, "journal": None}
    prepared = ROOT / ".prepared/bin/minio"
    program = flags.minio or (prepared if prepared.exists() else shutil.which("minio"))
    with temporary_place(flags.work, flags.size * MIB) as place:
        minio = Minio(place, program and Path(program).resolve())
        try:
            if not minio.missing():
                minio.start()
            measure(flags, examples, chosen, place, document, minio)
        except KeyboardInterrupt:
            document["failed"]["the run"] = "interrupted"
        finally:
            minio.end()
            document["load"].append(os.getloadavg()[0])
    whole = (not flags.quick and flags.whole and not flags.before
             and "the run" not in document["failed"])
    now = datetime.datetime.now()
    raw = page.write_raw(now.strftime("%Y-%m-%d" if whole else "%Y-%m-%d-%H%M%S"), document,
                         page.RESULTS if whole else page.RAW)
    kept = raw.with_suffix(".md")
    page.write(flags.page or kept, report.page(document), None)
    log(f"and {raw}")
