"""Programs at work on the disks of `disks.py`: how one cell is measured, and the tables of a page.

Not here: the programs (`databases.py`, `shapes.py`).
"""

import time

from harness import MIB, Rounds, Unfit, difference, log, machine, page, turns
from harness.machine import files_below
from suite.disks import all_disks

BASES = ("raw", "nbdkit-file")
DISKS = """\
Each contestant is a disk of {size} MiB as a loop device (direct I/O, sectors of 4 KiB) with \
ext4, all on one disk of the machine:

- **raw**: the loop device is on a preallocated file. No server, no FUSE.
- **nbdkit-file**: the same file behind nbdkit, in its page cache; nbdfuse shows it as a file \
again, and the loop device is on that.
- **sawmill-nbd**: the same path with Sawmill's NBD door in nbdkit's place.
- **sawmill**: `sawmill serve --fuse FOLDER --loop`, as its users have it.

So FUSE and a loop device are in the path of all but the first, and a sync passes through both. \
Sawmill's store is a folder on the disk of its journal, the disk that the others have their file \
on: Sawmill writes each byte twice. Medians of {rounds} rounds of {seconds} s in turn, in \
brackets the slowest and the fastest; a ratio is taken within each round. All files of a load are \
read before it, where nothing else is said, so that few reads reach the disk. CPU of the server: \
its processes, until everything is stored, without the kernel's threads of the loop device. CPU \
of the machine: all of it while the load ran, the load itself included.

"""


def intro(flags):
    return DISKS.format(size=flags.size, rounds=flags.rounds, seconds=flags.seconds)


def read_files(folder):
    """Has every file in the page cache of the file system."""
    for path in files_below(folder):
        with path.open("rb", buffering=0) as file:
            while file.read(MIB):
                pass


def prepared(place, flags, fill):
    """The contestants that can take part, filled, and why the others cannot."""
    ready, absent = [], {}
    for disk in all_disks(place, flags.binary):
        if disk.name not in flags.only:
            continue
        try:
            if why := disk.missing():
                raise Unfit(why)
            log(f"preparing {disk.name}")
            disk.prepare()
            with disk.running():
                fill(disk)
                disk.settle()
            ready.append(disk)
        except OSError as error:
            absent[disk.name] = str(error)
            log(f"without {disk.name}: {error}")
    return ready, absent


def all_cells(flags, loads, disks, measure):
    """Rounds over loads over contestants."""
    found = Rounds()
    for number, load, disk in turns(flags.rounds, loads, disks):
        row = measure(disk, load)
        found.keep(number, load, disk.name, row)
        log(f"{load}, {disk.name}: {rate(row):,.0f}/s, p50 {row['p50_us']:,.0f} us, "
            f"p99 {row['p99_us']:,.0f} us")
    return found


def measured(disk, load):
    """A cell: what `load` returns, what the disk counted, and what that cost."""
    cpu_before_s = sum(process.cpu_s() for process in disk.processes)
    before, busy_before_s = disk.counters(), machine.busy_s()
    found = load()
    found["machine_cpu_s"] = machine.busy_s() - busy_before_s
    found["flushes"] = difference(before, disk.counters())["device_flushes"]
    since = time.monotonic()
    disk.settle()
    found["settle_s"] = time.monotonic() - since
    found["server_cpu_s"] = sum(process.cpu_s() for process in disk.processes) - cpu_before_s
    found["counted"] = difference(before, disk.counters())
    return found


def rate(row):
    return row["done"] / row["seconds"]


def tables(found, absent, titles, what, unit, scale=1):
    """Rates, ratios and latency of each load, and what a unit of work costs."""
    parts, costs = [], []
    for load, title in titles.items():
        rows = []
        for name in found.names():
            rates = found.found(name, load, rate)
            if not rates:
                continue
            ratios = [found.ratio(name, base, load, rate) for base in BASES]
            waits = [found.median(name, load, key) for key in ("p50_us", "p99_us")]
            rows.append([name, f"{found.median(name, load, rate):,.0f} "
                               f"[{min(rates):,.0f} to {max(rates):,.0f}]",
                         *(page.text_of(ratio, ".2f") for ratio in ratios),
                         *(f"{wait:,.0f}" for wait in waits)])
            costs.append([title, name, *cost(found, name, load, scale)])
        head = ["", f"{what} a second", "÷ raw", "÷ nbdkit-file", "p50, µs", "p99, µs"]
        parts.append(f"### {title}\n\n{page.table(head, rows, True)}\n")
    parts += [f"{name} did not take part: {why}\n\n" for name, why in absent.items()]
    head = ["load", "", "CPU of the server, µs", "CPU of the machine, µs", "syncs", "flushes",
            "KiB written to the disk", "GETs", "PUTs", "KiB put"]
    parts.append(f"### What {unit} cost\n\n{page.table(head, costs, range(2, 10))}\n")
    return "".join(parts)


def cost(found, name, load, scale):
    """Medians for each unit of work."""
    def each(key, form):
        median = found.median(name, load, lambda row: key(row) * scale / max(row["done"], 1))
        return page.text_of(median, form)

    def counted(word, divisor=1):
        return lambda row: row["counted"].get(word, 0) / divisor
    has_store = all("puts" in row["counted"] for row in found.found(name, load, dict))
    store = [counted("gets"), counted("puts"), counted("put_bytes", 1024)]
    return [each(lambda row: row["server_cpu_s"] * 1e6, ",.0f"),
            each(lambda row: row["machine_cpu_s"] * 1e6, ",.0f"),
            each(lambda row: row["syncs"], ".2f"), each(lambda row: row["flushes"], ".2f"),
            each(counted("device_written_bytes", 1024), ",.1f"),
            *(each(key, form) if has_store else "–" for key, form in
              zip(store, (",.4f", ".4f", ",.1f")))]
