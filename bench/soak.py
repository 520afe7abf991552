#!/usr/bin/env python3
"""A link under load and trouble for a long time: what grows, what leaks, what is lost.

    bench/soak.py --seconds 3600 [--rate 2000] [--seed 1] [--page docs/measurements/soak.md]      as root

Two network namespaces with two veth pairs between them, removed at the end. In one a target with four disks
in memory; in the other a process with two connections, one over two UDP links and one by TCP, both sealed.
Each uses two of the disks: sixteen threads read, write, write packed, discard, zero and flush their own
regions and know every byte of them; a connection has 8 credits, so that requests wait for them.

A cycle is a dozen seconds of load, with trouble in most of them (a pair of interfaces pulled, all of them,
for longer than the target waits for silent peers; one made so narrow that it loses frames; all of the target
but its disks made anew; the connections made anew), and a rest: no requests, all links joined again. At rest
both processes are looked at: resident memory, bytes that are allocated, open descriptors, threads, credits.
Medians of the second tenth of the rests are compared with those of the last tenth. Any answer that is not
what was written, any error, and any rest that does not come within a minute fails the soak, as does
growth beyond the tolerances at the head of this file.

Needs `cargo build --release -p sawmill-link --example link_soak`; --binary names another copy of it.
"""

import argparse
import json
import os
import pathlib
import random
import select
import signal
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
BINARY = ROOT / "target/release/examples/link_soak"
MIB = 1 << 20
DISKS, DISK_BYTES = ("a", "b", "c", "d"), 8 * MIB
PAIRS, MTU = 2, 9000
CYCLE_S, SILENCE_S = 12, 20
ANSWER_S = 120
# (what, its unit, share that it may grow, and at least so much). The allocator of the C library keeps what
# threads that come and go leave behind, in an arena for each of many: resident memory moves by itself, less
# with one arena; what is allocated does not.
WATCHED = {
    "rss_kib": ("resident memory", "KiB", 0.05, 4096),
    "bytes_in_use": ("allocated at rest", "bytes", 0, 65536),
    "descriptors": ("open descriptors", "", 0, 0),
    "threads": ("threads", "", 0, 0),
}
KINDS = ("reads", "writes", "packed", "discards", "zeroes", "flushes")


def run(*words):
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(map(str, words))}: {(done.stderr or done.stdout).strip()[-300:]}")


class Wires:
    """Namespaces A (target) and B (load), with pairs of interfaces w0 and w1 between them."""

    def __init__(self):
        self.spaces = [f"sms{os.getpid()}{end}" for end in "ab"]

    def __enter__(self):
        a, b = self.spaces
        for space in self.spaces:
            run("ip", "netns", "add", space)
            run("ip", "-n", space, "link", "set", "lo", "up")
        for index in range(PAIRS):
            wire = f"w{index}"
            run("ip", "-n", a, "link", "add", wire, "type", "veth", "peer", "name", wire, "netns", b)
            for end, space in enumerate(self.spaces, 1):
                run("ip", "-n", space, "addr", "add", f"10.98.{index}.{end}/24", "dev", wire)
                run("ip", "-n", space, "link", "set", wire, "mtu", MTU, "up")
        return self

    def __exit__(self, *_):
        for space in self.spaces:
            subprocess.run(["ip", "netns", "del", space], check=False)

    def pull(self, index):
        run("ip", "-n", self.spaces[0], "link", "set", f"w{index}", "down")

    def plug(self, index):
        run("ip", "-n", self.spaces[0], "link", "set", f"w{index}", "up")

    def narrow(self, index, rate_mbit):
        """The target's answers go so fast at most, and what a short queue does not hold is lost."""
        words = ["tc", "-n", self.spaces[0], "qdisc", "replace", "dev", f"w{index}", "root", "tbf"]
        run(*words, "rate", f"{rate_mbit}mbit", "burst", 40000, "limit", 40000)

    def widen(self, index):
        run("tc", "-n", self.spaces[0], "qdisc", "del", "dev", f"w{index}", "root")


