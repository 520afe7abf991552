"""Writes that overlap in flight, over several connections, at any byte: after each round every byte
is of one of the writes that cover it, and any two writes lie over each other the same way
everywhere they meet.

usage: overlapping.py URI SEED IMAGE    (IMAGE: where to leave what was read at the end)
"""

import random
import sys

import nbd

ROUNDS, WRITES = 60, 24
uri, seed, image_path = sys.argv[1], int(sys.argv[2]), sys.argv[3]
dice = random.Random(seed)

connections = []
for _ in range(4):
    handle = nbd.NBD()
    handle.connect_uri(uri)
    assert handle.can_multi_conn()
    connections.append(handle)
size = connections[0].get_size()
model = bytearray(size)


def settle(handle, cookie):
    while not handle.aio_command_completed(cookie):
        handle.poll(-1)


for round_number in range(ROUNDS):
    center = dice.randrange(size)
    writes = []
    for number in range(WRITES):
        start = max(0, min(size - 1, center + dice.randrange(-70000, 70000)))
        length = min(size - start, dice.choice([1, 100, 511, 4096, 5000, 65536, 131072]))
        fill = 1 + (round_number * WRITES + number) % 255
        payload = bytes([fill]) * length
        handle = dice.choice(connections)
        cookie = handle.aio_pwrite(nbd.Buffer.from_bytearray(bytearray(payload)), start)
        writes.append((start, start + length, fill, handle, cookie))
    for _, _, _, handle, cookie in writes:
        settle(handle, cookie)

    low = min(write[0] for write in writes)
    high = max(write[1] for write in writes)
    seen = [bytes(handle.pread(high - low, low)) for handle in connections]
    assert all(other == seen[0] for other in seen), f"round {round_number}: readers differ"
    seen = seen[0]

    # A sweep over the points where coverage changes:
    # between two of them every byte has the same candidates.
    points = sorted({low, high} | {p for write in writes for p in write[:2]})
    above = set()  # (a, b): where both were, a was seen
    for left, right in zip(points, points[1:]):
        covering = [n for n, write in enumerate(writes) if write[0] <= left and right <= write[1]]
        piece = seen[left - low : right - low]
        if not covering:
            assert piece == model[left:right], (
                f"round {round_number}: bytes outside every write changed at {left}"
            )
            continue
        assert len(set(piece)) == 1, f"round {round_number}: a mixture at {left}..{right}"
        winners = [n for n in covering if writes[n][2] == piece[0]]
        assert winners, f"round {round_number}: {left}..{right} is of no write that covers it"
        above.update((winners[0], other) for other in covering if other != winners[0])
    mixed = [pair for pair in above if pair[::-1] in above]
    assert not mixed, f"round {round_number}: writes {mixed[0]} lie over each other both ways"
    model[low:high] = seen
    if dice.randrange(4) == 0:
        dice.choice(connections).flush()

for handle in connections:
    whole = b"".join(bytes(handle.pread(1 << 20, at)) for at in range(0, size, 1 << 20))
    assert whole == model, "a reader sees another image at the end"
with open(image_path, "wb") as image:
    image.write(model)
for handle in connections:
    handle.shutdown()
print(f"{ROUNDS} rounds of {WRITES} overlapping writes, seed {seed}")
