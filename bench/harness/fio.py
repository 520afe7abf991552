"""fio: one way to call it, whatever it runs against, and its results.

Not here: which workloads there are.
"""

import json
import time

from harness.machine import Unfit, run
from harness.process import PATIENCE_S, Process


def nbd(uri):
    """fio's arguments for an NBD server. It refuses --direct:
    there is no cache on its side anyway."""
    return ["--ioengine=nbd", f"--uri={uri}"]


def direct(path, engine="libaio"):
    """fio's arguments for a file or a device, around the page cache."""
    return [f"--ioengine={engine}", "--direct=1", f"--filename={path}"]


def words(target, mode, block, depth, size, *more, seconds=None, name="load"):
    """A job: for so many seconds, or once over everything."""
    timed = ["--time_based", f"--runtime={seconds}"] if seconds else []
    return [f"--name={name}", *target, f"--rw={mode}", f"--bs={block}", f"--iodepth={depth}",
            f"--size={size}", "--thread", *timed, *more]


def once(mode, server):
    """Writes or reads every block of a server once, in order."""
    call(words(server.target, mode, "1m", 4, server.size_bytes), server.folder, 3600)


def call(job, folder, timeout_s=900):
    """Runs a job to its end; returns its result."""
    output = folder / "fio.json"
    run("fio", *job, "--output-format=json", f"--output={output}", timeout=timeout_s, cwd=folder)
    return parse(output)[0]


def parse(output):
    """The jobs of a run without an error."""
    text = output.read_text()
    # It may print other lines, for example that it has connected, before the document begins.
    start = text.find("{\n")
    if start < 0:
        raise Unfit(f"fio printed no JSON: {text[:300]}")
    jobs = json.loads(text[start:])["jobs"]
    for job in jobs:
        if job["error"]:
            raise Unfit(f"fio met error {job['error']} in {job['jobname']}")
    return jobs


def percentile_us(side, percent):
    return side["clat_ns"].get("percentile", {}).get(f"{percent}.000000", 0) / 1000


class Load(Process):
    """fio while something else is done; it ends by itself,
    and must end without an error or a wrong byte."""

    def __init__(self, jobs, folder):
        self.output = folder / "fio.json"
        super().__init__("fio", "--output-format=json", f"--output={self.output}", *jobs,
                         log=folder / "fio.log", cwd=folder)

    def jobs(self, seconds=PATIENCE_S):
        """The results of the jobs, if they end within that time."""
        self.end_well(seconds, sign=None)
        return parse(self.output)

    def longest_ms(self):
        """The longest request, when it has ended."""
        job, = self.jobs()
        return max(job[way]["clat_ns"]["max"] for way in ("read", "write")) / 1e6


def verifying(target, block, size, rate, seconds, folder, *more):
    """Starts reading and writing at a steady rate; every byte that is read is compared."""
    more = ("--verify=crc32c", "--verify_state_save=0", f"--rate={rate},{rate}", "--randrepeat=0",
            *more)
    return Load(words(target, "randrw", block, 8, size, *more, seconds=seconds), folder)


def disturbed_ms(start, disturb, count):
    """The longest request of each of as many loads as are under way while it is disturbed `count`
    times."""
    longest, done = [], 0
    while done < count:
        with start() as load:
            time.sleep(0.3)
            while done < count and load.is_running():
                disturb(done)
                done += 1
            longest.append(load.longest_ms())
    return longest


def latencies(folder):
    """What --write_lat_log has left: when in ms of the day's clock, and how long in ms."""
    rows = (line.split(",") for path in folder.glob("*_clat*.log")
            for line in path.read_text().splitlines())
    return [(int(at_ms), int(took_ns) / 1e6) for at_ms, took_ns, *_ in rows]
