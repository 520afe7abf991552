"""Which thread of some processes was busiest while a load ran.

A thread that computes all the time, or waits for a core, bounds what goes through it, also where
the machine as a whole has time left. Threads are looked at several times a second: a connection's
has ended with its client. Not here: what the whole machine was busy with (`busy.py`).
"""

import threading
import time
from pathlib import Path

LOOK_EVERY_S = 0.25
# A thread seen for less says little.
SEEN_S_MIN = 1.0


def times(process):
    """Of each thread of a process by now: its name, and the seconds that it has computed and waited
    for a core."""
    found = {}
    for folder in Path(f"/proc/{process.pid}/task").glob("*"):
        try:
            computed_ns, awaited_ns, _ = map(int, (folder / "schedstat").read_text().split())
            found[folder.name] = ((folder / "comm").read_text().strip(), computed_ns / 1e9,
                                  awaited_ns / 1e9)
        except (OSError, ValueError):
            continue
    return found


class Threads:
    """Looks within a `with`; afterwards it knows `busiest`."""

    def __init__(self, processes):
        self.processes, self.first, self.last = processes, {}, {}
        self.is_over = threading.Event()
        self.looker = threading.Thread(target=self.look, daemon=True)

    def __enter__(self):
        self.looker.start()
        return self

    def __exit__(self, *_):
        self.is_over.set()
        self.looker.join()

    def look(self):
        while True:
            for process in self.processes:
                now = time.monotonic()
                for thread, found in times(process).items():
                    self.first.setdefault(thread, (now, found))
                    self.last[thread] = (now, found)
            if self.is_over.wait(LOOK_EVERY_S):
                return

    def busiest(self):
        """Its name, and the shares of its time in which it computed and in which it waited for a
        core; nothing if no thread was there for long."""
        best = {}
        for thread, (until, (name, computed_s, awaited_s)) in self.last.items():
            since, (_, computed_before_s, awaited_before_s) = self.first[thread]
            if until - since < SEEN_S_MIN:
                continue
            shares = [(computed_s - computed_before_s) / (until - since),
                      (awaited_s - awaited_before_s) / (until - since)]
            if not best or sum(shares) > best["thread_computes"] + best["thread_awaits"]:
                best = {"thread": name, "thread_computes": shares[0], "thread_awaits": shares[1]}
        return best
