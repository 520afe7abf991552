#!/usr/bin/env python3
"""Reads of a cold cache, opens without any local state, and starts of new clones, from a store
whose answers take long.

    bench/cold.py                             all parts
    bench/cold.py --only read --rounds 3      sequential, backward, strided and random reads
    bench/cold.py --only link                 the same over a link that is slower than this machine
    bench/cold.py --only open                 from the start of `serve` to its door
    bench/cold.py --only boot                 a start of a new clone, without and with a boot set
    bench/cold.py --before OLDER/sawmill      two builds in one run

The store is a folder behind a small S3 server that answers each request after --delay-ms; in part
"link", all bodies share a link of --link MB/s. Beside each rate stands what parallel ranged GETs
of that store carry, measured in the same round: 32 at once of 1 MiB each.

Before each cell the cache, the journal and the state folder are removed, so every byte comes from
the store, and no block is read twice. Needs fio, and
`cargo build --release -p sawmill -p sawmill-store --bins --example far_store`.

Not here: TLS and the time that a connection takes to open, which the store does not model.
"""

import json
import os
import shutil
import time
from pathlib import Path

from harness import (
    EXAMPLES, KIB, MIB, Process, Rounds, Sawmill, cli, fio, in_parts, page, run, log, turns,
    wait_until)

STRIDE = "read:384k"
# fio's mode, block and depth.
READS = {
    "128 KiB, depth 1": ("read", "128k", 1),
    "1 MiB, depth 4": ("read", "1m", 4),
    "4 MiB, depth 8": ("read", "4m", 8),
    "backward, 128 KiB, depth 1": ("read:-256k", "128k", 1),
    "every fourth 128 KiB, depth 1": (STRIDE, "128k", 1),
    "random 16 KiB, depth 1": ("randread", "16k", 1),
    "random 16 KiB, depth 16": ("randread", "16k", 16),
}
GETS_AT_ONCE, GET_BYTES = 32, MIB


class FarStore:
    """The store of `crates/store/examples/far_store.rs`."""

    bucket = "far"

    def __init__(self, place):
        self.folder = place.folder / "far_store"
        self.process, self.port = None, 0

    def missing(self):
        program = EXAMPLES / "far_store"
        return "" if program.exists() else f"{program} is not built"

    def start(self, delay_ms=0, link=0):
        (self.folder / self.bucket).mkdir(parents=True, exist_ok=True)
        self.process = Process(
            EXAMPLES / "far_store", "serve", self.folder / self.bucket, "--delay-ms", delay_ms,
            "--bytes-per-s", link * 1_000_000, log=self.folder.with_suffix(".log"), talks=True)
        self.port, = self.process.expect("port")

    def environment(self):
        return {
            "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1", "AWS_ALLOW_HTTP": "true",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}"}

    def end(self):
        self.process.end()

    def gets_mb_s(self, name):
        """What parallel ranged GETs of a volume's segments carry."""
        found = json.loads(run(
            EXAMPLES / "far_store", "read", f"s3://{self.bucket}/{name}", "--bytes", GET_BYTES,
            "--at-once", GETS_AT_ONCE, env=os.environ | self.environment()))
        return found["bytes"] / found["took_s"] / 1e6


class FarVolume(Sawmill):
    """A volume that knows nothing but its store when it starts."""

    def chill(self):
        for path in (self.journal, self.cache, self.cache.with_suffix(".index")):
            path.unlink(missing_ok=True)
        # The state folder is below this one.
        shutil.rmtree(self.state, ignore_errors=True)


def prepared(place, flags, link=0):
    """The store, and a volume in it for each build, every block written in order."""
    store = FarStore(place)
    store.start()
    volume = FarVolume(place, flags.binary, name="disk", s3=store)
    volume.prepare()
    store.end()
    builds = {"now": flags.binary} | ({"before": flags.before} if flags.before else {})
    store.start(flags.delay_ms, link)
    volumes = {}
    for name, binary in builds.items():
        volumes[name] = FarVolume(place, binary, name="disk", s3=store)
        volumes[name].title = name
    return store, volumes


