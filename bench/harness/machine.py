"""The machine that is measured: its facts, its programs' output, its page cache's content.

Whatever cannot be done here raises `Unfit`, which says why.
Not here: children that go on (`process.py`).
"""

import contextlib
import os
import platform
import shutil
import subprocess
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RELEASE = ROOT / "target/release"
EXAMPLES = RELEASE / "examples"
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


class Unfit(OSError):
    """A step cannot be done here; the text says why."""


def fields(path, mark=":"):
    """The names and values of a file."""
    pairs = (line.partition(mark) for line in Path(path).read_text().splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def disk_of(folder):
    """The file system below a folder and the disk that holds it, as the kernel names them."""
    folder, mounts = Path(folder).resolve(), []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        mounts.append((Path(before.split()[4]), *after.split()[:2]))
    _, kind, source = max((mount for mount in mounts if folder.is_relative_to(mount[0])),
                          key=lambda mount: len(mount[0].parts))
    # A partition is a folder of its disk.
    block = Path("/sys/class/block", Path(source).name).resolve()
    models = [path for path in (block / "device/model", block.parent / "device/model")
              if path.exists()]
    model = f" ({models[0].read_text().strip()})" if models else ""
    return f"{kind} on {source}{model}"


def describe(folder=ROOT):
    """Facts that belong beside every number. The disk is that of `folder`."""
    kib, _ = fields("/proc/meminfo")["MemTotal"].split()
    # Of all processors the last; the name alone may be that of a whole family.
    cpu = fields("/proc/cpuinfo")
    numbers = [f"{name} {cpu[key]}" for name, key in
               (("family", "cpu family"), ("model", "model"), ("stepping", "stepping"))
               if key in cpu]
    return {
        "cpu": cpu.get("model name", platform.machine()), "cpu_model": ", ".join(numbers),
        "disk": disk_of(folder),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int(kib) / MIB, 1), "kernel": platform.release(),
        "system": fields("/etc/os-release", "=").get("PRETTY_NAME", platform.platform()).strip('"'),
    }


def commit():
    """The short name of the commit that is checked out; with "+" if files differ from it, other
    than pages of measurements."""
    def git(*words):
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True,
                              check=False).stdout.strip()
    name = git("rev-parse", "--short=7", "HEAD")
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".",
                  ":!docs/measurements")
    return f"{name}+" if changed else name


def version(program):
    """First line of a program's version output; the empty text if the program is missing."""
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=20,
                              check=False)
    except OSError:
        return ""
    return (done.stdout + done.stderr).strip().partition("\n")[0]


def missing(*programs):
    """The reason why these cannot be used; the empty text if they can."""
    lacking = [program for program in programs if not shutil.which(program)]
    return f"{', '.join(lacking)} not installed" if lacking else ""


def run(*words, **more):
    """Runs a program to its end and returns its standard output;
    the error has what it printed."""
    words = [str(word) for word in words]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, **more)
    except subprocess.TimeoutExpired as error:
        raise Unfit(f"`{' '.join(words)}` took more than {error.timeout} s") from None
    if done.returncode:
        output = (done.stderr + done.stdout).strip()[-600:]
        raise Unfit(f"`{' '.join(words)}` ended with {done.returncode}: {output}")
    return done.stdout


def succeeds(*words):
    """Whether a program exits with 0."""
    try:
        run(*words)
    except Unfit:
        return False
    return True


def busy_s():
    """Processor time that the machine has spent so far, without idle time."""
    words = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _idle, _iowait, irq, softirq = map(int, words[:7])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def build(package, *more):
    run("cargo", "build", "--quiet", "--release", "-p", package, *more, cwd=ROOT)


def wait_until(what, ready, seconds=60):
    """Polls `ready` until it returns something true, and returns that."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := ready():
            return found
        time.sleep(0.02)
    raise Unfit(f"{what}: not within {seconds} s")


def forget_cached(folder):
    """Drops the pages of all files below `folder` from the page cache."""
    for name in files_below(folder):
        with contextlib.suppress(FileNotFoundError), open(name, "rb") as file:
            os.fsync(file)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def files_below(folder):
    """Regular files; folders that go away meanwhile are passed over."""
    for inside, _, names in os.walk(folder):
        for path in (Path(inside, name) for name in names):
            if path.is_file() and not path.is_symlink():
                yield path


def bytes_below(folder):
    """Sizes of all files below `folder`, added up."""
    return sum(path.stat().st_size for path in files_below(folder))
