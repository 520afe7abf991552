#!/usr/bin/env python3
"""The guest lab: boots Debian's newer kernel and runs tests that need one, with built binaries.

    tests/vm/run.py [NAME...] [--quick] [--list] [--keep-log]

A test is a script `tests/vm/TOPIC/NAME.sh`, which bash runs as root in the guest; a NAME here is
`TOPIC/NAME` or a whole TOPIC. All share one boot; after a hang or a panic the rest get another.
`--quick` takes those that `make test` runs. Each test gets one line, and the exit status is the
number that failed. A program `TOPIC/NAME.py` that says `where: host` in its head is a test as well:
it boots what it tests. `--keep-log` keeps and names the folder with all output even when nothing
failed. Machines without hardware virtualization emulate, which takes a core and is about fifteen
times slower.

In a script's head:

    # what it shows, in one line
    # set: quick                part of `make test` too (else: full); bench: only when asked for
    # seconds: 60 600           time limit when quick, and in full; one number for both
    # needs: nbd null_blk       kernel modules, loaded before and removed after it
    # drivers: c                what drivers.py builds for it first; skipped where that cannot be
    # expects-io-errors         the kernel's log may tell of them
    # fails-with: WORDS         it must fail, for this reason: a test of the lab itself
    # where: host               it runs here, with $SET and VM_ variables; no modules, no log

A script finds in its environment $BIN (a folder with `sawmill` and the examples of
crates/frontend), $SCRATCH (an empty folder in memory, its own, and its working folder), $SET
(`quick` or `full`), $VM_TESTS (this folder; scene.sh in it has what many need) and each variable of
the caller that begins with VM_. It fails by its exit status, by what the kernel logs, and by what
it leaves behind.

Not here: how a single test is carried out (guest.sh); where kernel and programs come from
(tests/setup/prepare.sh vm).
"""

import argparse
import ctypes
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import drivers

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
KERNEL = ROOT / ".prepared/kernel"
VNG = ROOT / ".prepared/venv/bin/vng"
RELEASE = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release"
BOOT_S = 600
# Time for a guest beyond a test's own limit: to end its processes, unmount, unload.
GRACE_S = 180
POLL_S = 0.2
# A plain processor is quicker to emulate than one with everything.
EMULATED_CPU = "Nehalem,+rdrand"
KERNEL_OPTIONS = [
    "mitigations=off", "nokaslr", "cryptomgr.notests", "log_buf_len=8M", "tsc=reliable",
    # A host that is busy starves the guest, which must not be taken for a fault of its kernel.
    "rcupdate.rcu_cpu_stall_suppress=1", "nowatchdog",
    # Hardware that QEMU shows and no test needs; probing it takes a third of the boot.
    "module_blacklist=ahci,libahci,libata,cdrom,sr_mod,sg,i2c_i801,i2c_smbus,lpc_ich,iTCO_wdt,"
    "i6300esb,psmouse,pcspkr,button,kvm,kvm_amd,kvm_intel,powernow_k8,acpi_cpufreq,joydev,evdev,"
    "hid,usbhid,xhci_hcd,aesni_intel,ghash_clmulni_intel,sha512_ssse3,sha256_ssse3,sha1_ssse3,"
    "crct10dif_pclmul,polyval_clmulni",
]
PR_SET_PDEATHSIG = 1


@dataclass
class Test:
    """A script and the options in its head."""
    name: str
    about: str
    set: str
    seconds: int
    modules: list[str]
    expects_io_errors: bool
    fails_with: str
    path: Path
    on_host: bool
    drivers: list[str]

    @classmethod
    def of(cls, path, quick):
        head = []
        for line in path.read_text().splitlines():
            if not line.startswith("#"):
                break
            head.append(line.lstrip("#").strip())
        values = {}
        for line in head:
            key, colon, value = line.partition(":")
            if colon and key in ("set", "seconds", "needs", "fails-with", "where", "drivers"):
                values[key] = value.split()
        kind = values.get("set", ["full"])[0]
        if kind not in ("quick", "full", "bench"):
            raise SystemExit(f"{path}: there is no set {kind}")
        limits = [int(word) for word in values.get("seconds", ["120"])]
        head = [line for line in head if not line.startswith("!")]
        return cls(str(path.relative_to(HERE).with_suffix("")), head[0] if head else "",
                   kind, limits[0] if quick else limits[-1],
                   values.get("needs", []), "expects-io-errors" in head,
                   " ".join(values.get("fails-with", [])), path, values.get("where") == ["host"],
                   values.get("drivers", []))

    def plan(self):
        expects = "yes" if self.expects_io_errors else "no"
        return " ".join([self.name, str(self.seconds), expects, *self.modules])


