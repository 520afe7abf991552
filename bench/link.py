#!/usr/bin/env python3
"""What a link carries and costs: each carrier, sealed and not, beside iSCSI (tgt) and our own NBD over TCP.

    bench/link.py [--rounds 3] [--seconds 1] [--page docs/measurements/link.md]     as root: half an hour

Two network namespaces with veth pairs of MTU 9000 between them, removed at the end; a target in one, a load
in the other, and a pair for each contestant. They take turns in each round of a cell, so that a busy host
slows all of them; figures are medians, ratios are taken within a round. CPU is of both processes while
requests flow (for qemu-img: of its whole run, less that of one request). Then one null device over 1, 2 and
4 links that `tc tbf` limits to 1 Gb/s each, sealed: payload beside the sum of the limits.

iSCSI is tuned to move as much at once as it can (segments and bursts of 256 KiB, immediate data). A veth
passes 64 KiB of TCP or UDP on as one, and eth's frames one by one: a card would cut, and treat them more
alike. Needs `cargo build --release -p sawmill-link -p sawmill-frontend --examples`; without tgt, qemu-utils
and qemu-block-extra those columns are missing.
"""

import argparse
import contextlib
import json
import os
import pathlib
import shutil
import signal
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "target/release/examples"
BINARY = EXAMPLES / "link_bench"
KIB, MIB = 1 << 10, 1 << 20
SIZES, DEPTHS, WAYS = (4 * KIB, 256 * KIB, 4 * MIB), (1, 16, 64), ("read", "write")
DEVICES = {"null": f"null:{1 << 40}", "memory": f"memory:{512 * MIB}"}
CARRIERS, TGT, NBD, IQN = ("udp", "tcp", "eth", "xdp"), "tgt", "nbd", "iqn.2026-01.example:null"
MTU, RATE_MBIT, RATE_BYTES = 9000, 1000, 125_000_000
READY_S = 30
# Long enough for the requests under way at its ends to count for little.
LIMITED_S = 1.5
DELAY_US = 200

WZBLK = """\
## What WZBLK reported

Theirs, not measured here (thesis of 2014, section 3.1.4: Linux kernel modules at both ends, 8 cores of
Opterons each, 4 links of 10 Gb/s, MTU 9000, a disk that copies nothing, 3 to 4 cores busy at each end): up to
4 GB/s written, almost 2 GB/s read, more than 170,000 requests/s, growing up to 64 outstanding; iSCSI (tgt,
null backend) on the same machines at most 650 MB/s and 100,000 requests/s, no more beyond 16 outstanding.
What differs here: user space, newer processors but two cores for both ends together, links that are memory,
and every packet sealed where it does not say insecure.
"""


def run(*words):
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(map(str, words))}: {(done.stderr or done.stdout).strip()[-300:]}")
    return done.stdout


def cpu_s(pid):
    """Processor time of all threads of a process."""
    spent = 0
    for path in pathlib.Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):
            spent += int(path.read_text().split()[0])
    return spent / 1e9


class Wires:
    """Namespaces A (target) and B (load), with pairs of interfaces w0, w1, ... between them."""

    def __init__(self, count, limited=False):
        self.count, self.limited = count, limited
        self.spaces = [f"sml{os.getpid()}{end}" for end in "AB"]

    def __enter__(self):
        a, b = self.spaces
        for space in self.spaces:
            run("ip", "netns", "add", space)
            run("ip", "-n", space, "link", "set", "lo", "up")
        for index in range(self.count):
            wire = f"w{index}"
            run("ip", "-n", a, "link", "add", wire, "type", "veth", "peer", "name", wire, "netns", b)
            for end, space in enumerate(self.spaces, 1):
                run("ip", "-n", space, "addr", "add", f"10.96.{index}.{end}/24", "dev", wire)
                run("ip", "-n", space, "link", "set", wire, "mtu", MTU, "up")
                if self.limited:
                    run("tc", "-n", space, "qdisc", "replace", "dev", wire, "root", "tbf",
                        "rate", f"{RATE_MBIT}mbit", "burst", "64kb", "limit", "2mb")
        return self

    def __exit__(self, *_):
        for space in self.spaces:
            subprocess.run(["ip", "netns", "del", space], check=False)

    def addresses(self, carrier, first, links):
        one = {"eth": "eth:w{0}", "xdp": "xdp:w{0}"}.get(carrier, carrier + ":10.96.{0}.1")
        return ",".join(one.format(index) for index in range(first, first + links))

    def within(self, end, *words, **how):
        command = ["ip", "netns", "exec", self.spaces[end], *map(str, words)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **how)


