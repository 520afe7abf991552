#!/usr/bin/env python3
"""Reads one segment object by segment.md alone: `read_segment.py FILE` verifies it,
prints what it writes."""

import struct
import sys

TABLE = []
for byte in range(256):
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    TABLE.append(byte)


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def need(condition, what):
    if not condition:
        sys.exit(f"{sys.argv[1]}: bad {what}")


def header_of(segment):
    need(len(segment) >= 164, "size")
    magic, kind, version, length = struct.unpack_from("<4sHHQ", segment)
    need(magic == b"SAWM" and kind == 2, "preamble")
    need(version in (1, 2), "version")
    need(164 <= length <= len(segment), "length")
    need(struct.unpack_from("<I", segment, length - 4)[0] == crc32c(segment[: length - 4]),
         "header checksum")
    return segment[:length]


def data_of(segment, header, frame_count, frames_at):
    place = header[16:32] + header[48:64]  # volume_id, sequence, epoch
    data = b""
    for frame in range(frame_count):
        body_offset, stored_bytes = struct.unpack_from("<II", header, frames_at + 8 * frame)
        start = len(header) + body_offset
        stored = segment[start : start + stored_bytes]
        need(len(stored) == stored_bytes, f"frame {frame} size")
        crc, data_bytes, payload_bytes, codec = struct.unpack_from("<IIIB", stored)
        need(crc == crc32c(place + struct.pack("<I", frame) + stored[4:]),
             f"frame {frame} checksum")
        need(codec == 0 and data_bytes == payload_bytes == stored_bytes - 16, f"frame {frame} head")
        data += stored[16:]
    return data


def main():
    with open(sys.argv[1], "rb") as file:
        segment = file.read()
    header = header_of(segment)
    sequence, epoch = struct.unpack_from("<QQ", header, 48)
    position_start, position_end = struct.unpack_from("<QQ", header, 88)
    segment_kind, data_bytes, extent_count, frame_count = struct.unpack_from("<B7xQII", header, 120)
    (version,) = struct.unpack_from("<H", header, 6)
    (size_bytes,) = struct.unpack_from("<Q", header, 152)
    need(size_bytes == 0 if version == 1 else segment_kind == 2 and size_bytes > 0, "size_bytes")
    origins_at = 160 + 24 * extent_count + 8 * frame_count
    moved = segment_kind == 3
    need(len(header) == origins_at + (16 * extent_count if moved else 0) + 4, "counts")
    data = data_of(segment, header, frame_count, 160 + 24 * extent_count)
    need(len(data) == data_bytes, "data_bytes")
    print(f"volume {header[16:32].hex()} sequence {sequence} epoch {epoch} kind {segment_kind}")
    print(f"positions {position_start} to {position_end}, "
          f"data {data_bytes} bytes in {frame_count} frames")
    if version == 2:
        print(f"disk {size_bytes} bytes")
    for extent in range(extent_count):
        address, length, data_offset, kind = struct.unpack_from("<QQIB", header, 160 + 24 * extent)
        shown = " bytes " + data[data_offset : data_offset + length].hex() if kind == 1 else ""
        origin = ("%d+%d" % struct.unpack_from("<QI", header, origins_at + 16 * extent)
                  if moved else "")
        source = f" from {origin}" if moved else ""
        print(f"{('data', 'zero', 'discard')[kind - 1]} address {address} length "
              f"{length}{source}{shown}")


if __name__ == "__main__":
    main()
