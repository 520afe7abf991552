#!/usr/bin/env python3
"""Other people's suites, unmodified, before Sawmill's NBD door, and before nbdkit in the same run.

    tests/external/run.py [SUITE...]

Suites: `iotests` (QEMU's own, for a raw image over NBD), `libnbd` (its programs that keep a shadow
copy of a disk which many connections write at once), `tester` (nbd-tester-client of the nbd
package: recorded traces, oversized requests, handshakes). `tests/setup/prepare.sh external` brings
their sources; nothing of them is kept here. Prints a table, names each failure, and ends with 0
only if Sawmill failed nothing but what EXPECTED lists with its reason, and all of that.

Not here: tests of ours on the same door (crates/frontend/tests/nbd,
tests/tests/serving/real_clients.rs).
"""

import contextlib
import ctypes
import difflib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXTERNAL = ROOT / ".prepared/external"
AS_QEMU_NBD = ROOT / "tests/external/as_qemu_nbd.sh"
SAWMILL = Path(os.environ.get("SAWMILL_BINARY", ROOT / "target/release/sawmill"))
SERVERS = ["sawmill", "nbdkit"]
MIB = 1 << 20
READY_S = 30
LIMIT_S = 600
PASS, FAIL, NOT_RUN = "pass", "fail", "not run"

NO_QTEST = "Debian builds QEMU without the qtest accelerator that the test asks for"
# What fails through no fault of the door, by suite and test, and why.
EXPECTED = {
    ("iotests", "094"): NO_QTEST,
    ("iotests", "119"): NO_QTEST,
    ("iotests", "143"): NO_QTEST,
    ("iotests", "145"): NO_QTEST,
    ("iotests", "181"): NO_QTEST,
    ("iotests", "241"): "it is about how qemu-nbd itself shows a file of 1000 bytes",
    ("tester", "integrity, huge"):
        "its requests are of up to 48 MiB; a server need not take more than 32 MiB, as documented",
}
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def prctl(option, value):
    ctypes.CDLL(None).prctl(option, value)


def die_with_parent():
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def end_orphans():
    """Kills what a suite left behind: such processes have become children of this one."""
    while True:
        children = []
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):
                children += (task / "children").read_text().split()
        if not children:
            return
        for child in map(int, children):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, 0)


class Place:
    """Folders of one suite before one server."""

    def __init__(self, server, folder):
        self.server, self.folder = server, Path(folder)
        self.environment = dict(os.environ, EXTERNAL_SERVER=server, EXTERNAL_PLACE=str(folder),
                                SAWMILL_BINARY=str(SAWMILL))

    def run(self, *words, **more):
        """A program to its end, and both of its outputs."""
        return subprocess.run([str(word) for word in words], env=self.environment,
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, errors="replace",
                              timeout=LIMIT_S, preexec_fn=die_with_parent, **more)

    @contextlib.contextmanager
    def disk(self, size_bytes, *options):
        """A fresh disk of zeroes behind the server; gives the socket."""
        image, path = self.folder / "image", self.folder / "nbd.sock"
        image.unlink(missing_ok=True)
        image.touch()
        os.truncate(image, size_bytes)
        words = [AS_QEMU_NBD, f"--pid-file={self.folder / 'pid'}", "-k", path, *options, image]
        server = subprocess.Popen([str(word) for word in words], env=self.environment,
                                  stdin=subprocess.DEVNULL, preexec_fn=die_with_parent)
        try:
            self.wait_until_ready(server, path)
            yield path
        finally:
            server.terminate()
            server.wait(LIMIT_S)

    def wait_until_ready(self, server, path):
        deadline = time.monotonic() + READY_S
        while True:
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as client:
                client.connect(str(path))
                return
            if server.poll() is not None or time.monotonic() > deadline:
                raise OSError(f"{self.server} did not get ready: {self.log()}")
            time.sleep(0.01)

    def log(self):
        log = self.folder / "log"
        return log.read_text(errors="replace")[-500:] if log.exists() else "it printed nothing"


def outcome_of(done):
    """Of a program that ends with 0, or with 77 for what it cannot do."""
    if done.returncode == 77:
        return NOT_RUN, done.stdout.strip()[-200:]
    result = f"ended with {done.returncode}: {done.stdout.strip()[-300:]}"
    return (PASS, "") if done.returncode == 0 else (FAIL, result)


def iotests(place):
    """QEMU's tests that know the protocol nbd and are not for another format alone."""
    folder = next(EXTERNAL.glob("qemu-*/tests/qemu-iotests"))
    names = [path.name for path in sorted(folder.glob("[0-9][0-9][0-9]")) if is_for_raw_nbd(path)]
    for program, path in {"QEMU_PROG": "qemu-system-x86_64", "QEMU_IMG_PROG": "qemu-img",
                          "QEMU_IO_PROG": "qemu-io", "QSD_PROG": "qemu-storage-daemon"}.items():
        place.environment[program] = shutil.which(path)
    place.environment.update(QEMU_NBD_PROG=str(AS_QEMU_NBD), TEST_DIR=str(place.folder / "scratch"),
                             SOCK_DIR=str(place.folder / "sock"))
    output = place.run("./check", "-raw", "-nbd", *names, cwd=folder).stdout
    results = {}
    for line in output.splitlines():
        match = re.search(r"(\d{3})\s+(pass|fail|not run)\s+\[[\d:]+\] \[[\d:]+\]\s+\S+\s*(.*)$",
                          line)
        if match:
            why = difference(folder, place, match[1]) if match[2] == FAIL else match[3].strip()
            results[match[1]] = match[2], why
    for name in names:
        results.setdefault(name, (FAIL, f"check did not reach it: {output[-300:]}"))
    return results


