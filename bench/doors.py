#!/usr/bin/env python3
"""What a request costs at the ways into a kernel: ublk and NBD beside the kernel's own, before devices that
do nothing, or keep bytes in memory.

    bench/doors.py [--rounds N]    boots a guest (tests/vm), measures in it, writes docs/measurements/doors.md

For each number of queues all contestants are set up in one boot and take turns, so that a busy host slows
all of them; ratios are taken within a round. Requests are of 4 KiB, random, by fio with libaio and O_DIRECT;
x2: two jobs before a device with two queues (connections, for NBD; TCMU and SCSI have one). CPU is the whole
guest's, fio included, while requests flow, for each request.

Not here: what a volume costs behind a door (bench/run.py).
"""

import argparse
import contextlib
import datetime
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/measurements/doors.md"
SIZE_MIB = 96
RUN_S, WINDOW_S = 3, 2
REFERENCE = {"null": "nbd, nbdkit null", "memory": "nbd, nbdkit memory"}
TARGET_RATIO = 1.6
OPERATIONS, DEPTHS, QUEUES = ["randread", "randwrite"], [1, 128], [1, 2]
READY_S = 60
BUS_NAMES = ["dbus-send", "--system", "--print-reply", "--dest=org.freedesktop.DBus", "/",
             "org.freedesktop.DBus.ListNames"]


def run(*words):
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr or done.stdout).strip()[-300:]
        raise OSError(f"{words[0]} ended with {done.returncode}: {said}")
    return done.stdout


def until(condition, what):
    deadline = time.monotonic() + READY_S
    while not condition():
        if time.monotonic() > deadline:
            raise OSError(f"waited in vain for {what}")
        time.sleep(0.02)


# ---- Inside the guest: contestants. Each is a context that gives the path of a device.

@contextlib.contextmanager
def module(name, *options):
    run("modprobe", name, *options)
    try:
        yield
    finally:
        run("modprobe", "--remove", name)


@contextlib.contextmanager
def null_blk(queues):
    with module("null_blk", "nr_devices=1", "gb=1", f"submit_queues={queues}", "irqmode=0", "queue_mode=2"):
        yield "/dev/nullb0"


@contextlib.contextmanager
def brd(_):
    with module("brd", "rd_nr=1", f"rd_size={SIZE_MIB << 10}"):
        yield "/dev/ram0"


@contextlib.contextmanager
def process(*words):
    """A server that ends when its input does, or when it is told."""
    server = subprocess.Popen([str(word) for word in words], stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, text=True)
    try:
        yield server
    finally:
        server.stdin.close()
        server.terminate()
        server.wait()


@contextlib.contextmanager
def nbd(index, export, queues, *server):
    path = Path(os.environ["SCRATCH"]) / f"nbd{index}-{queues}"
    with process(*[path if word == "SOCKET" else word for word in server]):
        until(lambda: listens(path), path)
        device = f"/dev/nbd{index}"
        run("nbd-client", "-unix", path, device, "-N", export, "-b", 4096, "-C", queues)
        try:
            yield device
        finally:
            run("nbd-client", "-d", device)


def listens(path):
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        return True
    return False


def nbdkit(index, plugin):
    return lambda queues: nbd(index, "", queues, "nbdkit", "-f", "-U", "SOCKET", plugin, f"size={SIZE_MIB}M")


def our_nbd(index, export):
    return lambda queues: nbd(index, export, queues, binary("nbd_null"), "SOCKET")


def binary(name):
    return Path(os.environ["BIN"]) / name


def ublk(*kind):
    @contextlib.contextmanager
    def contestant(queues):
        with process(binary("ublk_memory"), *kind, "--size", SIZE_MIB, "--queues", queues) as server:
            ready = server.stdout.readline().split()
            if ready[:1] != ["ready"]:
                raise OSError(f"ublk_memory did not get ready: {ready}")
            try:
                yield ready[1]
            finally:
                server.stdin.write("stop\n")
                server.stdin.flush()
                server.wait(READY_S)
    return contestant


@contextlib.contextmanager
def scsi_loopback(backend, number, control):
    """The kernel's SCSI target before its own loopback initiator, on a backend of the target."""
    root = Path("/sys/kernel/config/target")
    name = f"naa.500000000000000{number}"
    backend, fabric = root / "core" / backend, root / f"loopback/{name}"
    lun = fabric / "tpgt_1/lun/lun_0"
    disks = {path.name for path in Path("/sys/block").iterdir()}
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
    found = lambda: [path.name for path in Path("/sys/block").iterdir()  # noqa: E731
                     if path.name not in disks and path.name.startswith("sd")]
    try:
        until(found, "a SCSI disk")
        until(lambda: os.path.exists(f"/dev/{found()[0]}"), "its node")
        yield f"/dev/{found()[0]}"
    finally:
        (lun / "backend").unlink()
        for folder in [lun, fabric / "tpgt_1", fabric, backend, backend.parent]:
            folder.rmdir()


def scsi_null(_):
    return scsi_loopback("rd_mcp_0/null", 1, f"rd_pages={SIZE_MIB << 8},rd_nullio=1")