class Ours:
    """Our target, and a load for each cell."""

    def __init__(self, carrier, device, insecure, links=1):
        self.carrier, self.device, self.links = carrier, device, links
        self.more = ["--insecure"] if insecure else []
        self.name = f"{carrier}{', insecure' if insecure else ''}"

    def start(self, wires, first):
        self.wires = wires
        self.addresses = wires.addresses(self.carrier, first, self.links)
        words = ["--listen", self.addresses, "--device", DEVICES[self.device], *self.more]
        self.server = wires.within(0, BINARY, "target", *words)
        if self.server.stdout.readline().strip() != "ready":
            raise OSError(f"the target for {self.name} did not start")

    def cell(self, way, size, depth, seconds):
        words = ["--to", self.addresses, "--op", way, "--bytes", size, "--depth", depth]
        load = self.wires.within(1, BINARY, "load", *words, "--seconds", seconds, *self.more)
        if load.stdout.readline().strip() != "begin":
            raise OSError(f"the load of {self.name} did not begin")
        before = cpu_s(self.server.pid)
        line = load.stdout.readline()
        spent = cpu_s(self.server.pid) - before
        load.communicate()
        said = json.loads(line or "{}")
        if load.returncode or said["failed"]:
            raise OSError(f"the load of {self.name} failed: {line}")
        return {
            "rate": said["requests"] / said["seconds"],
            "cpu_s": (spent + said["cpu_s"]) / max(1, said["requests"]),
            "lost": sum(link["lost"] for link in said["links"]),
        }

    def stop(self):
        self.server.communicate()


class QemuImg:
    """Somebody's null device that `qemu-img bench` reads and writes; a subclass serves it at `uri`."""

    def __init__(self):
        self.rates = {}

    def bench(self, way, size, depth, count):
        words = ["bench", "-f", "raw", "-t", "none", "-c", count, "-d", depth, "-s", size]
        words += ["-w"] if way == "write" else []
        before = cpu_s(self.server.pid)
        client = self.wires.within(1, "qemu-img", *words, self.uri)
        told = client.stdout.read()
        _, status, usage = os.wait4(client.pid, 0)
        client.returncode = status
        if status:
            raise OSError(f"qemu-img bench failed: {told}")
        took = float(told.split("completed in ")[1].split()[0])
        spent = cpu_s(self.server.pid) - before + usage.ru_utime + usage.ru_stime
        return {"rate": count / max(took, 1e-3), "cpu_s": spent}

    def cell(self, way, size, depth, seconds):
        rate = self.rates.get((way, size, depth))
        if rate is None:
            rate = self.bench(way, size, depth, max(depth, 64))["rate"]
        count = max(depth, int(rate * seconds))
        found = self.bench(way, size, depth, count)
        self.rates[way, size, depth] = found["rate"]
        return {**found, "cpu_s": max(0, found["cpu_s"] - self.one) / count}


class Nbd(QemuImg):
    """Our own NBD server over TCP."""

    name, needs = NBD, ("qemu-img",)

    def start(self, wires, first):
        self.wires, place = wires, f"10.96.{first}.1:10809"
        self.uri = f"nbd://{place}/null"
        self.server = wires.within(0, EXAMPLES / "nbd_null", f"tcp:{place}")
        if not self.server.stdout.readline():
            raise OSError("our NBD server did not start")
        self.one = self.bench("read", 4 * KIB, 1, 1)["cpu_s"]

    def stop(self):
        self.server.communicate()