def difference(folder, place, name):
    """The first lines in which the output of a test is not the expected one."""
    expected, output = folder / f"{name}.out", place.folder / "scratch" / f"{name}.out.bad"
    if not output.exists():
        return "it printed nothing"
    lines = [path.read_text(errors="replace").splitlines() for path in (expected, output)]
    changed = [line for line in difflib.ndiff(*lines) if line.startswith(("- ", "+ "))]
    return "; ".join(changed[:4]) or "only its exit code is wrong"


def is_for_raw_nbd(path):
    text = path.read_text(errors="replace")
    protocols = re.findall(r"^_supported_proto (.*)$", text, re.MULTILINE)
    formats = re.findall(r"^_supported_fmt (.*)$", text, re.MULTILINE)
    return any({"nbd", "generic"} & set(line.split()) for line in protocols) and any(
        {"raw", "generic"} & set(line.split()) for line in formats)


def libnbd(place):
    """Each program knows the size of the disk, and two of them that it begins with
    nbdkit's pattern."""
    results = {}
    for name, size_bytes in [("aio-parallel", 64 * MIB), ("synch-parallel", 8 * MIB),
                             ("aio-parallel-load", 64 * MIB)]:
        with place.disk(size_bytes) as path:
            if name != "aio-parallel-load":
                pattern = ["[", "nbdkit", "--exit-with-parent", "pattern", f"size={size_bytes}",
                           "]"]
                place.run("nbdcopy", "--", *pattern, f"nbd+unix:///?socket={path}", check=True)
            results[name] = outcome_of(place.run(EXTERNAL / "bin" / name, path))
    return results


def tester(place):
    """The modes that nbd's own `make check` uses, on a Unix socket;
    not those that need its own server."""
    traces = next(EXTERNAL.glob("nbd-*/tests/run"))
    modes = {
        "read": [],
        "write": ["-w"],
        "write and flush": ["-w", "-f"],
        "write to read-only": ["-w", "-F"],
        "oversized requests": ["-o"],
        "handshake": ["-h"],
        "integrity": ["-i", "-t", traces / "integrity-test.tr"],
        "integrity, huge": ["-i", "-t", traces / "integrityhuge-test.tr"],
    }
    results = {}
    for name, options in modes.items():
        with place.disk(64 * MIB, *(["-r"] if "read-only" in name else [])) as path:
            client = EXTERNAL / "bin/nbd-tester-client"
            results[name] = outcome_of(place.run(client, "-N", "disk", "-u", path, *options))
    return results


SUITES = {"iotests": iotests, "libnbd": libnbd, "tester": tester}


def run(suite, server):
    """The results of one suite before one server, and the seconds it took."""
    began = time.monotonic()
    # In memory: iotests wait one second for a server to listen,
    # and syncs of a busy disk may take longer.
    with tempfile.TemporaryDirectory(prefix="sawmill-ext-", dir="/dev/shm") as folder:
        try:
            results = SUITES[suite](Place(server, folder))
        except (OSError, subprocess.SubprocessError) as error:
            results = {"the whole suite": (FAIL, str(error))}
        finally:
            end_orphans()
    return results, time.monotonic() - began


def print_table(results):
    print(f"\n{'suite':<10}{'server':<10}{'pass':>6}{'not run':>9}{'fail':>6}{'seconds':>9}")
    for (suite, server), (outcomes, seconds) in results.items():
        kinds = [outcome for outcome, _ in outcomes.values()]
        print(f"{suite:<10}{server:<10}{kinds.count(PASS):>6}{kinds.count(NOT_RUN):>9}"
              f"{kinds.count(FAIL):>6}{seconds:>9.1f}")


def judge(results):
    """Names what did not pass; returns the number of surprises."""
    surprises = 0
    for (suite, server), (outcomes, _) in results.items():
        for test, (outcome, why) in outcomes.items():
            expected = EXPECTED.get((suite, test))
            if outcome == FAIL:
                print(f"{suite} {test}, {server}: fail: {expected or why}")
            elif outcome == NOT_RUN:
                print(f"{suite} {test}, {server}: not run: {why}")
            if server == "sawmill" and outcome != NOT_RUN and (outcome == FAIL) != bool(expected):
                surprises += 1
                print(f"SURPRISE: {suite} {test}: {outcome}, {expected or 'was to pass'}")
    return surprises


def main():
    suites = sys.argv[1:] or list(SUITES)
    if not set(suites) <= set(SUITES):
        sys.exit(f"suites: {' '.join(SUITES)}")
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    # A signal ends this program the ordinary way, so that servers and folders go too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    results = {}
    for suite in suites:
        for server in SERVERS:
            print(f"{suite}, {server}", flush=True)
            results[suite, server] = outcomes, seconds = run(suite, server)
            passed = [test for test, (outcome, _) in outcomes.items() if outcome == PASS]
            print(f"  {len(passed)} of {len(outcomes)} passed in {seconds:.0f} s", flush=True)
    print_table(results)
    surprises = judge(results)
    print(f"{surprises} surprises")
    sys.exit(1 if surprises else 0)


if __name__ == "__main__":
    main()