class End:
    """One of the two processes: a line to it, a line of JSON from it."""

    def __init__(self, space, *words):
        command = ["ip", "netns", "exec", space, *map(str, words)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env={**os.environ, "MALLOC_ARENA_MAX": "1"}, **pipes)
        self.hear()

    def tell(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def hear(self, most_s=ANSWER_S):
        readable, _, _ = select.select([self.process.stdout], [], [], most_s)
        line = self.process.stdout.readline() if readable else ""
        if not line:
            how = "ended" if readable else f"said nothing for {most_s} s"
            raise OSError(f"process {self.process.args[4:6]} {how}")
        return json.loads(line)

    def ask(self, line, most_s=ANSWER_S):
        self.tell(line)
        return self.hear(most_s)

    def look(self):
        """What the kernel says of it."""
        proc = pathlib.Path(f"/proc/{self.process.pid}")
        status = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines())
        return {"rss_kib": int(status["VmRSS"].split()[0]), "threads": int(status["Threads"]),
                "descriptors": len(list((proc / "fd").iterdir()))}

    def end(self):
        self.process.stdin.close()
        try:
            return self.process.wait(ANSWER_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


class Trouble:
    """What goes wrong in a cycle, by chance."""

    def __init__(self, wires, target, seed):
        self.wires, self.target, self.dice = wires, target, random.Random(seed)
        self.counts = dict.fromkeys(("one pulled", "all pulled", "silence", "one narrow", "target anew"), 0)

    def cause(self):
        """Some of it; everything is mended at its end."""
        dice, fate = self.dice, self.dice.random()
        time.sleep(dice.uniform(0.5, 2))
        if fate < 0.35:
            for _ in range(dice.randint(1, 3)):
                self.count("one pulled")
                self.without([dice.randrange(PAIRS)], dice.uniform(0.1, 2))
        elif fate < 0.45:
            self.count("all pulled")
            self.without(range(PAIRS), dice.uniform(0.2, 3))
        elif fate < 0.49:
            self.count("silence")
            self.without(range(PAIRS), SILENCE_S + 5)
        elif fate < 0.64:
            self.count("one narrow")
            index = dice.randrange(PAIRS)
            self.wires.narrow(index, dice.choice((5, 20, 80)))
            time.sleep(dice.uniform(1, 6))
            self.wires.widen(index)
        elif fate < 0.85:
            for _ in range(dice.randint(1, 2)):
                self.count("target anew")
                self.target.ask("restart")
                time.sleep(dice.uniform(0.5, 2))

    def count(self, what):
        self.counts[what] += 1

    def without(self, pairs, seconds):
        for index in pairs:
            self.wires.pull(index)
        time.sleep(seconds)
        for index in pairs:
            self.wires.plug(index)
        time.sleep(self.dice.uniform(0.2, 1))


def soak(options):
    """(samples, counts of trouble, the load's last words); raises when something is not as it must be."""
    with Wires() as wires:
        a, b = wires.spaces
        udp = ",".join(f"udp:10.98.{index}.1" for index in range(PAIRS))
        tcp, disks = "tcp:10.98.0.1", ["--exports", ",".join(DISKS), "--bytes", DISK_BYTES]
        silence = ["--silence-s", SILENCE_S]
        target = End(a, options.binary, "target", "--listen", f"{udp},{tcp}", *disks, *silence)
        rate = ["--rate", options.rate, "--seed", options.seed]
        load = End(b, options.binary, "load", "--udp", udp, "--tcp", tcp, *disks, *rate)
        try:
            return cycles(options, Trouble(wires, target, options.seed), target, load)
        finally:
            for end in (load, target):
                end.end()


def cycles(options, trouble, target, load):
    samples, began, attached, ends = [], time.monotonic(), 0, False
    while not ends:
        if len(samples) % 10 == 9:
            attached += 1
            load.ask("attach")
        load.tell(f"run {CYCLE_S}")
        trouble.cause()
        load.hear()
        lasted_s = time.monotonic() - began
        ends = lasted_s >= options.seconds or options.told_to_end
        if ends:
            load.ask("verify")
        said, target_said = load.ask("rest"), target.ask("rest")
        if said["mismatches"] or said["errors"] or said["pending"] or said["slots"] != said["slots_free"]:
            raise OSError(f"after {lasted_s:.0f} s: {said}")
        samples.append({"at_s": round(lasted_s, 1), "load": {**said, **load.look()},
                        "target": {**target_said, **target.look()}})
        if options.samples:
            options.samples.write_text(json.dumps(samples, indent=1) + "\n")
        print(f"{lasted_s:7.0f} s: {json.dumps(samples[-1])}", file=sys.stderr, flush=True)
    return samples, {**trouble.counts, "connections anew": attached}


def growth(samples):
    """Rows (end, what, unit, second tenth, last tenth, limit, kept)."""
    tenth = max(1, len(samples) // 10)
    rows = []
    for end in ("target", "load"):
        for name, (words, unit, share, least) in WATCHED.items():
            early, late = (statistics.median(sample[end][name] for sample in part)
                           for part in (samples[tenth:2 * tenth] or samples, samples[-tenth:]))
            most = early + max(early * share, least)
            rows.append((end, words, unit, early, late, most, late <= most))
    left = {sample["target"]["connections"] for sample in samples}
    rows.append(("target", "connections, at any rest", "", 2, max(left), 2, left == {2}))
    return rows


def page(options, samples, trouble, rows):
    last = samples[-1]["load"]
    requests = sum(last[kind] for kind in KINDS)
    calm = statistics.median(sample["load"]["longest_us"] for sample in samples) / 1000
    most = max(sample["load"]["longest_us"] for sample in samples) / 1000
    lines = ["| end | what | second tenth | last tenth | limit | kept |", "|---|---|---:|---:|---:|---|"]
    for end, words, unit, early, late, limit, kept in rows:
        cells = (f"{number:,.0f} {unit}".strip() for number in (early, late, limit))
        lines.append(f"| {end} | {words} | {' | '.join(cells)} | {'yes' if kept else '**no**'} |")
    kinds = ", ".join(f"{last[kind]:,} {kind}" for kind in KINDS)
    troubles = ", ".join(f"{what} {count}" for what, count in trouble.items())
    command = f"bench/soak.py --seconds {options.seconds:g} --rate {options.rate} --seed {options.seed}"
    missing = last["slots"] - last["slots_free"]
    return "\n".join([
        f"`{command}`; how it comes about: the head of the script. {samples[-1]['at_s']:,.0f} s, "
        f"{len(samples)} rests; load average {os.getloadavg()[0]:.1f} at the end.", "",
        f"{requests:,} requests ({kinds}), {last['bytes'] / 1e9:.1f} GB; {last['mismatches']} answers that "
        f"were not what was written, {last['errors']} errors, {missing} credits missing at any rest. "
        f"Trouble: {troubles}. The longest request of a cycle took {calm:,.0f} ms in the median, "
        f"{most:,.0f} ms at most.", "",
        *lines, ""])


BEGIN, END = "<!-- bench/soak.py writes from here -->", "<!-- to here -->"


def main():
    as_it_stands = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_it_stands)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--rate", type=int, default=2000, help="requests a second, of all threads together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--binary", type=pathlib.Path, default=BINARY)
    parser.add_argument("--samples", type=pathlib.Path, help="where each rest's numbers go")
    parser.add_argument("--page", type=pathlib.Path)
    parser.set_defaults(told_to_end=False)
    options = parser.parse_args()
    if os.geteuid():
        sys.exit("only root makes network namespaces")
    signal.signal(signal.SIGTERM, lambda *_: setattr(options, "told_to_end", True))
    samples, trouble = soak(options)
    rows = growth(samples)
    text = page(options, samples, trouble, rows)
    print(text)
    if options.page:
        whole = options.page.read_text()
        before, after = whole.split(BEGIN)[0], whole.split(END)[1]
        options.page.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{after}")
    if not all(row[-1] for row in rows):
        sys.exit("something grew")


if __name__ == "__main__":
    main()