class Tgt(QemuImg):
    """tgtd with its null backend, by libiscsi."""

    name, needs = TGT, ("tgtd", "tgtadm", "qemu-img")

    def start(self, wires, first):
        self.wires, place = wires, f"10.96.{first}.1:3260"
        self.uri = f"iscsi://{place}/{IQN}/1"
        self.log = open(os.devnull, "w")
        portal = ["--iscsi", f"portal={place}"]
        self.server = wires.within(0, "tgtd", "-f", "-C", 7, *portal, stderr=self.log)
        deadline = time.monotonic() + READY_S
        while True:
            try:
                self.tgtadm("target", "new", "-T", IQN)
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
        self.tgtadm("logicalunit", "new", "--lun", 1, "--bstype", "null", "-b", "/dev/null")
        self.tgtadm("target", "bind", "-I", "ALL")
        limits = ["MaxRecvDataSegment", "MaxXmitDataSegment", "MaxBurst", "FirstBurst"]
        tuned = {f"{limit}Length": 256 * KIB for limit in limits}
        tuned |= {"InitialR2T": "No", "ImmediateData": "Yes"}
        for name, value in tuned.items():
            self.tgtadm("target", "update", "--name", name, "--value", value)
        self.one = self.bench("read", 4 * KIB, 1, 1)["cpu_s"]

    def tgtadm(self, mode, operation, *words):
        command = ["tgtadm", "-C", 7, "--lld", "iscsi", "--mode", mode, "--op", operation, "--tid", 1, *words]
        return run("ip", "netns", "exec", self.wires.spaces[0], *command)

    def stop(self):
        # While it has targets it does not hear of SIGTERM.
        self.server.kill()
        self.server.wait()
        self.log.close()


def measured(contestants, wires, cells, options, seconds=None):
    """{contestant: {cell: [found of each round]}}; contestants take turns within a cell."""
    found = {one.name: {} for one in contestants}
    with contextlib.ExitStack() as stack:
        for first, one in enumerate(contestants):
            one.start(wires, first)
            stack.callback(one.stop)
        for turn in range(options.rounds):
            for cell in cells:
                order = contestants[turn % len(contestants):] + contestants[:turn % len(contestants)]
                for one in order:
                    found[one.name].setdefault(cell, []).append(one.cell(*cell, seconds or options.seconds))
            print(f"  round {turn + 1} of {options.rounds}", file=sys.stderr, flush=True)
    return found


def middle(rounds, key):
    return statistics.median(each[key] for each in rounds)


def ratio(found, name, base, cell, key):
    pairs = zip(found[name][cell], found[base][cell])
    return statistics.median(ours[key] / theirs[key] for ours, theirs in pairs if theirs[key])


def words_of(cell):
    way, size, depth = cell
    return f"{way} {f'{size // MIB} MiB' if size >= MIB else f'{size // KIB} KiB'} qd{depth}"


def table(head, rows):
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in lines) + "\n"


def figures(found, cells):
    """Requests a second and MB/s, then what they cost."""
    names = list(found)
    rates, costs = [], []
    for cell in cells:
        rate = {name: middle(found[name][cell], "rate") for name in names}
        cost = {name: middle(found[name][cell], "cpu_s") for name in names}
        small = cell[1] < 64 * KIB
        rates.append([words_of(cell), *(f"{rate[name]:,.0f} /s" if small else
                                        f"{rate[name] * cell[1] / 1e6:,.0f} MB/s" for name in names)])
        costs.append([words_of(cell), *(f"{cost[name] * 1e6:.1f} µs" if small else
                                        f"{cost[name] / cell[1] * 1e9:.2f} s/GB" for name in names)])
    return ("Requests a second, or bytes:\n\n" + table(["", *names], rates)
            + "\nProcessor time of both processes, for a request or a gigabyte:\n\n"
            + table(["", *names], costs))


def verdict(what, value, least, most=None):
    kept = value >= least if most is None else value <= most
    limit = f"≥ {least}" if most is None else f"≤ {most}"
    return [what, limit, f"{value:.2f}", "yes" if kept else "**no**"]


