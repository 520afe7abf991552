"""Who takes part in `run.py` beside Sawmill, and what all do: peers, each with a disk of the same
size on the same file system, and workloads.

Not here: S3 (`s3.py`), how a cell is measured (`harness/serve.py`).
"""

from dataclasses import dataclass

from harness import Sawmill, Server, fio

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


class StoreInMemory(Sawmill):
    """Large writes with the store in memory: the journal's disk then takes each byte once."""

    name, title = "sawmill-memory", "**Sawmill**, the store in memory"

    def store_folder(self):
        return self.place.memory / f"{self.name}-store"

    def cell(self, workload, seconds):
        is_large = workload.mode == "write" and workload.block != "4k" and not workload.fsync
        return super().cell(workload, seconds) if is_large else None


class AllInMemory(Sawmill):
    """Writes with journal, cache and store in memory: what the cores allow, with a disk that takes
    no time. Not fsync, whose limit is the disk's own."""

    name, title = "sawmill-no-disk", "**Sawmill**, all in memory"

    def __init__(self, place, binary):
        super().__init__(place, binary)
        self.journal, self.cache = (place.memory / f"{self.name}-{what}"
                                    for what in ("journal", "cache"))

    def store_folder(self):
        return self.place.memory / f"{self.name}-store"

    def cell(self, workload, seconds):
        return super().cell(workload, seconds) if workload.writes and not workload.fsync else None


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
    # So many clients, each with this depth.
    jobs: int = 1

    @property
    def writes(self):
        return "write" in self.mode or self.mode == "randrw"

    def measure(self, server, seconds=None):
        """Runs it against a server for so long; without that, over every block exactly once."""
        more = ["--group_reporting", f"--numjobs={self.jobs}",
                *(["--fsync=1"] if self.fsync else []),
                *(["--rwmixread=70"] if self.mode == "randrw" else [])]
        # A cold block is cold once: the run ends early when all have been read.
        if seconds:
            more += [f"--runtime={seconds}"] if self.cold else ["--norandommap"]
        job = fio.call(fio.words(server.target, self.mode, self.block, self.depth,
                                 server.size_bytes, *more, seconds=None if self.cold else seconds,
                                 name=self.name),
                       server.folder, (seconds or 0) + 900)
        # Reads and writes of a mixed load count together; its latency is the slower side's.
        sides = [job[way] for way in ("read", "write") if job[way]["total_ios"]]
        waits = [sides] if self.mode == "randrw" else [[side] for side in sides]
        if self.fsync:
            waits.append([{"clat_ns": job["sync"]["lat_ns"]}])
        p50_us, p99_us = (sum(max(fio.percentile_us(each, percent) for each in wait)
                              for wait in waits) for percent in (50, 99))
        total = {key: sum(side[key] for side in sides) for key in ("iops", "total_ios", "io_bytes")}
        return {"iops": total["iops"], "p50_us": p50_us, "p99_us": p99_us,
                "requests": total["total_ios"], "bytes": total["io_bytes"],
                "seconds": max(side["runtime"] for side in sides) / 1000}


WORKLOADS = [
    Workload("randwrite-4k", "4 KiB random writes, qd 32", "randwrite", "4k", 32),
    Workload("randwrite-16k", "16 KiB random writes, qd 32", "randwrite", "16k", 32),
    Workload("randread-4k", "4 KiB random reads, warm, qd 32", "randread", "4k", 32, warm=True),
    Workload("seqwrite-64k", "64 KiB sequential writes, qd 16", "write", "64k", 16),
    Workload("seqread-64k", "64 KiB sequential reads, warm, qd 16", "read", "64k", 16, warm=True),
    Workload("fsync-4k", "4 KiB random writes, fsync each, qd 1", "randwrite", "4k", 1, fsync=True),
    Workload("cold-4k", "4 KiB random reads, cold, qd 1", "randread", "4k", 1, cold=True),
    Workload("randwrite-4k-4", "4 KiB random writes, 4 jobs of qd 32", "randwrite", "4k", 32,
             jobs=4),
    Workload("seqwrite-1m", "1 MiB sequential writes, qd 4", "write", "1m", 4),
    Workload("fsync-4k-8", "4 KiB random writes, fsync each, 8 jobs of qd 1", "randwrite", "4k", 1,
             fsync=True, jobs=8),
    Workload("mixed-8k", "8 KiB, 70 % reads and 30 % writes, warm, qd 16", "randrw", "8k", 16,
             warm=True),
    Workload("write-4k-1", "4 KiB random writes, qd 1", "randwrite", "4k", 1),
    Workload("read-4k-1", "4 KiB random reads, warm, qd 1", "randread", "4k", 1, warm=True),
]
COST = Workload("cost-16k", "16 KiB random writes, each block once, qd 32", "randwrite", "16k", 32)
