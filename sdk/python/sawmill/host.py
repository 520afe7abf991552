"""Finding a host, or starting one: `sawmill run`, in a session of its own,
so that it outlives this driver.

The program is $SAWMILL, else `sawmill` on the path. A driver that a host has started finds that
host in $SAWMILL_DRIVER.

Not here: the messages to a host (host_connection.py).
"""

import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time

from .errors import HostGone, NoHost, SawmillError

SOCKET_VARIABLE = "SAWMILL_DRIVER"
PROGRAM_VARIABLE = "SAWMILL"
# How long a dying host may take to report why.
REPORT_TIME_MAX_S = 2
CHECK_INTERVAL_S = 0.005

_numbers = itertools.count(1)


def program() -> str:
    """The path of the program."""
    path = os.environ.get(PROGRAM_VARIABLE) or shutil.which("sawmill")
    if path is None:
        raise NoHost(
            f"no program `sawmill` on the path: install it, or set {PROGRAM_VARIABLE} to its path"
        )
    return path


def running(name: str) -> str:
    """The driver socket of a running device."""
    command = [program(), "driver", "socket", name]
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise cannot_start(error) from None
    if output.returncode:
        raise NoHost(
            f"device {name!r} does not run: {output.stderr.strip() or output.stdout.strip()}"
        )
    return output.stdout.strip()


def cannot_start(error: OSError) -> NoHost:
    return NoHost(f"cannot start {program()}: {error.strerror}")


class Host:
    """A host that this driver has started. `socket`: where it listens for drivers."""

    def __init__(self, name: str | None, doors: list[str]):
        # A name that is unique on this machine, for callers that give none.
        name = name or f"python-{os.getpid()}-{next(_numbers)}"
        if not doors and os.path.exists("/dev/ublk-control") and os.geteuid() == 0:
            doors = ["ublk"]
        command = [program(), "run", "--json", "--name", name]
        for door in doors:
            command += ["--door", door]
        # Not a pipe: the host continues to write when this driver has died.
        self._output = tempfile.TemporaryFile()
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=self._output, start_new_session=True
            )
        except OSError as error:
            raise cannot_start(error) from None
        self.socket = self._listening()

    def wait_end(self, is_ending: bool) -> SawmillError | None:
        """Waits for the end of the host; returns its error, if any. Unless it `is_ending`, the host
        may continue without this driver and wait for another."""
        try:
            status = self._process.wait(None if is_ending else REPORT_TIME_MAX_S)
        except subprocess.TimeoutExpired:
            return None
        return self._failure(status) if status else None

    def give_up(self) -> None:
        """Ends a host immediately: it has no driver yet, or none any more."""
        self._process.terminate()
        try:
            self._process.wait(REPORT_TIME_MAX_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _listening(self) -> str:
        while True:
            status = self._process.poll()
            for event in self._events():
                if event.get("event") == "listening":
                    return str(event["socket"])
            if status is not None:
                raise NoHost(str(self._failure(status)))
            time.sleep(CHECK_INTERVAL_S)

    def _failure(self, status: int) -> SawmillError:
        for event in self._events():
            if event.get("outcome") == "failed":
                return SawmillError(str(event["message"]))
        return HostGone(f"`sawmill run` ended with status {status}: see what it wrote")

    def _events(self) -> list[dict[str, object]]:
        """The events that the host has printed so far, in whole lines."""
        size = os.fstat(self._output.fileno()).st_size
        lines = os.pread(self._output.fileno(), size, 0).split(b"\n")[:-1]
        events = (json.loads(line) for line in lines if line.startswith(b"{"))
        return [event for event in events if "event" in event]
