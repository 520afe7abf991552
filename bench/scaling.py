#!/usr/bin/env python3
"""How a device with a null driver grows with cores: batch layer and plain mode, in-process load; NBD beside.

    bench/scaling.py [--rounds 5] [--seconds 2] [--page docs/measurements/scaling.md]

The load, the host and the driver of one process may use one core, then two, up to all (taskset); a queue
and a loader for each core. The mode `copy` is the load without host and driver: what the cores can do at
most. Tied: with tie_queues=1. 4 MiB: of shared memory for a queue's writes, in chunks of 512 KiB, instead of
32: what is in flight then stays in caches. Rounds are interleaved, figures are medians. Beside them, one NBD
connection with fio: nbdkit's null plugin and `sawmill run` with the null example; and what the BUSE thesis
measured on its machines. Writes a table and a chart beside the page.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import tempfile
import time

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
RELEASE = REPOSITORY / "target/release"
MODES = ("copy", "batch", "batch, tied", "batch, tied, 4 MiB", "plain", "plain, tied")
WAYS, SIZES = ("write", "read"), (4096, 65536)
KINDS = [(mode, way, size) for mode in MODES for way in WAYS for size in SIZES]
# GB/s of 64 KiB requests: the BUSE thesis, tables 5.2 to 5.5. Null drivers behind the kernel, fio at depth 4
# with a job for each virtual CPU, m5zn instances of EC2.
THEIRS = """| their virtual CPUs | way | BUSE | NBD (nbdkit) | TCMU | BDUS |
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
    words = ["cargo", "bench", "-p", "sawmill-driver", "--bench", "scaling", "--no-run"]
    words += ["--message-format=json"]
    told = subprocess.run(words, check=True, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True).stdout
    artifacts = [json.loads(line) for line in told.splitlines()]
    found = [a["executable"] for a in artifacts if a.get("target", {}).get("name") == "scaling"]
    for package, what in (("sawmill", "--bins"), ("sawmill-driver", "--examples")):
        words = ["cargo", "build", "--quiet", "--release", "-p", package, what]
        subprocess.run(words, check=True, cwd=REPOSITORY)
    return found[-1]


def on_cores(count, words):
    """What a command prints that may use the first `count` cores."""
    cores = sorted(os.sched_getaffinity(0))[:count]
    pinned = ["taskset", "--cpu-list", ",".join(map(str, cores)), *map(str, words)]
    return subprocess.run(pinned, check=True, stdout=subprocess.PIPE, text=True).stdout


