#!/usr/bin/env python3
"""How long users wait when a driver is replaced or killed under them, in every language,
again and again.

For each language `sawmill run` holds a device whose driver is the example `file`; fio writes to it
over NBD and verifies what it wrote. Then the driver is replaced `--rounds` times (SIGHUP to the
host), and killed (-9) as often. fio must end without an error each time. The stall is the longest
that any request of fio took. Not here: what a driver's requests cost (`bench/scaling.py`).
"""

import os
import signal
import time

from harness import (
    EXAMPLES, MIB, RELEASE, ROOT, Process, cli, fio, machine, page, run, temporary_place)

SDK, SIZE_BYTES, PATIENCE_S = ROOT / "sdk", 32 * MIB, 60


def rust(_folder):
    machine.build("sawmill-driver", "--examples")
    return [EXAMPLES / "file"]


def python(_folder):
    return ["env", f"PYTHONPATH={SDK}/python", "python3", SDK / "python/examples/file.py"]


def go(folder):
    run("go", "build", "-o", folder / "file-go", "./file", cwd=SDK / "go/examples")
    return [folder / "file-go"]


def c(folder):
    machine.build("sawmill-c")
    run("cc", "-O2", f"-I{SDK}/c/include", "-o", folder / "file-c", SDK / "c/examples/file.c",
        f"-L{RELEASE}", f"-Wl,-rpath,{RELEASE}", "-lsawmill")
    return [folder / "file-c"]


LANGUAGES = {"rust": rust, "python": python, "go": go, "c": c}


class Device(Process):
    """A host with a driver, and its events."""

    def __init__(self, flags, place, command):
        backing, door = place.folder / "bytes", place.memory / "nbd.sock"
        with backing.open("wb") as file:
            file.truncate(SIZE_BYTES)
        self.uri = f"nbd+unix:///disk?socket={door}"
        super().__init__(
            flags.binary, "run", "--json", "--name", "disk", "--door", f"nbd=unix:{door}",
            "--option", f"mode={flags.mode}", "--", *command, backing, SIZE_BYTES, talks=True,
            log=place.folder / "log",
            env=os.environ | {"XDG_STATE_HOME": str(place.folder / "state")})
        self.generation = 0

    def wait_for(self, event, generation=0):
        while True:
            status = self.read_event(PATIENCE_S)
            if status.get("state") == "attached":
                self.generation, self.driver = status["generation"], status["pid"]
            is_it = status["event"] == event and status.get("state") != "gone"
            if is_it and status.get("generation", generation) >= generation:
                return

    def replace(self, _):
        self.child.send_signal(signal.SIGHUP)
        self.wait_for("driver", self.generation + 1)
        time.sleep(0.02)

    def kill(self, _):
        # A driver that has lived a second is restarted at once; a crash loop would be slowed down.
        time.sleep(1.05)
        os.kill(self.driver, signal.SIGKILL)
        self.wait_for("driver", self.generation + 1)
        time.sleep(0.02)


def measure(flags, language):
    """The longest request of each load, undisturbed, while the driver is replaced, and while it is
    killed."""
    with temporary_place(flags.work) as place, \
            Device(flags, place, LANGUAGES[language](place.folder)) as device:
        device.wait_for("ready")

        def load(seconds=20):
            return fio.verifying(fio.nbd(device.uri), "4k", SIZE_BYTES, "20m", seconds,
                                 place.folder, "--verify_backlog=256")
        found = {"language": language, "undisturbed_ms": load(3).longest_ms(),
                 "replaced_ms": fio.disturbed_ms(load, device.replace, flags.rounds),
                 "killed_ms": fio.disturbed_ms(load, device.kill, flags.rounds)}
        device.end_well(PATIENCE_S)
    return found


@cli.script
def main():
    flags = cli.parse(
        __doc__, ("--mode", ["plain", "batch"]), rounds=100, only={"languages": list(LANGUAGES)},
        only_too="--languages", binary=cli.SAWMILL, work=cli.TEMPORARY)
    found = list(page.as_they_come(measure(flags, language) for language in flags.only))
    rows = [[one["language"], f"{one['undisturbed_ms']:.1f}",
             flags.rounds, f"{max(one['replaced_ms']):.1f}",
             flags.rounds, f"{max(one['killed_ms']):.1f}"] for one in found]
    table = page.table(["language", "undisturbed ms", "replaced", "longest ms", "killed",
                        "longest ms"], rows)
    page.write(flags.page, "# Drivers replaced and killed under fio verify over NBD\n\n"
               f"`bench/drivers.py --rounds {flags.rounds} --mode {flags.mode}`; "
               f"milliseconds.\n\n{table}", found)