def read_once(volume, kind, seconds):
    """One cell of reads: rate, and what it fetched."""
    mode, block, depth = READS[kind]
    # A stride passes the volume once.
    more = [f"--number_ios={volume.size_bytes // (512 * KIB)}"] if mode == STRIDE else []
    volume.chill()
    with volume.running():
        before = volume.counters()
        job = fio.words(volume.target, mode, block, depth, volume.size_bytes, *more,
                        f"--runtime={seconds}", "--randrepeat=0")
        found = fio.call(job, volume.folder)["read"]
        after = volume.counters()
    return {"mb_s": found["bw_bytes"] / 1e6, "iops": found["iops"],
            "p99_ms": fio.percentile_us(found, 99) / 1000, "read_bytes": found["io_bytes"],
            "fetched_bytes": after["get_bytes"] - before["get_bytes"],
            "gets": after["gets"] - before["gets"],
            "prefetched_frames": after["prefetched_frames"] - before["prefetched_frames"]}


READ = """\
## Reads{over}

A volume of {size} MiB, written once in order. Answers take {delay} ms, and the link carries \
{link}. *GETs* is what {at_once} ranged GETs of 1 MiB at once carry. *Fetched* is bytes from the \
store for each byte read.

{table}"""


def linked(place, flags):
    return read(place, flags, flags.link)


def read(place, flags, link=0):
    store, volumes = prepared(place, flags, link)
    found = Rounds()
    for number, kind, name in turns(flags.rounds, READS, [*volumes, "gets"]):
        row = ({"mb_s": store.gets_mb_s("disk")} if name == "gets"
               else read_once(volumes[name], kind, flags.seconds))
        found.keep(number, kind, name, row)
        log(f"{kind}, {name}: {row}")
    store.end()
    rows = []
    for kind in READS:
        gets = found.median("gets", kind, "mb_s")
        for name in volumes:
            fetched = found.median(
                name, kind, lambda row: row["fetched_bytes"] / max(row["read_bytes"], 1))
            rows.append([
                kind, name, f"{found.median(name, kind, 'mb_s'):.0f}",
                f"{min(found.found(name, kind, 'mb_s')):.0f} to "
                f"{max(found.found(name, kind, 'mb_s')):.0f}",
                f"{gets:.0f}", f"{found.ratio(name, 'gets', kind, 'mb_s'):.2f}",
                f"{found.median(name, kind, 'p99_ms'):.0f}", f"{fetched:.2f}",
                f"{found.median(name, kind, 'prefetched_frames'):.0f}"])
    table = page.table(["reads", "build", "MB/s", "range", "GETs, MB/s", "reads / GETs", "p99, ms",
                        "fetched", "frames ahead"], rows, range(2, 9))
    carried = f"{link} MB/s" if link else "as much as this machine does"
    return {"rounds": found.rows("reads")}, READ.format(
        over=f" over a link of {carried}" * bool(link), size=flags.size, delay=flags.delay_ms,
        link=carried, at_once=GETS_AT_ONCE, table=table)


OPEN = """\
## Opens

From the start of `sawmill serve` to its door, with an empty state folder and no journal. Answers \
take {delay} ms. Medians of {opens}, in ms. *Unprobed* is with `--no-fencing`, which leaves out \
the probe of conditional create.

{table}"""


def open_once(volume, options):
    """Serves from nothing: milliseconds until the door is open, and of each step of recovery."""
    volume.chill()
    volume.options = options
    with volume.running():
        store = volume.status()["stores"][0]
        ready = volume.ready
    return {"ready_ms": ready["after_s"] * 1000,
            "steps_ms": {step["name"]: step["took_ms"] for step in ready["recovery"]},
            "requests": {call: store[call]["requests"] for call in ("get", "put", "list")}}


def opened(place, flags):
    store, volumes = prepared(place, flags)
    ways = {"probed": [], "unprobed": ["--no-fencing"]}
    found = Rounds()
    for number, way, name in turns(flags.opens, ways, volumes):
        row = open_once(volumes[name], ways[way])
        found.keep(number, way, name, row)
        log(f"open, {way}, {name}: {row}")
    store.end()
    rows = []
    for way in ways:
        for name in volumes:
            requests = found.median(name, way, lambda row: sum(row["requests"].values()))
            millis = sorted(found.found(name, way, "ready_ms"))
            rows.append([way, name, f"{found.median(name, way, 'ready_ms'):.0f}",
                         f"{millis[0]:.0f} to {millis[-1]:.0f}", f"{requests:.0f}"])
    table = page.table(["open", "build", "ms", "range", "requests"], rows, (2, 3, 4))
    return {"rounds": found.rows("open")}, OPEN.format(
        delay=flags.delay_ms, opens=flags.opens, table=table)


