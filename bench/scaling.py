#!/usr/bin/env python3
"""How a device with a null driver grows with cores:
batch layer and plain mode, in-process load; NBD beside.

The load, the host and the driver of one process may use one core, then two, up to all (taskset); a
queue and a loader for each core. The mode `copy` is the load without host and driver: what the
cores can do at most. Tied: with tie_queues=1. 4 MiB: of shared memory for a queue's writes, in
chunks of 512 KiB, instead of 32: what is in flight then stays in caches. Rounds are interleaved,
figures are medians. Beside them, one NBD connection with fio: nbdkit's null plugin and `sawmill
run` with the null example; and what the BUSE thesis measured on its machines. Writes a table and a
chart beside the page. Not here: a kernel between (`bench/doors.py`).
"""

import itertools
import json
import os

from harness import (
    EXAMPLES, KIB, MIB, ROOT, Process, Rounds, cli, fio, machine, page, run, temporary_place,
    wait_until)

MODES = ("copy", "batch", "batch, tied", "batch, tied, 4 MiB", "plain", "plain, tied")
WAYS, SIZES = ("write", "read"), (4 * KIB, 64 * KIB)
# Theirs: null drivers behind the kernel, fio at depth 4 with a job for each virtual CPU,
# m5zn of EC2.
PAGE = """\
{rates}
{nbd}
Not ours and not of this machine: GB/s of 64 KiB requests through a kernel to a null driver, from \
the BUSE thesis (2021, tables 5.2 to 5.5).

| their virtual CPUs | way | BUSE | NBD (nbdkit) | TCMU | BDUS |
| --- | --- | --- | --- | --- | --- |
| 2 | write | 5.88 | 2.12 | 3.42 | - |
| 2 | read | 6.56 | 2.72 | 3.89 | - |
| 8 | write | 22.81 | 5.29 | 5.67 | 4.68 |
| 8 | read | 13.83 | 5.63 | 5.42 | 5.48 |
| 24 | write | 57.50 | 11.58 | 6.79 | 6.19 |
| 24 | read | 36.39 | 12.32 | 6.19 | 6.80 |
"""


def built():
    """The load's program."""
    output = run("cargo", "bench", "-p", "sawmill-driver", "--bench", "scaling", "--no-run",
               "--message-format=json", cwd=ROOT)
    artifacts = [json.loads(line) for line in output.splitlines()]
    machine.build("sawmill", "--bins")
    machine.build("sawmill-driver", "--examples")
    return [a["executable"] for a in artifacts if a.get("target", {}).get("name") == "scaling"][-1]


def over_nbd(place, export, seconds, *server):
    """The rate of fio's 4 KiB writes on one connection."""
    door = place.memory / "nbd.sock"
    uri = f"nbd+unix:///{export}?socket={door}"
    with Process(*server, log=os.devnull, env=os.environ | {"XDG_STATE_HOME": str(place.memory)}):
        wait_until(f"{server[0]} listens", lambda: machine.succeeds("nbdinfo", "--size", uri), 20)
        found = fio.call(fio.words(fio.nbd(uri), "randwrite", "4k", 64, "64M", seconds=seconds),
                         place.folder)
    door.unlink(missing_ok=True)
    return {"requests_per_s": found["write"]["iops"]}


def kinds_of(flags):
    return itertools.product(flags.only, WAYS, SIZES)


def measured(program, cores, flags, place):
    """Requests a second: of modes by cores, way and size; of NBD by server."""
    rates, nbd = Rounds(), Rounds()
    # Servers with nothing behind them, by name: their export and command.
    door, null = place.memory / "nbd.sock", ["--", EXAMPLES / "null", "64M"]
    ours = ["null", flags.binary, "run", "--name", "null", "--door", f"nbd=unix:{door}", "--option"]
    servers = {"nbdkit null": ["", "nbdkit", "-f", "-U", door, "null", "64M"],
               "sawmill run, plain": [*ours, "mode=plain", *null],
               "sawmill run, batch": [*ours, "mode=batch", *null]}
    for number in range(flags.rounds):
        for count, (mode, *request) in itertools.product(cores, kinds_of(flags)):
            mode_only, *how = mode.split(", ")
            memory = (4 if "4 MiB" in how else 32) * MIB
            first = ",".join(map(str, sorted(os.sched_getaffinity(0))[:count]))
            output = run("taskset", "--cpu-list", first, program, mode_only, *request, count,
                       flags.seconds, int("tied" in how), memory)
            rates.keep(number, (count, *request), mode, json.loads(output))
        for name, (export, *server) in servers.items():
            nbd.keep(number, None, name, over_nbd(place, export, flags.seconds, *server))
    return rates, nbd


def page_of(rates, nbd, cores):
    rows = [[mode, f"{way} {size // KIB} KiB", *(f"{rate:,.0f}" for rate in each),
             f"{each[-1] * size / 1e9:.2f}", f"{each[-1] / cores[-1]:,.0f}",
             f"{each[-1] / each[0]:.2f}"]
            for (mode, way, size), each in rates.items()]
    head = [f"{count} core{'s' * (count > 1)}, requests/s" for count in cores]
    head = ["mode", "request", *head, "GB/s", "per core", f"{cores[-1]} to 1"]
    beside = [[name, f"{nbd.median(name, None, 'requests_per_s'):,.0f}"] for name in nbd.names()]
    beside = page.table(["NBD, one connection, fio", "4 KiB writes/s at depth 64"], beside)
    return PAGE.format(rates=page.table(head, rows), nbd=beside)


@cli.script
def main():
    flags = cli.parse(__doc__, rounds=5, seconds=2.0, only={"modes": MODES}, binary=cli.SAWMILL,
                      work=cli.TEMPORARY)
    most = len(os.sched_getaffinity(0))
    cores = [count for count in (1, 2, 4, 8, 16, 32) if count <= most]
    with temporary_place(flags.work) as place:
        found, nbd = measured(built(), cores, flags, place)
    rates = {(mode, *request): [found.median(mode, (count, *request), "requests_per_s")
                                for count in cores] for mode, *request in kinds_of(flags)}
    head = ""
    if flags.page:
        image = flags.page.with_suffix(".svg")
        groups = [((mode.replace(", tied", " tied").replace(", 4 MiB", " 4M"),
                    f"{way} {size // KIB}K"), each)
                  for (mode, way, size), each in rates.items() if mode != "copy"]
        page.bars(image, f"requests/s; a bar for 1 to {cores[-1]} cores", groups)
        head = (f"# A null driver and more cores\n\n`bench/scaling.py --rounds {flags.rounds} "
                f"--seconds {flags.seconds:g}`, medians, {most} cores.\n\n"
                f"![chart]({image.name})\n\n")
    page.write(flags.page, head + page_of(rates, nbd, cores),
               {"modes": found.rows("cores", "way", "bytes_per_request"), "nbd": nbd.rows()})
