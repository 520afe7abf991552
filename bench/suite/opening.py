"""How long the real binary takes to open a volume whose log is far past its checkpoint, step by
step, and what a volume costs while nobody uses it: memory, and requests to the store.

Not here: the builder of such volumes (`crates/volume/examples/bench_volume.rs`).
"""

import shutil
import signal
import time
from statistics import median

from harness import KIB, Sawmill, difference, machine, run, log

# More log than this has come since the checkpoint, and no new one is to be made while we look.
NO_CHECKPOINT = ("--checkpoint-bytes", "1P")
OPENS = 3
# Past the age at which a batch is sealed, so that deferred work shows.
SETTLE_S = 7


def recovery(place, binary, examples, segments):
    """Opens with the page cache warm and cold in turn; medians over `OPENS` of each."""
    volume = Sawmill(place, binary, NO_CHECKPOINT, name="recovery")
    volume.volumes = ["log"]
    volume.folder.mkdir(parents=True)
    log(f"building a volume of {segments} segments past its checkpoint")
    built = run(examples / "bench_volume", "log", volume.folder, segments).strip()
    # The staging memory of the builder, where the server looks for it. Its journal already exists.
    for staging in volume.folder.glob("*.staging"):
        shutil.move(staging, place.memory)
    opened = {"warm": [], "cold": []}
    for _ in range(OPENS):
        for kind, found in opened.items():
            if kind == "cold":
                machine.forget_cached(volume.folder)
            volume.processes = []
            volume.start()
            # As abrupt as the death before this opening, so that the next opening finds the same.
            volume.processes[0].end(signal.SIGKILL)
            found.append(volume.ready)
            log(f"opened, page cache {kind}: {volume.ready['after_s']:.2f} s")
    shutil.rmtree(volume.folder)
    return {"built": built, "opened": opened}


def recovery_rows(found):
    """Rows of (step, what it found, warm ms, cold ms), and the totals in seconds."""
    opened = found["opened"]
    rows = [(step["name"], step["detail"],
             *(median(one["recovery"][index]["took_ms"] for one in opened[kind])
               for kind in ("warm", "cold")))
            for index, step in enumerate(opened["warm"][0]["recovery"])]
    return rows, {kind: median(one["after_s"] for one in every) for kind, every in opened.items()}


def watched(volume, seconds):
    """Serves it, looks at its memory once it is at rest, then counts requests for `seconds`."""
    with volume.running():
        time.sleep(SETTLE_S)
        resident, peak = (volume.processes[0].status(kind) * KIB for kind in ("VmRSS", "VmHWM"))
        before = volume.counters()
        time.sleep(seconds)
        counted = difference(before, volume.counters())
        extents, opened_s = volume.volume_status()["extents"], volume.ready["after_s"]
    shutil.rmtree(volume.folder)
    requests = sum(counted[call] for call in ("gets", "puts", "lists", "deletes"))
    return {"extents": extents, "opened_s": opened_s, "resident_bytes": resident,
            "peak_bytes": peak, "watched_s": seconds, "requests": requests}


def memory(place, binary, examples, extents, seconds):
    """An empty volume of 1 TiB, and full ones with that many extents of up to so many pages."""
    log(f"watching an idle volume of 1 TiB for {seconds} s")
    volume = Sawmill(place, binary, name="idle")
    volume.make(1 << 40)
    found = {"empty": watched(volume, seconds), "full": []}
    volume.volumes = ["map"]
    for pages_max in (16, 1):
        log(f"loading {extents} extents of 1 to {pages_max} pages")
        volume.folder.mkdir()
        built = run(examples / "bench_volume", "map", volume.folder, extents, pages_max).strip()
        seen = watched(volume, 1)
        # Some more are counted: the map cuts an extent where one of its areas ends.
        if seen["extents"] < extents:
            raise RuntimeError(f"{seen['extents']} of {extents} extents were found: {built}")
        found["full"].append({"built": built, "pages_max": pages_max, **seen})
    return found
