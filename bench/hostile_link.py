#!/usr/bin/env python3
"""How long a handshake takes while an attacker replays thousands of recorded hellos.

Two network namespaces with a veth pair between them, removed at the end, and a relay before the
client that holds each packet back for half of the round trip. A target in one; in the other a
client, and at another address of the same interface a flood of the hellos of 40 clients, recorded
at a socket that answers nothing. The target has never answered one of them. A round is a client
that is started, connects, opens an export and reads from it; it gives up after 20 s.

Needs `cargo build --release -p sawmill-link --example link_bench`; `--binary` names another build
of it. Not here: a simulated network of the same kind (`crates/link/tests/simulation/hostile.rs`).
"""

import collections
import concurrent.futures
import contextlib
import ctypes
import os
import select
import signal
import socket
import threading
import time
from statistics import median

from harness import EXAMPLES, GIB, Unfit, Wires, cli, page, run

CLONE_NEWNET = 0x40000000
HELLOS, RTT_MS = 40, 50
# No flood; the rate that locked out all clients before there were cookies; a higher rate.
RATES = ("0", "1000", "3000")
TARGET, RELAY, THIEF, PORT = "10.96.0.1", "10.96.0.2", "10.96.0.3", 9700


def enter(space):
    """Moves this thread into the network namespace."""
    with open(f"/run/netns/{space}", encoding="ascii") as handle:
        if ctypes.CDLL(None, use_errno=True).setns(handle.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {space}")


def client(wires, binary, at=RELAY):
    words = ["--to", f"udp:{at}", "--op", "read", "--bytes", 4096, "--depth", 1, "--seconds", 0.01]
    return wires.within(1, binary, "load", *words, log=os.devnull)


def recorded(wires, binary):
    """The first packets of some clients, left unanswered; enters a namespace."""
    enter(wires.spaces[0])
    hellos = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as buffered_input:
        buffered_input.bind((TARGET, PORT))
        for _ in range(HELLOS):
            buffered_input.settimeout(10)
            with client(wires, binary, TARGET) as one:
                hellos.append(buffered_input.recv(2048))
                one.end(signal.SIGKILL)
            buffered_input.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while buffered_input.recv(2048):
                    pass
            time.sleep(0.1)
    return list(dict.fromkeys(hellos))


@contextlib.contextmanager
def beside(work, *arguments):
    """Work in a thread of its own for as long as the `with` lasts:
    it gets an event that tells it to stop."""
    stops = threading.Event()
    thread = threading.Thread(target=work, args=(stops, *arguments))
    thread.start()
    try:
        yield
    finally:
        stops.set()
        thread.join()


def relay(stops, space, delay_s):
    """Forwards packets between client and target with a delay."""
    enter(space)
    front, back = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2))
    front.bind((RELAY, PORT))
    back.connect((TARGET, PORT))
    waiting, client_at = collections.deque(), None
    while not stops.is_set():
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, to_target, packet = waiting.popleft()
            with contextlib.suppress(OSError):
                back.send(packet) if to_target else front.sendto(packet, client_at)
        wait_s = min(0.05, waiting[0][0] - now) if waiting else 0.05
        for ready in select.select([front, back], [], [], wait_s)[0]:
            with contextlib.suppress(OSError):
                packet, where = ready.recvfrom(65536)
                client_at = where if ready is front else client_at
                waiting.append((time.monotonic() + delay_s, ready is front, packet))


def flood(stops, space, hellos, rate, rates):
    """Replays the hellos at this rate; `rates` gets the one that it reached."""
    enter(space)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.bind((THIEF, 0))
        sender.setblocking(False)
        count, began = 0, time.monotonic()
        while not stops.is_set():
            took_s = time.monotonic() - began
            while count < took_s * rate:
                with contextlib.suppress(BlockingIOError):
                    sender.sendto(hellos[count % len(hellos)], (TARGET, PORT))
                count += 1
            rates[:] = [count / max(took_s, 1e-9)]
            time.sleep(0.001)


def measure(wires, server, hellos, rate, flags):
    """The rounds beside one flood; who gives up has not connected."""
    took_ms, rates = [], []
    with beside(flood, wires.spaces[1], hellos, rate, rates):
        time.sleep(2)
        began, spent = time.monotonic(), server.threads_cpu_s()
        for _ in range(flags.rounds):
            start = time.monotonic()
            with client(wires, flags.binary) as one:
                with contextlib.suppress(Unfit):
                    one.expect("begin")
                    took_ms.append((time.monotonic() - start) * 1000)
                # It gives the export back.
                one.end(None)
        cores = (server.threads_cpu_s() - spent) / (time.monotonic() - began)
    return {"round_trip_ms": RTT_MS, "aim_hellos_per_s": rate, "hellos_per_s": rates[0],
            "rounds": flags.rounds, "connected_after_ms": took_ms, "target_cores": cores}


def row_of(found):
    took_ms = found["connected_after_ms"]
    took = f"{median(took_ms):.0f} ms, at most {max(took_ms):.0f} ms" if took_ms else "-"
    return [f"{RTT_MS} ms", f"{found['hellos_per_s']:,.0f}", f"{len(took_ms)} of {found['rounds']}",
            took, f"{found['target_cores']:.2f}"]


@cli.script
def main():
    flags = cli.parse(__doc__, rounds=5, only={"rates": RATES}, binary=EXAMPLES / "link_bench",
                      root=True)
    words = ["target", "--listen", f"udp:{TARGET}", "--device", f"null:{GIB}"]
    with Wires() as wires:
        run("ip", "-n", wires.spaces[1], "addr", "add", f"{THIEF}/24", "dev", "w0")
        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            hellos = threads.submit(recorded, wires, flags.binary).result()
        with wires.ready(0, flags.binary, *words) as server, \
                beside(relay, wires.spaces[1], RTT_MS / 2000):
            found = list(page.as_they_come(measure(wires, server, hellos, rate, flags)
                                           for rate in map(int, flags.only)))
    before, _ = page.around(flags.page, begin="| round trip |")
    head = ["round trip", "hellos a second", "connected", "start to first read",
            "cores of the target"]
    page.write(flags.page, before + page.table(head, map(row_of, found)), found)
