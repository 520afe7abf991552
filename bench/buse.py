#!/usr/bin/env python3
"""What a write costs before the BUSE module and before ublk: null devices, and volumes.

    bench/buse.py [--rounds 5]     boots a guest (tests/vm), writes docs/measurements/buse.md

All are set up in one boot and take turns; requests, processor time and ratios as in bench/doors.py,
which has what is not here. Requests of 4 KiB; with two jobs, ublk has two queues, and BUSE has one.
"""

import contextlib
import functools
import os
import sys
from pathlib import Path

import doors
from harness import Process, cli, guest, page, run, wait_until

DEPTHS, OPERATIONS, JOBS = [1, 32], ["randwrite", "randread"], [1, 2]
CONTESTANTS = ["null_blk", "ublk, null", "buse, null", "ublk, volume", "buse, volume"]
# Each aim: a pair of contestants, and the least ratio of writes at depth 32.
AIMS = [("buse, null", "ublk, null", 2.0), ("buse, volume", "ublk, volume", 1.3)]


# ---- Inside the guest.

@contextlib.contextmanager
def buse_module():
    run("modprobe", "configfs")
    config = Path("/sys/kernel/config")
    if not os.path.ismount(config):
        run("mount", "-t", "configfs", "none", config)
    run("insmod", doors.binary("drivers/buse/buse.ko"))
    try:
        yield
    finally:
        wait_until("the end of its devices", lambda: not any((config / "buse").iterdir()))
        run("rmmod", "buse")


@contextlib.contextmanager
def buse_null():
    with Process(doors.binary("buse_null"), talks=True) as server:
        device, = server.expect("ready")
        try:
            yield device
        finally:
            server.end_well(sign=None)


@contextlib.contextmanager
def volume(door):
    """A volume whose journal, staging memory and store are in memory."""
    folder = doors.scratch() / door
    folder.mkdir()
    environment = os.environ | {"SAWMILL_STORE": f"file://{folder}/store"}
    sawmill = doors.binary("sawmill")
    run(sawmill, "create", door, "--size", f"{doors.SIZE_MIB}M", env=environment)
    words = ["serve", door, f"--{door}", "--journal", folder / "journal", "--journal-bytes", "256M",
             "--cache-bytes", "0"]
    with Process(sawmill, *words, talks=True, env=environment) as server:
        yield server.read_line()


def inside(jobs):
    contestants = {"null_blk": functools.partial(
                       doors.block("/dev/nullb0", "null_blk", "nr_devices=1", "gb=1",
                                   f"submit_queues={jobs}", "irqmode=0", "queue_mode=2"), jobs),
                   "ublk, null": functools.partial(doors.ublk("--null"), jobs),
                   "buse, null": buse_null,
                   "ublk, volume": functools.partial(volume, "ublk"),
                   "buse, volume": functools.partial(volume, "buse")}
    chosen = [({"name": name, "jobs": jobs}, contestant)
              for name, contestant in contestants.items()]
    measure = functools.partial(doors.measure, queues=jobs, operations=OPERATIONS, depths=DEPTHS)
    with doors.module("ublk_drv"), buse_module():
        guest.inside(chosen, measure)


# ---- Outside.

CELLS = [(operation, depth, jobs)
         for operation in OPERATIONS for depth in DEPTHS for jobs in JOBS]


def table_of(found, unit):
    heads = [f"{operation} qd{depth} ×{jobs}" for operation, depth, jobs in CELLS]
    rows = [[name, *(page.text_of(found.median(name, cell, unit)) for cell in CELLS)]
            for name in found.names()]
    return page.table(["", *heads], rows, True)


def aims_of(found):
    rows = []
    for name, beside, least in AIMS:
        for jobs in JOBS:
            cell = ("randwrite", 32, jobs)
            ratio, cost = (found.ratio(name, beside, cell, unit) for unit in ("iops", "cpu_us"))
            if ratio:
                rows.append([f"{name} beside {beside}, ×{jobs}", f"≥ {least:.1f}", f"{ratio:.2f}",
                             f"{cost:.2f}", "yes" if ratio >= least else "**no**"])
    return page.table(["writes of 4 KiB, qd32", "aim", "requests", "processor time", "met"], rows,
                      True)


def page_of(lines):
    found = guest.results(lines, "operation", "depth", "jobs")
    about = f"""\
In a guest of two processors, emulated by QEMU: ratios say where the instructions go, and rates say
nothing. Medians; {doors.RUN_S} s for each cell; requests of 4 KiB, `libaio` with `O_DIRECT`. \
*volume*: `sawmill serve` with journal and store in memory. ×2: two jobs; ublk has two queues \
then, BUSE one.
A write of BUSE is complete when the kernel has it; the processor time has all that follows."""
    parts = ["# What a write costs before BUSE and ublk", about, "## The aims", aims_of(found),
             "## All cells", "Requests a second:", table_of(found, "iops"),
             "Processor time for each request, of the whole guest with fio, in µs:",
             table_of(found, "cpu_us")]
    if absent := guest.absent(lines):
        parts += ["## Not measured", absent]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


@cli.script
def main():
    if "--inside" in sys.argv:
        return inside(int(os.environ["VM_QUEUES"]))
    flags = cli.parse(__doc__, rounds=5, only={"contestants": CONTESTANTS},
                      page=page.MEASUREMENTS / "buse.md")
    lines = [line for jobs in JOBS for line in guest.boot("buse", flags, VM_QUEUES=str(jobs))]
    return page.write(flags.page, page_of(lines), lines)
