#!/usr/bin/python3
"""What the past costs: a thousand clones of one image, a clone of a great map, snapshots beside writers.

    bench/clones.py                    all parts; writes docs/measurements/clones.md
    bench/clones.py --only thousand    clones of one image, each of which reads its beginning
    bench/clones.py --only great       a clone of 1 TiB with a million extents
    bench/clones.py --only stall       what a writer feels of a snapshot

Needs fio and python3-libnbd. SAWMILL_BINARY is measured, else target/release/sawmill.
"""

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import threading
import time
from pathlib import Path

import fio
import machine
import nbd
import servers
from sawmill import Sawmill

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/measurements/clones.md"
MIB = 1 << 20
EXTENTS = 1_000_000
# Small: each of a thousand volumes has one of its own.
SEGMENT = "1M"
SERVE = ["--journal-bytes", "16M", "--staging-bytes", "4M", "--cache-bytes", "2G"]


def say(text):
    print(f"clones: {text}", flush=True)


class Clones(Sawmill):
    """Many volumes of one store, served by one process."""

    def __init__(self, place, binary, names):
        super().__init__(place, binary, SERVE, name="thousand")
        self.names = names
        self.uris = {}
        self.journal = self.folder / "journals"

    def start(self):
        self.journal.mkdir(exist_ok=True)
        command = [self.binary, "serve", *self.names, "--json", "--nbd", f"unix:{self.socket}",
                   "--admin", "127.0.0.1:0", "--journal", self.journal, "--cache", self.cache,
                   "--staging", self.place.memory, *self.options]
        process = self.spawn(command, self.environment(), pipe=True)
        for _ in self.names:
            line = process.child.stdout.readline()
            if not line:
                process.child.wait()
                process.check()
            self.ready = json.loads(line)
            self.uris[self.ready["volume"]] = self.ready["uri"]
        # What it says at its end is more than a pipe holds.
        threading.Thread(target=process.child.stdout.read, daemon=True).start()


def digest(uri, length):
    """Reads the beginning of an export."""
    handle, found = nbd.NBD(), hashlib.blake2b()
    handle.connect_uri(uri)
    for at in range(0, length, MIB):
        found.update(handle.pread(MIB, at))
    handle.shutdown()
    return found.digest()


def thousand(place, binary, given):
    base = Sawmill(place, binary, name="thousand")
    base.folder.mkdir(parents=True)
    base.sawmill("create", base.volume, "--size", f"{given.image}M", "--segment-bytes", SEGMENT)
    length = given.boot << 20
    say(f"writing an image of {given.image} MiB")
    with base.running():
        fio.fill(base.target, given.image << 20, base.folder)
        base.settle()
        expected = digest(base.ready["uri"], length)
    base_bytes = machine.bytes_below(base.store_folder())
    say(f"making {given.clones} clones")
    names = [f"clone-{number:04}" for number in range(given.clones)]
    took = []
    started = time.monotonic()
    for name in names:
        before = time.monotonic()
        base.sawmill("clone", base.volume, name)
        took.append(time.monotonic() - before)
    made_s = time.monotonic() - started
    clone_bytes = machine.bytes_below(base.store_folder()) - base_bytes
    # The base's own cache is not theirs.
    for path in (base.cache, base.cache.with_suffix(".index")):
        path.unlink(missing_ok=True)
    clones = Clones(place, binary, names)
    opening = time.monotonic()
    with clones.running():
        opened_s = time.monotonic() - opening
        before = clones.status()["stores"][0]["get"]
        reading = time.monotonic()
        for number, name in enumerate(names):
            if digest(clones.uris[name], length) != expected:
                raise machine.Unfit(f"{name} does not begin as its base does")
            if number % 100 == 99:
                say(f"{number + 1} have read their first {given.boot} MiB")
        read_s = time.monotonic() - reading
        status = clones.status()
        after = status["stores"][0]["get"]
        resident, _ = clones.processes[0].memory()
        closing = time.monotonic()
    closed_s = time.monotonic() - closing
    shutil.rmtree(base.folder)
    return {
        "clones": given.clones, "image_mib": given.image, "boot_mib": given.boot,
        "base_store_bytes": base_bytes, "clone_store_bytes": clone_bytes,
        "clone_s": made_s, "clone_median_ms": statistics.median(took) * 1000, "opened_s": opened_s,
        "read_s": read_s, "closed_s": closed_s, "resident_bytes": resident,
        "fetched_bytes": after["bytes_in"] - before["bytes_in"],
        "gets": after["requests"] - before["requests"], "cache": status["cache"]}


