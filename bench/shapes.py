#!/usr/bin/env python3
"""Files on ext4, on Sawmill and on a raw file: the shapes of varmail, oltp and fileserver.

    bench/shapes.py --page docs/measurements/shapes.md    as root: three minutes

Needs what tests/setup/prepare.sh bench installs. Contestants and order are those of databases.py;
at the end all file systems must be sound.

Not here: the loads (`shapes.c`), a database (`databases.py`).
"""

import json
from pathlib import Path

from harness import MIB, cli, page, run, temporary_place
from suite.cells import all_cells, intro, measured, prepared, read_files, tables
from suite.disks import NAMES

SHAPES = {
    "varmail": "varmail, 16 threads",
    "oltp": "oltp, 50 readers and 11 writers",
    "fileserver": "fileserver, 50 threads",
}
WHAT = """\
`bench/shapes.c` follows filebench's definitions of these loads with the sizes of LSVD's table 2, \
scaled down. **They are shapes: filebench's own figures cannot be compared with them.** What they \
do, and where they deviate:

- *varmail* (table 2: 900,000 files; here 8,000, 80 % of them there at first): gamma-distributed \
sizes with a mean of 32 KiB, 16 threads in one folder. A loop: delete a file; create one, append, \
fsync; open one, read it whole, append, fsync; open one and read it. Appends have a mean of 16 \
KiB.
- *oltp* (250 files of 100 MiB; here 10 of 20 MiB and a log of 20 MiB): 50 readers read records \
of 2,000 bytes; after 1,000 reads one of 10 writers writes 100 records with O_DSYNC, after 3,200 \
the log's writer 256 KiB. Readers go on until the writers are two turns behind. Writers use \
pwrite instead of asynchronous I/O, and nobody burns CPU between requests, as filebench's readers \
do.
- *fileserver* (200,000 files; here 6,000): mean 128 KiB, 50 threads, folders of 20 files, one \
level of them. A loop: create and write a file whole; append 16 KiB in the mean to one; read one \
whole; delete one; stat one. With so few files most are deleted before the kernel writes them, so \
the file system is synced after every 512 MiB written (table 3: 579 MiB between two barriers).
- All: the file system is synced at the end, and that time counts. An operation is a call of \
filebench: open, close, delete, read whole, write, append, fsync, stat. The latency is that of an \
fsync (varmail), of a synchronous write (oltp), of a whole loop (fileserver). *Syncs* are calls, \
*flushes* those of the loop device: ext4 serves several syncs with one.

"""


@cli.script
def main():
    flags = cli.parse(__doc__, ("--size", 2048, "MiB of each disk"), rounds=3, seconds=5,
                      only={"contestants": NAMES}, binary=cli.SAWMILL, work=cli.TARGET, root=True)
    with temporary_place(flags.work, flags.size * MIB) as place:
        program = place.folder / "shapes"
        source = Path(__file__).with_suffix(".c")
        run("gcc", "-O2", "-o", program, source, "-lpthread", "-lm")

        def fill(disk):
            for shape in SHAPES:
                (disk.root / shape).mkdir()
                run(program, shape, disk.root / shape, 0)

        def load(folder, shape):
            row = json.loads(run(program, shape, folder, flags.seconds,
                                 timeout=flags.seconds + 300))
            return {**row, "done": row["operations"], "seconds": row["synced_s"]}

        def cell(disk, shape):
            folder = disk.root / shape
            with disk.running():
                read_files(folder)
                return measured(disk, lambda: load(folder, shape))

        disks, absent = prepared(place, flags, fill)
        found = all_cells(flags, SHAPES, disks, cell)
        for disk in disks:
            disk.check()
    page.write(flags.page, "# Files on ext4: the shapes of varmail, oltp and fileserver\n\n"
               + intro(flags) + WHAT
               + tables(found, absent, SHAPES, "operations", "1,000 operations", 1000)
               + "After all rounds `e2fsck -fn` found nothing wrong on any of them.\n",
               {"size_mib": flags.size, "absent": absent, "cells": found.rows("load")})
