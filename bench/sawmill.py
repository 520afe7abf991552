"""Sawmill as a contestant, and as what `recovery.py` and `memory.py` open."""

import json
import os
import select
import time
import urllib.request

import fio
from machine import Unfit, bytes_below, forget_cached, run
from servers import Server, difference


class Sawmill(Server):
    """A volume in a folder store. `options` go to `serve`."""

    name, title = "sawmill", "**Sawmill** on file://"

    def __init__(self, place, binary, options=(), name=None):
        super().__init__(place, name)
        self.binary = binary
        # The control socket lies below XDG_STATE_HOME: a short path. The rest is on the measured disk.
        self.state = place.memory / f"{self.name}-state"
        self.journal, self.cache = self.folder / "journal", self.folder / "cache"
        self.options = list(options)
        self.volume = "disk"
        self.ready = {}

    def store_url(self):
        return f"file://{self.store_folder()}"

    def store_folder(self):
        """Where the store's bytes lie on this machine."""
        return self.folder / "store"

    def environment(self):
        return {
            **os.environ,
            "SAWMILL_STORE": self.store_url(),
            "SAWMILL_LOG": "warn",
            "XDG_STATE_HOME": str(self.state),
        }

    def sawmill(self, *arguments):
        """Runs a command and returns its standard output."""
        return run([self.binary, *arguments], env=self.environment())

    def make(self):
        self.create(self.size_bytes)

    def create(self, size_bytes):
        self.sawmill("create", self.volume, "--size", str(size_bytes))

    def start(self):
        command = [self.binary, "serve", self.volume, "--json", "--nbd", f"unix:{self.socket}",
                   "--admin", "127.0.0.1:0", "--journal", self.journal, "--cache", self.cache,
                   "--staging", self.place.memory, *self.options]
        started = time.monotonic()
        process = self.spawn(command, self.environment(), pipe=True)
        if not select.select([process.child.stdout], [], [], 600)[0]:
            raise Unfit("sawmill was not ready within 600 s")
        line = process.child.stdout.readline()
        if not line:
            process.child.wait()
            process.check()
        self.ready = json.loads(line)
        self.ready["after_s"] = time.monotonic() - started
        self.target = fio.nbd(self.ready["uri"])

    def status(self):
        """What the serving process tells about itself."""
        with urllib.request.urlopen(self.ready["admin"] + "status", timeout=30) as answer:
            return json.load(answer)

    def settle(self):
        self.sawmill("wait", self.volume, "--stored", "--timeout", "300s")

    def counters(self):
        status = self.status()
        store, volume = status["stores"][0], status["volumes"][0]["counters"]
        counted = {f"{call}s": store[call]["requests"] for call in ("get", "put", "list", "delete")}
        counted["put_bytes"] = store["put"]["bytes_out"]
        counted["get_bytes"] = store["get"]["bytes_in"]
        for name in ("writes", "written_bytes", "reads", "read_bytes", "reads_store", "segments_stored",
                     "segment_bytes_stored", "journal_written_bytes", "checkpoints", "writes_stalled",
                     "prefetched_frames"):
            counted[name] = volume[name]
        return counted

    def chill(self):
        # It was closed cleanly, so journal and cache may go.
        for path in (self.journal, self.cache, self.cache.with_suffix(".index")):
            path.unlink(missing_ok=True)
        super().chill()
        forget_cached(self.store_folder())

    def cost(self):
        """Writes every block of a fresh volume once, in random order; what that costs at the store."""
        self.folder.mkdir(parents=True)
        self.make()
        before_bytes = bytes_below(self.store_folder())
        with self.running():
            before = self.counters()
            cell = fio.measure(self.target, fio.COST, self.size_bytes, self.folder)
            self.settle()
            counted = difference(before, self.counters())
        return {
            "writes": cell.requests,
            "written_bytes": cell.bytes,
            "counted_until_stored": counted,
            # With the last checkpoint, which closing makes.
            "store_bytes_after_close": bytes_below(self.store_folder()) - before_bytes,
            "iops": cell.iops,
        }


class SawmillS3(Sawmill):
    """The same on an S3 of our own."""

    name, title = "sawmill-s3", "**Sawmill** on MinIO"

    def __init__(self, place, binary, s3, name=None):
        super().__init__(place, binary, name=name)
        self.s3 = s3

    def missing(self):
        return self.s3.missing()

    def store_url(self):
        return f"s3://{self.s3.bucket}/{self.folder.name}"

    def store_folder(self):
        return self.s3.folder / self.s3.bucket / self.folder.name

    def environment(self):
        return {**super().environment(), **self.s3.environment()}