BOOT = """\
## Starts of a clone

A start is {reads} reads of 16 KiB one after the other, at places that are the same each time, \
spread over the {size} MiB of the base. Each reads a clone on a machine that has nothing of it. \
Answers take {delay} ms. *Fetched first*: the boot set was fetched (`sawmill warm --boot-set`) \
before the start began; *at once*: the start began when the door was open, and fio's own start \
gave the set time to arrive.

{table}"""
BOOTS = {
    "no boot set": ["--boot-set-bytes", "0"],
    "boot set, at once": [],
    "boot set, fetched first": [],
}


def start_of(volume, flags):
    """One start: seconds, and what waited for the store."""
    job = fio.words(volume.target, "randread", "16k", 1, volume.size_bytes, "--randrepeat=1",
                    "--randseed=7", f"--number_ios={flags.boot_reads}")
    before = volume.counters()
    found = fio.call(job, volume.folder)["read"]
    after = volume.counters()
    return {"s": found["runtime"] / 1000, "reads": found["total_ios"],
            "waited": after["reads_store"] - before["reads_store"]}


def booted(place, flags):
    store, volumes = prepared(place, flags)
    clone = volumes["now"]
    clone.sawmill("clone", "disk", "probe", "clone")
    clone.volumes, clone.options = ["probe"], ["--boot-set-bytes", "0"]
    clone.chill()
    with clone.running():
        recording = Process(flags.binary, "boot-set", "record", "probe", "--for", "1h", "--log",
                            "info", "--json", env=clone.environment(),
                            log=clone.folder / "recording")
        wait_until("it is recorded",
                   lambda: "recording" in (clone.folder / "recording").read_text())
        start_of(clone, flags)
        recording.end()
    clone.volumes = ["clone"]
    found = Rounds()
    for number, way, name in turns(flags.rounds, BOOTS, ["now"]):
        clone.chill()
        clone.options = BOOTS[way]
        with clone.running():
            before = time.monotonic()
            if way == "boot set, fetched first":
                clone.sawmill("warm", "clone", "--boot-set")
            warm_s = time.monotonic() - before
            row = {"warm_s": warm_s, **start_of(clone, flags)}
        found.keep(number, way, name, row)
        log(f"{way}: {row}")
    store.end()
    rows = [[way, f"{found.median('now', way, 'warm_s'):.1f}",
             f"{found.median('now', way, 's'):.2f}",
             f"{min(found.found('now', way, 's')):.2f} to {max(found.found('now', way, 's')):.2f}",
             f"{found.median('now', way, 'waited'):.0f}"] for way in BOOTS]
    table = page.table(["start", "fetched for, s", "took, s", "range", "reads that waited"], rows,
                       (1, 2, 3, 4))
    return {"rounds": found.rows("boot")}, BOOT.format(
        reads=flags.boot_reads, size=flags.size, delay=flags.delay_ms, table=table)


PARTS = {"read": read, "link": linked, "open": opened, "boot": booted}


@cli.script
def main():
    flags = cli.parse(
        __doc__, ("--size", 1024, "size of the volume, MiB"),
        ("--delay-ms", 20, "how long each answer of the store takes"),
        ("--link", 300, "what the link of part \"link\" carries, MB/s"),
        ("--opens", 5, "how often it is opened"),
        ("--boot-reads", 400, "reads of a start"),
        ("--before", Path, "another build, measured in the same rounds"),
        rounds=3, seconds=6, only={"parts": PARTS}, binary=cli.SAWMILL, work=cli.TARGET)
    found, sections = in_parts(flags, PARTS, flags.size * MIB)
    page.write(flags.page, "# Cold reads, opens and starts\n\n" + "\n".join(sections), found)