def great(place, binary, given):
    """The time of a clone is that of the command; reading the checkpoint is in it, and told beside it."""
    volume = Sawmill(place, binary, name="great")
    volume.volume = "map"
    volume.folder.mkdir(parents=True)
    example = ROOT / "target/release/examples/bench_volume"
    machine.run([example, "map", volume.folder, str(EXTENTS), "16"])
    cloned, read = [], []
    for number in range(given.rounds):
        started = time.monotonic()
        # What any command does that reads the map.
        volume.sawmill("inspect", "recovery", "map")
        middle = time.monotonic()
        volume.sawmill("clone", "map", f"clone-{number}")
        read.append(middle - started)
        cloned.append(time.monotonic() - middle)
        say(f"round {number + 1}: inspect {read[-1] * 1000:.0f} ms, clone {cloned[-1] * 1000:.0f} ms")
    shutil.rmtree(volume.folder)
    return {"extents": EXTENTS, "clone_ms": [one * 1000 for one in cloned],
            "inspect_ms": [one * 1000 for one in read]}


def stall(place, binary, given):
    """Latency of every write of a run, those under a snapshot beside all others."""
    volume = Sawmill(place, binary, name="stall")
    volume.folder.mkdir(parents=True)
    volume.create(1 << 30)
    seconds = 3 * given.snapshots + 4
    with volume.running():
        log = volume.folder / "stall"
        command = ["fio", "--name=stall", "--rw=randwrite", "--bs=4k", "--iodepth=1", "--thread",
                   "--time_based", "--size=1g", f"--runtime={seconds}", "--rate_iops=2000",
                   f"--write_lat_log={log}",
                   "--log_unix_epoch=1", *volume.target]
        with (volume.folder / "fio.log").open("w") as out:
            load = subprocess.Popen(command, stdout=out, stderr=out, cwd=volume.folder)
        time.sleep(2)
        windows = []
        for number in range(given.snapshots):
            started = time.time()
            volume.sawmill("snapshot", "create", volume.volume, f"snap-{number}")
            windows.append((started * 1000, time.time() * 1000))
            # As long again without one: what the machine does by itself.
            time.sleep(2)
        if load.wait():
            said = (volume.folder / "fio.log").read_text()
            raise machine.Unfit(f"fio ended with {load.returncode}: {said}")
    times = []
    for line in next(volume.folder.glob("stall_clat*.log")).read_text().splitlines():
        at_ms, took_ns = line.split(",")[:2]
        times.append((int(at_ms), int(took_ns) / 1e6))
    within = [max((took for at, took in times if begin <= at <= end + took), default=0)
              for begin, end in windows]
    between = [max((took for at, took in times if begin <= at <= end), default=0)
               for begin, end in ((windows[n][1] + 500, windows[n][1] + 1500) for n in range(len(windows)))]
    shutil.rmtree(volume.folder)
    return {"snapshots": given.snapshots, "writes": len(times), "longest_ms": within, "between_ms": between,
            "took_ms": [end - begin for begin, end in windows]}


