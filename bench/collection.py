#!/usr/bin/env python3
"""Garbage collection: forecast against truth, and what users feel of it.

    bench/collection.py                      both parts; writes docs/measurements/collection.md
    bench/collection.py --only overwrite     a volume overwritten ten times at random, and its forecast
    bench/collection.py --only latency       latency of users with collection on and off, in turn

The same made-up trace goes through `sawmill bench replay` (at its own pace, every byte verified) and through
`sawmill simulate`. Latency: fio at parts of the rate that the volume reaches by itself, and as fast as it
goes.
SAWMILL_BINARY is measured, else target/release/sawmill.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import time
from pathlib import Path

import fio
import machine
import servers
from sawmill import Sawmill

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/measurements/collection.md"
BLOCK_BYTES = 16 << 10
# Below 1: a live share of 0.70 where collection begins, and the tolerance of the promise.
LIVE_SHARE, SPARE = 0.70, 1.05
SEED = 20261122
# Of the rate that the volume reaches by itself.
PARTS = (2,)


def say(text):
    print(f"collection: {text}", flush=True)


def write_trace(path, size_bytes, rounds, bytes_per_s):
    """Uniform random writes of one block each, `rounds` times the size of the disk."""
    dice, blocks = random.Random(SEED), size_bytes // BLOCK_BYTES
    with path.open("w") as out:
        out.write("time_us,operation,address_bytes,length_bytes\n")
        for number in range(rounds * blocks):
            time_us = number * BLOCK_BYTES * 1_000_000 // bytes_per_s
            out.write(f"{time_us},write,{dice.randrange(blocks) * BLOCK_BYTES},{BLOCK_BYTES}\n")


def settled(volume):
    """Waits until nothing is collected or deleted any more; the status then."""
    volume.settle()
    last, calm_since = None, time.monotonic()
    while time.monotonic() - calm_since < 10:
        found = volume.status()["volumes"][0]
        seen = (found["counters"]["moved_bytes"], found["counters"]["segments_deleted"])
        if seen != last:
            last, calm_since = seen, time.monotonic()
        time.sleep(0.5)
    return volume.status()


def overwrite(place, binary, given):
    size_bytes = given.size << 20
    trace = place.folder / "overwrite.csv"
    write_trace(trace, size_bytes, given.rounds_written, given.rate << 20)
    volume = Sawmill(place, binary, name="overwrite")
    volume.folder.mkdir(parents=True)
    volume.create(size_bytes)
    say(f"overwriting {given.size} MiB {given.rounds_written} times at {given.rate} MiB/s")
    with volume.running():
        command = ["bench", "replay", str(trace), "--nbd", volume.ready["uri"], "--speed", "1", "--json"]
        replayed = json.loads(volume.sawmill(*command))
        status = settled(volume)
    counters = status["volumes"][0]["counters"]
    command = ["simulate", str(trace), "--size", str(size_bytes), "--json"]
    forecast = json.loads(volume.sawmill(*command))["traces"][0]
    written = counters["written_bytes"]
    live = status["volumes"][0]["live_bytes"]
    found = {
        "replay": replayed, "written_bytes": written, "live_bytes": live,
        "store_bytes": machine.bytes_below(volume.store_folder() / ""),
        "segment_object_bytes": status["volumes"][0]["segment_object_bytes"],
        "amplification": {
            "measured": counters["segment_bytes_stored"] / written,
            "forecast": forecast["put_bytes"] / forecast["written_bytes"]},
        "moved": {
            "measured": 1 + counters["moved_bytes"] / written, "forecast": forecast["gc_amplification"]},
        "merge": {
            "measured": counters["coalesced_bytes"] / written, "forecast": forecast["merge_ratio"]},
    }
    shutil.rmtree(volume.folder)
    return found


def cell(volume, given, rate_iops):
    """fio's 16 KiB random writes for a while: its 99th percentile in microseconds, and its rate."""
    command = ["fio", "--name=users", "--rw=randwrite", "--bs=16k", "--iodepth=8", "--thread", "--time_based",
               f"--size={given.size << 20}", f"--runtime={given.runtime}", "--norandommap", *volume.target]
    if rate_iops:
        command.append(f"--rate_iops={rate_iops}")
    job = fio.call(command, volume.folder, given.runtime + 300)["jobs"][0]["write"]
    percentile = job["clat_ns"]["percentile"]
    return {"iops": job["iops"], "p50_us": percentile["50.000000"] / 1000,
            "p99_us": percentile["99.000000"] / 1000}


def prepare(place, binary, given, name, options):
    volume = Sawmill(place, binary, options, name=name)
    volume.folder.mkdir(parents=True)
    volume.create(given.size << 20)
    with volume.running():
        fio.fill(volume.target, given.size << 20, volume.folder)
        cell(volume, given, 0)
        volume.settle()
    return volume


