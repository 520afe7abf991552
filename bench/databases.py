#!/usr/bin/env python3
"""What a sync costs a database: PostgreSQL on ext4, on Sawmill and on a raw file.

    bench/databases.py --page docs/measurements/databases.md    as root: six minutes

Needs what tests/setup/prepare.sh bench installs. Each contestant is a loop device with ext4
(suite/disks.py). Rounds over loads over contestants: each cell starts its contestant and ends it,
so what it puts off is done and counted before the next. At the end all databases and file systems
must be sound.

Not here: loads of files (`shapes.py`), what a sync costs without a file system (`flush.py`).
"""

import time

from harness import MIB, cli, machine, page, temporary_place
from harness.machine import forget_cached
from suite.cells import all_cells, intro, measured, prepared, read_files, tables
from suite.disks import NAMES
from suite.postgres import Postgres, program

# Title, arguments of pgbench, whether all files are read beforehand.
LOADS = {
    "tpcb-1": ("TPC-B-like, 1 client", ["--builtin=tpcb-like", "--client=1"], True),
    "tpcb-8": ("TPC-B-like, 8 clients", ["--builtin=tpcb-like", "--client=8"], True),
    "select-8": ("select only, 8 clients, cold", ["--builtin=select-only", "--client=8"], False),
}
SETTINGS = """\
PostgreSQL {version} with pgbench, scale {scale}, over a Unix socket; `fsync`, `full_page_writes` \
and `synchronous_commit` are on, `wal_sync_method` is `fdatasync`, `shared_buffers` 128 MiB, no \
autovacuum; a checkpoint before each cell, so pages are first written whole to PostgreSQL's log. \
*Syncs* are those of that log, *flushes* those of the loop device. *Cold*: nothing of the disk is \
in memory at first; Sawmill's read cache on the disk is kept.

"""


def database(place, disk):
    return Postgres(disk.root / "data", place.memory / f"{disk.name}.socket")


def transactions(server, seconds, words):
    """pgbench for a while, after a checkpoint."""
    server.query("checkpoint")
    before = int(server.query("select wal_sync from pg_stat_wal"))
    waits_us = server.bench(seconds, *words)
    # The statistics of a client's process come with its end, or a second later.
    time.sleep(0.2)
    syncs = int(server.query("select wal_sync from pg_stat_wal")) - before
    return {"done": len(waits_us), "seconds": seconds, "syncs": syncs,
            "p50_us": waits_us[len(waits_us) // 2], "p99_us": waits_us[len(waits_us) * 99 // 100]}


def check(place, disk):
    """Demands a sound database and file system; the transactions that it has."""
    server = database(place, disk)
    with disk.running():
        with server.running():
            count = server.check()
        server.check_pages()
    disk.check()
    return f"{disk.name} {count:,}"


@cli.script
def main():
    flags = cli.parse(__doc__, ("--size", 2048, "MiB of each disk"),
                      ("--scale", 20, "pgbench's: 100,000 accounts each"), rounds=3, seconds=5,
                      only={"contestants": NAMES}, binary=cli.SAWMILL, work=cli.TARGET, root=True)
    postgres = program("postgres")
    with temporary_place(flags.work, flags.size * MIB) as place:

        def fill(disk):
            server = database(place, disk)
            server.make()
            with server.running():
                server.fill(flags.scale)

        def cell(disk, load):
            server, (_, words, is_warm) = database(place, disk), LOADS[load]
            forget_cached(disk.folder)
            with disk.running(), server.running():
                if is_warm:
                    read_files(server.data)
                return measured(disk, lambda: transactions(server, flags.seconds, words))

        disks, absent = prepared(place, flags, fill)
        found = all_cells(flags, LOADS, disks, cell)
        sound = [check(place, disk) for disk in disks]
    foot = ("After all rounds, on each: `pg_amcheck` with every index against its table, the four "
            "sums of pgbench, `pg_checksums --check` and `e2fsck -fn` found nothing wrong. "
            f"Transactions in pgbench's history then: {', '.join(sound)}.\n")
    settings = SETTINGS.format(version=machine.version(postgres).split()[2], scale=flags.scale)
    titles = {load: title for load, (title, *_) in LOADS.items()}
    page.write(flags.page, "# PostgreSQL on ext4: what a commit costs\n\n" + intro(flags) + settings
               + tables(found, absent, titles, "transactions", "a transaction") + foot,
               {"size_mib": flags.size, "scale": flags.scale, "absent": absent,
                "cells": found.rows("load")})
