#!/usr/bin/python3
"""Measures Sawmill beside its peers and the limits of the machine, in one run.

    bench/run.py                         everything; an hour. Writes bench/results/DATE.md
    bench/run.py --quick                 everything in small, to see that it runs: its numbers mean nothing
    bench/run.py --only randwrite-4k     one workload, contestant or part (see --list); repeatable

Raw numbers go to bench/results/raw/. How each number comes about: bench/README.md.
"""

import argparse
import dataclasses
import datetime
import json
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import fio
import machine
import memory
import recovery
import report
import s3
import servers
from sawmill import Sawmill, SawmillS3

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("cost", "recovery", "memory", "journal")
# What ends one contestant or part, and not the run.
FAILURES = (machine.Unfit, OSError, subprocess.SubprocessError)


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="measure each cell N times (3)")
    parser.add_argument("--runtime", type=int, default=10, metavar="S", help="seconds per cell (10)")
    parser.add_argument("--size", type=int, default=1024, metavar="MIB", help="size of each disk (1024)")
    parser.add_argument("--only", action="append", default=[], metavar="NAME",
                        help="a workload, contestant or part; repeatable")
    parser.add_argument("--quick", action="store_true", help="one round of 1 s on small disks")
    parser.add_argument("--long", action="store_true", help="watch the idle volume for 5 minutes")
    parser.add_argument("--minio", metavar="PATH", help="MinIO (.prepared/bin/minio, else from PATH)")
    parser.add_argument("--binary", metavar="PATH", help="measure this sawmill; examples lie beside it or "
                        "are built")
    parser.add_argument("--before", metavar="PATH", help="measure an older sawmill too, and no peers: what "
                        "has a change cost?")
    parser.add_argument("--work", metavar="FOLDER", help="where the disks go: the disk that is measured "
                        "(target/)")
    parser.add_argument("--out", metavar="FILE", help="write the page there")
    parser.add_argument("--list", action="store_true", help="print the names that --only knows")
    given = parser.parse_args()
    if given.quick:
        given.rounds, given.runtime, given.size = 1, 1, 128
    if given.rounds < 1 or given.runtime < 1 or given.size < 64:
        parser.error("--rounds and --runtime are at least 1, --size at least 64")
    return parser, given


def say(text):
    print(f"bench: {text}", file=sys.stderr, flush=True)


def contestants(place, binary, minio, before=None):
    if before:
        older = [Sawmill(place, before, name="sawmill-before"),
                 SawmillS3(place, before, minio, name="sawmill-s3-before")]
        for server in older:
            server.title += ", before"
        return [*older, Sawmill(place, binary), SawmillS3(place, binary, minio)]
    return [
        servers.Raw(place), servers.NbdkitNull(place), servers.NbdkitMemory(place),
        servers.NbdkitFile(place), servers.QemuNone(place), servers.QemuWriteback(place),
        Sawmill(place, binary), SawmillS3(place, binary, minio), s3.S3backer(place, minio)]


def choose(parser, only, all_servers):
    """What --only leaves. A name of one kind leaves the other kinds whole, except that parts stand alone."""
    names = {"workloads": [workload.name for workload in fio.WORKLOADS],
             "servers": [server.name for server in all_servers], "parts": list(PARTS)}
    known = sum(names.values(), [])
    for name in only:
        if name not in known:
            parser.error(f"--only {name}: unknown; one of {', '.join(known)}")
    if not only:
        return names
    chosen = {kind: [name for name in every if name in only] for kind, every in names.items()}
    if chosen["workloads"] and not chosen["servers"]:
        chosen["servers"] = names["servers"]
    if chosen["servers"] and not chosen["workloads"] and not chosen["parts"]:
        chosen["workloads"] = names["workloads"]
    return chosen


def build(given):
    """The binary and the folder of the examples."""
    binary = Path(given.binary or ROOT / "target/release/sawmill").resolve()
    examples = binary.parent / "examples"
    if not given.binary:
        cargo(["build", "--release", "-p", "sawmill"])
    if not given.binary or not (examples / "bench_volume").exists():
        cargo(["build", "--release", "-p", "sawmill-volume", "--example", "bench_volume"])
        cargo(["build", "--release", "-p", "sawmill-sys", "--example", "journal_candidates"])
        examples = ROOT / "target/release/examples"
    return binary, examples


def cargo(words):
    subprocess.run(["cargo", *words], cwd=ROOT, check=True)


def find_minio(given):
    prepared = ROOT / ".prepared/bin/minio"
    found = given.minio or (prepared if prepared.exists() else shutil.which("minio"))
    return Path(found).resolve() if found else None


