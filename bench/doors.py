#!/usr/bin/env python3
"""What a request costs at the ways into a kernel: ublk and NBD beside the kernel's own, before
devices that do nothing, or keep bytes in memory.

    bench/doors.py [--rounds N]    boots a guest (tests/vm), measures in it, writes
                                   docs/measurements/doors.md

For each number of queues all contestants are set up in one boot and take turns, so that a busy host
slows all of them; ratios are taken within a round. Requests are of 4 KiB, random, by fio with
libaio and O_DIRECT; x2: two jobs before a device with two queues (connections, for NBD; TCMU and
SCSI have one). CPU is the whole guest's, fio included, while requests flow, for each request.

Not here: what a volume costs behind a door (bench/run.py).
"""

import contextlib
import datetime
import functools
import itertools
import os
import sys
import time
from pathlib import Path

from harness import PATIENCE_S, Process, cli, fio, guest, listens, machine, page, run, wait_until

SIZE_MIB = 96
RUN_S, WINDOW_S = 3, 2
REFERENCE = {"null": "nbd, nbdkit null", "memory": "nbd, nbdkit memory"}
TARGET_RATIO = 1.6
OPERATIONS, DEPTHS, QUEUES = ["randread", "randwrite"], [1, 128], [1, 2]
BUS_NAMES = ["dbus-send", "--system", "--print-reply", "--dest=org.freedesktop.DBus", "/",
             "org.freedesktop.DBus.ListNames"]


# ---- Inside the guest: contestants. Each is a context that gives the path of a device.

def scratch():
    return Path(os.environ["SCRATCH"])


def binary(name):
    return Path(os.environ["BIN"]) / name


@contextlib.contextmanager
def module(name, *options):
    run("modprobe", name, *options)
    try:
        yield
    finally:
        run("modprobe", "--remove", name)


def block(device, *words):
    @contextlib.contextmanager
    def contestant(queues):
        with module(*(word.format(queues=queues) for word in words)):
            yield device
    return contestant


def nbd(index, kind, is_ours):
    @contextlib.contextmanager
    def contestant(queues):
        path, device = scratch() / f"nbd{index}-{queues}", f"/dev/nbd{index}"
        server = ["nbdkit", "-f", "-U", path, kind, f"size={SIZE_MIB}M"]
        with Process(*([binary("nbd_null"), path] if is_ours else server), talks=True):
            wait_until(path, lambda: listens(path))
            export = kind if is_ours else ""
            run("nbd-client", "-unix", path, device, "-N", export, "-b", 4096, "-C", queues)
            try:
                yield device
            finally:
                run("nbd-client", "-d", device)
    return contestant


def ublk(*kind):
    @contextlib.contextmanager
    def contestant(queues):
        words = [binary("ublk_memory"), *kind, "--size", SIZE_MIB, "--queues", queues]
        with Process(*words, talks=True) as server:
            device, *_ = server.expect("ready")
            try:
                yield device
            finally:
                server.send("stop")
                server.end(None, PATIENCE_S)
    return contestant


@contextlib.contextmanager
def scsi_loopback(backend, number, control):
    """The kernel's SCSI target before its own loopback initiator, on a backend of the target."""
    root = Path("/sys/kernel/config/target")
    name = f"naa.500000000000000{number}"
    backend, fabric = root / "core" / backend, root / f"loopback/{name}"
    lun = fabric / "tpgt_1/lun/lun_0"
    disks = set(Path("/sys/block").iterdir())
    for needed in ["target_core_mod", "tcm_loop", "sd_mod"]:
        run("modprobe", needed)
    if not root.exists():
        run("mount", "-t", "configfs", "config", "/sys/kernel/config")
    backend.mkdir(parents=True)
    (backend / "control").write_text(control)
    (backend / "enable").write_text("1")
    lun.mkdir(parents=True)
    (fabric / "tpgt_1/nexus").write_text(name)
    (lun / "backend").symlink_to(backend)
    try:
        found, *_ = wait_until("a SCSI disk", lambda: set(Path("/sys/block").glob("sd*")) - disks)
        wait_until("its node", Path("/dev", found.name).exists)
        yield f"/dev/{found.name}"
    finally:
        (lun / "backend").unlink()
        for folder in [lun, fabric / "tpgt_1", fabric, backend, backend.parent]:
            folder.rmdir()


