#!/usr/bin/env python3
"""A driver for the tests of `sawmill conform`, against docs/format/driver.md,
with Python's library alone.

driver.py [OPTION=VALUE]... [FAULT]...: keeps its bytes in memory, or in the file of path=FILE. Each
fault makes it wrong in one way. In batch mode it wants hw_queues=1: then chunks come in the order
of their sequences. Not here: speed, and what a driver of yours should look like.
"""
import array
import mmap
import os
import socket
import struct
import sys
import threading

READ, WRITE, FLUSH, DISCARD, WRITE_ZEROES, CHUNK, END = range(1, 8)
FAULTS = {"forgets", "offset", "silent", "dies", "stays", "fails", "backwards"}


def packet(kind, facts):
    text = "".join(f"{name}={value}\n" for name, value in facts.items())
    return struct.pack("<I", kind) + text.encode()


def receive(control):
    bytes_, ancillary, _, _ = control.recvmsg(65536, socket.CMSG_SPACE(16))
    descriptors = array.array("i")
    for _, _, data in ancillary:
        descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    facts = dict(line.split("=", 1) for line in bytes_[4:].decode().splitlines())
    return struct.unpack_from("<I", bytes_)[0] if bytes_ else 0, facts, list(descriptors)


class Driver:
    def __init__(self, facts, faults):
        self.faults = faults
        path = facts.pop("path", None)
        size = int(facts["size"])
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT) if path else os.memfd_create("bytes")
        if os.fstat(descriptor).st_size < size:
            os.ftruncate(descriptor, size)
        self.bytes = mmap.mmap(descriptor, size)
        self.commands = 0
        self.lock = threading.Lock()

    def carry_out(self, kind, address, length, offset, memory):
        """The errno, or None for no answer."""
        with self.lock:
            self.commands += 1
            if self.commands > 60:
                if "dies" in self.faults:
                    os._exit(9)
                if "silent" in self.faults and self.commands == 70:
                    return None
                if "fails" in self.faults and self.commands % 50 == 0:
                    return 28
            if kind == READ:
                memory[offset : offset + length] = self.bytes[address : address + length]
            elif kind == WRITE and not ("forgets" in self.faults and self.commands % 40 == 0):
                if "offset" in self.faults and length > 512:
                    length -= 512
                self.bytes[address : address + length] = memory[offset : offset + length]
            elif kind == WRITE_ZEROES or kind == DISCARD:
                self.bytes[address : address + length] = bytes(length)
        return 0

    def store_chunk(self, offset, entries, memory):
        at = offset + self.metadata_bytes
        writes = []
        for entry in range(entries):
            sector, sectors, _, _ = struct.unpack_from("<QQQQ", memory, offset + 32 * entry)
            writes.append((sector * 512, at, sectors * 512))
            at += sectors * 512
        for address, at, length in reversed(writes) if "backwards" in self.faults else writes:
            self.carry_out(WRITE, address, length, at, memory)
        return 0

    def serve(self, queue, memory):
        while commands := queue.recv(65536):
            answers = b""
            for at in range(0, len(commands), 64):
                kind, _, number, address, length, offset, entries = struct.unpack_from(
                    "<IIQQQQQ", commands, at)
                if kind == END:
                    if answers:
                        queue.send(answers)
                    if "stays" in self.faults:
                        threading.Event().wait()
                    queue.close()
                    return
                if kind == CHUNK:
                    errno = self.store_chunk(offset, entries, memory)
                else:
                    errno = self.carry_out(kind, address, length, offset, memory)
                if errno is not None:
                    answers += struct.pack("<QiI", number, errno, 0)
            if answers:
                queue.send(answers)


def main():
    words = sys.argv[1:]
    facts = {"protocol": 1, "program": "driver.py", "size": 32 << 20, "hw_queues": 2,
             "can_discard": 1}
    facts.update(can_write_zeroes=1)
    facts.update(word.split("=", 1) for word in words if "=" in word)
    faults = {word for word in words if "=" not in word}
    if faults - FAULTS:
        sys.exit(f"no such fault: {faults - FAULTS}")
    driver = Driver(facts, faults)
    control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    control.connect(os.environ["SAWMILL_DRIVER"])
    said = {name: value for name, value in facts.items() if name != "path"}
    control.send(packet(1, said))
    queues = []
    while True:
        kind, facts, descriptors = receive(control)
        if kind == 3:
            for lane in range(len(descriptors) // 2):
                queue = socket.socket(fileno=descriptors[2 * lane])
                memory = mmap.mmap(descriptors[2 * lane + 1], 0)
                queues.append(threading.Thread(target=driver.serve, args=(queue, memory)))
        elif kind == 4:
            break
        elif kind == 2:
            driver.metadata_bytes = int(facts.get("metadata_bytes", 0))
        else:
            sys.exit(f"refused: {facts}")
    for queue in queues:
        queue.start()
    for queue in queues:
        queue.join()


main()