def over_nbd(server, uri, seconds):
    """Requests per second of 4 KiB writes by fio on one connection."""
    process = subprocess.Popen(server, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 20
        while subprocess.run(["nbdinfo", "--size", uri], capture_output=True).returncode != 0:
            assert time.monotonic() < deadline, f"{server[0]} does not listen"
            time.sleep(0.05)
        words = ["fio", "--name=x", "--ioengine=nbd", f"--uri={uri}", "--rw=randwrite", "--bs=4k"]
        words += ["--iodepth=64", "--size=64M", "--time_based", f"--runtime={seconds}"]
        words += ["--output-format=json"]
        told = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout
        return json.loads(told[told.index("{"):])["jobs"][0]["write"]["iops"]
    finally:
        process.terminate()
        process.wait()


def contestants(folder):
    """Servers with nothing behind them, by name."""
    socket = f"{folder}/nbd.sock"
    run = [str(RELEASE / "sawmill"), "run", "--name", "null", "--door", f"nbd=unix:{socket}", "--option"]
    null = ["--", str(RELEASE / "examples/null"), "64M"]
    ours = f"nbd+unix:///null?socket={socket}"
    return {
        "nbdkit null": (["nbdkit", "-f", "-U", socket, "null", "64M"], f"nbd+unix:///?socket={socket}"),
        "sawmill run, plain": ([*run, "mode=plain", *null], ours),
        "sawmill run, batch": ([*run, "mode=batch", *null], ours),
    }


def measured(program, cores, rounds, seconds):
    rates, nbd = {}, {}
    for _ in range(rounds):
        for count in cores:
            for kind in KINDS:
                mode, *how = kind[0].split(", ")
                memory = (4 if "4 MiB" in how else 32) << 20
                words = [program, mode, *kind[1:], count, seconds, int("tied" in how), memory]
                told = json.loads(on_cores(count, words))
                rates.setdefault((*kind, count), []).append(told["requests_per_s"])
        with tempfile.TemporaryDirectory() as folder:
            os.environ["XDG_STATE_HOME"] = folder
            for name, (server, uri) in contestants(folder).items():
                nbd.setdefault(name, []).append(over_nbd(server, uri, seconds))
                pathlib.Path(f"{folder}/nbd.sock").unlink(missing_ok=True)
    return tuple({key: statistics.median(all_) for key, all_ in kept.items()} for kept in (rates, nbd))


def table(rates, cores):
    head = ["mode", "request", *(f"{count} core{'s' * (count > 1)}, requests/s" for count in cores)]
    head += ["GB/s", "per core", f"{cores[-1]} to 1"]
    rows = [head, ["---"] * len(head)]
    for mode, way, size in KINDS:
        each = [rates[mode, way, size, count] for count in cores]
        growth = each[-1] / each[0]
        cells = [mode, f"{way} {size // 1024} KiB", *(f"{rate:,.0f}" for rate in each)]
        rows.append([*cells, f"{each[-1] * size / 1e9:.2f}", f"{each[-1] / cores[-1]:,.0f}", f"{growth:.2f}"])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def chart(rates, cores):
    """Bars of requests per second, a group for each kind."""
    kinds = [kind for kind in KINDS if kind[0] != "copy"]
    width, height = 90 * len(kinds) + 60, 260
    top = max(rates[*kind, count] for kind in kinds for count in cores)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height + 60}" '
             'font-family="sans-serif" font-size="11">']
    bar = 70 // len(cores)
    for group, kind in enumerate(kinds):
        left = 50 + 90 * group
        for place, count in enumerate(cores):
            tall = rates[*kind, count] / top * (height - 20)
            shade = 200 - 150 * place // max(1, len(cores) - 1)
            parts.append(f'<rect x="{left + place * bar}" y="{height - tall:.0f}" width="{bar - 2}" '
                         f'height="{tall:.0f}" fill="rgb({shade},{shade},{shade})"/>')
        mode, way, size = kind
        mode = mode.replace(", tied", " tied").replace(", 4 MiB", " 4M")
        parts.append(f'<text x="{left}" y="{height + 16}">{mode}</text>')
        parts.append(f'<text x="{left}" y="{height + 30}">{way} {size // 1024}K</text>')
    parts.append(f'<text x="4" y="14">{top:,.0f} requests/s; a bar for 1 to {cores[-1]} cores</text></svg>')
    return "\n".join(parts) + "\n"


def main():
    as_it_stands = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_it_stands)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2)
    parser.add_argument("--page", type=pathlib.Path)
    options = parser.parse_args()
    most = len(os.sched_getaffinity(0))
    cores = [count for count in (1, 2, 4, 8, 16, 32) if count <= most]
    rates, nbd = measured(built(), cores, options.rounds, options.seconds)
    beside = "\n".join(f"| {name} | {rate:,.0f} |" for name, rate in nbd.items())
    beside = f"| NBD, one connection, fio | 4 KiB writes/s at depth 64 |\n| --- | --- |\n{beside}\n"
    text = f"{table(rates, cores)}\n\n{beside}\n"
    text += "Not ours and not of this machine: GB/s of 64 KiB requests through a kernel to a null driver, "
    text += f"from the BUSE thesis (2021, tables 5.2 to 5.5).\n\n{THEIRS}"
    print(text)
    if options.page:
        image = options.page.with_suffix(".svg")
        image.write_text(chart(rates, cores))
        command = f"`bench/scaling.py --rounds {options.rounds} --seconds {options.seconds:g}`"
        head = f"# A null driver and more cores\n\n{command}, medians, {most} cores.\n\n"
        head += f"![chart]({image.name})\n\n"
        options.page.write_text(head + text)


if __name__ == "__main__":
    main()