@contextlib.contextmanager
def tcmu(_):
    """A target in user space (TCMU): tcmu-runner, whose handler for images takes a raw file in memory."""
    scratch = Path(os.environ["SCRATCH"])
    image = scratch / "tcmu.raw"
    with open(image, "wb") as file:
        file.truncate(SIZE_MIB << 20)
    for needed in ["target_core_user", "uio"]:
        run("modprobe", needed)
    # It tells what it offers on the system's bus, and ends where there is none.
    Path("/run/dbus").mkdir(exist_ok=True)
    with process("dbus-daemon", "--system", "--nofork", "--nopidfile"):
        until(lambda: listens("/run/dbus/system_bus_socket"), "the system's bus")
        with process("tcmu-runner", "--tcmu-log-dir", scratch):
            until(lambda: "org.kernel.TCMUService1" in run(*BUS_NAMES), "tcmu-runner on the bus")
            control = f"dev_config=qcow/{image},dev_size={SIZE_MIB << 20},hw_block_size=512,async=1"
            with scsi_loopback("user_0/memory", 2, control) as device:
                yield device


def contestants():
    yield "null", "null_blk", null_blk
    yield "null", "SCSI target, loopback", scsi_null
    yield "null", "nbd, nbdkit null", nbdkit(0, "null")
    yield "null", "nbd, Sawmill null", our_nbd(1, "null")
    if binary("ublk_memory").exists():
        yield "null", "ublk, Sawmill null", ublk("--null")
    yield "memory", "brd", brd
    yield "memory", "TCMU, tcmu-runner", tcmu
    yield "memory", "nbd, nbdkit memory", nbdkit(2, "memory")
    yield "memory", "nbd, Sawmill memory", our_nbd(3, "memory")
    if binary("ublk_memory").exists():
        yield "memory", "ublk, Sawmill memory", ublk()


def busy_s():
    """Processor time that the guest has spent so far on anything but waiting."""
    words = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _idle, _iowait, irq, softirq = map(int, words[:7])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def measure(device, queues):
    """Requests a second and processor time for each, by operation and depth: jobs of one fio, in turn."""
    cells = [(operation, depth) for operation in OPERATIONS for depth in DEPTHS]
    words = ["fio", "--output-format=json", "--group_reporting"]
    started = {}
    for operation, depth in cells:
        name = f"{operation}-{depth}"
        started[name] = Path(os.environ["SCRATCH"]) / name
        started[name].unlink(missing_ok=True)
        words += [f"--name={name}", f"--filename={device}", f"--rw={operation}", "--bs=4k", "--direct=1",
                  "--ioengine=libaio", f"--iodepth={depth}", f"--numjobs={queues}", f"--size={SIZE_MIB}M",
                  "--time_based", f"--runtime={RUN_S}", "--norandommap", "--thread", "--stonewall",
                  f"--exec_prerun=touch {started[name]}"]
    fio = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    shares = {}
    for name, path in started.items():
        until(lambda path=path: path.exists() or fio.poll() is not None, "fio")
        time.sleep((RUN_S - WINDOW_S) / 2)
        from_s, from_busy_s = time.monotonic(), busy_s()
        time.sleep(WINDOW_S)
        shares[name] = (busy_s() - from_busy_s) / (time.monotonic() - from_s)
    out, error = fio.communicate()
    if fio.returncode:
        raise OSError(f"fio on {device}: {error.strip()[-300:]}")
    # fio also says on its output what it ran before.
    for job in json.loads(out[out.index("{\n"):])["jobs"]:
        operation, _, depth = job["jobname"].partition("-")
        iops = job["read"]["iops"] + job["write"]["iops"]
        yield {"operation": operation, "depth": int(depth), "iops": iops,
               "cpu_us": shares[job["jobname"]] / iops * 1e6}


def inside(rounds, queues):
    """Prints a line of JSON for each measurement, and for each contestant that could not take part."""
    with module("nbd"), module("ublk_drv"), contextlib.ExitStack() as stack:
        entered = []
        for kind, name, contestant in contestants():
            try:
                entered.append((kind, name, stack.enter_context(contestant(queues))))
            except OSError as error:
                print(json.dumps({"absent": f"{name} ×{queues}", "why": str(error)}), flush=True)
        for kind, _, device in entered:
            if kind == "memory":
                run("dd", "if=/dev/urandom", f"of={device}", "bs=1M", f"count={SIZE_MIB}", "oflag=direct")
        for number in range(rounds):
            turn = number % len(entered)
            for kind, name, device in entered[turn:] + entered[:turn]:
                cell = {"kind": kind, "name": name, "queues": queues, "round": number}
                for measured in measure(device, queues):
                    print(json.dumps(cell | measured), flush=True)


# ---- Outside.

def said_in_guest(rounds, queues):
    """Boots, measures, gives the lines of the guest."""
    environment = dict(os.environ, VM_ROUNDS=str(rounds), VM_QUEUES=str(queues),
                       VM_MEMORY=os.environ.get("VM_MEMORY", "3G"))
    done = subprocess.run([ROOT / "tests/vm/run.py", "bench/doors", "--keep-log"], env=environment,
                          stdout=subprocess.PIPE, text=True)
    print(done.stdout)
    folder = next(line.rpartition(" ")[2] for line in done.stdout.splitlines() if "all output is in" in line)
    if done.returncode:
        raise SystemExit(f"the guest did not get through; see {folder}")
    lines = (Path(folder) / "bench/doors.log").read_text().splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


