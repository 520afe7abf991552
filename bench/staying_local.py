#!/usr/bin/env python3
"""What was written is read without the store: a volume is written once at random, then read.

    bench/staying_local.py                   writes docs/measurements/staying-local.md
    bench/staying_local.py --before OLDER    two builds of Sawmill, in turn

The volume is larger than the journal and smaller than the read cache. How fast it is written, how
many of the reads and bytes then come from the store, and what the local disk got for it.
Not here: the rates of small and large writes (`bench/run.py`).
"""

from pathlib import Path

from harness import MIB, Rounds, Sawmill, cli, fio, machine, page, log, temporary_place, turns

BLOCKS = ("4k", "64k")
HEAD = ["block", "build", "written, MiB/s", "in the cache, MiB", "not in time, MiB",
        "reads from the store", "fetched, MiB", "read, MiB/s"]


def counted(volume):
    status = volume.status()
    counters, store = status["volumes"][0]["counters"], status["stores"][0]
    return {"reads_store": counters["reads_store"], "get_bytes": store["get"]["bytes_in"],
            # A build of before has no such counters.
            "cached_bytes": counters.get("written_cached_bytes", 0),
            "uncached_bytes": counters.get("written_uncached_bytes", 0)}


def rate(side):
    return side["io_bytes"] / MIB / (side["runtime"] / 1000)


def cell(flags, block, build, binary):
    """A fresh volume: every block written once at random, then read once at random."""
    with temporary_place(flags.work, flags.size * MIB) as place:
        sizes = ["--journal-bytes", f"{flags.journal}M", "--cache-bytes", f"{flags.cache}M"]
        volume = Sawmill(place, binary, sizes, name=build)
        volume.make()
        with volume.running():
            job = fio.words(volume.target, "randwrite", block, 16, volume.size_bytes)
            written = fio.call(job, volume.folder)["write"]
            volume.settle()
            before = counted(volume)
            job = fio.words(volume.target, "randread", block, 16, volume.size_bytes)
            read = fio.call(job, volume.folder)["read"]
            after = counted(volume)
    return {"write_mib_per_s": rate(written), "read_mib_per_s": rate(read),
            "reads_store": after["reads_store"] - before["reads_store"],
            "get_mib": (after["get_bytes"] - before["get_bytes"]) / MIB,
            "cached_mib": after["cached_bytes"] / MIB,
            "uncached_mib": after["uncached_bytes"] / MIB}


@cli.script
def main():
    flags = cli.parse(
        __doc__, ("--size", 1536, "MiB of the disk"), ("--journal", 256, "MiB of the journal"),
        ("--cache", 2048, "MiB of the read cache"),
        ("--before", Path, "measure an older sawmill too"),
        rounds=3, binary=cli.SAWMILL, work=cli.TARGET,
        page=page.MEASUREMENTS / "staying-local.md")
    builds = {"now": flags.binary} | ({"before": flags.before.resolve()} if flags.before else {})
    command = (f"bench/staying_local.py --size {flags.size} --journal {flags.journal} "
               f"--cache {flags.cache} --rounds {flags.rounds}")
    facts, found, rows = machine.describe(), Rounds(), []
    for number, block, build in turns(flags.rounds, BLOCKS, builds):
        row = cell(flags, block, build, builds[build])
        found.keep(number, block, build, row)
        log(f"round {number + 1}, {block}, {build}: {row}")
    for block in BLOCKS:
        for build in builds:
            rows.append([block, build, *(
                f"{found.median(build, block, key):,.0f}" for key in (
                    "write_mib_per_s", "cached_mib", "uncached_mib", "reads_store", "get_mib",
                    "read_mib_per_s"))])
    page.write(flags.page, (
        "# What was written is read without the store\n\n" + page.written_by(command, facts) + "\n"
        f"{flags.size} MiB written once at random, then read once at random, fio at queue depth "
        f"16; a journal of {flags.journal} MiB, a cache of {flags.cache} MiB, all on one disk; "
        f"medians of {flags.rounds} rounds.\n\n" + page.table(HEAD, rows)),
        {"rounds": found.rows("block")})
