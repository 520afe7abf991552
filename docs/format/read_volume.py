#!/usr/bin/env python3
"""Reads a volume by these pages alone: `read_volume.py STORE ID IMAGE` writes what a store in a
folder has of it. Not here: names, ancestors of a clone, rollbacks, replicas, the journal."""

import os
import sys
from struct import unpack_from

from read_segment import crc32c, data_of, header_of, need

STORE, VOLUME, IMAGE = sys.argv[1:4]
# By kind: the newest version that the pages describe.
VERSIONS = {3: 5, 4: 2}


def get(key):
    path = os.path.join(STORE, VOLUME, key)
    return open(path, "rb").read() if os.path.exists(path) else b""


def checked(key, kind, number):
    found = get(key)
    need(len(found) > 56 and unpack_from("<4sH", found) == (b"SAWM", kind), key)
    need(1 <= unpack_from("<H", found, 6)[0] <= VERSIONS[kind], f"{key}: version")
    need(unpack_from("<I", found, len(found) - 4)[0] == crc32c(found[:-4]), f"{key}: checksum")
    need((found[16:32].hex(), unpack_from("<Q", found, 48)[0]) == (VOLUME, number),
         f"{key}: identity")
    return found


def segment_of(sequence):
    found = get(f"seg/{sequence % 256:02x}/{sequence:020}")
    header = header_of(found) if found else b""
    need(not header or (header[16:32].hex(), unpack_from("<Q", header, 48)[0])
         == (VOLUME, sequence), f"segment {sequence}: identity")
    return header, found


def extents_of(found):
    """Of a map part: first byte, the byte after the last, sequence, data offset."""
    numbers, shift = [0], 0
    for byte in found[80:-4]:
        numbers[-1] |= (byte & 127) << shift
        shift = shift + 7 if byte & 128 else 0
        numbers += [] if byte & 128 else [0]
    (end,), sequence, offset = unpack_from("<Q", found, 72), 0, 0
    for gap, length, sequence_step, offset_step in zip(*[iter(numbers[:-1])] * 4):
        start, end = end + gap, end + gap + length
        sequence += sequence_step >> 1 ^ -(sequence_step & 1)
        offset += offset_step >> 1 ^ -(offset_step & 1)
        yield start, end, sequence, offset
        offset += length


def without(extents, start, end):
    before = [(a, min(b, start), s, o) for a, b, s, o in extents if a < start]
    return before + [(max(a, end), b, s, o + max(a, end) - a) for a, b, s, o in extents if b > end]


def apply(extents, header, sequence):
    count, frames = unpack_from("<II", header, 136)
    for index in range(count):
        start, length, offset, kind = unpack_from("<QQIB", header, 160 + 24 * index)
        pieces = [(start, start + length)]
        if header[120] == 3:
            old, old_offset = unpack_from("<QI", header, 160 + 24 * count + 8 * frames + 16 * index)
            pieces = [(max(a, start), min(b, start + length)) for a, b, s, o in extents
                      if s == old and o - a == old_offset - start
                      and a < start + length and b > start]
        for a, b in pieces:
            extents = without(extents, a, b)
            extents += [(a, b, sequence, offset + a - start)] if kind == 1 else []
    return extents


def stored(root):
    """The size and the extents at the end of the log."""
    number, epoch, _, sequence, position = unpack_from("<QQQQQ", root, 48)
    size, segments, parts, kept = unpack_from("<Q4xIII", root, 96)
    number = unpack_from("<Q", root, 144)[0] or number
    need(not kept or unpack_from("<I", root, 160 + 56 * segments + 48 * parts + 20)[0] == 0,
         "choice: a clone")
    extents, whole = [], {}
    for index in range(parts):
        group, written, put = unpack_from("<QQ16s", root, 160 + 56 * segments + 48 * index)
        found = extents_of(checked(f"map/{written:020}-{put.hex()}/{group:08x}", 4, written))
        if group >> 63:
            for start, end, of, offset in found:
                if whole.get(start >> 34, 0) < written:
                    extents = without(extents, start, end)
                    extents += [(start, end, of, offset)] if of else []
        else:
            extents, whole[group] = extents + list(found), written
    while (header := (got := segment_of(sequence))[0]):
        epoch_of, = unpack_from("<Q", header, 56)
        checkpoint, start, end = unpack_from("<QQQ", header, 80)
        if header[120] == 2:
            need(epoch_of > epoch, f"fence {sequence}: epoch")
            epoch, size_of = epoch_of, unpack_from("<Q", header, 152)[0]
            size = size_of if size_of and checkpoint >= number else size
        else:
            need((epoch_of, start) == (epoch, position), f"segment {sequence}: epoch or position")
            position = end
            need(header[120] != 4 or data_of(got[1], header, 1, 160)[0] < 4, "choice: a rollback")
            extents = apply(extents, header, sequence)
        sequence, = unpack_from("<Q", header, 112)
    for later in filter(None, (segment_of(sequence + 1 + i)[0] for i in range(64))):
        (later_epoch,), (through,) = unpack_from("<Q", later, 56), unpack_from("<Q", later, 72)
        need(later_epoch <= epoch and through < sequence, f"segment {sequence}: it is gone")
    return size, extents


def main():
    number = max(os.listdir(os.path.join(STORE, VOLUME, "checkpoint")))
    size, extents = stored(checked(f"checkpoint/{number}", 3, int(number)))
    with open(IMAGE, "wb") as image:
        image.truncate(size)
        for sequence in {extent[2] for extent in extents}:
            header, found = segment_of(sequence)
            extent_count, frame_count = unpack_from("<II", header, 136)
            data = data_of(found, header, frame_count, 160 + 24 * extent_count)
            for start, end, of, offset in extents:
                if of == sequence:
                    image.seek(start)
                    image.write(data[offset : offset + end - start])


if __name__ == "__main__":
    main()
