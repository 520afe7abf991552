"""The machine that is measured: what it is, how busy, CPU time of processes, its page cache."""

import os
import platform
import signal
import subprocess
import time
from pathlib import Path


class Unfit(Exception):
    """A step cannot be done here; the text says why."""


def describe():
    """Facts that belong beside every number."""
    cpu = next(
        (line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
         if line.startswith("model name")), platform.machine())
    memory_kib = int(Path("/proc/meminfo").read_text().split()[1])
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_kib / 2**20, 1),
        "kernel": platform.release(),
        "system": system_name(),
    }


def system_name():
    for line in Path("/etc/os-release").read_text().splitlines():
        if line.startswith("PRETTY_NAME="):
            return line.split("=", 1)[1].strip('"')
    return platform.platform()


def load():
    """Load average of the last minute."""
    return os.getloadavg()[0]


def version(*command):
    """First line of what a program says of its version; the empty text if it is not there."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except OSError:
        return ""
    lines = (done.stdout + done.stderr).strip().splitlines()
    return lines[0] if lines else ""


def run(command, **more):
    """Runs a program to its end and returns its standard output; what it said goes into the error."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, **more)
    if done.returncode:
        said = (done.stderr + done.stdout).strip()[-600:]
        raise Unfit(f"`{' '.join(map(str, command))}` ended with {done.returncode}: {said}")
    return done.stdout


def wait_until(what, ready, seconds=60):
    """Polls `ready` until it returns something true, and returns that."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = ready()
        if found:
            return found
        time.sleep(0.02)
    raise Unfit(f"{what}: not within {seconds} s")


class Process:
    """A child of ours: started in a session of its own, its log kept, ended by its id alone."""

    def __init__(self, command, log, env=None, pipe=False):
        self.log = Path(log)
        self.name = Path(command[0]).name
        with self.log.open("a") as out:
            self.child = subprocess.Popen(
                [str(word) for word in command], stdin=subprocess.DEVNULL, stderr=out,
                stdout=subprocess.PIPE if pipe else out, env=env, text=True, start_new_session=True)
        self.pid = self.child.pid
        self.cpu_total_s = None

    def check(self):
        """Raises when the process is gone."""
        if self.child.poll() is not None:
            raise Unfit(f"{self.name} ended with {self.child.returncode}: {self.tail()}")

    def tail(self):
        return self.log.read_text()[-600:].strip()

    def cpu_s(self):
        """User and system time so far, in seconds."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory(self):
        """Resident bytes now, and at the peak."""
        fields = dict(
            line.split(":", 1) for line in Path(f"/proc/{self.pid}/status").read_text().splitlines())
        kib = {name: int(fields[name].split()[0]) for name in ("VmRSS", "VmHWM")}
        return kib["VmRSS"] * 1024, kib["VmHWM"] * 1024

    def end(self, sign=signal.SIGTERM, seconds=600):
        """Asks the process to end (`None`: it does so by itself), waits, and returns its exit code.

        Kills it after `seconds`. `cpu_total_s` is set then.
        """
        if self.child.returncode is not None:
            return self.child.returncode
        if sign is not None:
            self.child.send_signal(sign)
        deadline = time.monotonic() + seconds
        while True:
            # wait4 tells the CPU time of the whole life, to the end.
            pid, status, usage = os.wait4(self.pid, os.WNOHANG)
            if pid:
                self.cpu_total_s = usage.ru_utime + usage.ru_stime
                self.child.returncode = os.waitstatus_to_exitcode(status)
                return self.child.returncode
            if time.monotonic() > deadline:
                self.child.send_signal(signal.SIGKILL)
                deadline = float("inf")
            time.sleep(0.01)


def forget_cached(folder):
    """Drops the pages of all files below `folder` from the page cache."""
    for name in files_below(folder):
        try:
            file = os.open(name, os.O_RDONLY)
        except OSError:
            continue
        try:
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def files_below(folder):
    """Regular files; folders that go away meanwhile are passed over."""
    for inside, _, names in os.walk(folder):
        for path in (Path(inside, name) for name in names):
            if path.is_file() and not path.is_symlink():
                yield path


def bytes_below(folder):
    """Sizes of all files below `folder`, added up."""
    return sum(path.stat().st_size for path in files_below(folder))