class Results:
    """Measurements by contestant and cell, and what they are beside the reference, round by round."""

    def __init__(self, lines):
        self.absent = {line["absent"]: line["why"] for line in lines if "absent" in line}
        self.cells = {}
        self.names = {"null": [], "memory": []}
        for line in lines:
            if "absent" not in line:
                key = line["name"], line["operation"], line["depth"], line["queues"]
                self.cells.setdefault(key, {})[line["round"]] = line
                if line["name"] not in self.names[line["kind"]]:
                    self.names[line["kind"]].append(line["name"])

    def median(self, name, cell, unit):
        found = self.cells.get((name, *cell))
        return statistics.median(line[unit] for line in found.values()) if found else None

    def rounds(self, queues):
        """How often the cell that was measured least was."""
        return min((len(found) for (_, _, _, of), found in self.cells.items() if of == queues), default=0)

    def ratio(self, name, reference, cell, unit):
        mine, others = self.cells.get((name, *cell)), self.cells.get((reference, *cell))
        if not mine or not others:
            return None
        return statistics.median(mine[n][unit] / others[n][unit] for n in mine if n in others)


def table(results, kind, unit):
    cells = [(operation, depth, queues)
             for operation in OPERATIONS for depth in DEPTHS for queues in QUEUES]
    heads = [f"{operation.removeprefix('rand')} qd{depth} ×{queues}" for operation, depth, queues in cells]
    lines = [f"| | {' | '.join(heads)} |", "|---|" + "---:|" * len(cells)]
    for name in results.names[kind]:
        ratios = [results.ratio(name, REFERENCE[kind], cell, unit) for cell in cells]
        shown = " | ".join("–" if ratio is None else f"{ratio:.2f}" for ratio in ratios)
        lines.append(f"| {name} | {shown} |")
    absolute = [results.median(REFERENCE[kind], cell, unit) for cell in cells]
    shown = " | ".join("–" if value is None else f"{value:,.0f}" for value in absolute)
    lines.append(f"| *1.00 is* | {shown} |")
    return "\n".join(lines)


def verdict(results):
    """Beside nbdkit, as the aim says, and beside our own NBD door."""
    lines = []
    for operation in OPERATIONS:
        for queues in QUEUES:
            cell = operation, 128, queues
            ratio, ours = (results.ratio("ublk, Sawmill null", name, cell, "iops")
                           for name in ("nbd, nbdkit null", "nbd, Sawmill null"))
            if ratio and ours:
                said = "met" if ratio >= TARGET_RATIO else "missed"
                lines.append(f"- {operation.removeprefix('rand')}, ×{queues}: {said}, {ratio:.2f} times "
                             f"nbdkit's null, {ours:.2f} times our own over NBD")
    return "\n".join(lines) or "ublk took no part."


def page(results, processor):
    rounds = " and ".join(f"{results.rounds(queues)} (×{queues})" for queues in QUEUES)
    parts = ["# What a request costs at a door", f"""\
Written by `bench/doors.py` on {datetime.date.today()}: Debian's kernel in a guest of two processors,
{processor}; medians of {rounds} rounds of {RUN_S} s for each cell. Requests of 4 KiB, random, `libaio` with
`O_DIRECT`; ×2: two jobs before two queues (connections). Ratios beside *nbd, nbdkit*, taken within a round.
An emulated guest pays about fifteen times more for each instruction and nothing for caches: ratios there say
where the instructions go, and absolute numbers say nothing."""]
    titles = {"null": "Devices that do nothing with the bytes", "memory": "Devices that keep them in memory"}
    for kind, title in titles.items():
        parts += [f"## {title}", "Requests a second (more is better):", table(results, kind, "iops"),
                  "Processor time for each request, of the whole guest with fio (less is better), in µs:",
                  table(results, kind, "cpu_us")]
    aim = f"## The aim: ublk at least {TARGET_RATIO} times the kernel's NBD, 4 KiB, qd128"
    parts += [aim, verdict(results)]
    if results.absent:
        # tests/setup/prepare.sh bench installs what is not Debian's own.
        absent = (f"- {name}: {why}" for name, why in results.absent.items())
        parts += ["## Not measured", "\n".join(absent)]
    return "\n\n".join(parts) + "\n"


def main():
    words = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    words.add_argument("--rounds", type=int, default=5)
    words.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    words = words.parse_args()
    if words.inside:
        return inside(int(os.environ["VM_ROUNDS"]), int(os.environ["VM_QUEUES"]))
    lines = [line for queues in QUEUES for line in said_in_guest(words.rounds, queues)]
    flags = Path("/proc/cpuinfo").read_text()
    processor = "with hardware virtualization" if " vmx" in flags or " svm" in flags else "emulated by QEMU"
    PAGE.write_text(page(Results(lines), processor))
    print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
