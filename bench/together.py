#!/usr/bin/env python3
"""What to fetch beside a cold read: frames written together with it, or frames next to it on the
disk. Recorded requests, played over a model of the map.

    SAWMILL_TRACES=FOLDER bench/together.py --page docs/measurements/together.md

The model: an image lies in the log in the order of its addresses. Writes are collected into
segments of 8 MiB, or of five seconds, each sorted by address; a frame is 64 KiB of a segment. After
half of the requests the cache is emptied, and the reads of the other half are counted. The cache
gives up what was not used for longest. Garbage collection, which would move data by address, is
left out.

FOLDER is that of `bench/traces.py`. Not here: reads that follow each other, which the engine
recognizes by their addresses (`bench/cold.py`).
"""

import os
import struct
import subprocess
from collections import OrderedDict, deque
from pathlib import Path

from harness import MIB, Unfit, cli, log, page

BLOCK, FRAME_BLOCKS, SEGMENT_BLOCKS = 4096, 16, 2048
SEGMENT_AGE_S = 5
READ, WRITE = "read", "write"


def lines(data):
    return data.decode("latin1").splitlines()


def blkreplay(data):
    for line in lines(data):
        words = [word.strip() for word in line.split(";")]
        if len(words) > 3 and words[3] in ("R", "W"):
            yield (float(words[0]), words[3] == "W", 0, int(words[1]) * 512, int(words[2]) * 512)


def vscsi(data):
    for _, length, _, command, _, sector, micros in struct.iter_unpack("<IIIHHQQ", data):
        if command in (0x28, 0x2A, 0x88, 0x8A):
            yield micros / 1e6, command in (0x2A, 0x8A), 0, sector * 512, length


def ascii_lines(unit_s, sector):
    def read(data):
        for line in lines(data):
            words = line.split()
            if len(words) > 4:
                yield (float(words[0]) * unit_s, int(words[4]) & 1 == 0, int(words[1]),
                       int(words[2]) * sector, int(words[3]) * sector)
    return read


TRACES = {
    "linux-mysql.load": ("MySQL", blkreplay),
    "cloudPhysicsIO.vscsi": ("a virtual machine, two hours", vscsi),
    "umass-financial1-head.ascii": ("OLTP", ascii_lines(1e-9, 512)),
    "msr-cut-rw20_80.105": ("a server's volume", ascii_lines(1e-3, 1)),
    "msr-cut-rw40_60.1370": ("a server's volume", ascii_lines(1e-3, 1)),
}
# What is fetched with a miss: by what, how many frames, and whether only where misses cluster.
WAYS = {
    "nothing": (None, 0, False),
    "3 written together": ("log", 3, False),
    "3 next by address": ("address", 3, False),
    "15 written together": ("log", 15, False),
    "15 next by address": ("address", 15, False),
    "3 written together, where misses cluster (the engine)": ("log", 3, True),
    "3 next by address, where misses cluster": ("address", 3, True),
}
CLUSTER_FRAMES, MISSES_KEPT = 8, 8


