"""What a volume costs while nobody uses it: memory of the real binary, and requests to the store."""

import shutil
import time

from machine import run
from sawmill import Sawmill
from servers import difference

CALLS = ("gets", "puts", "lists", "deletes")
# Past the age at which a batch is sealed, so that what is put off comes to light.
SETTLE_S = 7


class Idle(Sawmill):
    name = "idle"

    def __init__(self, place, binary, volume, options):
        super().__init__(place, binary, options)
        self.volume = volume

    def watch(self, seconds):
        """Serves it, looks at its memory once it is at rest, then counts requests for `seconds`."""
        with self.running():
            time.sleep(SETTLE_S)
            resident, peak = self.processes[0].memory()
            before = self.counters()
            time.sleep(seconds)
            counted = difference(before, self.counters())
            extents = self.status()["volumes"][0]["extents"]
            opened_s = self.ready["after_s"]
        shutil.rmtree(self.folder)
        return {
            "extents": extents, "opened_s": opened_s, "resident_bytes": resident, "peak_bytes": peak,
            "watched_s": seconds, "requests": sum(counted[call] for call in CALLS)}


def empty(place, binary, seconds):
    """An empty volume of 1 TiB with the usual journal and cache."""
    volume = Idle(place, binary, "disk", [])
    volume.folder.mkdir(parents=True)
    volume.create(1 << 40)
    return volume.watch(seconds)


def full(place, binary, examples, extents, pages_max):
    """A volume of 1 TiB with that many extents of 1 to `pages_max` pages."""
    volume = Idle(place, binary, "map", [])
    volume.folder.mkdir(parents=True)
    built = run([examples / "bench_volume", "map", volume.folder, str(extents), str(pages_max)]).strip()
    return {"built": built, "pages_max": pages_max, **volume.watch(1)}


def measure(place, binary, examples, extents, seconds, say):
    say(f"watching an idle volume of 1 TiB for {seconds} s")
    found = {"empty": empty(place, binary, seconds), "full": []}
    for pages_max in (16, 1):
        say(f"loading {extents} extents of 1 to {pages_max} pages")
        found["full"].append(full(place, binary, examples, extents, pages_max))
    return found
