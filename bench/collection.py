#!/usr/bin/env python3
"""Garbage collection: forecast against truth, and what users feel of it.

    bench/collection.py                      both parts; writes docs/measurements/collection.md
    bench/collection.py --only overwrite     a volume overwritten ten times at random,
                                             and its forecast
    bench/collection.py --only latency       latency of users with collection on and off, in turn

The same made-up trace goes through `sawmill bench replay` (at its own pace, every byte verified)
and through `sawmill simulate`. Latency: fio at half of the rate that the volume reaches with
collection, and as fast as it goes.
SAWMILL_BINARY is measured, else target/release/sawmill.
Not here: recorded traces (`bench/traces.py`).
"""

import json
import random
import time

from harness import MIB, Rounds, Sawmill, cli, fio, in_parts, machine, page, log, turns

BLOCK_BYTES = 16 << 10
# Below 1: a live share of 0.70 where collection begins, and the tolerance of the promise.
LIVE_SHARE, SPARE = 0.70, 1.05
SEED = 20261122
# The contestant without collection, measured twice a round: how far apart equals come.
AGAIN = "off, again"


def write_trace(path, size_bytes, rounds, bytes_per_s):
    """Uniform random writes of one block each, `rounds` times the size of the disk."""
    dice, blocks = random.Random(SEED), size_bytes // BLOCK_BYTES
    with path.open("w") as out:
        out.write("time_us,operation,address_bytes,length_bytes\n")
        for number in range(rounds * blocks):
            time_us = number * BLOCK_BYTES * 1_000_000 // bytes_per_s
            out.write(f"{time_us},write,{dice.randrange(blocks) * BLOCK_BYTES},{BLOCK_BYTES}\n")


def settled(volume):
    """Waits until nothing is collected or deleted any more; returns the status then."""
    volume.settle()
    last, calm_since = None, time.monotonic()
    while time.monotonic() - calm_since < 10:
        counters = volume.volume_status()["counters"]
        seen = (counters["moved_bytes"], counters["segments_deleted"])
        if seen != last:
            last, calm_since = seen, time.monotonic()
        time.sleep(0.5)
    return volume.volume_status()


def overwrite(place, flags):
    trace = place.folder / "overwrite.csv"
    write_trace(trace, place.size_bytes, flags.rounds_written, flags.rate * MIB)
    volume = Sawmill(place, flags.binary, name="overwrite")
    volume.make()
    log(f"overwriting {flags.size} MiB {flags.rounds_written} times at {flags.rate} MiB/s")
    with volume.running():
        replayed = json.loads(volume.sawmill(
            "bench", "replay", trace, "--nbd", volume.ready["uri"], "--speed", "1", "--json"))
        status = settled(volume)
    forecast = volume.sawmill("simulate", trace, "--size", place.size_bytes, "--json")
    forecast, counters = json.loads(forecast)["traces"][0], status["counters"]
    written, live = counters["written_bytes"], status["live_bytes"]
    found = {
        "replay": replayed, "written_bytes": written, "live_bytes": live,
        "store_bytes": machine.bytes_below(volume.store_folder()),
        "segment_object_bytes": status["segment_object_bytes"]}
    rows = []
    for key, title, measured, expected in (
            ("amplification", "bytes put in segments / bytes written",
             counters["segment_bytes_stored"] / written,
             forecast["put_bytes"] / forecast["written_bytes"]),
            ("moved", "1 + bytes moved / bytes written", 1 + counters["moved_bytes"] / written,
             forecast["gc_amplification"]),
            ("merge", "merge ratio", counters["coalesced_bytes"] / written,
             forecast["merge_ratio"])):
        found[key] = {"measured": measured, "forecast": expected}
        ratio = "" if key == "merge" else f"{measured / expected:.3f}"
        rows.append([title, f"{measured:.3f}", f"{expected:.3f}", ratio])
    held = (found["store_bytes"], found["segment_object_bytes"], live, live / LIVE_SHARE * SPARE)
    store, segments, live, bound = (f"{held_bytes / MIB:,.0f} MiB" for held_bytes in held)
    return found, (
        f"## {flags.size} MiB overwritten {flags.rounds_written} times at random\n\n"
        "16 KiB a write, uniform, at a pace the volume keeps; every byte verified at the end. The "
        "forecast is `sawmill simulate` on the same trace.\n\n"
        f"{page.table(['', 'measured', 'forecast', 'measured / forecast'], rows, True)}\nWhen all "
        f"had settled the store held {store}, {segments} of it segments, for {live} live; "
        f"live/0.70 + 5 % is {bound}.\n")


