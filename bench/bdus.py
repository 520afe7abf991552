#!/usr/bin/env python3
"""What a request costs before BDUS's kernel module and before ublk, for drivers that do nothing.

    bench/bdus.py --kbdus FOLDER [--rounds 5]    boots a guest (tests/vm), writes
                                                 docs/measurements/bdus.md
    bench/bdus.py --page FILE                    without kbdus, beside ublk in one process

FOLDER holds `kbdus.ko`, built for the guest's kernel (.prepared/kernel), and BDUS's `libbdus.so`:
neither is ours. One program, tests/vm/bench/bdus_null.c, runs with that library and with
`libsawmill`; beside them, the null device of the ublk door in one process, the null example in
both modes, and the null example in C as its own host. All
are set up in one boot and take turns; requests, processor time and ratios as in bench/doors.py,
which has what is not here.
"""

import contextlib
import datetime
import functools
import itertools
import json
import os
import sys
import tempfile
from pathlib import Path

import doors
from harness import (
    MIB, PATIENCE_S, RELEASE, ROOT, Process, Unfit, cli, guest, machine, page, run, wait_until)

SIZE_BYTES, CALLBACKS = doors.SIZE_MIB * MIB, 16
REFERENCE, ONE_PROCESS = "BDUS, kbdus", "ublk, in one process"


# ---- Inside the guest.

@contextlib.contextmanager
def with_library(folder):
    """The program of tests/vm/bench/bdus_null.c with the libbdus.so of a folder."""
    words = [os.environ["VM_BDUS_NULL"], SIZE_BYTES, CALLBACKS]
    with Process(*words, talks=True, env=os.environ | {"LD_LIBRARY_PATH": str(folder)}) as driver:
        yield driver.expect("ready")[0]


@contextlib.contextmanager
def kbdus():
    folder = Path(os.environ["VM_KBDUS"])
    run("insmod", folder / "kbdus.ko")
    try:
        with with_library(folder) as device:
            yield device
    finally:
        run("rmmod", "kbdus")


@contextlib.contextmanager
def host(mode):
    """The null example before `sawmill run`."""
    words = ["run", "--json", "--name", f"null-{mode}", "--door", "ublk",
             "--option", f"mode={mode}"]
    words += ["--", doors.binary("null"), SIZE_BYTES]
    with Process(doors.binary("sawmill"), *words, talks=True) as server:
        yield server.expect_event()["doors"][0]["address"]


@contextlib.contextmanager
def own_host():
    """The null example in C, which has the device itself."""
    env = os.environ | {"LD_LIBRARY_PATH": os.environ["VM_LIBSAWMILL"], "SAWMILL_HOST": "none",
                        "SAWMILL_NAME": "null-own", "SAWMILL_DOORS": "ublk"}
    sawmill = doors.binary("sawmill")

    def opened():
        devices = json.loads(run(sawmill, "driver", "list", "--json"))
        return [door for one in devices if one["name"] == "null-own" for door in one["doors"]]
    with Process(os.environ["VM_NULL"], SIZE_BYTES, env=env) as driver:
        yield wait_until("its device", opened)[0]
        run(sawmill, "driver", "end", "null-own")
        driver.end(None, PATIENCE_S)


CONTESTANTS = {
    REFERENCE: kbdus,
    "ublk, the same program with libsawmill": lambda: with_library(os.environ["VM_LIBSAWMILL"]),
    "ublk, a program in C, its own host": own_host,
    "ublk, sawmill run, plain": lambda: host("plain"),
    "ublk, sawmill run, batch": lambda: host("batch"),
    ONE_PROCESS: lambda: doors.ublk("--null")(1),
}


def inside():
    os.environ["SAWMILL"] = str(doors.binary("sawmill"))
    os.environ["XDG_STATE_HOME"] = os.environ["SCRATCH"]
    with doors.module("ublk_drv"):
        guest.inside([({"name": name}, enter) for name, enter in CONTESTANTS.items()],
                     doors.measure)


