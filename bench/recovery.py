"""How long the real binary takes to open a volume whose log is far past its checkpoint, step by step."""

import shutil
import signal
from statistics import median

from machine import forget_cached, run
from sawmill import Sawmill

# More log than this has come since the checkpoint, and no new one is to be made while we look.
NO_CHECKPOINT = ("--checkpoint-bytes", "1P")
OPENS = 3


class Log(Sawmill):
    """A volume that `bench_volume log` has built, with journal and staging where it has put them."""

    name = "recovery"

    def __init__(self, place, binary):
        super().__init__(place, binary)
        self.volume = "log"
        self.options = NO_CHECKPOINT

    def build(self, examples, segments):
        self.folder.mkdir(parents=True)
        built = run([examples / "bench_volume", "log", self.folder, str(segments)]).strip()
        # The staging memory of the builder, where the server looks for it.
        for staging in self.folder.glob("*.staging"):
            shutil.move(staging, self.place.memory)
        return built

    def open(self):
        """Opens it once; how long each step took, in milliseconds, and what it found."""
        self.processes = []
        self.start()
        # As abrupt as the death it was opened after: the next opening finds the same.
        self.processes[0].end(signal.SIGKILL)
        return self.ready


def measure(place, binary, examples, segments, say):
    """Opens with the page cache warm and cold in turn; medians over `OPENS` of each."""
    volume = Log(place, binary)
    say(f"building a volume of {segments} segments past its checkpoint")
    built = volume.build(examples, segments)
    opened = {"warm": [], "cold": []}
    for _ in range(OPENS):
        for kind, found in opened.items():
            if kind == "cold":
                forget_cached(volume.folder)
            found.append(volume.open())
            say(f"opened, page cache {kind}: {found[-1]['after_s']:.2f} s")
    shutil.rmtree(volume.folder)
    return {"built": built, "opened": opened}


def summary(found):
    """Rows of (step, what it found, warm ms, cold ms), and the totals in seconds."""
    steps = found["opened"]["warm"][0]["recovery"]

    def took(kind, index):
        return median(opened["recovery"][index]["took_ms"] for opened in found["opened"][kind])
    rows = [(step["name"], step["detail"], took("warm", index), took("cold", index))
            for index, step in enumerate(steps)]
    total = {kind: median(opened["after_s"] for opened in every) for kind, every in found["opened"].items()}
    return rows, total
