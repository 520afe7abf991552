#!/usr/bin/env python3
"""A link pulled and put back under fio verify, again and again: no error, no wrong byte, how long users wait.

    bench/pull.py [--pulls 50] [--links 2] [--carriers udp,tcp,eth] [--page FILE]

Two network namespaces with --links veth pairs. `sawmill target memory:` in one, `sawmill attach --nbd`
over all links in the other, sealed; fio writes and verifies there. One link after the other is taken down
at the target's end, left down for 0.3 s, and put up again; with `--links 1` nothing is left meanwhile.
fio must end without an error. The stall is the longest that any request of fio took. Needs root.
"""

import argparse
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
SAWMILL = REPOSITORY / "target/release/sawmill"
SPACES = ("pull-a", "pull-b")
SIZE_BYTES = 32 << 20
PATIENCE_S = 120
DOWN_S = 0.3


def run(*words):
    subprocess.run([str(word) for word in words], check=True, capture_output=True)


class Wires:
    """The namespaces and their cables."""

    def __init__(self, count):
        self.count = count

    def __enter__(self):
        self.__exit__()
        for space in SPACES:
            run("ip", "netns", "add", space)
            run("ip", "-n", space, "link", "set", "lo", "up")
        for index in range(self.count):
            peer = ("peer", "name", f"w{index}", "netns", SPACES[1])
            run("ip", "-n", SPACES[0], "link", "add", f"w{index}", "type", "veth", *peer)
            for end, space in enumerate(SPACES, 1):
                run("ip", "-n", space, "addr", "add", f"10.78.{index}.{end}/24", "dev", f"w{index}")
                run("ip", "-n", space, "link", "set", f"w{index}", "mtu", 9000, "up")
        return self

    def __exit__(self, *_):
        for space in SPACES:
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)

    def addresses(self, carrier):
        one = "eth:w{0}" if carrier == "eth" else carrier + ":10.78.{0}.1"
        return ",".join(one.format(index) for index in range(self.count))

    def pull(self, index):
        run("ip", "-n", SPACES[0], "link", "set", f"w{index}", "down")
        # The time itself is the fault.
        time.sleep(DOWN_S)
        run("ip", "-n", SPACES[0], "link", "set", f"w{index}", "up")


class Ends:
    """A target and an attachment in two namespaces."""

    def __init__(self, wires, carrier, folder):
        self.folder, self.processes = folder, []
        key = folder / "key"
        run(SAWMILL, "link", "key", key)
        listen = wires.addresses(carrier)
        self.start(0, "target", f"memory:{SIZE_BYTES}", "--listen", listen, "--key-file", key)
        nbd = ("--nbd", f"unix:{folder}/nbd.sock")
        self.start(1, "attach", f"link:{listen}/memory", "--key-file", key, *nbd)

    def start(self, end, *words):
        environment = os.environ | {"XDG_STATE_HOME": str(self.folder / f"state{end}")}
        command = ["ip", "netns", "exec", SPACES[end], SAWMILL, *words, "--json"]
        log = open(self.folder / f"log{end}", "wb")
        pipes = {"stdout": subprocess.PIPE, "stderr": log, "text": True, "env": environment}
        process = subprocess.Popen([str(word) for word in command], **pipes)
        self.processes.append(process)
        for line in process.stdout:
            if json.loads(line).get("event") == "ready":
                return
        sys.exit(f"{words[0]} did not start; see {log.name}")

    def end(self):
        for process in reversed(self.processes):
            process.send_signal(signal.SIGTERM)
            if process.wait(PATIENCE_S) != 0:
                sys.exit(f"an end did not end in order; see {self.folder}")


def load(folder, runtime_s):
    uri = f"nbd+unix:///?socket={folder}/nbd.sock"
    words = ["nbdinfo", "--list", "--json", uri]
    exports = subprocess.run(words, check=True, capture_output=True, text=True)
    name = json.loads(exports.stdout)["exports"][0]["export-name"]
    uri = f"nbd+unix:///{name}?socket={folder}/nbd.sock"
    words = ["fio", "--name=load", "--ioengine=nbd", f"--uri={uri}", "--rw=randrw", "--bsrange=4k-64k"]
    words += ["--iodepth=8", f"--size={SIZE_BYTES}", "--time_based", f"--runtime={runtime_s}"]
    words += ["--verify=crc32c", "--verify_backlog=256", "--rate=20m,20m", "--output-format=json"]
    words += ["--verify_state_save=0"]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def judged(fio):
    """The longest request of a load that ended, in ms."""
    text, _ = fio.communicate(timeout=PATIENCE_S)
    if fio.returncode != 0 or "{" not in text:
        sys.exit("fio met an error or a wrong byte:\n" + text[-2000:])
    job = json.loads(text[text.index("{"):])["jobs"][0]
    if job["error"] != 0:
        sys.exit(f"fio met error {job['error']}")
    return max(job[way]["clat_ns"]["max"] for way in ("read", "write")) / 1e6


def measure(carrier, links, pulls):
    folder = pathlib.Path(tempfile.mkdtemp(prefix="sawmill-pull-"))
    with Wires(links) as wires:
        ends = Ends(wires, carrier, folder)
        quiet = judged(load(folder, 3))
        longest, done = 0.0, 0
        while done < pulls:
            fio = load(folder, 20)
            while done < pulls and fio.poll() is None:
                wires.pull(done % links)
                done += 1
                time.sleep(DOWN_S)
            longest = max(longest, judged(fio))
        ends.end()
    shutil.rmtree(folder)
    return quiet, longest


def main():
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("--pulls", type=int, default=50)
    parser.add_argument("--links", default="1,2")
    parser.add_argument("--carriers", default="udp,tcp,eth")
    parser.add_argument("--page", type=pathlib.Path)
    options = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("bench/pull.py: it makes network namespaces: run it as root")
    rows = [["carrier", "links", "undisturbed ms", "pulls", "longest ms"], ["---"] * 5]
    for carrier in options.carriers.split(","):
        for links in map(int, options.links.split(",")):
            quiet, longest = measure(carrier, links, options.pulls)
            row = [carrier, links, f"{quiet:.1f}", options.pulls, f"{longest:.1f}"]
            rows.append([str(cell) for cell in row])
            print("  ".join(rows[-1]), flush=True)
    if options.page:
        table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
        head = "# A link pulled and put back under fio verify"
        how = f"`bench/pull.py --pulls {options.pulls}`: every {DOWN_S} s a link is taken down for as long;"
        how += " with one link nothing is left meanwhile.\n"
        how += "No error, no wrong byte. Longest request of fio, in ms."
        options.page.write_text(f"{head}\n\n{how}\n\n{table}\n")


if __name__ == "__main__":
    main()
