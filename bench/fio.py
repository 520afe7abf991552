"""The workloads, and one run of fio."""

import json
from dataclasses import dataclass, field
from pathlib import Path

from machine import Unfit, run


@dataclass(frozen=True)
class Workload:
    """What one cell of the table measures."""

    name: str
    title: str
    mode: str
    block: str
    depth: int
    # An fsync after every write.
    fsync: bool = False
    # The data is read once before, so that every cache is warm.
    warm: bool = False
    # The caches are emptied before, and every block is read at most once.
    cold: bool = False

    @property
    def writes(self):
        return "write" in self.mode


WORKLOADS = [
    Workload("randwrite-4k", "4 KiB random writes, qd 32", "randwrite", "4k", 32),
    Workload("randwrite-16k", "16 KiB random writes, qd 32", "randwrite", "16k", 32),
    Workload("randread-4k", "4 KiB random reads, warm, qd 32", "randread", "4k", 32, warm=True),
    Workload("seqwrite-64k", "64 KiB sequential writes, qd 16", "write", "64k", 16),
    Workload("seqread-64k", "64 KiB sequential reads, warm, qd 16", "read", "64k", 16, warm=True),
    Workload("fsync-4k", "4 KiB random writes, fsync each, qd 1", "randwrite", "4k", 1, fsync=True),
    Workload("cold-4k", "4 KiB random reads, cold, qd 1", "randread", "4k", 1, cold=True),
]
COST = Workload("cost-16k", "16 KiB random writes, each block once, qd 32", "randwrite", "16k", 32)


@dataclass
class Cell:
    """What fio found."""

    iops: float
    p50_us: float
    p99_us: float
    requests: int
    bytes: int
    seconds: float
    # What the server's side adds: CPU seconds, store requests, ...
    more: dict = field(default_factory=dict)


def nbd(uri):
    """fio's arguments for an NBD server. It refuses --direct: there is no cache on its side anyway."""
    return ["--ioengine=nbd", f"--uri={uri}"]


def raw(path):
    """fio's arguments for a file, around the page cache."""
    return ["--ioengine=io_uring", "--direct=1", f"--filename={path}"]


def measure(target, workload, size_bytes, folder, runtime_s=None):
    """Runs a workload against a target for `runtime_s`; without it, over every block exactly once."""
    command = [
        "fio", f"--name={workload.name}", f"--rw={workload.mode}", f"--bs={workload.block}",
        f"--iodepth={workload.depth}", f"--size={size_bytes}", "--thread", "--group_reporting", *target]
    if workload.fsync:
        command.append("--fsync=1")
    if runtime_s:
        command.append(f"--runtime={runtime_s}")
        # A cold block is cold once: the run ends early when all have been read.
        if not workload.cold:
            command += ["--time_based", "--norandommap"]
    return parse(call(command, folder, (runtime_s or 0) + 900), workload)


def fill(target, size_bytes, folder):
    """Writes every block once, in order."""
    call(["fio", "--name=fill", "--rw=write", "--bs=1m", "--iodepth=4", f"--size={size_bytes}", "--thread",
          *target], folder, 3600)


def read_through(target, size_bytes, folder):
    """Reads every block once, in order."""
    call(["fio", "--name=warm", "--rw=read", "--bs=1m", "--iodepth=4", f"--size={size_bytes}", "--thread",
          *target], folder, 3600)


def call(command, folder, timeout_s):
    output = Path(folder) / "fio.json"
    run([*command, "--output-format=json", f"--output={output}"], timeout=timeout_s, cwd=folder)
    text = output.read_text()
    # Its NBD engine says that it has connected before the document begins.
    start = text.find("{")
    if start < 0:
        raise Unfit(f"fio printed no JSON: {text[:300]}")
    return json.loads(text[start:])


def parse(document, workload):
    job = document["jobs"][0]
    if job.get("error"):
        raise Unfit(f"fio met error {job['error']} in {workload.name}")
    side = job["write" if workload.writes else "read"]
    latencies = [side["clat_ns"]]
    if workload.fsync:
        latencies.append(job["sync"]["lat_ns"])
    percentile = lambda wanted: sum(  # noqa: E731
        latency.get("percentile", {}).get(wanted, 0) for latency in latencies) / 1000
    return Cell(
        iops=side["iops"], p50_us=percentile("50.000000"), p99_us=percentile("99.000000"),
        requests=side["total_ios"], bytes=side["io_bytes"], seconds=side["runtime"] / 1000)