def aims(found, shares):
    rows = []
    if TGT in found:
        for name in (f"{carrier}, insecure" for carrier in CARRIERS):
            for way in WAYS:
                small, large = (way, 4 * KIB, 64), (way, 256 * KIB, 64)
                if not {small, large} <= set(found.get(name, {})):
                    continue
                rows.append(verdict(f"{name}, {words_of(small)}: requests/s beside tgt",
                                    ratio(found, name, TGT, small, "rate"), 1.2))
                rows.append(verdict(f"{name}, {words_of(large)}: bytes/s beside tgt",
                                    ratio(found, name, TGT, large, "rate"), 1.0))
                rows.append(verdict(f"{name}, {words_of(large)}: CPU per byte beside tgt",
                                    ratio(found, name, TGT, large, "cpu_s"), None, 1.0))
    for (name, way, links), share in shares.items():
        rows.append(verdict(f"{name}, {way}, {links} × 1 Gb/s: share of the sum", share, 0.93))
    return table(["aim", "limit", "measured", "kept"], rows)


class Delayed(Ours):
    """Our target by UDP, behind a relay that hands packets on later."""

    def start(self, wires, first):
        super().start(wires, first)
        near, far = "10.96.0.1:9702", "10.96.0.1:9700"
        self.relay = wires.within(0, EXAMPLES / "bass", "relay", near, far, DELAY_US // 2)
        if self.relay.stdout.readline().strip() != "ready":
            raise OSError("the relay did not start")
        self.addresses = f"udp:{near}"

    def stop(self):
        self.relay.communicate()
        super().stop()


def delayed(options):
    """Requests of 4 KiB with 16 and 64 outstanding, on a link with delay."""
    cells = [(way, 4 * KIB, depth) for depth in (16, 64) for way in WAYS]
    with Wires(1) as wires:
        one = Delayed("udp", "null", False)
        found = measured([one], wires, cells, options)[one.name]
    rows = []
    for way in WAYS:
        rates = [middle(found[way, 4 * KIB, depth], "rate") for depth in (16, 64)]
        rows.append([f"{way} 4 KiB", *(f"{rate:,.0f} /s" for rate in rates), f"{rates[1] / rates[0]:.2f}"])
    return (f"## With {DELAY_US / 1000:g} ms of delay, udp\n\n"
            + table(["", "16 outstanding", "64 outstanding", "times as much"], rows))


def growth(found):
    rows = []
    for name, cells in found.items():
        each = [(way, size) for way in WAYS for size in SIZES if (way, size, 64) in cells]
        grown = [middle(cells[(*kind, 64)], "rate") / middle(cells[(*kind, 16)], "rate") for kind in each]
        rows.append([name, *(f"{one:.2f}" for one in grown)])
    return table(["", *(words_of((*kind, 64)) for kind in each)], rows)


def limited(carriers, options):
    """Share of the sum of limited links, by (contestant, way, links); counted without any headers."""
    shares = {}
    for links in (1, 2, 4):
        with Wires(links, limited=True) as wires:
            for carrier in carriers:
                one = Ours(carrier, "null", False, links)
                cells = [(way, 256 * KIB, 16) for way in WAYS]
                found = measured([one], wires, cells, options, LIMITED_S)[one.name]
                for cell in cells:
                    rate = middle(found[cell], "rate") * cell[1]
                    shares[one.name, cell[0], links] = rate / (RATE_BYTES * links)
    return shares


def chart(found):
    """Bars: requests per second of 4 KiB by depth, a group for each contestant and way."""
    groups = [(name, way) for name in found for way in WAYS]
    rates = {(name, way, depth): middle(found[name][way, 4 * KIB, depth], "rate")
             for name, way in groups for depth in DEPTHS}
    width, height, top = 90 * len(groups) + 60, 260, max(rates.values())
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height + 40}" '
             'font-family="sans-serif" font-size="11">']
    for group, (name, way) in enumerate(groups):
        left = 20 + 90 * group
        for place, depth in enumerate(DEPTHS):
            tall = rates[name, way, depth] / top * (height - 20)
            shade = 200 - 75 * place
            parts.append(f'<rect x="{left + place * 23}" y="{height - tall:.0f}" width="21" '
                         f'height="{tall:.0f}" fill="rgb({shade},{shade},{shade})"/>')
        parts.append(f'<text x="{left}" y="{height + 16}">{name}</text>')
        parts.append(f'<text x="{left}" y="{height + 30}">{way}</text>')
    head = f"4 KiB: {top:,.0f} requests/s; bars for 1, 16, 64 outstanding"
    parts.append(f'<text x="4" y="14">{head}</text></svg>')
    return "\n".join(parts) + "\n"


