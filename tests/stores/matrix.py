#!/usr/bin/env python3
"""Which stores keep two writers apart? Other people's S3 servers before the real `sawmill doctor`.

    tests/stores/matrix.py [--runs N] [SERVER...]

Starts each server on the loopback with a fresh folder, runs `sawmill doctor` on it N times (20 by
default), prints a table of servers and checks, and asserts: an honest server passes every check of
every run; the dishonest one is found out in every run by the races (and by them alone), with
advice, and `create` and `serve` refuse it. moto looks and makes in two steps without a lock, but
quickly: a few races have several winners, most do not, so its races are shown and not asserted.
Exit code 0 only if all of that holds.

A server dies with this program however it ends: the kernel sees to it. `tests/setup/prepare.sh
stores` builds the servers. Not here: our own small dishonest server, which `make test` uses
(tests/tests/stores/dishonest_store.rs).
"""

import argparse
import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PREPARED = ROOT / ".prepared"
SAWMILL = Path(os.environ.get("SAWMILL_BINARY", ROOT / "target/release/sawmill"))
BUCKET = "timber"
USER, SECRET = "sawmill-test", "sawmill-test-secret"
READY_S = 60
RACES = {
    "let one of many puts win (conditional create)",
    "let one of many interleaved puts win (conditional create)",
}
INTERLEAVED = "let one of many interleaved puts win (conditional create)"
REFUSED = 5


def minio(address, folder):
    (folder / BUCKET).mkdir()
    return [PREPARED / "bin/minio", "server", "--quiet", "--address", address, folder]


def versitygw(address, folder):
    (folder / BUCKET).mkdir()
    return [PREPARED / "bin/versitygw", "--port", address, "--access", USER, "--secret", SECRET,
            "--quiet", "posix", folder]


def gofakes3(address, folder):
    return [PREPARED / "bin/gofakes3", "-host", address, "-backend", "memory",
            "-initialbucket", BUCKET]


def moto(address, folder):
    host, port = address.split(":")
    return [PREPARED / "moto/bin/moto_server", "-H", host, "-p", port]


def s3s_fs(address, folder):
    (folder / BUCKET).mkdir()
    host, port = address.split(":")
    return [PREPARED / "bin/s3s-fs", "--host", host, "--port", port, "--access-key", USER,
            "--secret-key", SECRET, folder]


# How a server does in races: it never lets two win, it seldom does, it always does.
HONEST, SELDOM, DISHONEST = "honest", "seldom not", "dishonest"
SERVERS = [
    ("minio", minio, HONEST),
    ("versitygw", versitygw, HONEST),
    ("gofakes3", gofakes3, HONEST),
    ("moto", moto, SELDOM),
    ("s3s-fs", s3s_fs, DISHONEST),
]


class Broken(Exception):
    """Something is not as it must be."""


