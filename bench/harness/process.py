"""Children that keep running: servers, loads, helpers.

Each is in a session of its own, so that an interrupt of ours reaches it as an orderly end, and is
ended by its id alone. Not here: programs that run to their end (`machine.run`).
"""

import json
import os
import re
import select
import signal
import subprocess
import time
from pathlib import Path

from harness.machine import Unfit, fields

# For an answer, and for a server to be ready.
PATIENCE_S = 120


class Process:
    """One child. One that `talks` has a line to it and lines from it,
    and may end when its input does."""

    def __init__(self, *words, log=None, env=None, cwd=None, talks=False):
        """Without a `log`, its standard error is ours, and its output is discarded."""
        words = [str(word) for word in words]
        self.name, self.log, self.unread = Path(words[0]).name, log, b""
        self.cpu_total_s = self.kernel_total_s = None
        with open(log or os.devnull, "a") as out:
            self.child = subprocess.Popen(
                words, bufsize=0, env=env, cwd=cwd, start_new_session=True,
                stderr=out if log else None, stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
                stdout=subprocess.PIPE if talks else out)
        self.pid = self.child.pid

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end()

    def is_running(self):
        return self.child.poll() is None

    def check(self):
        """Raises if it has ended, with its last output."""
        if not self.is_running():
            output = Path(self.log).read_text()[-1000:].strip() if self.log else ""
            raise Unfit(f"{self.name} ended with {self.child.returncode}: {output}")

    def send(self, line):
        self.child.stdin.write(f"{line}\n".encode())

    def read_line(self, seconds=PATIENCE_S):
        """Its next line."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self.unread:
            left_s = max(0, deadline - time.monotonic())
            if not select.select([self.child.stdout], [], [], left_s)[0]:
                raise Unfit(f"{self.name} printed nothing for {seconds} s")
            piece = os.read(self.child.stdout.fileno(), 1 << 16)
            if not piece:
                self.child.wait()
                self.check()
            self.unread += piece
        line, _, self.unread = self.unread.partition(b"\n")
        return line.decode()

    def read_event(self, seconds=PATIENCE_S):
        return json.loads(self.read_line(seconds))

    def expect(self, word):
        """Waits for a line that begins with a word; the rest of its words."""
        words = self.read_line().split()
        if words[:1] != [word]:
            raise Unfit(f"{self.name} did not print {word}: {words}")
        return words[1:]

    def expect_event(self, event="ready"):
        """Passes over lines of JSON until one reports an event."""
        while (event_line := self.read_event())["event"] != event:
            pass
        return event_line

    def cpu_s(self):
        """User and system time so far, in seconds."""
        return sum(self.times_s())

    def kernel_s(self):
        """System time so far, in seconds."""
        return self.times_s()[1]

    def times_s(self):
        spent = Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
        return [int(ticks) / os.sysconf("SC_CLK_TCK") for ticks in spent]

    def peak_bytes(self):
        """The most memory that it had at once, shared memory included."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) * 1024

    def threads_cpu_s(self):
        """Processor time of the threads that it has now:
        exact, where the other counts in hundredths."""
        spent = 0
        for path in Path(f"/proc/{self.pid}/task").glob("*/schedstat"):
            try:
                spent += int(path.read_text().split()[0])
            except OSError:
                continue
        return spent / 1e9

    def status(self, kind):
        """The kernel's counter of that name; memory in KiB."""
        return int(fields(f"/proc/{self.pid}/status")[kind].split()[0])

    def end(self, sign=signal.SIGTERM, seconds=600):
        """Asks it to end (`None`: it does so by itself), waits, kills it after `seconds`;
        its exit code.

        `cpu_total_s` and the part of it in the kernel, `kernel_total_s`, are set then.
        """
        if self.child.returncode is not None:
            return self.child.returncode
        if self.child.stdin:
            self.child.stdin.close()
        # Not `send_signal`, which would reap it unseen if it has ended by now.
        if sign is not None:
            os.kill(self.pid, sign)
        deadline = time.monotonic() + seconds
        while True:
            # wait4 returns the CPU time of the whole life, up to the end.
            pid, status, usage = os.wait4(self.pid, os.WNOHANG)
            if pid:
                self.cpu_total_s = usage.ru_utime + usage.ru_stime
                self.kernel_total_s = usage.ru_stime
                self.child.returncode = os.waitstatus_to_exitcode(status)
                return self.child.returncode
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
                deadline = float("inf")
            # Its last output may be more than a pipe holds.
            out = self.child.stdout
            if not (out and select.select([out], [], [], 0)[0] and os.read(out.fileno(), 1 << 16)):
                time.sleep(0.01)

    def end_well(self, seconds=PATIENCE_S, sign=signal.SIGTERM):
        """The same, and raises if it did not end cleanly."""
        if self.end(sign, seconds):
            self.check()
