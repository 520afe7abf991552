#!/usr/bin/env python3
"""What a request costs before BDUS's kernel module and before ublk, for drivers that do nothing.

    bench/bdus.py --kbdus FOLDER [--rounds 5]    boots a guest (tests/vm), writes docs/measurements/bdus.md

FOLDER holds `kbdus.ko`, built for the guest's kernel (.prepared/kernel), and BDUS's `libbdus.so`: neither is
ours. One program, bench/bdus_null.c, runs with that library and with `libsawmill`; beside them, the null
device of the ublk door in one process and the null example in both modes. All are set up in one boot and take
turns; requests, processor time and ratios as in bench/doors.py.
"""

import argparse
import contextlib
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import doors

ROOT = doors.ROOT
PAGE = ROOT / "docs/measurements/bdus.md"
SIZE_BYTES, CALLBACKS = doors.SIZE_MIB << 20, 16
REFERENCE = "BDUS, kbdus"
CELLS = [(operation, depth) for operation in doors.OPERATIONS for depth in doors.DEPTHS]


# ---- Inside the guest.

@contextlib.contextmanager
def with_library(folder, **environment):
    """The program of bench/bdus_null.c with the libbdus.so of a folder."""
    environment = dict(os.environ, LD_LIBRARY_PATH=str(folder), **environment)
    words = [Path(os.environ["VM_BDUS_NULL"]), str(SIZE_BYTES), str(CALLBACKS)]
    driver = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        ready = driver.stdout.readline().split()
        if ready[:1] != ["ready"]:
            raise OSError(f"bdus_null did not get ready: {ready}")
        yield ready[1]
    finally:
        driver.terminate()
        driver.wait()


@contextlib.contextmanager
def kbdus():
    folder = Path(os.environ["VM_KBDUS"])
    doors.run("insmod", folder / "kbdus.ko")
    try:
        with with_library(folder) as device:
            yield device
    finally:
        doors.run("rmmod", "kbdus")


@contextlib.contextmanager
def host(mode):
    """The null example before `sawmill run`."""
    words = ["run", "--json", "--name", f"null-{mode}", "--door", "ublk", "--option", f"mode={mode}"]
    words += ["--", doors.binary("null"), str(SIZE_BYTES)]
    with doors.process(doors.binary("sawmill"), *words) as server:
        ready = next((line for line in map(json.loads, server.stdout) if line["event"] == "ready"), None)
        if ready is None:
            raise OSError("sawmill run ended")
        yield ready["doors"][0]["address"]


def contestants():
    yield REFERENCE, kbdus
    yield "ublk, the same program with libsawmill", lambda: with_library(os.environ["VM_LIBSAWMILL"])
    yield "ublk, sawmill run, plain", lambda: host("plain")
    yield "ublk, sawmill run, batch", lambda: host("batch")
    yield "ublk, in one process", lambda: doors.ublk("--null")(1)


def inside(rounds):
    os.environ["SAWMILL"] = str(doors.binary("sawmill"))
    os.environ["XDG_STATE_HOME"] = os.environ["SCRATCH"]
    with doors.module("ublk_drv"), contextlib.ExitStack() as stack:
        entered = []
        for name, contestant in contestants():
            try:
                entered.append((name, stack.enter_context(contestant())))
            except (OSError, ValueError, KeyError) as error:
                print(json.dumps({"absent": name, "why": str(error)}), flush=True)
        for number in range(rounds):
            turn = number % len(entered)
            for name, device in entered[turn:] + entered[:turn]:
                for measured in doors.measure(device, 1):
                    print(json.dumps({"name": name, "round": number} | measured), flush=True)


# ---- Outside.

def built(folder):
    """What the guest finds: the program, and our library under BDUS's name."""
    program = folder / "bdus_null"
    manifest = ROOT / "Cargo.toml"
    doors.run("cargo", "build", "--quiet", "--release", "--manifest-path", manifest, "-p", "sawmill-c")
    (folder / "libbdus.so").symlink_to(ROOT / "target/release/libsawmill.so")
    doors.run("cc", "-O2", "-o", program, ROOT / "bench/bdus_null.c", f"-I{ROOT}/sdk/c/include",
              f"-L{folder}", "-l:libbdus.so", "-Wl,--allow-shlib-undefined")
    return program


def said_in_guest(kbdus_folder, rounds):
    with tempfile.TemporaryDirectory(dir=ROOT / "target") as folder:
        folder = Path(folder)
        environment = dict(os.environ, VM_ROUNDS=str(rounds), VM_KBDUS=str(kbdus_folder.resolve()),
                           VM_BDUS_NULL=str(built(folder)), VM_LIBSAWMILL=str(folder), VM_MEMORY="3G")
        words = [ROOT / "tests/vm/run.py", "bench/bdus", "--keep-log"]
        done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True)
    print(done.stdout)
    kept = next(line.rpartition(" ")[2] for line in done.stdout.splitlines() if "all output is in" in line)
    if done.returncode:
        raise SystemExit(f"the guest did not get through; see {kept}")
    lines = (Path(kept) / "bench/bdus.log").read_text().splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def table(lines, unit):
    """Medians, and beside them the median of the ratios to BDUS within a round."""
    rounds = {}
    for line in lines:
        if "absent" not in line:
            key = line["name"], line["operation"], line["depth"]
            rounds.setdefault(key, {})[line["round"]] = line[unit]
    heads = [f"{operation.removeprefix('rand')} qd{depth}" for operation, depth in CELLS]
    rows = [f"| | {' | '.join(heads)} |", "|---|" + "---:|" * len(heads)]
    for name in dict.fromkeys(key[0] for key in rounds):
        shown = []
        for cell in CELLS:
            mine, theirs = rounds[(name, *cell)], rounds.get((REFERENCE, *cell), {})
            ratios = [mine[number] / theirs[number] for number in mine if number in theirs]
            beside = f" ({statistics.median(ratios):.2f})" if ratios else ""
            shown.append(f"{statistics.median(mine.values()):,.0f}{beside}")
        rows.append(f"| {name} | {' | '.join(shown)} |")
    return "\n".join(rows)


def page(lines, rounds):
    parts = ["# BDUS's kernel module and ublk", f"""\
Written by `bench/bdus.py` on {datetime.date.today()}: Debian's kernel in a guest of two processors, emulated
where there is no hardware virtualization; medians of {rounds} rounds; in brackets the ratio to BDUS, taken
within a round. 4 KiB, random, `libaio`, `O_DIRECT`, one job. kbdus was made to build on this kernel by hand:
its source stops before Linux 5.18. Requests a second for each core are the reciprocal of the processor time
for each request.""",
             "Requests a second (more is better):", table(lines, "iops"),
             "Processor time for each request, of the whole guest with fio (less is better), in µs:",
             table(lines, "cpu_us")]
    absent = [f"- {line['absent']}: {line['why']}" for line in lines if "absent" in line]
    return "\n\n".join(parts + (["Not measured:", "\n".join(absent)] if absent else [])) + "\n"


def main():
    words = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    words.add_argument("--kbdus", type=Path, help="folder with kbdus.ko and libbdus.so")
    words.add_argument("--rounds", type=int, default=5)
    words.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    words = words.parse_args()
    if words.inside:
        return inside(int(os.environ["VM_ROUNDS"]))
    if not words.kbdus or not all((words.kbdus / name).exists() for name in ("kbdus.ko", "libbdus.so")):
        raise SystemExit("--kbdus FOLDER: a folder with kbdus.ko and libbdus.so, built from BDUS's source")
    PAGE.write_text(page(said_in_guest(words.kbdus, words.rounds), words.rounds))
    print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