def cells(ready, workloads, given, document):
    """Rounds over workloads over contestants; each round begins with another contestant."""
    failed = document["failed"]
    for number in range(given.rounds):
        found = {workload.name: {} for workload in workloads}
        document["cells"].append(found)
        first = number % max(len(ready), 1)
        for workload in workloads:
            for server in ready[first:] + ready[:first]:
                if server.name in failed:
                    continue
                try:
                    cell = server.cell(workload, given.runtime)
                except FAILURES as error:
                    failed[server.name] = f"{workload.name}: {error}"
                    say(f"{server.name} failed: {error}")
                    continue
                if cell:
                    found[workload.name][server.name] = dataclasses.asdict(cell)
                    say(f"round {number + 1}, {workload.name}, {server.name}: {cell.iops:,.0f}/s")


def cost(place, binary, minio, chosen):
    found = {}
    for kind, more in ((Sawmill, ()), (SawmillS3, (minio,))):
        name = kind.name
        server = kind(place, binary, *more, name=f"{name}-cost")
        if server.missing() or (chosen["servers"] and name not in chosen["servers"]):
            continue
        say(f"what writes cost at the store of {name}")
        found[name] = server.cost()
    return found


def measure(given, chosen, place, document, binary, examples, minio):
    everyone = contestants(place, binary, minio, given.before and Path(given.before).resolve())
    everyone = [server for server in everyone if server.name in chosen["servers"]]
    workloads = [workload for workload in fio.WORKLOADS if workload.name in chosen["workloads"]]
    if workloads:
        ready, document["absent"] = servers.prepare_all(everyone, say)
        document["servers"] = {server.name: server.title for server in ready}
        cells(ready, workloads, given, document)
    idle_s = 300 if given.long else 2 if given.quick else 10
    extents, segments, turn_ms = (1_000_000, 200, 200) if given.quick else (10_000_000, 2000, 2000)
    parts = {
        "cost": lambda: cost(place, binary, minio, chosen),
        "recovery": lambda: recovery.measure(place, binary, examples, segments, say),
        "memory": lambda: memory.measure(place, binary, examples, extents, idle_s, say),
        "journal": lambda: machine.run([examples / "journal_candidates", place.folder, str(turn_ms)]),
    }
    for part in chosen["parts"]:
        say(f"{part}:")
        try:
            document[part] = parts[part]()
        except FAILURES as error:
            document["failed"][part] = str(error)
            say(f"{part} failed: {error}")


def versions(binary):
    return {
        "sawmill": machine.version(binary, "--version"), "fio": machine.version("fio", "--version"),
        "nbdkit": machine.version("nbdkit", "--version"), "qemu": machine.version("qemu-nbd", "--version"),
        "s3backer": machine.version("s3backer", "--version")}


def write(document, given):
    raw = ROOT / "bench/results/raw"
    raw.mkdir(parents=True, exist_ok=True)
    stamp = datetime.datetime.now().strftime("%Y-%m-%d-%H%M%S")
    (raw / f"{stamp}.json").write_text(json.dumps(document, indent=1))
    text = report.page(document)
    whole = not given.quick and not given.only and "the run" not in document["failed"]
    out = Path(given.out or (ROOT / f"bench/results/{document['date']}.md" if whole else raw / f"{stamp}.md"))
    out.write_text(text)
    print(text)
    say(f"wrote {out} and {raw / stamp}.json")


def main():
    parser, given = arguments()
    binary, examples = Path(given.binary or "sawmill"), None
    nowhere = servers.Place("/", "/", 0)
    chosen = choose(parser, given.only, contestants(nowhere, binary, s3.Minio(nowhere, None), given.before))
    if given.list:
        for kind, names in chosen.items():
            print(f"{kind}: {' '.join(names)}")
        return
    binary, examples = build(given)
    work = Path(given.work or ROOT / "target").resolve()
    document = {
        "date": datetime.date.today().isoformat(), "command": shlex.join(["bench/run.py", *sys.argv[1:]]),
        "machine": machine.describe(), "versions": versions(binary), "load": [machine.load()],
        "settings": {"rounds": given.rounds, "runtime_s": given.runtime, "size_bytes": given.size << 20},
        "workloads": chosen["workloads"], "servers": {}, "absent": {}, "failed": {}, "cells": [], "cost": {},
        "recovery": None, "memory": None, "journal": None}
    folder = tempfile.mkdtemp(prefix="bench-", dir=work)
    memory_folder = tempfile.mkdtemp(prefix="bench-", dir="/dev/shm")
    place = servers.Place(folder, memory_folder, given.size << 20)
    minio = s3.Minio(place, find_minio(given))
    try:
        if not minio.missing():
            minio.start()
        measure(given, chosen, place, document, binary, examples, minio)
    except KeyboardInterrupt:
        document["failed"]["the run"] = "interrupted"
    finally:
        minio.end()
        document["load"].append(machine.load())
        for made in (folder, memory_folder):
            shutil.rmtree(made, ignore_errors=True)
    write(document, given)


if __name__ == "__main__":
    try:
        main()
    except machine.Unfit as error:
        say(error)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