@contextlib.contextmanager
def tcmu(_):
    """A target in user space (TCMU): tcmu-runner, whose handler for images takes a
    raw file in memory."""
    image, bus = scratch() / "tcmu.raw", Path("/run/dbus/system_bus_socket")
    with image.open("wb") as file:
        file.truncate(SIZE_MIB << 20)
    for needed in ["target_core_user", "uio"]:
        run("modprobe", needed)
    # It announces its handlers on the system bus, and exits without one.
    bus.parent.mkdir(exist_ok=True)
    with Process("dbus-daemon", "--system", "--nofork", "--nopidfile"):
        wait_until("the system's bus", lambda: listens(bus))
        with Process("tcmu-runner", "--tcmu-log-dir", scratch()):
            wait_until("tcmu-runner on the bus",
                       lambda: "org.kernel.TCMUService1" in run(*BUS_NAMES))
            control = f"dev_config=qcow/{image},dev_size={SIZE_MIB << 20},hw_block_size=512,async=1"
            with scsi_loopback("user_0/memory", 2, control) as device:
                yield device


CONTESTANTS = [
    ("null", "null_blk", block("/dev/nullb0", "null_blk", "nr_devices=1", "gb=1",
                               "submit_queues={queues}", "irqmode=0", "queue_mode=2")),
    ("null", "SCSI target, loopback",
     lambda _: scsi_loopback("rd_mcp_0/null", 1, f"rd_pages={SIZE_MIB << 8},rd_nullio=1")),
    ("null", "nbd, nbdkit null", nbd(0, "null", False)),
    ("null", "nbd, Sawmill null", nbd(1, "null", True)),
    ("null", "ublk, Sawmill null", ublk("--null")),
    ("memory", "brd", block("/dev/ram0", "brd", "rd_nr=1", f"rd_size={SIZE_MIB << 10}")),
    ("memory", "TCMU, tcmu-runner", tcmu),
    ("memory", "nbd, nbdkit memory", nbd(2, "memory", False)),
    ("memory", "nbd, Sawmill memory", nbd(3, "memory", True)),
    ("memory", "ublk, Sawmill memory", ublk()),
]


def measure(device, queues=1, operations=OPERATIONS, depths=DEPTHS):
    """Requests a second and processor time for each, by operation and depth:
    jobs of one fio, in turn."""
    jobs, started, shares = ["--group_reporting"], {}, {}
    for operation, depth in itertools.product(operations, depths):
        name = f"{operation}-{depth}"
        started[name] = scratch() / name
        started[name].unlink(missing_ok=True)
        more = (f"--numjobs={queues}", "--norandommap", "--stonewall",
                f"--exec_prerun=touch {started[name]}")
        jobs += fio.words(fio.direct(device), operation, "4k", depth, f"{SIZE_MIB}M", *more,
                          seconds=RUN_S, name=name)
    with fio.Load(jobs, scratch()) as load:
        for name, path in started.items():
            wait_until("fio", lambda path=path: path.exists() or not load.is_running())
            time.sleep((RUN_S - WINDOW_S) / 2)
            from_s, from_busy_s = time.monotonic(), machine.busy_s()
            time.sleep(WINDOW_S)
            shares[name] = (machine.busy_s() - from_busy_s) / (time.monotonic() - from_s)
        for job in load.jobs():
            operation, _, depth = job["jobname"].partition("-")
            iops = job["read"]["iops"] + job["write"]["iops"]
            yield {"operation": operation, "depth": int(depth), "iops": iops,
                   "cpu_us": shares[job["jobname"]] / iops * 1e6}


