#!/usr/bin/env python3
"""How long users wait when the server is replaced under them: `sawmill handoff`, again and again, under fio.

    bench/handoff.py [--rounds 20] [--rate 20m] [--door nbd] [--door loop]

For each door a volume in a fresh folder is served, fio writes to it at a steady rate and verifies what it
wrote, and the server is replaced `--rounds` times. A round's stall is the longest that any request of fio
took around it, as fio logged it; beside it stands the longest request of the seconds in which nothing
happened. fio must end without an error. Prints a table, and with --page FILE writes it there as Markdown.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
SAWMILL = REPOSITORY / "target/release/sawmill"
# fio's log has one row, the longest request, for each of these.
WINDOW_MS = 500
# Between two hand-offs: what one of them costs must not be seen by the next.
PAUSE_S = 2.0


class Scene:
    """A volume in a folder, a server of it and fio on it."""

    def __init__(self, folder, door, size, environment):
        self.folder, self.door = folder, door
        self.environment = environment
        self.volume = f"file://{folder}/store/disk"
        self.sawmill("create", self.volume, "--size", size)
        options = {
            "nbd": ["--nbd", f"unix:{folder}/nbd.sock"],
            "loop": ["--fuse", f"{folder}/mount", "--loop"],
        }[door]
        command = [SAWMILL, "serve", self.volume, "--staging", "/dev/shm", *options]
        self.log = open(folder / "server.log", "wb")
        self.server = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self.log, env=environment, text=True
        )
        self.address = self.server.stdout.readline().strip()
        if not self.address:
            sys.exit(f"the server ended: {(folder / 'server.log').read_text()}")
        self.pid = self.server.pid

    def sawmill(self, *words):
        done = subprocess.run(
            [SAWMILL, *words], env=self.environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(f"sawmill {' '.join(words)}: {done.stderr}")
        return done.stdout

    def load(self, rate, seconds):
        """Starts fio: it writes, reads back and verifies, with direct I/O where there is a kernel below."""
        engine = {
            "nbd": ["--ioengine=nbd", f"--uri={self.address}"],
            "loop": ["--ioengine=libaio", "--direct=1", f"--filename={self.address}"],
        }[self.door]
        command = [
            "fio", "--name=load", *engine, "--rw=randrw", "--rwmixread=30", "--bs=16k", "--iodepth=8",
            "--size=512m", f"--rate={rate},{rate}", "--verify=crc32c", "--verify_backlog=512",
            "--verify_fatal=1", "--time_based", f"--runtime={seconds}", "--randrepeat=0",
            f"--write_lat_log={self.folder}/fio", f"--log_avg_msec={WINDOW_MS}", "--log_max_value=1",
            "--log_unix_epoch=1", "--output-format=json", f"--output={self.folder}/fio.json",
        ]
        return subprocess.Popen(command, cwd=self.folder, env=self.environment)

    def hand_off(self):
        """Returns when it began, in ms of the day's clock, and what the command said."""
        began = time.time() * 1000
        said = json.loads(self.sawmill("handoff", self.volume, "--json"))
        self.pid = said["pid"]
        if said["lost_doors"]:
            sys.exit(f"a door was lost: {said['lost_doors']}")
        return began, said

    def longest(self):
        """fio's windows: end in ms of the day's clock, and the longest request in ms."""
        rows = []
        for path in self.folder.glob("fio_clat*.log"):
            for line in path.read_text().splitlines():
                fields = [field.strip() for field in line.split(",")]
                rows.append((int(fields[0]), int(fields[1]) / 1e6))
        return rows

    def stop(self):
        os.kill(self.pid, 15)
        while pathlib.Path(f"/proc/{self.pid}/fd").exists() and self.is_running():
            time.sleep(0.05)
        self.log.close()

    def is_running(self):
        try:
            return pathlib.Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
        except FileNotFoundError:
            return False


def measure(door, arguments):
    with tempfile.TemporaryDirectory(prefix="sawmill-handoff-") as name:
        folder = pathlib.Path(name)
        kinds = ("STATE_HOME", "DATA_HOME", "RUNTIME_DIR")
        environment = os.environ | {f"XDG_{kind}": name for kind in kinds}
        scene = Scene(folder, door, "2G", environment)
        seconds = int(arguments.rounds * (PAUSE_S + 1.5) + 10)
        fio = scene.load(arguments.rate, seconds)
        time.sleep(4)
        spans, said = [], []
        for _ in range(arguments.rounds):
            began, answer = scene.hand_off()
            spans.append((began, time.time() * 1000 + 2 * WINDOW_MS))
            said.append(answer)
            time.sleep(PAUSE_S)
        if fio.wait() != 0:
            sys.exit(f"{door}: fio failed: {(folder / 'fio.json').read_text()[-2000:]}")
        rows = scene.longest()
        scene.stop()
    inside = [
        max(ms for end, ms in rows if began <= end + WINDOW_MS and end <= until) for began, until in spans
    ]
    outside = [ms for end, ms in rows if not any(b <= end + WINDOW_MS and end <= u for b, u in spans)]
    return {
        "door": door,
        "stalls_ms": inside,
        "told_ms": [answer["stall_ms"] for answer in said],
        "prepared_ms": [answer["prepared_ms"] for answer in said],
        "quiet_ms": max(outside),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--rate", default="10m", help="of reads and of writes, each")
    parser.add_argument("--door", action="append", choices=["nbd", "loop"])
    parser.add_argument("--page", type=pathlib.Path)
    arguments = parser.parse_args()
    lines = [
        "| door | hand-offs | longest request, median | worst | told, median | getting ready, median | "
        "longest without a hand-off |",
        "|---|---|---|---|---|---|---|",
    ]
    for door in arguments.door or ["nbd", "loop"]:
        found = measure(door, arguments)
        middle = statistics.median
        lines.append(
            f"| {door} | {len(found['stalls_ms'])} | {middle(found['stalls_ms']):.0f} ms | "
            f"{max(found['stalls_ms']):.0f} ms | {middle(found['told_ms']):.0f} ms | "
            f"{middle(found['prepared_ms']):.0f} ms | {found['quiet_ms']:.0f} ms |"
        )
        print(lines[-1], flush=True)
    print("\n".join(lines))
    if arguments.page:
        head = (
            "# Hand-off: how long users wait\n\nMade by `bench/handoff.py`; see there for what is measured. "
            f"fio reads and writes {arguments.rate}B/s each, 16 KiB, 8 in flight, and verifies; "
            f"{os.cpu_count()} cores, everything on one disk.\n\n"
        )
        arguments.page.write_text(head + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
