"""A volume of Sawmill, or several, served by the real binary.

Not here: what an S3 is (`suite/s3.py`), and what is measured.
"""

import json
import os
import time
import urllib.request

from harness import fio
from harness.machine import forget_cached, run
from harness.serve import Server

COUNTED = ("writes", "written_bytes", "reads", "read_bytes", "reads_store", "segments_stored",
           "segment_bytes_stored", "journal_written_bytes", "checkpoints", "writes_stalled",
           "prefetched_frames")


class Sawmill(Server):
    """`volumes` in a folder store, or on an S3. `options` go to `serve`."""

    name, title, volumes = "sawmill", "**Sawmill** on file://", ["disk"]

    def __init__(self, place, binary, options=(), name=None, s3=None):
        super().__init__(place, name)
        self.binary, self.s3 = binary, s3
        # The control socket lies below XDG_STATE_HOME: a short path.
        # The rest is on the measured disk.
        self.state = place.memory / f"{self.name}-state"
        self.journal, self.cache = self.folder / "journal", self.folder / "cache"
        self.options = list(options)
        self.ready, self.uris = {}, {}

    @property
    def volume(self):
        return self.volumes[0]

    def missing(self):
        return self.s3.missing() if self.s3 else ""

    def store_folder(self):
        """The folder of the store's bytes on this machine."""
        return self.s3.folder / self.s3.bucket / self.name if self.s3 else self.folder / "store"

    def environment(self):
        url = f"s3://{self.s3.bucket}/{self.name}" if self.s3 else f"file://{self.store_folder()}"
        ours = {"SAWMILL_STORE": url, "SAWMILL_LOG": "warn", "XDG_STATE_HOME": str(self.state)}
        return os.environ | ours | (self.s3.environment() if self.s3 else {})

    def sawmill(self, *words, timeout=None):
        """Runs a command and returns its standard output."""
        return run(self.binary, *words, env=self.environment(), timeout=timeout)

    def make(self, size=None, *more):
        self.folder.mkdir(parents=True, exist_ok=True)
        self.sawmill("create", self.volume, "--size", size or self.size_bytes, *more)

    def start(self):
        self.serve("--nbd", f"unix:{self.socket}", "--admin", "127.0.0.1:0",
                   "--journal", self.journal, "--cache", self.cache, "--staging", self.place.memory)

    def serve(self, *words):
        """Serves with these doors and places, until it is ready."""
        started = time.monotonic()
        process = self.spawn(self.binary, "serve", *self.volumes, "--json", *words, *self.options,
                             env=self.environment(), talks=True)
        for _ in self.volumes:
            self.ready = process.read_event(600)
            self.uris[self.ready["volume"]] = self.ready["uri"]
        self.ready["after_s"] = time.monotonic() - started
        self.target = fio.nbd(self.ready["uri"])

    def status(self):
        """The status document of the serving process."""
        with urllib.request.urlopen(self.ready["admin"] + "status", timeout=30) as answer:
            return json.load(answer)

    def volume_status(self):
        """The status of its volume, as long as it has one."""
        return self.status()["volumes"][0]

    def settle(self):
        self.sawmill("wait", self.volume, "--stored", "--timeout", "300s")

    def counters(self):
        status = self.status()
        store, volume = status["stores"][0], status["volumes"][0]["counters"]
        counted = {f"{call}s": store[call]["requests"] for call in ("get", "put", "list", "delete")}
        counted |= {"put_bytes": store["put"]["bytes_out"], "get_bytes": store["get"]["bytes_in"]}
        return counted | {name: volume[name] for name in COUNTED}

    def chill(self):
        # It was closed cleanly, so journal and cache may go.
        for path in (self.journal, self.cache, self.cache.with_suffix(".index")):
            path.unlink(missing_ok=True)
        super().chill()
        forget_cached(self.store_folder())
