#!/usr/bin/env python3
"""What a link carries and costs: each carrier, sealed and not, beside iSCSI (tgt)
and our own NBD over TCP.

As root, half an hour. Two network namespaces with veth pairs of MTU 9000 between them, removed at
the end; a target in one, a load in the other, and a pair for each contestant. They take turns in
each round of a cell, so that a busy host slows all of them; figures are medians, ratios are taken
within a round. CPU is of both processes while requests flow (for qemu-img: of its whole run, less
that of one request). Then one null device over 1, 2 and 4 links that `tc tbf` limits to 1 Gb/s
each, sealed: payload beside the sum of the limits.

iSCSI is tuned to move as much at once as it can (segments and bursts of 256 KiB, immediate data). A
veth passes 64 KiB of TCP or UDP on as one, and eth's frames one by one: a card would cut, and treat
them more alike. Needs `cargo build --release -p sawmill-link -p sawmill-frontend --examples`;
without tgt, qemu-utils and qemu-block-extra those columns are missing. Not here: both ends of ours
(`crates/link/examples`).
"""

import itertools
import os
import pathlib

from harness import (
    EXAMPLES, KIB, MIB, MTU, PATIENCE_S, Rounds, Unfit, Wires, cli, machine, page, run, turns,
    wait_until)
from harness.page import kept, table

SIZES, DEPTHS, WAYS = (4 * KIB, 256 * KIB, 4 * MIB), (1, 16, 64), ("read", "write")
# What a cell consists of, and what is measured in it.
CELL, RATE, COST = ("way", "bytes", "depth"), "requests_per_s", "cpu_s_per_request"
DEVICES = {"null": f"null:{1 << 40}", "memory": f"memory:{512 * MIB}"}
CARRIERS, IQN = ("udp", "tcp", "eth", "xdp"), "iqn.2026-01.example:null"
RATE_MBIT, RATE_BYTES, DELAY_US = 1000, 125_000_000, 200
# Long enough for the requests under way at its ends to count for little.
LIMITED_S = 1.5
WZBLK = """\
## What WZBLK reported

Theirs, not measured here (thesis of 2014, section 3.1.4: \
Linux kernel modules at both ends, 8 cores of
Opterons each, 4 links of 10 Gb/s, MTU 9000, a disk that copies nothing, \
3 to 4 cores busy at each end): up to
4 GB/s written, almost 2 GB/s read, more than 170,000 requests/s, \
growing up to 64 outstanding; iSCSI (tgt,
null backend) on the same machines at most 650 MB/s and 100,000 requests/s, \
no more beyond 16 outstanding.
What differs here: user space, newer processors but two cores for both ends together, \
links that are memory,
and every packet sealed where it does not say insecure.
"""


class Ours:
    """Our target, and a load for each cell."""

    def __init__(self, flags, carrier, device="null", insecure=False, links=1):
        self.binary, self.carrier, self.device, self.links = flags.binary, carrier, device, links
        self.more = ["--insecure"] if insecure else []
        self.name = f"{carrier}{', insecure' if insecure else ''}"

    def start(self, wires, first):
        self.wires = wires
        self.addresses = wires.addresses(self.carrier, first, self.links)
        words = ["--listen", self.addresses, "--device", DEVICES[self.device], *self.more]
        self.server = wires.ready(0, self.binary, "target", *words)

    def cell(self, way, size, depth, seconds):
        words = ["--to", self.addresses, "--op", way, "--bytes", size, "--depth", depth,
                 "--seconds", seconds]
        with self.wires.within(1, self.binary, "load", *words, *self.more) as load:
            load.expect("begin")
            before = self.server.cpu_s()
            report = load.read_event(seconds + PATIENCE_S)
            spent = self.server.cpu_s() - before
            if load.end(None) or report["failed"]:
                raise Unfit(f"the load of {self.name} failed: {report}")
        return {RATE: report["requests"] / report["seconds"],
                COST: (spent + report["cpu_s"]) / max(1, report["requests"])}


