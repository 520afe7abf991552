"""Two network namespaces with cables between them, for both ends of a link.

Both, and what still runs in them, are gone afterwards. Only root makes them.
Not here: what runs in them.
"""

import json
import os
import signal
import subprocess
import time

from harness.machine import run
from harness.process import Process

MTU = 9000


class Wires:
    """Namespaces A (target) and B (load), with pairs of interfaces w0, w1, ... between them."""

    def __init__(self, count=1, limit_mbit=None):
        self.count, self.limit_mbit, self.processes = count, limit_mbit, []
        self.spaces = [f"sawmill{os.getpid()}{end}" for end in "ab"]

    def __enter__(self):
        a, b = self.spaces
        for space in self.spaces:
            run("ip", "netns", "add", space)
            run("ip", "-n", space, "link", "set", "lo", "up")
        for index in range(self.count):
            wire = f"w{index}"
            run("ip", "-n", a, "link", "add", wire, "type", "veth", "peer",
                "name", wire, "netns", b)
            for end, space in enumerate(self.spaces, 1):
                run("ip", "-n", space, "addr", "add", f"10.96.{index}.{end}/24", "dev", wire)
                run("ip", "-n", space, "link", "set", wire, "mtu", MTU, "up")
                if self.limit_mbit:
                    self.narrow(index, self.limit_mbit, "64kb", "2mb", space)
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.end(signal.SIGKILL)
        for space in self.spaces:
            subprocess.run(["ip", "netns", "del", space], check=False)

    def addresses(self, carrier, first=0, links=None):
        one = carrier + (":w{0}" if carrier in ("eth", "xdp") else ":10.96.{0}.1")
        return ",".join(one.format(index) for index in range(first, first + (links or self.count)))

    def within(self, end, *words, **how):
        """Starts a program in one of them."""
        process = Process("ip", "netns", "exec", self.spaces[end], *words, talks=True, **how)
        process.name = " ".join(map(str, words[:2]))
        self.processes.append(process)
        return process

    def ready(self, end, *words, wait=lambda process: process.expect("ready"), **how):
        """The same, and waits until it is ready."""
        process = self.within(end, *words, **how)
        wait(process)
        return process

    def pull(self, indexes, seconds):
        """Takes links down at the target's end, and puts them up again:
        the time itself is the fault."""
        self.set(indexes, "down")
        time.sleep(seconds)
        self.set(indexes, "up")

    def set(self, indexes, state):
        for index in indexes:
            run("ip", "-n", self.spaces[0], "link", "set", f"w{index}", state)

    def narrow(self, index, rate_mbit, burst=40000, limit=40000, space=None):
        """One end, the target's, sends so fast at most,
        and what its queue does not hold is lost."""
        run("tc", "-n", space or self.spaces[0], "qdisc", "replace", "dev", f"w{index}", "root",
            "tbf", "rate", f"{rate_mbit}mbit", "burst", burst, "limit", limit)

    def widen(self, index):
        run("tc", "-n", self.spaces[0], "qdisc", "del", "dev", f"w{index}", "root")

    def bytes(self):
        """What has passed the first link, both directions, as its interface counts it."""
        show = run("ip", "-n", self.spaces[1], "-s", "-j", "link", "show", "w0")
        stats = json.loads(show)[0]["stats64"]
        return stats["tx"]["bytes"] + stats["rx"]["bytes"]
