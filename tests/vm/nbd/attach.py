#!/usr/bin/env python3
"""Connects a kernel's NBD device to an export, and again whenever the server comes back.

    attach.py SOCKET_PATH EXPORT INDEX [--connections N] [--timeout SECONDS] [--dead SECONDS]

The kernel keeps requests while it has no connection for --dead seconds, and sends those again that
got no answer within --timeout. It does so only for a device that was configured through netlink,
and it wants somebody to hand it the new connections: that is this program. Prints `attached` and
`attached again`; disconnects the device and ends with SIGTERM. (docs/guide/kernel-nbd.md says what
nbd-client can do.)
"""

import argparse
import select
import signal
import socket
import struct
import sys
import time

GENERIC, CONTROLLER, GET_FAMILY = 16, 16, 3
REQUEST, ACKNOWLEDGE, NESTED = 1, 4, 0x8000
FAMILY_ID, FAMILY_NAME = 1, 2
CONNECT, DISCONNECT, RECONFIGURE = 1, 2, 3
INDEX, SIZE_BYTES, BLOCK_BYTES, TIMEOUT, SERVER_FLAGS, CLIENT_FLAGS, SOCKETS, DEAD = range(1, 9)
SOCKET_ITEM, SOCKET_FD = 1, 1
OPTION_GO, REPLY_ACK, REPLY_INFO = 7, 1, 3
OPTION_MAGIC = b"IHAVEOPT"
RETRY_S = 0.05


def attribute(kind, payload):
    length = 4 + len(payload)
    return struct.pack("=HH", length, kind) + payload + bytes(-length % 4)


def u32(kind, value):
    return attribute(kind, struct.pack("=I", value))


def u64(kind, value):
    return attribute(kind, struct.pack("=Q", value))


class Netlink:
    """The part of generic netlink that the family `nbd` needs."""

    def __init__(self):
        self.link = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, GENERIC)
        self.link.bind((0, 0))
        answer = self.ask(CONTROLLER, GET_FAMILY, attribute(FAMILY_NAME, b"nbd\0"))
        while answer:
            length, kind = struct.unpack_from("=HH", answer)
            if kind == FAMILY_ID:
                self.family = struct.unpack_from("=H", answer, 4)[0]
            answer = answer[(length + 3) & ~3:]

    def ask(self, family, command, attributes):
        """Attributes of the answer; raises what the kernel refuses with."""
        body = struct.pack("=BBxx", command, 1) + attributes
        self.link.send(struct.pack("=IHHII", 16 + len(body), family, REQUEST | ACKNOWLEDGE, 0, 0)
                       + body)
        answer = b""
        while True:
            messages = self.link.recv(1 << 16)
            while messages:
                length, kind = struct.unpack_from("=IH", messages)
                if kind == 2:
                    error = -struct.unpack_from("=i", messages, 16)[0]
                    if error:
                        raise OSError(error, f"the kernel refuses command {command}")
                    return answer
                answer = messages[20:length]
                messages = messages[(length + 3) & ~3:]

    def nbd(self, command, *attributes):
        return self.ask(self.family, command, b"".join(attributes))


def receive(server, count):
    data = server.recv(count, socket.MSG_WAITALL)
    if len(data) < count:
        raise ConnectionError("the server hung up")
    return data


def open_export(path, name):
    """A connection that is ready for requests, with the export's size and flags."""
    server = socket.socket(socket.AF_UNIX)
    server.connect(path)
    magic, option_magic, _ = struct.unpack(">8s8sH", receive(server, 18))
    if (magic, option_magic) != (b"NBDMAGIC", OPTION_MAGIC):
        raise ConnectionError("that is no NBD server")
    words = struct.pack(">I", len(name)) + name.encode() + bytes(2)
    server.sendall(struct.pack(">I8sII", 3, OPTION_MAGIC, OPTION_GO, len(words)) + words)
    size = flags = None
    while True:
        _, _, kind, length = struct.unpack(">8sIII", receive(server, 20))
        payload = receive(server, length) if length else b""
        if kind == REPLY_INFO and payload[:2] == bytes(2):
            size, flags = struct.unpack(">QH", payload[2:12])
        elif kind == REPLY_ACK:
            return server, size, flags
        elif kind & 1 << 31:
            raise ConnectionError(f"the server refuses {name!r}: "
                                  f"{payload.decode(errors='replace')}")


def sockets_of(servers):
    items = [attribute(SOCKET_ITEM | NESTED, u32(SOCKET_FD, server.fileno())) for server in servers]
    return attribute(SOCKETS | NESTED, b"".join(items))


def insist(attempt):
    """Until it goes well: a server that is not back yet,
    a socket that the kernel has not given up yet."""
    while True:
        try:
            return attempt()
        except OSError:
            time.sleep(RETRY_S)


def watch(netlink, servers, arguments, size):
    """Gives the kernel a new connection for each one that ends."""
    while True:
        ends = select.poll()
        for server in servers:
            ends.register(server, select.POLLRDHUP)
        ended = {fd for fd, _ in ends.poll()}
        for n, server in enumerate(servers):
            if server.fileno() in ended:
                fresh, now, _ = insist(lambda: open_export(arguments.socket, arguments.export))
                if now != size:
                    raise SystemExit(f"the export had {size} bytes and has {now} now")
                server.close()
                servers[n] = fresh
                handed = u32(INDEX, arguments.index), sockets_of([fresh])
                insist(lambda: netlink.nbd(RECONFIGURE, *handed))
                print("attached again", flush=True)


def main():
    words = argparse.ArgumentParser()
    words.add_argument("socket")
    words.add_argument("export")
    words.add_argument("index", type=int)
    words.add_argument("--connections", type=int, default=1)
    words.add_argument("--timeout", type=int, default=60)
    words.add_argument("--dead", type=int, default=600)
    arguments = words.parse_args()
    netlink = Netlink()
    servers, size, flags = [], 0, 0
    for _ in range(arguments.connections):
        server, size, flags = open_export(arguments.socket, arguments.export)
        servers.append(server)
    netlink.nbd(CONNECT, u32(INDEX, arguments.index), u64(SIZE_BYTES, size), u64(BLOCK_BYTES, 4096),
                u64(TIMEOUT, arguments.timeout), u64(SERVER_FLAGS, flags),
                u64(DEAD, arguments.dead), sockets_of(servers))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    print("attached", flush=True)
    try:
        watch(netlink, servers, arguments, size)
    finally:
        netlink.nbd(DISCONNECT, u32(INDEX, arguments.index))


if __name__ == "__main__":
    main()