class Delayed(Ours):
    """Our target by UDP, behind a relay that hands packets on later."""

    def start(self, wires, first):
        super().start(wires, first)
        near, far = "10.96.0.1:9702", "10.96.0.1:9700"
        wires.ready(0, EXAMPLES / "bass", "relay", near, far, DELAY_US // 2)
        self.addresses = f"udp:{near}"


class QemuImg:
    """Somebody's null device that `qemu-img bench` reads and writes;
    a subclass serves it at `uri`."""

    needs = ("qemu-img",)

    def __init__(self):
        self.rates = {}

    def lacks(self):
        """What is not there; the empty text if all is."""
        return machine.missing(*self.needs)

    def start(self, wires, first):
        self.wires = wires
        self.serve(f"10.96.{first}.1")
        _, self.one_s = self.bench("read", 4 * KIB, 1, 1)

    def bench(self, way, size, depth, count):
        """Requests a second, and processor time of all."""
        words = ["bench", "-f", "raw", "-t", "none", "-c", count, "-d", depth, "-s", size]
        words += ["-w"] if way == "write" else []
        before = self.server.cpu_s()
        with self.wires.within(1, "qemu-img", *words, self.uri) as client:
            while "completed in " not in (line := client.read_line(3600)):
                pass
            client.end_well(sign=None)
        took = float(line.split("completed in ")[1].split()[0])
        spent = self.server.cpu_s() - before + client.cpu_total_s
        return count / max(took, 1e-3), spent

    def cell(self, way, size, depth, seconds):
        rate = self.rates.get((way, size, depth))
        if rate is None:
            rate, _ = self.bench(way, size, depth, max(depth, 64))
        count = max(depth, int(rate * seconds))
        rate, cpu_s = self.bench(way, size, depth, count)
        self.rates[way, size, depth] = rate
        return {RATE: rate, COST: max(0, cpu_s - self.one_s) / count}


class Nbd(QemuImg):
    """Our own NBD server over TCP."""

    name = "nbd"

    def serve(self, address):
        self.uri = f"nbd://{address}:10809/null"
        self.server = self.wires.within(0, EXAMPLES / "nbd_null", f"tcp:{address}:10809")
        self.server.read_line()


class Tgt(QemuImg):
    """tgtd with its null backend, by libiscsi."""

    name, needs = "tgt", ("tgtd", "tgtadm", "qemu-img")

    def lacks(self):
        modules = pathlib.Path("/usr/lib").glob("*/qemu/block-iscsi.so")
        return super().lacks() or ("" if any(modules) else "qemu-block-extra not installed")

    def serve(self, address):
        self.uri = f"iscsi://{address}:3260/{IQN}/1"
        portal = ["--iscsi", f"portal={address}:3260"]
        self.server = self.wires.within(0, "tgtd", "-f", "-C", 7, *portal, log=os.devnull)
        wait_until("tgtd answers",
                   lambda: self.tgtadm("target", "new", "-T", IQN, how=machine.succeeds))
        self.tgtadm("logicalunit", "new", "--lun", 1, "--bstype", "null", "-b", "/dev/null")
        self.tgtadm("target", "bind", "-I", "ALL")
        for name in ("MaxRecvDataSegment", "MaxXmitDataSegment", "MaxBurst", "FirstBurst"):
            self.tgtadm("target", "update", "--name", f"{name}Length", "--value", 256 * KIB)
        for name, value in (("InitialR2T", "No"), ("ImmediateData", "Yes")):
            self.tgtadm("target", "update", "--name", name, "--value", value)

    def tgtadm(self, mode, operation, *words, how=run):
        command = ["tgtadm", "-C", 7, "--lld", "iscsi", "--mode", mode, "--op", operation,
                   "--tid", 1, *words]
        return how("ip", "netns", "exec", self.wires.spaces[0], *command)


def measured(contestants, wires, cells, flags, seconds=None):
    """The results of each, by round and cell; contestants take turns within a cell."""
    found = Rounds()
    for first, one in enumerate(contestants):
        one.start(wires, first)
    for number, cell, one in turns(flags.rounds, cells, contestants):
        found.keep(number, cell, one.name, one.cell(*cell, seconds or flags.seconds))
    return found


def words_of(cell):
    way, size, depth = cell
    return f"{way} {f'{size // MIB} MiB' if size >= MIB else f'{size // KIB} KiB'} qd{depth}"


def figures(found, cells):
    """Requests a second and MB/s, then what they cost."""
    rates, costs = [], []
    for cell in cells:
        rate, cost = ([found.median(name, cell, key) for name in found.names()]
                      for key in (RATE, COST))
        if cell[1] < 64 * KIB:
            rates.append([words_of(cell), *(f"{each:,.0f} /s" for each in rate)])
            costs.append([words_of(cell), *(f"{each * 1e6:.1f} µs" for each in cost)])
        else:
            rates.append([words_of(cell), *(f"{each * cell[1] / 1e6:,.0f} MB/s" for each in rate)])
            costs.append([words_of(cell), *(f"{each / cell[1] * 1e9:.2f} s/GB" for each in cost)])
    head = ["", *found.names()]
    return (f"Requests a second, or bytes:\n\n{table(head, rates, True)}\nProcessor time of both "
            f"processes, for a request or a gigabyte:\n\n{table(head, costs, True)}")


def aims(found, shares):
    rows = []
    for carrier, way in itertools.product(CARRIERS, WAYS):
        small, large = (way, 4 * KIB, 64), (way, 256 * KIB, 64)
        for cell, key, what, sign, limit in (
                (small, RATE, "requests/s", "≥", 1.2), (large, RATE, "bytes/s", "≥", 1.0),
                (large, COST, "CPU per byte", "≤", 1.0)):
            ratio = found.ratio(f"{carrier}, insecure", "tgt", cell, key)
            if ratio is not None:
                rows.append((f"{carrier}, insecure, {words_of(cell)}: {what} beside tgt", sign,
                             limit, ratio))
    for (name, way, links), share in shares.items():
        rows.append((f"{name}, {way}, {links} × 1 Gb/s: share of the sum", "≥", 0.93, share))
    return table(["aim", "limit", "measured", "kept"], [
        [what, f"{sign} {limit}", f"{value:.2f}",
         kept(value >= limit if sign == "≥" else value <= limit)]
        for what, sign, limit, value in rows], True)


def delayed(flags):
    """Requests of 4 KiB with 16 and 64 outstanding, on a link with delay: the rounds, and their
    section."""
    rows, cells = [], list(itertools.product(WAYS, [4 * KIB], (16, 64)))
    with Wires() as wires:
        found = measured([Delayed(flags, "udp")], wires, cells, flags)
    for way in WAYS:
        few, many = (found.median("udp", (way, 4 * KIB, depth), RATE) for depth in (16, 64))
        rows.append([f"{way} 4 KiB", f"{few:,.0f} /s", f"{many:,.0f} /s", f"{many / few:.2f}"])
    head = ["", "16 outstanding", "64 outstanding", "times as much"]
    return (found.rows(*CELL),
            f"## With {DELAY_US / 1000:g} ms of delay, udp\n\n{table(head, rows, True)}\n")


def growth(found):
    cells = list(itertools.product(WAYS, SIZES, [64]))
    rows = [[name, *(
        f"{found.median(name, cell, RATE) / found.median(name, (*cell[:2], 16), RATE):.2f}"
        for cell in cells)] for name in found.names()]
    return ("From 16 to 64 outstanding, times as much:\n\n"
            f"{table(['', *map(words_of, cells)], rows, True)}\n")


def limited(flags):
    """The rounds on limited links, and the share of their sum by (contestant, way, links), counted
    without any headers."""
    rows, shares, cells = [], {}, [(way, 256 * KIB, 16) for way in WAYS]
    for links, carrier in itertools.product((1, 2, 4), flags.only):
        # Packets that xdp sends bypass tbf.
        if carrier != "xdp":
            with Wires(links, RATE_MBIT) as wires:
                found = measured([Ours(flags, carrier, links=links)], wires, cells, flags,
                                 LIMITED_S)
            rows += [{"links": links, **row} for row in found.rows(*CELL)]
            for cell in cells:
                rate = found.median(carrier, cell, RATE) * cell[1]
                shares[carrier, cell[0], links] = rate / (RATE_BYTES * links)
    return rows, shares


def contestants_of(device, flags):
    """Ours on this device, and others beside the null ones; and which are missing, and why."""
    everyone = [Ours(flags, carrier, device, insecure) for carrier in flags.only
                for insecure in (False, True)
                if flags.seals in ("both", "insecure" if insecure else "sealed")]
    absent = ""
    for other in (Nbd(), Tgt()) if device == "null" and not flags.no_others else ():
        if lacks := other.lacks():
            absent += f"No column of {other.name}: {lacks}.\n\n"
        else:
            everyone.append(other)
    return everyone, absent


@cli.script
def main():
    flags = cli.parse(
        __doc__, ("--devices", tuple(DEVICES)), ("--seals", ["both", "sealed", "insecure"]),
        ("--sizes", SIZES), ("--depths", DEPTHS), ("--no-others", False), ("--no-limited", False),
        ("--no-delayed", False), rounds=3, seconds=1.0, only={"carriers": CARRIERS},
        only_too="--carriers", binary=EXAMPLES / "link_bench", root=True)
    cells = [(way, size, depth) for size in flags.sizes for depth in flags.depths for way in WAYS]
    text, found, load_before = "", {"null": Rounds()}, os.getloadavg()[0]
    for device in flags.devices:
        contestants, absent = contestants_of(device, flags)
        with Wires(len(contestants)) as wires:
            found[device] = measured(contestants, wires, cells, flags)
        text += f"## A {device} device over one link\n\n{absent}{figures(found[device], cells)}\n"
        if {16, 64} <= set(flags.depths) and flags.sizes == SIZES:
            text += growth(found[device])
    raw = {device: rounds.rows(*CELL) for device, rounds in found.items()}
    raw["limited"], shares = ([], {}) if flags.no_limited else limited(flags)
    raw["delayed"], more = ([], "") if flags.no_delayed else delayed(flags)
    text += more
    head = ""
    if flags.page:
        image = flags.page.with_suffix(".svg")
        page.bars(image, f"requests/s; bars for {', '.join(map(str, DEPTHS))} outstanding", [
            ((name, way), [found["null"].median(name, (way, 4 * KIB, depth), RATE)
                           for depth in DEPTHS])
            for name, way in itertools.product(found["null"].names(), WAYS)])
        head = (
            f"# What a link carries, and costs\n\n`bench/link.py --rounds {flags.rounds} --seconds "
            f"{flags.seconds:g}`, medians; {os.cpu_count()} cores for both ends and whatever else "
            f"ran; veth pairs of MTU {MTU}. Method: see the head of the script. "
            f"Load average {load_before:.1f} before and {os.getloadavg()[0]:.1f} after: with more "
            f"than 2, rates say less than CPU.\n\n![requests per second]({image.name})\n\n")
    page.write(flags.page, f"{head}## The aims\n\n{aims(found['null'], shares)}\n{text}{WZBLK}",
               raw)