# ---- Outside.

def said_in_guest(flags):
    """The programs for the guest: bdus_null, and our library under BDUS's name."""
    with tempfile.TemporaryDirectory(dir=RELEASE.parent) as folder:
        program = Path(folder) / "bdus_null"
        machine.build("sawmill-c")
        (Path(folder) / "libbdus.so").symlink_to(RELEASE / "libsawmill.so")
        run("cc", "-O2", "-o", program, ROOT / "tests/vm/bench/bdus_null.c",
            f"-I{ROOT}/sdk/c/include",
            f"-L{folder}", "-l:libbdus.so", "-Wl,--allow-shlib-undefined")
        (Path(folder) / "libsawmill.so").symlink_to(RELEASE / "libsawmill.so")
        run("cc", "-O2", "-o", Path(folder) / "null", ROOT / "sdk/c/examples/null.c",
            f"-I{ROOT}/sdk/c/include", f"-L{folder}", "-lsawmill")
        return guest.boot("bdus", flags, VM_KBDUS=str(flags.kbdus and flags.kbdus.resolve()),
                          VM_BDUS_NULL=str(program), VM_LIBSAWMILL=folder, VM_NULL=f"{folder}/null")


def reference_of(found):
    return next(name for name in (REFERENCE, ONE_PROCESS) if name in found.names())


def table_of(found, unit):
    """Medians, and beside them the median of the ratios to BDUS within a round; without it, to ublk
    in one process."""
    reference = reference_of(found)
    cells, rows = list(itertools.product(doors.OPERATIONS, doors.DEPTHS)), []
    for name in found.names():
        ratios = [found.ratio(name, reference, cell, unit) for cell in cells]
        rows.append([name, *(f"{found.median(name, cell, unit):,.0f}"
                             + (f" ({ratio:.2f})" if ratio else "")
                             for cell, ratio in zip(cells, ratios))])
    heads = [f"{operation.removeprefix('rand')} qd{depth}" for operation, depth in cells]
    return page.table(["", *heads], rows, True)


def page_of(lines, rounds):
    found = guest.results(lines, "operation", "depth")
    parts = ["# BDUS's kernel module and ublk", f"""\
Written by `bench/bdus.py` on {datetime.date.today()}: Debian's kernel in a guest of two \
processors, emulated
where there is no hardware virtualization; medians of {rounds} rounds; \
in brackets the ratio to "{reference_of(found)}", taken
within a round. 4 KiB, random, `libaio`, `O_DIRECT`, one job. \
kbdus was patched to build on this kernel,
because its source supports Linux before 5.18 only. \
Requests a second for each core are the reciprocal of the \
processor time
for each request.""",
             *guest.tables(functools.partial(table_of, found))]
    if absent := guest.absent(lines):
        parts += ["Not measured:", absent]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


@cli.script
def main():
    if "--inside" in sys.argv:
        return inside()
    flags = cli.parse(__doc__, ("--kbdus", Path, "folder with kbdus.ko and libbdus.so"), rounds=5,
                      only={"contestants": list(CONTESTANTS)}, page=page.MEASUREMENTS / "bdus.md")
    if not flags.kbdus and REFERENCE in flags.only:
        if flags.page == page.MEASUREMENTS / "bdus.md":
            raise Unfit("--kbdus FOLDER: a folder with kbdus.ko and libbdus.so, built from BDUS's "
                        "source; without it, name another page: --page FILE")
        flags.only = [name for name in flags.only if name != REFERENCE]
    if flags.kbdus and not all((flags.kbdus / name).exists()
                               for name in ("kbdus.ko", "libbdus.so")):
        raise Unfit(f"{flags.kbdus} does not hold kbdus.ko and libbdus.so")
    lines = said_in_guest(flags)
    return page.write(flags.page, page_of(lines, flags.rounds), lines)