def tests(names, quick):
    """The requested tests, by name."""
    everything = [Test.of(path, quick)
                  for path in sorted([*HERE.glob("*/*.sh"), *HERE.glob("*/*.py")])]
    everything = [test for test in everything if test.on_host or test.path.suffix == ".sh"]
    for name in names:
        if not any(name in (test.name, test.name.split("/")[0]) for test in everything):
            raise SystemExit(f"there is no test {name}: tests/vm/run.py --list shows all")
    bench = ["bench"] if names else []
    matches = [t for t in everything if not names or {t.name, t.name.split("/")[0]} & set(names)]
    return [test for test in matches
            if test.set in (["quick"] if quick else ["quick", "full", *bench])]


def has_virtualization():
    """Whether the processor itself can run a guest. A /dev/kvm alone does not say so."""
    flags = re.search(r"^flags.*\b(vmx|svm)\b", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return bool(flags) and os.access("/dev/kvm", os.R_OK | os.W_OK)


def die_with_parent():
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def fill(share, quick):
    """Copies the binaries into the shared folder, without debug information."""
    (share / "bin").mkdir()
    sawmill = Path(os.environ.get("SAWMILL_BINARY", RELEASE / "sawmill"))
    examples = [path for path in (RELEASE / "examples").glob("*")
                if os.access(path, os.X_OK) and path.is_file()
                and re.fullmatch(r"[a-z0-9_]+", path.name)]
    for path in [sawmill, *examples]:
        if not path.exists():
            raise SystemExit(f"{path} is missing: cargo build --release -p sawmill")
        subprocess.run(["strip", "-o", share / "bin" / path.name, path], check=True)
    variables = {key: value for key, value in os.environ.items() if key.startswith("VM_")}
    variables["SET"] = "quick" if quick else "full"
    lines = [f"{key}={shlex.quote(value)}\n" for key, value in variables.items()]
    (share / "environment").write_text("".join(lines))


def with_drivers(selection, share):
    """Builds what these want; without those that this machine cannot build for, which it says."""
    kinds = dict.fromkeys(kind for test in selection for kind in test.drivers)
    missing = {kind: drivers.build(kind, RELEASE, share / "bin") for kind in kinds}
    for test in selection:
        for kind in filter(missing.get, test.drivers):
            print(f"skipped {test.name}: {missing[kind]}", flush=True)
    return [test for test in selection if not any(map(missing.get, test.drivers))]


class Guest:
    """One boot, and the tests it is to run."""

    def __init__(self, share, selection, accelerated):
        self.share = share
        (share / "ready").unlink(missing_ok=True)
        (share / "current").unlink(missing_ok=True)
        (share / "plan").write_text("".join(test.plan() + "\n" for test in selection))
        kernel = next((KERNEL / "boot").glob("vmlinuz-*"), None)
        if kernel is None or not VNG.exists():
            raise SystemExit("no kernel to boot: run tests/setup/prepare.sh vm")
        words = [VNG, "--run", kernel, "--force-9p", "--disable-microvm", "--user", "root",
                 "--verbose", "--cpus", "2", "--memory", os.environ.get("VM_MEMORY", "2G"),
                 f"--rwdir={share}"]
        words += [word for option in KERNEL_OPTIONS for word in ("--append", option)]
        if not accelerated:
            words += ["--disable-kvm", f"--qemu-opts=-cpu {EMULATED_CPU} "
                      "-accel tcg,thread=multi,tb-size=512"]
        words += ["--", f"exec {HERE / 'guest.sh'} {share}"]
        environment = dict(os.environ, PATH=f"{VNG.parent}:{os.environ['PATH']}:/usr/sbin:/sbin")
        self.process = subprocess.Popen([str(word) for word in words], stdin=subprocess.DEVNULL,
                                        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                        env=environment, start_new_session=True,
                                        preexec_fn=die_with_parent)
        self.console = threading.Thread(target=self.copy_console, daemon=True)
        self.console.start()

    def copy_console(self):
        """The output of boot and kernel goes into a file.
        QEMU opens its output by name, so that is a pipe."""
        with open(self.share / "console", "ab") as console:
            while bytes_of_console := self.process.stdout.read1():
                console.write(bytes_of_console)
                console.flush()

    def is_ready(self):
        return (self.share / "ready").exists()

    def is_running(self):
        return self.process.poll() is None

    def outcome(self, test):
        """How a test ended: seconds and words; None as long as it has not."""
        path = self.share / f"{test.name}.outcome"
        if not path.exists():
            return None
        seconds, _, result = path.read_text().strip().partition(" ")
        return int(seconds), result

    def wait_for(self, condition, limit_s):
        """Whether it came true before the guest's end and the limit."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            running = self.is_running()
            if condition():
                return True
            if not running:
                return False
            time.sleep(POLL_S)
        return False

    def end(self):
        if self.is_running():
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.console.join(5)


def last_words(path, count):
    if not path.exists():
        return "it printed nothing"
    lines = [line.rstrip() for line in path.read_text(errors="replace").splitlines()
             if line.strip()]
    return "\n    ".join(lines[-count:]) or "it printed nothing"


class Lab:
    """Runs tests in as many guests as it takes."""

    def __init__(self, share):
        self.share, self.passed, self.failed = share, 0, []
        self.accelerated = has_virtualization()
        # QEMU itself was seen to abort before the kernel ran.
        self.starts_spare = 1

    def report(self, test, seconds, result):
        if result == "ok" if not test.fails_with else test.fails_with in result:
            self.passed += 1
            print(f"ok {test.name} {seconds} s", flush=True)
            return
        if test.fails_with:
            result = f"should have failed with {test.fails_with!r}; it ended with {result!r}"
        self.failed.append(test.name)
        print(f"FAILED {test.name} after {seconds} s: {result}\n    "
              + last_words(self.share / f"{test.name}.log", 15), flush=True)

    def run(self, remaining):
        while remaining:
            from_s = time.monotonic()
            guest = Guest(self.share, remaining, self.accelerated)
            try:
                if guest.wait_for(guest.is_ready, BOOT_S):
                    print(f"booted in {time.monotonic() - from_s:.0f} s", flush=True)
                    remaining = self.follow(guest, remaining)
                elif self.accelerated:
                    print("the guest did not start with hardware virtualization: emulating",
                          flush=True)
                    self.accelerated = False
                elif self.starts_spare and not guest.is_running():
                    print("the machine ended before its kernel was up: once more", flush=True)
                    self.starts_spare -= 1
                else:
                    for test in remaining:
                        self.report(test, 0, "the guest did not start")
                    print("    " + last_words(self.share / "console", 30))
                    return
            finally:
                guest.end()

    def run_here(self, test, quick):
        """One that boots what it tests by itself."""
        from_s, log = time.monotonic(), self.share / f"{test.name}.log"
        log.parent.mkdir(exist_ok=True)
        environment = dict(os.environ, SET="quick" if quick else "full")
        with open(log, "wb") as into:
            process = subprocess.Popen([test.path], stdin=subprocess.DEVNULL, stdout=into,
                                       stderr=into, env=environment, preexec_fn=die_with_parent)
        try:
            result = ("ok" if process.wait(test.seconds) == 0
                    else f"it ended with {process.returncode}")
        except subprocess.TimeoutExpired:
            # It must end its own children.
            process.terminate()
            process.wait()
            result = f"it took more than {test.seconds} s"
        self.report(test, round(time.monotonic() - from_s), result)

    def follow(self, guest, remaining):
        """Waits for one test after the other; gives those that a dead guest left."""
        for n, test in enumerate(remaining):
            from_s = time.monotonic()
            has_ended = guest.wait_for(lambda: guest.outcome(test), test.seconds + GRACE_S)
            if has_ended:
                self.report(test, *guest.outcome(test))
                continue
            current = self.share / "current"
            if current.exists() and current.read_text().strip() != test.name:
                # It ended after the previous test, as it must when that left something behind.
                return remaining[n:]
            why = "the guest hangs" if guest.is_running() else "the guest died"
            self.report(test, round(time.monotonic() - from_s), f"{why}; its console:\n    "
                      + last_words(self.share / "console", 25) + "\n    and the test printed:")
            return remaining[n + 1:]
        return []


def main():
    words = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    words.add_argument("names", nargs="*", metavar="NAME")
    words.add_argument("--quick", action="store_true",
                       help="only what make test runs, and less of it")
    words.add_argument("--list", action="store_true", help="show the tests and run none")
    words.add_argument("--keep-log", action="store_true",
                       help="keep all output even when nothing failed")
    words = words.parse_args()
    if platform.machine() != "x86_64":
        print("skipped all guest tests: their kernel is of x86_64, this machine is "
              f"{platform.machine()}")
        return 0
    selection = tests(words.names, words.quick)
    if words.list:
        for test in selection:
            print(f"{test.name:32} {test.set:5} {test.seconds:5} s  {test.about}")
        return 0
    (ROOT / ".prepared/vm").mkdir(parents=True, exist_ok=True)
    share = Path(tempfile.mkdtemp(prefix="run-", dir=ROOT / ".prepared/vm"))
    fill(share, words.quick)
    selection = with_drivers(selection, share)
    # An abandoned guest would use a core forever.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))
    from_s = time.monotonic()
    lab = Lab(share)
    try:
        lab.run([test for test in selection if not test.on_host])
        for test in selection:
            if test.on_host:
                lab.run_here(test, words.quick)
    finally:
        if lab.failed or words.keep_log:
            print(f"all output is in {share}")
            shutil.rmtree(share / "bin")
        else:
            shutil.rmtree(share)
    print(f"guest tests: {lab.passed} passed, {len(lab.failed)} failed in "
          f"{time.monotonic() - from_s:.0f} s")
    return len(lab.failed)


if __name__ == "__main__":
    sys.exit(main())