def describe_thousand(found):
    whole = found["clone_s"] + found["opened_s"] + found["read_s"]
    image, boot = found["image_mib"], found["boot_mib"]
    return [
        f"## {found['clones']} clones of an image of {image} MiB", "",
        f"Every byte of the image is data. The clones are made one command after the other, served by one "
        f"process, and each reads its first {boot} MiB, compared with the base's. Segments of {SEGMENT}, "
        "so that a journal of 16 MiB does for each.", "",
        "| | |", "|---|---:|",
        f"| to make them, s (median of one, ms) | {found['clone_s']:.1f} ({found['clone_median_ms']:.0f}) |",
        f"| to open them all, s | {found['opened_s']:.1f} |",
        f"| to read {found['clones'] * boot / 1024:,.0f} GiB through them, s | {found['read_s']:.1f} |",
        f"| all of that, s | {whole:.1f} |",
        f"| the base in the store, MiB | {found['base_store_bytes'] / MIB:,.1f} |",
        f"| the clones in the store, MiB | {found['clone_store_bytes'] / MIB:,.1f} |",
        f"| the read cache, MiB | {found['cache']['bytes'] / MIB:,.1f} |",
        f"| fetched from the store, MiB | {found['fetched_bytes'] / MIB:,.1f} |",
        f"| fetched / the base's first {boot} MiB | {found['fetched_bytes'] / (boot * MIB):.2f} |",
        f"| requests for it | {found['gets']:,} |",
        f"| memory of the process, MiB | {found['resident_bytes'] / MIB:,.0f} |", ""]


def describe_great(found):
    clone, look = statistics.median(found["clone_ms"]), statistics.median(found["inspect_ms"])
    return [
        f"## A clone of 1 TiB with {found['extents']:,} extents", "",
        f"`sawmill clone` takes {clone:.0f} ms, `sawmill inspect recovery`, which reads the same map "
        f"and writes nothing, {look:.0f} ms: {clone - look:.0f} ms are the clone's own (medians of "
        f"{len(found['clone_ms'])}).", ""]


def describe_stall(found):
    within, between = found["longest_ms"], found["between_ms"]
    return [
        "## What a writer feels of a snapshot", "",
        f"{found['snapshots']} snapshots beside 2,000 writes of 4 KiB a second, queue depth 1. The longest "
        "write while a snapshot was made, and in a second without one:", "",
        "| | median, ms | longest, ms |", "|---|---:|---:|",
        f"| while a snapshot is made | {statistics.median(within):.1f} | {max(within):.1f} |",
        f"| without | {statistics.median(between):.1f} | {max(between):.1f} |",
        f"| the command | {statistics.median(found['took_ms']):.0f} | {max(found['took_ms']):.0f} |", ""]


PARTS = {"thousand": (thousand, describe_thousand), "great": (great, describe_great),
         "stall": (stall, describe_stall)}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(PARTS), help="one part")
    parser.add_argument("--clones", type=int, default=1000, metavar="N", help="how many (1000)")
    parser.add_argument("--image", type=int, default=10240, metavar="MIB", help="size of the image (10240)")
    parser.add_argument("--boot", type=int, default=50, metavar="MIB", help="what each clone reads (50)")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="clones of the great map (7)")
    parser.add_argument("--snapshots", type=int, default=20, metavar="N", help="beside a writer (20)")
    parser.add_argument("--out", type=Path, default=PAGE, metavar="FILE", help="write the page there")
    given = parser.parse_args()
    binary = Path(os.environ.get("SAWMILL_BINARY", ROOT / "target/release/sawmill")).resolve()
    found, facts = {}, machine.describe()
    with servers.temporary_place(given.image << 20) as place:
        for part, (measure, _) in PARTS.items():
            if given.only in (None, part):
                found[part] = measure(place, binary, given)
    raw = ROOT / "bench/results/raw"
    raw.mkdir(parents=True, exist_ok=True)
    (raw / "clones.json").write_text(json.dumps(found, indent=1))
    lines = ["# Clones and snapshots", "", f"Written by `bench/clones.py` on {facts['cores']} cores of "
             f"{facts['cpu']}, kernel {facts['kernel']}.", ""]
    for part, measured in found.items():
        lines += PARTS[part][1](measured)
    given.out.write_text("\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
