#!/usr/bin/env python3
"""How long users wait when a driver is replaced or killed under them, in every language, again and again.

    bench/drivers.py [--rounds 100] [--languages rust,python,go,c] [--mode plain] [--page FILE]

For each language `sawmill run` holds a device whose driver is the example `file`; fio writes to it over NBD
and verifies what it wrote. Then the driver is replaced `--rounds` times (SIGHUP to the host), and killed
(-9) as often. fio must end without an error each time. The stall is the longest that any request of fio took.
"""

import argparse
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
SAWMILL = REPOSITORY / "target/release/sawmill"
SDK = REPOSITORY / "sdk"
SIZE_BYTES = 32 << 20
PATIENCE_S = 60


def cargo(package, *more):
    words = ["cargo", "build", "--quiet", "--release", "-p", package, *more]
    subprocess.run(words, check=True, cwd=REPOSITORY)


def rust(_folder):
    cargo("sawmill-driver", "--examples")
    return [REPOSITORY / "target/release/examples/file"], {}


def python(_folder):
    return ["python3", SDK / "python/examples/file.py"], {"PYTHONPATH": str(SDK / "python")}


def go(folder):
    words = ["go", "build", "-o", folder / "file-go", "./file"]
    subprocess.run(words, check=True, cwd=SDK / "go/examples")
    return [folder / "file-go"], {}


def c(folder):
    cargo("sawmill-c")
    command = ["cc", "-O2", f"-I{SDK}/c/include", "-o", folder / "file-c", SDK / "c/examples/file.c"]
    libraries = [f"-L{REPOSITORY}/target/release", f"-Wl,-rpath,{REPOSITORY}/target/release", "-lsawmill"]
    subprocess.run(command + libraries, check=True)
    return [folder / "file-c"], {}


LANGUAGES = {"rust": rust, "python": python, "go": go, "c": c}


class Device:
    """A host with a driver, and what it tells."""

    def __init__(self, folder, command, environment, mode):
        backing = folder / "bytes"
        backing.write_bytes(b"")
        os.truncate(backing, SIZE_BYTES)
        self.uri = f"nbd+unix:///disk?socket={folder}/nbd.sock"
        environment = os.environ | environment | {"XDG_STATE_HOME": str(folder / "state")}
        words = [SAWMILL, "run", "--json", "--name", "disk", "--door", f"nbd=unix:{folder}/nbd.sock"]
        words += ["--option", f"mode={mode}", "--", *command, backing, str(SIZE_BYTES)]
        self.log = open(folder / "log", "wb")
        pipes = {"stdout": subprocess.PIPE, "stderr": self.log}
        self.process = subprocess.Popen(words, env=environment, text=True, **pipes)
        self.generation = 0
        self.wait_for("ready")

    def wait_for(self, event, generation=0):
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            line = self.process.stdout.readline()
            if not line:
                break
            told = json.loads(line)
            if told.get("state") == "attached":
                self.generation, self.pid = told["generation"], told["pid"]
            is_it = told["event"] == event and told.get("state") != "gone"
            if is_it and told.get("generation", generation) >= generation:
                return
        sys.exit(f"waited in vain for {event}; see {self.log.name}")

    def replace(self):
        self.process.send_signal(signal.SIGHUP)
        self.wait_for("driver", self.generation + 1)

    def kill(self):
        # One that has lived a second is started again at once; a crash loop would be slowed down.
        time.sleep(1.05)
        os.kill(self.pid, signal.SIGKILL)
        self.wait_for("driver", self.generation + 1)

    def end(self):
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_S)


def load(uri, runtime_s):
    """fio with verification, started; ends by itself."""
    words = ["fio", "--name=load", "--ioengine=nbd", f"--uri={uri}", "--rw=randrw", "--bs=4k", "--iodepth=8"]
    words += [f"--size={SIZE_BYTES}", "--time_based", f"--runtime={runtime_s}"]
    words += ["--verify=crc32c", "--verify_backlog=256"]
    words += ["--rate=20m,20m", "--output-format=json", "--verify_state_save=0", "--randrepeat=0"]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def judged(fio):
    """The longest request of a load that ended, in ms; None when it was not flawless."""
    text, _ = fio.communicate(timeout=PATIENCE_S * 2)
    if fio.returncode != 0 or "{" not in text:
        print(text[-2000:], file=sys.stderr)
        return None
    job = json.loads(text[text.index("{"):])["jobs"][0]
    if job["error"] != 0:
        return None
    return max(job[way]["clat_ns"]["max"] for way in ("read", "write")) / 1e6


def rounds(device, disturb, count):
    """Disturbs again and again under load: the longest stall in ms, and how often it was disturbed."""
    longest, done = 0.0, 0
    runtime_s = 20
    while done < count:
        fio = load(device.uri, runtime_s)
        time.sleep(0.3)
        while done < count and fio.poll() is None:
            disturb()
            done += 1
            time.sleep(0.02)
        stall = judged(fio)
        if stall is None:
            sys.exit(f"fio met an error or a wrong byte; see {device.log.name}")
        longest = max(longest, stall)
    return longest


def main():
    as_it_stands = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_it_stands)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--languages", default=",".join(LANGUAGES))
    parser.add_argument("--mode", default="plain", choices=["plain", "batch"])
    parser.add_argument("--page", type=pathlib.Path)
    options = parser.parse_args()
    rows = [["language", "undisturbed ms", "replaced", "longest ms", "killed", "longest ms"]]
    for language in options.languages.split(","):
        folder = pathlib.Path(tempfile.mkdtemp(prefix="sawmill-drivers-"))
        command, environment = LANGUAGES[language](folder)
        device = Device(folder, command, environment, options.mode)
        quiet = judged(load(device.uri, 3))
        replaced = rounds(device, device.replace, options.rounds)
        killed = rounds(device, device.kill, options.rounds)
        if device.end() != 0:
            sys.exit(f"{language}: the device did not end in order; see {device.log.name}")
        shutil.rmtree(folder)
        row = [language, f"{quiet:.1f}", options.rounds, f"{replaced:.1f}", options.rounds, f"{killed:.1f}"]
        rows.append([str(cell) for cell in row])
        print("  ".join(rows[-1]), flush=True)
    table = "\n".join("| " + " | ".join(row) + " |" for row in [rows[0], ["---"] * len(rows[0]), *rows[1:]])
    print(table)
    if options.page:
        command = f"`bench/drivers.py --rounds {options.rounds} --mode {options.mode}`"
        head = "# Drivers replaced and killed under fio verify over NBD"
        options.page.write_text(f"{head}\n\n{command}; milliseconds.\n\n{table}\n")


if __name__ == "__main__":
    main()