def die_with_parent():
    """In the child, before the server: it is killed when this program goes, whatever ends it."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def free_address():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return "127.0.0.1:%d" % listener.getsockname()[1]


@contextlib.contextmanager
def running(name, command_of):
    """A server with a folder of its own; gives its address and the folder."""
    with tempfile.TemporaryDirectory(prefix=f"sawmill-{name}-") as folder:
        folder = Path(folder)
        address, data, log = free_address(), folder / "data", folder / "log"
        data.mkdir()
        environment = dict(os.environ, MINIO_ROOT_USER=USER, MINIO_ROOT_PASSWORD=SECRET,
                           MINIO_BROWSER="off", MINIO_UPDATE="off")
        with open(log, "wb") as output:
            server = subprocess.Popen([str(word) for word in command_of(address, data)],
                                      env=environment, stdin=subprocess.DEVNULL, stdout=output,
                                      stderr=output, cwd=folder, preexec_fn=die_with_parent)
        try:
            wait_until_ready(name, server, address, log)
            yield address, data
        finally:
            server.kill()
            server.wait()


def wait_until_ready(name, server, address, log):
    """Waits until it answers HTTP, whatever it answers, and the bucket is there."""
    deadline = time.monotonic() + READY_S
    while True:
        with contextlib.suppress(OSError):
            # moto keeps buckets in memory and takes a request without a signature; for the others
            # it is a question like any other.
            method = "PUT" if name == "moto" else "GET"
            request = urllib.request.Request(f"http://{address}/{BUCKET}", method=method)
            try:
                urllib.request.urlopen(request, timeout=5).close()
                return
            except urllib.error.HTTPError as answer:
                if answer.code < 500:
                    return
        if server.poll() is not None or time.monotonic() > deadline:
            raise Broken(f"{name} did not get ready: {log.read_text(errors='replace')[-500:]}")
        time.sleep(0.02)


def environment_of(address, home):
    """What makes the server reachable, and a home in which nothing is yet."""
    return dict(os.environ, AWS_ACCESS_KEY_ID=USER, AWS_SECRET_ACCESS_KEY=SECRET,
                AWS_REGION="us-east-1", AWS_ENDPOINT_URL=f"http://{address}", AWS_ALLOW_HTTP="true",
                HOME=str(home), XDG_STATE_HOME=f"{home}/state", XDG_DATA_HOME=f"{home}/data",
                XDG_RUNTIME_DIR=f"{home}/run", XDG_CACHE_HOME=f"{home}/cache",
                SAWMILL_STORE=f"s3://{BUCKET}/yard")


def sawmill(environment, *words):
    return subprocess.run([str(SAWMILL), *words], env=environment, stdin=subprocess.DEVNULL,
                          capture_output=True, text=True)


def doctor(name, environment):
    """One run: what each check found. The exit code must agree."""
    result = sawmill(environment, "doctor", "--json")
    if result.returncode not in (0, 1):
        raise Broken(f"{name}: doctor ended with {result.returncode}: {result.stderr}")
    checks = json.loads(result.stdout)["store_checks"]
    if (result.returncode == 0) != all(check["ok"] for check in checks):
        raise Broken(f"{name}: the exit code {result.returncode} does not agree with the checks")
    return checks


def expect_refusal(name, what, result):
    """A refusal says what is wrong and what to do."""
    words = ["cannot fence a second writer", "had several winners", "sawmill doctor",
             "--no-fencing"]
    missing = [word for word in words if word not in result.stderr]
    if result.returncode != REFUSED or missing:
        raise Broken(f"{name}: {what} was to be refused with {words}; it ended with "
                     f"{result.returncode}: {result.stdout}{result.stderr}")


def check_refusals(name, environment, data):
    """A store that lets two win is refused by create,
    and by serve for a volume that is there already."""
    expect_refusal(name, "create", sawmill(environment, "create", "disk1", "--size", "16M"))
    result = sawmill(environment, "create", "disk2", "--size", "16M", "--no-fencing")
    if result.returncode != 0:
        raise Broken(f"{name}: create --no-fencing failed: {result.stderr}")
    expect_refusal(name, "serve",
                   sawmill(environment, "serve", "disk2", "--nbd", f"unix:{data}/nbd.sock"))


def judge(name, kind, runs):
    """The faults of a server's runs, as texts."""
    faults = []
    for number, checks in enumerate(runs, 1):
        failed = {check["name"] for check in checks if not check["ok"]}
        if (failed if kind == HONEST else failed - RACES):
            details = [check["detail"] for check in checks if not check["ok"]]
            faults.append(f"{name}: run {number} failed {sorted(failed)}: {details}")
        if kind == DISHONEST and INTERLEAVED not in failed:
            faults.append(f"{name}: run {number} was to fail in races of halves; "
                          f"it failed {sorted(failed)}")
        for check in checks:
            if not check["ok"] and not ("winner" in check["detail"]
                                        and "--no-fencing" in check["advice"]):
                faults.append(f"{name}: run {number}: no clear text: {check}")
    return faults


def print_table(results, took):
    names = list(results)
    checks = list(dict.fromkeys(check["name"] for runs in results.values() for run in runs
                                for check in run))
    width = max(map(len, checks), default=0)
    print("\nruns in which a check passed, of all runs")
    print(" " * width, *(f"{name:>12}" for name in names))
    for title in checks:
        cells = []
        for name in names:
            passed = Counter(check["ok"] for run in results[name] for check in run
                             if check["name"] == title)
            cells.append(f"{passed[True]}/{passed.total()}")
        print(title.ljust(width), *(f"{cell:>12}" for cell in cells))
    print("seconds for all runs".ljust(width), *(f"{took[name]:>12.1f}" for name in names))


def main():
    parser = argparse.ArgumentParser(description="Other people's S3 servers "
                                     "before `sawmill doctor`.")
    parser.add_argument("--runs", type=int, default=20, help="runs of doctor per server")
    parser.add_argument("servers", nargs="*", metavar="SERVER", help="these servers only")
    arguments = parser.parse_args()
    # A signal ends this program the ordinary way, so that folders go too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    results, took, faults = {}, {}, []
    for name, command_of, kind in SERVERS:
        if arguments.servers and name not in arguments.servers:
            continue
        print(f"{name}: {arguments.runs} runs", flush=True)
        results[name], began = [], time.monotonic()
        try:
            with running(name, command_of) as (address, data), \
                    tempfile.TemporaryDirectory() as home:
                environment = environment_of(address, home)
                for _ in range(arguments.runs):
                    results[name].append(doctor(name, environment))
                if kind == DISHONEST:
                    check_refusals(name, environment, data)
        except (Broken, OSError) as fault:
            faults.append(str(fault))
        took[name] = time.monotonic() - began
        faults.extend(judge(name, kind, results[name]))
    print_table(results, took)
    for fault in faults:
        print(f"FAILED: {fault}")
    if not results:
        print("FAILED: no such server")
    print(f"{len(results)} servers, {sum(map(len, results.values()))} runs, {len(faults)} faults")
    sys.exit(1 if faults or not results else 0)


if __name__ == "__main__":
    main()
