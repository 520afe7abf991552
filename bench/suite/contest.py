"""Who takes part in `run.py` beside Sawmill, and what all do: peers, each with a disk of the same
size on the same file system, and workloads.

Not here: S3 (`s3.py`), how a cell is measured (`harness/serve.py`).
"""

from dataclasses import dataclass

from harness import Server, fio

# Name, title, command; whether it keeps what is written,
# and whether it still has it after a restart.
PEERS = [
    # The limit: a file, without any server.
    ("raw", "raw file, io_uring O_DIRECT", "", True, True),
    ("nbdkit-null", "nbdkit null", "nbdkit -f -U SOCKET null BYTES", False, True),
    ("nbdkit-memory", "nbdkit memory", "nbdkit -f -U SOCKET memory BYTES", True, False),
    ("nbdkit-file", "nbdkit file (page cache)", "nbdkit -f -U SOCKET file DISK", True, True),
    ("qemu-none", "qemu-nbd raw, cache=none",
     "qemu-nbd -t -f raw --cache=none --aio=native -k SOCKET DISK", True, True),
    ("qemu-writeback", "qemu-nbd raw, writeback",
     "qemu-nbd -t -f raw --cache=writeback -k SOCKET DISK", True, True),
]


class Peer(Server):
    def __init__(self, place, name, title, command, keeps, lasts):
        super().__init__(place, name)
        self.title, self.command, self.keeps, self.lasts = title, command.split(), keeps, lasts
        self.program, self.disk = command.partition(" ")[0], self.folder / "disk"

    def make(self):
        with self.disk.open("wb") as file:
            file.truncate(self.size_bytes)

    def start(self):
        known = {"SOCKET": self.socket, "BYTES": self.size_bytes, "DISK": self.disk}
        if self.command:
            self.listening(*(known.get(word, word) for word in self.command))
        else:
            self.target = fio.direct(self.disk, "io_uring")


@dataclass(frozen=True)
class Workload:
    name: str
    title: str
    mode: str
    block: str
    depth: int
    # An fsync after every write.
    fsync: bool = False
    # The data is read once beforehand, so that every cache is warm.
    warm: bool = False
    # The caches are emptied beforehand, and every block is read at most once.
    cold: bool = False

    @property
    def writes(self):
        return "write" in self.mode

    def measure(self, server, seconds=None):
        """Runs it against a server for so long; without that, over every block exactly once."""
        more = ["--group_reporting", *(["--fsync=1"] if self.fsync else [])]
        # A cold block is cold once: the run ends early when all have been read.
        if seconds:
            more += [f"--runtime={seconds}"] if self.cold else ["--norandommap"]
        job = fio.call(fio.words(server.target, self.mode, self.block, self.depth,
                                 server.size_bytes, *more, seconds=None if self.cold else seconds,
                                 name=self.name),
                       server.folder, (seconds or 0) + 900)
        side = job["write" if self.writes else "read"]
        latencies = [side, {"clat_ns": job["sync"]["lat_ns"]}] if self.fsync else [side]
        p50_us, p99_us = (sum(fio.percentile_us(each, percent) for each in latencies)
                          for percent in (50, 99))
        return {"iops": side["iops"], "p50_us": p50_us, "p99_us": p99_us,
                "requests": side["total_ios"], "bytes": side["io_bytes"],
                "seconds": side["runtime"] / 1000}


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
