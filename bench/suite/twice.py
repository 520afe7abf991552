"""The limit of a log-structured disk whose store is a folder on its journal's disk: what this disk
takes if each byte is written to the ring of a journal and to a new file, as Sawmill does, and
nothing else is done.

Files of 8 MiB are made as an object of the store is: synced, named, and the name synced. They are
deleted, and that synced, when what is in them has been overwritten: on a file system that discards
what is deleted, that is a good part of the work. Not here: NBD, checksums, maps.
"""

import mmap
import os
import threading
import time

from harness import GIB, MIB, Server
from harness.busy import Busy

SPAN_BYTES, SEGMENT_BYTES, PIECE_BYTES = 4 * MIB, 8 * MIB, MIB
UPLOADS = 6
# How far the journal may be ahead of the files: the memory that Sawmill has for it.
AHEAD_BYTES = 64 * MIB


class Twice(Server):
    name, title = "twice", "raw, each byte to a ring and to a new file"

    def make(self):
        self.ring = os.open(self.folder / "ring", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        self.number = 0

    def prepare(self):
        self.folder.mkdir(parents=True)
        self.make()
        self.write(self.size_bytes, None)

    def cell(self, workload, seconds):
        if workload.mode not in ("write", "randwrite") or workload.fsync or workload.block == "4k":
            return None
        block_bytes = int(workload.block[:-1]) * (MIB if workload.block[-1] == "m" else 1024)
        busy = Busy(self.folder)
        written_bytes, took_s, cpu_s = self.write(None, seconds)
        return {"iops": written_bytes / block_bytes / took_s, "p50_us": 0, "p99_us": 0,
                "requests": written_bytes // block_bytes, "bytes": written_bytes, "seconds": took_s,
                "more": {"cpu_s_per_gib": cpu_s / (written_bytes / GIB), **busy.found(took_s)}}

    def write(self, bytes_max, seconds):
        """Writes so many bytes, or for so long: bytes that are in both places, seconds, CPU
        seconds."""
        turn, condition = {"ring": 0, "files": 0, "stop": False}, threading.Condition()
        span, segment = mmap.mmap(-1, SPAN_BYTES), mmap.mmap(-1, SEGMENT_BYTES)
        span.write(os.urandom(SPAN_BYTES))
        segment.write(os.urandom(SEGMENT_BYTES))

        def journal():
            while True:
                with condition:
                    condition.wait_for(
                        lambda: turn["stop"] or turn["ring"] - turn["files"] < AHEAD_BYTES)
                    if turn["stop"]:
                        return
                    at = turn["ring"]
                os.pwrite(self.ring, span, at % self.size_bytes)
                with condition:
                    turn["ring"] += SPAN_BYTES
                    condition.notify_all()

        def uploads():
            while True:
                with condition:
                    condition.wait_for(
                        lambda: turn["stop"] or turn["ring"] - taken[0] >= SEGMENT_BYTES)
                    if turn["stop"]:
                        return
                    taken[0] += SEGMENT_BYTES
                    number, self.number = self.number, self.number + 1
                self.put(number, segment)
                with condition:
                    turn["files"] += SEGMENT_BYTES
                    condition.notify_all()

        taken, began, cpu = [0], time.monotonic(), time.process_time()
        threads = [threading.Thread(target=what) for what in [journal] + [uploads] * UPLOADS]
        for thread in threads:
            thread.start()
        with condition:
            condition.wait_for(lambda: bytes_max and turn["files"] >= bytes_max, seconds)
            turn["stop"] = True
            found = turn["files"], time.monotonic() - began, time.process_time() - cpu
            condition.notify_all()
        for thread in threads:
            thread.join()
        return found

    def put(self, number, segment):
        names = os.open(self.folder, os.O_RDONLY)
        file = os.open(self.folder, os.O_WRONLY | os.O_TMPFILE | os.O_DIRECT, 0o600)
        for at in range(0, SEGMENT_BYTES, PIECE_BYTES):
            os.pwrite(file, memoryview(segment)[at:at + PIECE_BYTES], at)
        os.fsync(file)
        # With a folder's descriptor, Python follows the link to the file.
        os.link(f"/proc/self/fd/{file}", f"{number}", dst_dir_fd=names)
        os.fsync(names)
        os.close(file)
        dead = self.folder / f"{number - self.size_bytes // SEGMENT_BYTES}"
        if dead.exists():
            dead.unlink()
            os.fsync(names)
        os.close(names)