def inside(queues):
    def fill(entered):
        for known, device in entered:
            if known["kind"] == "memory":
                run("dd", "if=/dev/urandom", f"of={device}", "bs=1M", f"count={SIZE_MIB}",
                    "oflag=direct")
    # The ublk contestants need their example.
    chosen = [({"kind": kind, "name": name, "queues": queues},
               functools.partial(contestant, queues))
              for kind, name, contestant in CONTESTANTS
              if not name.startswith("ublk") or binary("ublk_memory").exists()]
    with module("nbd"), module("ublk_drv"):
        guest.inside(chosen, functools.partial(measure, queues=queues), fill)


# ---- Outside.

def table_of(found, kind, unit):
    """Ratios to the reference, and what that does."""
    cells = list(itertools.product(OPERATIONS, DEPTHS, QUEUES))
    heads = [f"{operation.removeprefix('rand')} qd{depth} ×{queues}"
             for operation, depth, queues in cells]
    names = [name for of, name, _ in CONTESTANTS if of == kind and name in found.names()]
    rows = [[name, *(page.text_of(found.ratio(name, REFERENCE[kind], cell, unit), ".2f")
                     for cell in cells)] for name in names]
    rows.append(["*1.00 is*", *(page.text_of(found.median(REFERENCE[kind], cell, unit))
                                for cell in cells)])
    return page.table(["", *heads], rows, True)


def verdict(found):
    """Beside nbdkit, as the aim says, and beside our own NBD door."""
    lines = []
    for operation, queues in itertools.product(OPERATIONS, QUEUES):
        ratio, ours = (found.ratio("ublk, Sawmill null", name, (operation, 128, queues), "iops")
                       for name in ("nbd, nbdkit null", "nbd, Sawmill null"))
        if ratio and ours:
            verdict = "met" if ratio >= TARGET_RATIO else "missed"
            lines.append(f"- {operation.removeprefix('rand')}, ×{queues}: {verdict}, {ratio:.2f} "
                         f"times nbdkit's null, {ours:.2f} times our own over NBD")
    return "\n".join(lines) or "ublk took no part."


def rounds_of(found, queues):
    """The number of rounds of the least measured cell."""
    counts = (len(found.found(name, (operation, depth, queues), "iops")) for name in found.names()
              for operation, depth in itertools.product(OPERATIONS, DEPTHS))
    return min(filter(None, counts), default=0)


def page_of(lines, processor):
    found = guest.results(lines, "operation", "depth", "queues")
    rounds = " and ".join(f"{rounds_of(found, queues)} (×{queues})" for queues in QUEUES)
    parts = ["# What a request costs at a door", f"""\
Written by `bench/doors.py` on {datetime.date.today()}: \
Debian's kernel in a guest of two processors,
{processor}; medians of {rounds} rounds of {RUN_S} s for each cell. \
Requests of 4 KiB, random, `libaio` with
`O_DIRECT`; ×2: two jobs before two queues (connections). \
Ratios beside *nbd, nbdkit*, taken within a round.
An emulated guest pays about fifteen times more for each instruction and nothing for caches: \
ratios there say
where the instructions go, and absolute numbers say nothing."""]
    titles = {"null": "Devices that do nothing with the bytes",
              "memory": "Devices that keep them in memory"}
    for kind, title in titles.items():
        parts += [f"## {title}", *guest.tables(functools.partial(table_of, found, kind))]
    aim = f"## The aim: ublk at least {TARGET_RATIO} times the kernel's NBD, 4 KiB, qd128"
    parts += [aim, verdict(found)]
    if absent := guest.absent(lines):
        # tests/setup/prepare.sh bench installs what is not Debian's own.
        parts += ["## Not measured", absent]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


@cli.script
def main():
    if "--inside" in sys.argv:
        return inside(int(os.environ["VM_QUEUES"]))
    flags = cli.parse(__doc__, rounds=5, only={"contestants": [name for _, name, _ in CONTESTANTS]},
                      page=page.MEASUREMENTS / "doors.md")
    lines = [line for queues in QUEUES
             for line in guest.boot("doors", flags, VM_QUEUES=str(queues))]
    flags = Path("/proc/cpuinfo").read_text()
    processor = ("with hardware virtualization" if " vmx" in flags or " svm" in flags
                 else "emulated by QEMU")
    return page.write(flags.page, page_of(lines, processor), lines)