class Disk:
    """Where each block lies: in an image, or in a segment of the log."""

    def __init__(self):
        self.places, self.open, self.since, self.segments = {}, set(), 0.0, 0
        # Blocks of each segment, in their order.
        self.contents = {}

    def write(self, at_s, block):
        if self.open and (len(self.open) >= SEGMENT_BLOCKS or at_s - self.since > SEGMENT_AGE_S):
            self.seal()
        if not self.open:
            self.since = at_s
        self.open.add(block)

    def seal(self):
        self.segments += 1
        self.contents[self.segments] = blocks = sorted(self.open)
        for index, block in enumerate(blocks):
            self.places[block] = (self.segments, index)
        self.open = set()

    def frame(self, block):
        """The frame of a block; none while it is only in the journal."""
        if block in self.open:
            return None
        segment, index = self.places.get(block) or (("image", block // SEGMENT_BLOCKS),
                                                    block % SEGMENT_BLOCKS)
        return segment, index // FRAME_BLOCKS

    def frames_of(self, segment):
        blocks = SEGMENT_BLOCKS if isinstance(segment, tuple) else len(self.contents[segment])
        return -(-blocks // FRAME_BLOCKS)


class Cache:
    """Frames, each with whether a read has used it."""

    def __init__(self, frames_max):
        self.frames, self.frames_max = OrderedDict(), frames_max

    def use(self, frame):
        if frame not in self.frames:
            return False
        self.frames[frame] = True
        self.frames.move_to_end(frame)
        return True

    def put(self, frame, is_used):
        self.frames[frame] = is_used
        while len(self.frames) > self.frames_max:
            self.frames.popitem(last=False)


def beside(disk, cache, way, block, frame):
    """The frames to fetch with a miss that ends with this block."""
    by, count, _ = way
    if by == "log":
        segment, number = frame
        wanted = [(segment, number + step) for step in range(1, count + 1)]
        found = [one for one in wanted if one[1] < disk.frames_of(segment)]
    else:
        found = []
        for step in range(1, count * FRAME_BLOCKS + 1):
            one = disk.frame(block + step)
            if one and one != frame and one not in found:
                found.append(one)
            if len(found) == count:
                break
    return [one for one in found if one not in cache.frames]


def near(way, block, frame, misses):
    """Whether misses cluster around this one, as the way sees it."""
    by, _, is_clustered = way
    if not is_clustered:
        return True
    if by == "log":
        return any(one[0] == frame[0] and abs(one[1] - frame[1]) <= CLUSTER_FRAMES
                   for one, _ in misses)
    return any(abs(other - block) <= CLUSTER_FRAMES * FRAME_BLOCKS for _, other in misses)


def play(requests, way, cache_bytes):
    """Reads, those that waited, frames fetched for them and beside them."""
    disk = Disk()
    cache = Cache(cache_bytes // (BLOCK * FRAME_BLOCKS))
    misses = deque(maxlen=MISSES_KEPT)
    found = {"reads": 0, "waited": 0, "needed": 0, "beside": 0}
    for number, (at_s, is_write, blocks) in enumerate(requests):
        if is_write:
            for block in blocks:
                disk.write(at_s, block)
            continue
        if number < len(requests) // 2:
            continue
        missed = {}
        for block in blocks:
            frame = disk.frame(block)
            if frame and not cache.use(frame):
                missed[frame] = block
        found["reads"] += 1
        found["waited"] += bool(missed)
        found["needed"] += len(missed)
        for frame, block in missed.items():
            cache.put(frame, True)
            if way[0] and near(way, block, frame, misses):
                for one in beside(disk, cache, way, block, frame):
                    cache.put(one, False)
                    found["beside"] += 1
            misses.append((frame, block))
    return found


def requests_of(path, read):
    data = subprocess.run(["zstd", "-dc", path], check=True, stdout=subprocess.PIPE).stdout \
        if path.suffix == ".zst" else path.read_bytes()
    found, began = [], None
    for at_s, is_write, device, address, length in sorted(read(data), key=lambda one: one[0]):
        began = at_s if began is None else began
        first = (device << 40) + address // BLOCK
        last = (device << 40) + (address + max(length, 1) - 1) // BLOCK
        found.append((at_s - began, is_write, range(first, last + 1)))
    return found


PAGE = """# What to fetch beside a cold read

LSVD fetches what was written together with a block that is missed (section 3.2 of the paper). \
Here that is compared with what lies next to it on the disk, over recorded requests (whose they \
are: [traces](traces.md)). A model, described in the head of the script; a cache of {cache} MiB, \
empty after half of the requests. *Waited* is the share of the reads that waited for the store. \
*Saved* is how many waits each fetched MiB saved, beside fetching nothing more.

There is no recording of a boot among these traces. What a boot reads is recorded by \
`sawmill boot-set` instead of guessed.

{table}
"""


@cli.script
def main():
    flags = cli.parse(__doc__, ("--cache", 256, "size of the cache, MiB"),
                      only={"traces": TRACES})
    folder = Path(os.environ.get("SAWMILL_TRACES", ""))
    if "SAWMILL_TRACES" not in os.environ or not folder.is_dir():
        raise Unfit("SAWMILL_TRACES must name a folder of traces")
    rows, raw = [], []
    for name in flags.only:
        path = next((path for path in (folder / name, folder / f"{name}.zst") if path.exists()),
                    None)
        if not path:
            log(f"{name} is not there")
            continue
        what, read = TRACES[name]
        requests = requests_of(path, read)
        plain = None
        for title, way in WAYS.items():
            found = play(requests, way, flags.cache * MIB)
            raw.append({"trace": name, "way": title, **found})
            log(raw[-1])
            plain = plain or found
            more = found["needed"] + found["beside"] - plain["needed"]
            saved = plain["waited"] - found["waited"]
            mib = BLOCK * FRAME_BLOCKS / MIB
            rows.append([f"{name} ({what})" if title == "nothing" else "", title,
                         f"{found['reads']:,}",
                         f"{100 * found['waited'] / max(found['reads'], 1):.1f} %",
                         f"{(found['needed'] + found['beside']) * mib:,.0f}",
                         f"{saved / (more * mib):.2f}" if more > 0 else "–"])
    table = page.table(["trace", "beside a miss", "reads", "waited", "fetched, MiB",
                        "saved a MiB"], rows, range(2, 6))
    page.write(flags.page, PAGE.format(cache=flags.cache, table=table), raw)