def contestants_of(device, options):
    """Ours on this device, and others beside the null ones; and which are missing, and why."""
    all_ = [Ours(carrier, device, insecure) for carrier in options.carriers for insecure in (False, True)
            if options.seals in ("both", "insecure" if insecure else "sealed")]
    if device != "null" or options.no_others:
        return all_, ""
    missing = ""
    for other in (Nbd(), Tgt()):
        lacks = [program for program in other.needs if not shutil.which(program)]
        if lacks:
            missing += f"No column of {other.name}: {', '.join(lacks)} not found.\n\n"
        else:
            all_.append(other)
    return all_, missing


def main():
    as_it_stands = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_it_stands)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1)
    parser.add_argument("--carriers", type=lambda text: text.split(","), default=CARRIERS)
    parser.add_argument("--devices", type=lambda text: text.split(","), default=tuple(DEVICES))
    parser.add_argument("--seals", choices=["both", "sealed", "insecure"], default="both")
    parser.add_argument("--sizes", type=lambda text: tuple(map(int, text.split(","))), default=SIZES)
    parser.add_argument("--depths", type=lambda text: tuple(map(int, text.split(","))), default=DEPTHS)
    parser.add_argument("--no-others", action="store_true")
    parser.add_argument("--no-limited", action="store_true")
    parser.add_argument("--no-delayed", action="store_true")
    parser.add_argument("--page", type=pathlib.Path)
    options = parser.parse_args()
    if os.geteuid():
        sys.exit("only root makes network namespaces")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to stop"))
    cells = [(way, size, depth) for size in options.sizes for depth in options.depths for way in WAYS]
    text, kept, load_before = "", {}, os.getloadavg()[0]
    for device in options.devices:
        contestants, missing = contestants_of(device, options)
        with Wires(len(contestants)) as wires:
            kept[device] = measured(contestants, wires, cells, options)
        text += f"## A {device} device over one link\n\n{missing}{figures(kept[device], cells)}\n"
        if {16, 64} <= set(options.depths) and options.sizes == SIZES:
            text += f"From 16 to 64 outstanding, times as much:\n\n{growth(kept[device])}\n"
    # What xdp sends passes tbf by.
    bound = [carrier for carrier in options.carriers if carrier != "xdp"]
    shares = {} if options.no_limited else limited(bound, options)
    text += "" if options.no_delayed else delayed(options) + "\n"
    text = f"## The aims\n\n{aims(kept.get('null', {}), shares)}\n{text}{WZBLK}"
    print(text)
    if options.page:
        image = options.page.with_suffix(".svg")
        image.write_text(chart(kept["null"]))
        command = f"bench/link.py --rounds {options.rounds} --seconds {options.seconds:g}"
        head = (f"# What a link carries, and costs\n\n`{command}`, medians; {os.cpu_count()} cores for both "
                f"ends and whatever else ran; veth pairs of MTU {MTU}. How each number comes about: "
                f"the head of the script. Load average {load_before:.1f} before and {os.getloadavg()[0]:.1f} "
                "after: with more than 2, rates say less than CPU.\n\n"
                f"![requests per second]({image.name})\n\n")
        options.page.write_text(head + text.rstrip() + "\n")


if __name__ == "__main__":
    main()