def latency(place, binary, given):
    """Each measurement begins with a volume at its steady state: overwritten once, collection at work."""
    volumes = {"on": prepare(place, binary, given, "on", []),
               "off": prepare(place, binary, given, "off", ["--gc-start", "0"])}
    with volumes["off"].running():
        full_rate = cell(volumes["off"], given, 0)["iops"]
    loads = {f"1/{part}": int(full_rate / part) for part in PARTS} | {"all": 0}
    rounds = []
    for number in range(given.rounds):
        found = {}
        order = ["on", "off"] if number % 2 else ["off", "on"]
        for load, rate in loads.items():
            for kind in order:
                volume = volumes[kind]
                with volume.running():
                    # Into the steady state: garbage is made and, if it may be, collected.
                    cell(volume, given, rate)
                    before = volume.status()["volumes"][0]["counters"]["moved_bytes"]
                    measured = cell(volume, given, rate)
                    after = volume.status()["volumes"][0]["counters"]["moved_bytes"]
                measured["moved_bytes"] = after - before
                found[f"{load} {kind}"] = measured
                say(f"round {number + 1}, {load} of the rate, collection {kind}: p99 "
                    f"{measured['p99_us']:.0f} us, {measured['iops']:.0f}/s, "
                    f"moved {measured['moved_bytes'] >> 20} MiB")
                # What the other kind has no use for must not fill the disk.
                if kind == "off":
                    volume.sawmill("gc", volume.volume, "--threshold", "0.95")
        rounds.append(found)
    for volume in volumes.values():
        shutil.rmtree(volume.folder)
    return {"rate_iops": loads, "rounds": rounds}


def page(document):
    lines = ["# Garbage collection: forecast and truth, and what users feel", "",
             f"Written by `{document['command']}` on {document['machine']['cores']} cores of "
             f"{document['machine']['cpu']}, kernel {document['machine']['kernel']}.", ""]
    found = document.get("overwrite")
    if found:
        bound = found["live_bytes"] / LIVE_SHARE * SPARE
        lines += [
            f"## {document['size_mib']} MiB overwritten {document['rounds_written']} times at random", "",
            "16 KiB a write, uniform, at a pace the volume keeps; every byte verified at the end. The "
            "forecast is `sawmill simulate` on the same trace.", "",
            "| | measured | forecast | measured / forecast |", "|---|---:|---:|---:|"]
        for key, title in (("amplification", "bytes put in segments / bytes written"),
                           ("moved", "1 + bytes moved / bytes written")):
            one = found[key]
            ratio = one["measured"] / one["forecast"]
            lines.append(f"| {title} | {one['measured']:.3f} | {one['forecast']:.3f} | {ratio:.3f} |")
        merge = found["merge"]
        lines.append(f"| merge ratio | {merge['measured']:.3f} | {merge['forecast']:.3f} | |")
        lines += ["", f"When all had settled the store held {found['store_bytes'] / 2**20:,.0f} MiB, "
                  f"{found['segment_object_bytes'] / 2**20:,.0f} MiB of it segments, for "
                  f"{found['live_bytes'] / 2**20:,.0f} MiB live; live/0.70 + 5 % is "
                  f"{bound / 2**20:,.0f} MiB.", ""]
    found = document.get("latency")
    if found:
        lines += ["## What users feel of it", "",
                  "fio, 16 KiB random writes, queue depth 8, at parts of the rate the volume reaches by "
                  "itself and as fast as it goes, on a volume whose every block was written; collection on "
                  "(the default) and off, in turn. Store, journal and cache are on one disk, and fio, the "
                  "server and collection share the cores: the hardest place there is. The ratio is taken in "
                  "each round; "
                  f"the median of {len(found['rounds'])} rounds.", "",
                  "| load | writes a second | p99 off, us | p99 on, us | on / off | moved meanwhile, MiB |",
                  "|---|---:|---:|---:|---:|---:|"]
        for load in found["rate_iops"]:
            on, off = ([one[f"{load} {kind}"] for one in found["rounds"]] for kind in ("on", "off"))
            ratio = statistics.median(a["p99_us"] / b["p99_us"] for a, b in zip(on, off))
            p99 = [statistics.median(one["p99_us"] for one in side) for side in (off, on)]
            moved = statistics.median(one["moved_bytes"] for one in on) / 2**20
            rate = statistics.median(one["iops"] for one in on)
            lines.append(f"| {load} | {rate:,.0f} | {p99[0]:,.0f} | {p99[1]:,.0f} | {ratio:.2f} "
                         f"| {moved:,.0f} |")
        lines.append("")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["overwrite", "latency"], help="one part")
    parser.add_argument("--size", type=int, default=1024, metavar="MIB", help="size of the disk (1024)")
    parser.add_argument("--rounds-written", type=int, default=10, metavar="N", help="times overwritten (10)")
    parser.add_argument("--rate", type=int, default=40, metavar="MIB", help="MiB written a second (40)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="rounds of latency (5)")
    parser.add_argument("--runtime", type=int, default=10, metavar="S", help="seconds a cell (10)")
    parser.add_argument("--out", type=Path, default=PAGE, metavar="FILE", help="write the page there")
    given = parser.parse_args()
    binary = Path(os.environ.get("SAWMILL_BINARY", ROOT / "target/release/sawmill")).resolve()
    options = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in vars(given).items()
                       if name != "out" and value is not None)
    document = {"command": f"bench/collection.py {options}", "machine": machine.describe(),
                "size_mib": given.size, "rounds_written": given.rounds_written}
    with servers.temporary_place(given.size << 20) as place:
        for part, measure in (("overwrite", overwrite), ("latency", latency)):
            if given.only in (None, part):
                document[part] = measure(place, binary, given)
    raw = ROOT / "bench/results/raw"
    raw.mkdir(parents=True, exist_ok=True)
    (raw / "collection.json").write_text(json.dumps(document, indent=1))
    text = page(document)
    given.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
