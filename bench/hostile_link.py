#!/usr/bin/env python3
"""How long a hand-shake takes while somebody says recorded hellos again, by the thousand.

    bench/hostile_link.py [--rounds 5] [--binary PATH] [--page docs/measurements/hostile_link.md]     as root

Two network namespaces with a veth pair between them, removed at the end, and a relay before the client that
holds each packet back for half of the round trip. A target in one; in the other a client, and at another
address of the same interface a flood of the hellos of 40 clients, recorded at a socket that answers nothing.
The target has never answered one of them. A round is a client that is started, connects, opens an export and
reads from it; it gives up after 20 s.

Needs `cargo build --release -p sawmill-link --example link_bench`; `--binary` names another build of it.
"""

import argparse
import collections
import contextlib
import ctypes
import pathlib
import select
import socket
import statistics
import subprocess
import sys
import threading
import time

from link import BINARY, Wires, cpu_s, run

CLONE_NEWNET = 0x40000000
HELLOS, RTT_MS = 40, (50,)
# No flood; what kept everybody out before there were cookies; more than that.
RATES = (0, 1000, 3000)
TARGET, RELAY, THIEF, PORT = "10.96.0.1", "10.96.0.2", "10.96.0.3", 9700


def enter(space):
    """This thread's network is that of the namespace from now on."""
    with open(f"/run/netns/{space}", encoding="ascii") as handle:
        if ctypes.CDLL(None, use_errno=True).setns(handle.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {space}")


def in_thread(work):
    """Runs work in a thread of its own, which may enter a namespace; gives its result."""
    told = []
    thread = threading.Thread(target=lambda: told.append(work()))
    thread.start()
    thread.join()
    return told[0]


def client(wires, binary, at=RELAY):
    words = ["--to", f"udp:{at}", "--op", "read", "--bytes", 4096, "--depth", 1, "--seconds", 0.01]
    return wires.within(1, binary, "load", *words, stderr=subprocess.DEVNULL)


def recorded(wires, binary):
    """The first packet of each of some clients, which nobody answers."""

    def listen():
        enter(wires.spaces[0])
        hellos = []
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as heard:
            heard.bind((TARGET, PORT))
            heard.settimeout(10)
            for _ in range(HELLOS):
                with client(wires, binary, TARGET) as one:
                    hellos.append(heard.recv(2048))
                    one.kill()
                heard.setblocking(False)
                while True:
                    try:
                        heard.recv(2048)
                    except BlockingIOError:
                        break
                time.sleep(0.1)
                heard.settimeout(10)
        return list(dict.fromkeys(hellos))

    return in_thread(listen)


class Relay(threading.Thread):
    """Hands on what the client and the target say to each other, each time a while later."""

    def __init__(self, space, delay_s):
        super().__init__(daemon=True)
        self.space, self.delay_s, self.stops = space, delay_s, False

    def run(self):
        enter(self.space)
        front, back = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2))
        front.bind((RELAY, PORT))
        back.connect((TARGET, PORT))
        waiting, client_at = collections.deque(), None
        while not self.stops:
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
                    waiting.append((time.monotonic() + self.delay_s, ready is front, packet))


class Flood(threading.Thread):
    """Says the hellos again, so many a second, until it is told to stop."""

    def __init__(self, space, hellos, rate):
        super().__init__()
        self.space, self.hellos, self.rate = space, hellos, rate
        self.stops, self.said, self.took_s = False, 0, 0.0

    def run(self):
        enter(self.space)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as says:
            says.bind((THIEF, 0))
            says.setblocking(False)
            began = time.monotonic()
            while not self.stops:
                self.took_s = time.monotonic() - began
                while self.said < self.took_s * self.rate:
                    try:
                        says.sendto(self.hellos[self.said % len(self.hellos)], (TARGET, PORT))
                    except BlockingIOError:
                        pass
                    self.said += 1
                time.sleep(0.001)


def rounds(wires, binary, server, hellos, rate, count):
    """Seconds of each round, or None where the client gave up; what was said a second; the target's cores."""
    flood = Flood(wires.spaces[1], hellos, rate)
    flood.start()
    time.sleep(2)
    took, began, spent = [], time.monotonic(), cpu_s(server.pid)
    for _ in range(count):
        start = time.monotonic()
        with client(wires, binary) as one:
            is_open = one.stdout.readline().strip() == "begin"
            took.append(time.monotonic() - start if is_open else None)
            # It gives the export back.
            one.communicate()
    cores = (cpu_s(server.pid) - spent) / (time.monotonic() - began)
    flood.stops = True
    flood.join()
    return took, flood.said / flood.took_s if flood.took_s else 0, cores


def told(took):
    out = sum(one is None for one in took)
    within = [one for one in took if one is not None]
    if not within:
        return "-", f"0 of {out}"
    shown = f"{statistics.median(within) * 1000:.0f} ms, at most {max(within) * 1000:.0f} ms"
    return shown, f"{len(within)} of {len(within) + out}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--binary", type=pathlib.Path, default=BINARY)
    parser.add_argument("--page", type=pathlib.Path)
    asked = parser.parse_args()
    lines = ["| round trip | hellos a second | connected | start to first read | cores of the target |",
             "|---|---|---|---|---|"]
    for rtt_ms in RTT_MS:
        with Wires(1) as wires:
            run("ip", "-n", wires.spaces[1], "addr", "add", f"{THIEF}/24", "dev", "w0")
            hellos = recorded(wires, asked.binary)
            server = wires.within(0, asked.binary, "target", "--listen", f"udp:{TARGET}",
                                  "--device", f"null:{1 << 30}")
            if server.stdout.readline().strip() != "ready":
                raise OSError("the target did not start")
            relay = Relay(wires.spaces[1], rtt_ms / 2000)
            relay.start()
            for rate in RATES:
                took, said, cores = rounds(wires, asked.binary, server, hellos, rate, asked.rounds)
                shown, within = told(took)
                lines.append(f"| {rtt_ms} ms | {said:,.0f} | {within} | {shown} | {cores:.2f} |")
                print(lines[-1], file=sys.stderr, flush=True)
            relay.stops = True
            relay.join()
            server.kill()
            server.wait()
    text = "\n".join(lines)
    print(text)
    if asked.page:
        head = asked.page.read_text(encoding="utf-8").split("| round trip |")[0]
        asked.page.write_text(head + text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
