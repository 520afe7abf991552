#!/usr/bin/env python3
"""How long users wait when the server is replaced under them:
`sawmill handoff`, again and again, under fio.

For each door a volume in a fresh folder is served, fio writes to it at a steady rate and verifies
what it wrote, and the server is replaced `--rounds` times. A round's stall is the longest that any
request of fio took around it, as fio logged it; beside it stands the longest request of the seconds
in which nothing happened. fio must end without an error. Prints a table, and with --page FILE
writes it there as Markdown. Not here: hand-offs that must not fail
(`tests/tests/handoff_under_fio.rs`).
"""

import json
import os
import signal
import time
from pathlib import Path
from statistics import median

from harness import GIB, Sawmill, Unfit, cli, fio, page, temporary_place, wait_until

# fio's log has one row, the longest request, for each of these.
WINDOW_MS = 500
# Between two hand-offs: what one of them costs must not be seen by the next.
PAUSE_S = 2.0


class Replaced(Sawmill):
    """A volume whose server is another process after each hand-off;
    everything it keeps is in one folder."""

    def environment(self):
        # Short for sockets; journal and cache are in there too, and it is no place in memory.
        homes = ("STATE_HOME", "DATA_HOME", "RUNTIME_DIR")
        return super().environment() | {f"XDG_{home}": str(self.place.folder) for home in homes}

    def start(self):
        doors = {"nbd": ["--nbd", f"unix:{self.socket}"],
                 "loop": ["--fuse", self.folder / "mount", "--loop"]}
        self.serve("--staging", "/dev/shm", *doors[self.name])
        self.pid = self.processes[0].pid
        if self.name == "loop":
            self.target = fio.direct(self.ready["uri"])

    def hand_off(self):
        report = json.loads(self.sawmill("handoff", self.volume, "--json"))
        self.pid = report["pid"]
        if report["lost_doors"]:
            raise Unfit(f"a door was lost: {report['lost_doors']}")
        return report

    def is_serving(self):
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
        except FileNotFoundError:
            return False

    def end(self):
        """The last one is no child of ours."""
        os.kill(self.pid, signal.SIGTERM)
        wait_until("the server has ended", lambda: not self.is_serving(), 600)
        super().end()


def measure(door, flags):
    with temporary_place(flags.work, 2 * GIB) as place:
        volume = Replaced(place, flags.binary, name=door)
        volume.make()
        with volume.running():
            job = fio.verifying(
                volume.target, "16k", "512m", flags.rate, int(flags.rounds * (PAUSE_S + 1.5) + 10),
                volume.folder, "--rwmixread=30", "--verify_backlog=512", "--verify_fatal=1",
                f"--write_lat_log={volume.folder}/fio", f"--log_avg_msec={WINDOW_MS}",
                "--log_max_value=1", "--log_unix_epoch=1")
            spans, reports = [], []
            with job as load:
                time.sleep(4)
                for _ in range(flags.rounds):
                    # In ms of the day's clock, as fio's log has it.
                    began = time.time() * 1000
                    reports.append(volume.hand_off())
                    spans.append((began - WINDOW_MS, time.time() * 1000 + 2 * WINDOW_MS))
                    time.sleep(PAUSE_S)
                load.jobs(3600)
            rows = fio.latencies(volume.folder)
    stalls = [max(ms for end, ms in rows if since <= end <= until) for since, until in spans]
    quiet = [ms for end, ms in rows if not any(since <= end <= until for since, until in spans)]
    return {"door": door, "longest_ms": stalls, "undisturbed_ms": quiet,
            **{key: [answer[key] for answer in reports] for key in ("stall_ms", "prepared_ms")}}


def row_of(found):
    stalls = found["longest_ms"]
    figures = (median(stalls), max(stalls), median(found["stall_ms"]), median(found["prepared_ms"]),
               max(found["undisturbed_ms"]))
    return [found["door"], len(stalls), *(f"{figure:.0f} ms" for figure in figures)]


@cli.script
def main():
    flags = cli.parse(
        __doc__, ("--rate", "10m", "of reads and of writes, each"), rounds=20,
        only={"doors": ["nbd", "loop"]}, only_too="--door", binary=cli.SAWMILL, work=cli.TEMPORARY)
    found = list(page.as_they_come(measure(door, flags) for door in flags.only))
    head = ["door", "hand-offs", "longest request, median", "worst", "reported, median",
            "getting ready, median", "longest without a hand-off"]
    text = (
        "# Hand-off: how long users wait\n\nMade by `bench/handoff.py`; see there for what is "
        f"measured. fio reads and writes {flags.rate}B/s each, 16 KiB, 8 in flight, and verifies; "
        f"{os.cpu_count()} cores, everything on one disk.\n\n")
    page.write(flags.page, text + page.table(head, map(row_of, found)), found)