def cell(volume, flags, rate_iops):
    """fio's 16 KiB random writes for a while: its 99th percentile in microseconds, and its rate."""
    more = ["--norandommap", *([f"--rate_iops={rate_iops}"] if rate_iops else [])]
    job = fio.words(volume.target, "randwrite", "16k", 8, volume.size_bytes, *more,
                    seconds=flags.seconds)
    found = fio.call(job, volume.folder, flags.seconds + 300)["write"]
    p50_us, p99_us = (fio.percentile_us(found, percent) for percent in (50, 99))
    return {"iops": found["iops"], "p50_us": p50_us, "p99_us": p99_us}


def prepared(place, flags, name, options):
    volume = Sawmill(place, flags.binary, options, name=name)
    volume.prepare()
    with volume.running():
        cell(volume, flags, 0)
        volume.settle()
    return volume


def latency(place, flags):
    """Each measurement begins with a volume at its steady state:
    overwritten once, collection at work."""
    off = prepared(place, flags, "off", ["--gc-start", "0"])
    volumes = {"off": off, AGAIN: off, "on": prepared(place, flags, "on", [])}
    # What it keeps up with collection: without, it goes faster for as long as the store has space.
    with volumes["on"].running():
        full_rate = cell(volumes["on"], flags, 0)["iops"]
    loads, found = {"1/2": int(full_rate / 2), "all": 0}, Rounds()
    for number, load, kind in turns(flags.rounds, loads, volumes):
        volume = volumes[kind]
        with volume.running():
            # Reaches the steady state: garbage is made and, if enabled, collected.
            cell(volume, flags, loads[load])
            before = volume.volume_status()["counters"]["moved_bytes"]
            row = cell(volume, flags, loads[load])
            row["moved_bytes"] = volume.volume_status()["counters"]["moved_bytes"] - before
        found.keep(number, load, kind, row)
        log(f"round {number + 1}, {load} of the rate, collection {kind}: "
            f"p99 {row['p99_us']:.0f} us, {row['iops']:.0f}/s, "
            f"moved {row['moved_bytes'] // MIB} MiB")
        # Data that the other kind does not need must not fill the disk.
        if volume is off:
            volume.sawmill("gc", volume.volume, "--threshold", "0.95")
    return {"rate_iops": loads, "rounds": found.rows("load")}, latency_section(loads, found)


def latency_section(loads, found):
    rows = []
    for load in loads:
        p99_off, p99_on = (found.median(kind, load, "p99_us") for kind in ("off", "on"))
        iops, moved = (found.median("on", load, key) for key in ("iops", "moved_bytes"))
        ratios = (page.spread(found.ratios(kind, "off", load, "p99_us")) for kind in ("on", AGAIN))
        rows.append([load, f"{iops:,.0f}", f"{p99_off:,.0f}", f"{p99_on:,.0f}", *ratios,
                     f"{moved / MIB:,.0f}"])
    head = ["load", "writes a second", "p99 off, us", "p99 on, us", "on / off", "off again / off",
            "moved meanwhile, MiB"]
    return ("## What users feel of it\n\n"
            "fio, 16 KiB random writes, queue depth 8, at half of the rate the volume reaches "
            "with collection, and as fast as it goes, on a volume whose every block was written; "
            "collection on (the default) and off, in turn. Store, journal and cache are on one "
            "disk, and fio, the server and collection share the cores: the hardest place there is. "
            "A ratio is taken in each round: the median, the smallest and the largest of "
            f"{len(found.rounds)} rounds. *Off again* is the same without collection, measured "
            "once more in each round: its range is how far apart equals come here.\n\n"
            f"{page.table(head, rows, True)}")


@cli.script
def main():
    parts = {"overwrite": overwrite, "latency": latency}
    flags = cli.parse(
        __doc__, ("--size", 1024, "MiB of the disk"), ("--rounds-written", 10, "times overwritten"),
        ("--rate", 40, "MiB written a second"), rounds=5, seconds=10, only={"parts": list(parts)},
        binary=cli.SAWMILL, work=cli.TARGET, page=page.MEASUREMENTS / "collection.md")
    only = "".join(f"--only {part} " for part in flags.only if not flags.whole)
    command = (f"bench/collection.py {only}--size {flags.size} --rounds-written "
               f"{flags.rounds_written} --rate {flags.rate} --rounds {flags.rounds} "
               f"--runtime {flags.seconds}")
    facts = machine.describe()
    found, sections = in_parts(flags, parts, flags.size * MIB)
    head = "# Garbage collection: forecast and truth, and what users feel\n\n"
    page.write(flags.page, head + "\n".join([page.written_by(command, facts), *sections]),
               {"size_mib": flags.size, "rounds_written": flags.rounds_written, **found})
