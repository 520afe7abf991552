#!/usr/bin/env python3
"""What the BUSE module says to every kind of call: packets, errors, order, redelivery.

Each check makes a device of its own, drives its ports from here, and removes it. Invariant: the
module answers a wrong call with an error and stays as it was.

Not here: a daemon that serves a disk (daemon.c), endings under load (../endings.sh).
"""

import ctypes
import errno
import fcntl
import mmap
import os
import select
import struct
import threading
import time
from contextlib import contextmanager
from pathlib import Path

CONFIG = Path("/sys/kernel/config/buse")
INDEX = 7
NAME = f"/dev/buse{INDEX}"
END = 2**64 - 1
ACK_WITH_ERRNO = 0x4004BE01
CHUNK = 65536
METADATA = CHUNK // 512 * 32


def fails(code, function, *words):
    try:
        function(*words)
    except OSError as error:
        assert error.errno == code, f"{errno.errorcode[error.errno]}, not {errno.errorcode[code]}"
    else:
        raise AssertionError(f"no {errno.errorcode[code]}")


def put(name, value, index=INDEX):
    descriptor = os.open(CONFIG / str(index) / name, os.O_WRONLY)
    try:
        os.write(descriptor, str(value).encode())
    finally:
        os.close(descriptor)


def get(name):
    return (CONFIG / str(INDEX) / name).read_text().strip()


class Port:
    """One open character device."""

    def __init__(self, kind, queue=0, flags=0):
        self.is_read = kind == "r"
        self.file = os.open(f"{NAME}-{kind}{queue}", os.O_RDWR | flags)
        size = get("read_shm_size" if self.is_read else "write_shm_size")
        self.memory = mmap.mmap(self.file, int(size))

    def fetch(self):
        packet = os.read(self.file, 24 if self.is_read else 16)
        return struct.unpack("<3Q" if self.is_read else "<2Q", packet)

    def has_packet(self, limit_s=0.0):
        ready = select.poll()
        ready.register(self.file, select.POLLIN)
        return bool(ready.poll(limit_s * 1000))

    def ack(self, token, error=None):
        words = struct.pack("<Q", token) if error is None else struct.pack("<QII", token, error, 0)
        os.write(self.file, words)

    def records(self, packet):
        at = packet[0]
        return [struct.unpack_from("<4Q", self.memory, at + n * 32) for n in range(packet[1])]

    def close(self):
        self.memory.close()
        os.close(self.file)


class Serving(threading.Thread):
    """Answers every read of a port with zeroes until the end."""

    def __init__(self, port, error=None):
        super().__init__(daemon=True)
        self.port, self.error, self.is_last = port, error, False
        self.start()

    def run(self):
        while (packet := self.port.fetch())[2] != END:
            self.port.memory[packet[2]:packet[2] + packet[1] * 512] = bytes(packet[1] * 512)
            is_last = self.is_last
            self.port.ack(packet[2], self.error)
            if is_last:
                return

    def pause(self, one_more_read):
        """Ends it without the end of the device: by a last read."""
        self.is_last = True
        one_more_read()
        self.join()


def wait_for(condition, limit_s=30):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)


def settle():
    """Until udev has looked through the disk."""
    assert os.system("udevadm settle") == 0


@contextmanager
def device(**options):
    (CONFIG / str(INDEX)).mkdir()
    try:
        defaults = {"size": 1 << 20, "write_chunk_size": CHUNK, "write_shm_size": 4 * CHUNK,
                    "read_shm_size": 1 << 20}
        for name, value in (defaults | options).items():
            put(name, value)
        yield
    finally:
        (CONFIG / str(INDEX)).rmdir()


@contextmanager
def disk(**options):
    """With power and open ports: the write port, and the disk's descriptor."""
    with device(**options):
        put("power", 1)
        write, read = Port("w"), Port("r")
        serving = Serving(read)
        wait_for(lambda: Path(NAME).is_block_device())
        settle()
        descriptor = os.open(NAME, os.O_RDWR | os.O_DIRECT)
        try:
            yield write, descriptor
        finally:
            os.close(descriptor)
            # What udev may still read.
            settle()
            stop = threading.Thread(target=put, args=("power", 0))
            stop.start()
            while (packet := write.fetch())[0] != END:
                write.ack(packet[0])
            stop.join()
            serving.join()
            read.close()
            write.close()


def bytes_of(fill, count=4096):
    memory = mmap.mmap(-1, count)
    memory.write(bytes([fill]) * count)
    return memory


def later(function, *words):
    """Runs it in a thread; join() returns its error, or None."""
    class Later(threading.Thread):
        error = None

        def run(self):
            try:
                function(*words)
            except OSError as error:
                self.error = error.errno

        def join(self, timeout=60):
            super().join(timeout)
            assert not self.is_alive(), "it hangs"
            return self.error
    thread = Later(daemon=True)
    thread.start()
    return thread


def values_are_judged_together_when_power_goes_on():
    wrong = [("blocksize", 1024), ("size", 0), ("size", 1000), ("size", 2**64 - 512),
             ("write_chunk_size", 4096), ("write_chunk_size", 65537),
             ("write_shm_size", 65536 * 3 + 512), ("write_shm_size", 2**33),
             ("read_shm_size", 512), ("collision_area_size", 1000),
             ("hw_queues", 0), ("queue_depth", 10**6), ("io_min", 100), ("io_opt", 2**40),
             ("can_write_same", 1), ("can_discard", 2), ("no_scheduler", 7),
             ("chunk_age_ms", 10**9)]
    for name, value in wrong:
        with device(**{name: value}):
            fails(errno.EINVAL, put, "power", 1)
            assert get("power") == "0" and get("state") == "off"
    # Right together, wrong one after the other.
    with device(collision_area_size=4096, blocksize=4096, write_chunk_size=1 << 20,
                write_shm_size=1 << 20):
        put("power", 1)
        fails(errno.EBUSY, put, "blocksize", 512)
        fails(errno.EINVAL, put, "power", 1)
        put("power", 0)
        fails(errno.EINVAL, put, "power", 0)
    for name in ["a", "007", "-1", "4294967296"]:
        fails(errno.ERANGE if name[0] == "4" else errno.EINVAL, (CONFIG / name).mkdir)


def queues_are_as_many_as_processors():
    with device(hw_queues=1000):
        put("power", 1)
        count = int(get("hw_queues"))
        assert count == os.cpu_count(), count
        assert Path(f"{NAME}-w{count - 1}").exists() and not Path(f"{NAME}-w{count}").exists()
        put("power", 0)
        assert get("hw_queues") == "1000"


def wrong_calls_are_errors():
    with disk() as (write, descriptor):
        fails(errno.EBUSY, Port, "w")
        for count in [0, 1, 8, 15, 17, 24, 4096]:
            fails(errno.EINVAL, os.read, write.file, count)
        for count in [0, 1, 7, 9, 16, 4096]:
            fails(errno.EINVAL, os.write, write.file, bytes(count))
        for token in [0, 1, CHUNK, 4 * CHUNK, 2**32, 2**32 + 1, 2**47, 2**63, END]:
            fails(errno.EINVAL, write.ack, token)
        fails(errno.ESPIPE, os.pread, write.file, 16, 8)
        fails(errno.EINVAL, mmap.mmap, write.file, 4096, mmap.MAP_PRIVATE)
        fails(errno.ENOTTY, fcntl.ioctl, write.file, 0x1234, 0)
        os.set_blocking(write.file, False)
        fails(errno.EAGAIN, write.fetch)
        os.set_blocking(write.file, True)
        assert not write.has_packet()
        os.pwrite(descriptor, bytes_of(1), 0)
        flush = later(os.fsync, descriptor)
        assert write.has_packet(30)
        chunk = write.fetch()
        # Only what is fetched, and once.
        fails(errno.EINVAL, write.ack, chunk[0] + 512)
        write.ack(chunk[0])
        fails(errno.EINVAL, write.ack, chunk[0])
        token = write.fetch()[0]
        assert 2**32 < token < END
        fails(errno.EINVAL, write.ack, token + 1)
        write.ack(token)
        assert flush.join() is None
        fails(errno.EINVAL, write.ack, token)


def records_split_at_areas_and_count_up():
    with disk(collision_area_size=4096) as (write, descriptor):
        os.pwrite(descriptor, bytes_of(5, 8192), 2048)
        os.pwrite(descriptor, bytes_of(6, 512), 4096)
        flush = later(os.fsync, descriptor)
        chunk = write.fetch()
        assert chunk[1] == 4, chunk
        assert write.records(chunk) == [(4, 4, 1, 1), (8, 8, 1, 1), (16, 4, 1, 1), (8, 1, 2, 1)]
        at = chunk[0] + METADATA
        assert write.memory[at:at + 8704] == bytes([5]) * 8192 + bytes([6]) * 512
        write.ack(chunk[0])
        write.ack(write.fetch()[0])
        assert flush.join() is None


def ranges_are_records_without_bytes():
    with disk(can_discard=1, can_write_zeroes=1, can_secure_erase=1) as (write, descriptor):
        fcntl.ioctl(descriptor, 0x1277, struct.pack("<QQ", 4096, 8192))
        fcntl.ioctl(descriptor, 0x127F, struct.pack("<QQ", 65536, 4096))
        fcntl.ioctl(descriptor, 0x127D, struct.pack("<QQ", 131072, 4096))
        os.pwrite(descriptor, bytes_of(9), 0)
        flush = later(os.fsync, descriptor)
        chunk = write.fetch()
        flags = [(record[0], record[1], record[3]) for record in write.records(chunk)]
        assert flags == [(8, 8, 3), (16, 8, 3), (128, 8, 9), (256, 8, 5), (0, 8, 1)], flags
        assert write.memory[chunk[0] + METADATA] == 9
        write.ack(chunk[0])
        write.ack(write.fetch()[0])
        assert flush.join() is None


def a_read_waits_for_the_writes_before_it():
    with disk() as (write, descriptor):
        os.pwrite(descriptor, bytes_of(3), 8192)
        other = bytes_of(0)
        # Other sectors do not wait.
        os.preadv(descriptor, [other], 65536)
        read = later(os.preadv, descriptor, [other], 8192)
        # The read closed the chunk.
        chunk = write.fetch()
        read_waits = read.is_alive()
        # A newer write of the same sectors does not delay it further.
        os.pwrite(descriptor, bytes_of(4), 8192)
        write.ack(chunk[0])
        assert read_waits and read.join() is None
        assert not write.has_packet()


def age_hands_a_chunk_over():
    with disk(chunk_age_ms=50) as (write, descriptor):
        os.pwrite(descriptor, bytes_of(3), 0)
        chunk = write.fetch()
        assert chunk[1] == 1
        write.ack(chunk[0])
    with disk() as (write, descriptor):
        os.pwrite(descriptor, bytes_of(3), 0)
        assert not write.has_packet(0.5)


def a_write_waits_for_a_chunk():
    with disk(write_shm_size=CHUNK) as (write, descriptor):
        data = bytes_of(1, 32768)
        os.pwrite(descriptor, data, 0)
        waiting = later(os.pwrite, descriptor, data, 65536)
        chunk = write.fetch()
        assert waiting.is_alive()
        write.ack(chunk[0])
        assert waiting.join() is None


def failures_reach_the_flush_and_the_read():
    with disk() as (write, descriptor):
        fcntl.ioctl(write.file, ACK_WITH_ERRNO, struct.pack("<I", 1))
        fails(errno.EINVAL, write.ack, 0)
        os.pwrite(descriptor, bytes_of(1), 0)
        flush = later(os.fsync, descriptor)
        chunk, token = write.fetch(), write.fetch()[0]
        fails(errno.EINVAL, write.ack, chunk[0], 5000)
        write.ack(chunk[0], errno.ENOSPC)
        write.ack(token, 0)
        assert flush.join() == errno.ENOSPC, flush.error
        # Reported once; the next flush has nothing to report.
        os.pwrite(descriptor, bytes_of(1), 0)
        flush = later(os.fsync, descriptor)
        write.ack(write.fetch()[0], 0)
        write.ack(write.fetch()[0], 0)
        assert flush.join() is None
        # Without a flush behind it, the next one reports.
        read = later(os.preadv, descriptor, [bytes_of(0)], 0)
        os.pwrite(descriptor, bytes_of(1), 4096)
        later(os.preadv, descriptor, [bytes_of(0)], 4096)
        write.ack(write.fetch()[0], errno.EIO)
        assert read.join() is None
        flush = later(os.fsync, descriptor)
        write.ack(write.fetch()[0], 0)
        assert flush.join() == errno.EIO, flush.error
        fcntl.ioctl(write.file, ACK_WITH_ERRNO, struct.pack("<I", 0))


def what_was_fetched_comes_again_in_order():
    with device():
        put("power", 1)
        write, read = Port("w"), Port("r")
        serving = Serving(read)
        wait_for(lambda: Path(NAME).is_block_device())
        settle()
        descriptor = os.open(NAME, os.O_RDWR | os.O_DIRECT)
        os.pwrite(descriptor, bytes_of(1), 0)
        flush = later(os.fsync, descriptor)
        first = [write.fetch(), write.fetch()]
        os.pwrite(descriptor, bytes_of(2), 0)
        second = later(os.preadv, descriptor, [bytes_of(0)], 0)
        first.append(write.fetch())
        records = write.records(first[2])
        # Acknowledged ones do not come again.
        write.ack(first[0][0])
        write.close()
        assert get("state") == "waiting"
        write = Port("w")
        assert get("state") == "running"
        again = [write.fetch(), write.fetch()]
        assert again == first[1:], (again, first)
        assert write.records(again[1]) == records
        for packet in again:
            write.ack(packet[0])
        assert flush.join() is None and second.join() is None
        os.close(descriptor)
        settle()
        stop = threading.Thread(target=put, args=("power", 0))
        stop.start()
        while (packet := write.fetch())[0] != END:
            write.ack(packet[0])
        # It stays the end, also when the device is gone.
        stop.join()
        assert write.fetch() == (END, 0) and write.has_packet()
        fails(errno.EINVAL, write.ack, 0)
        serving.join()
        write.close()
        read.close()


def a_failed_read_fails_and_the_rest_comes_again():
    with device():
        put("power", 1)
        write, read = Port("w"), Port("r")
        fcntl.ioctl(read.file, ACK_WITH_ERRNO, struct.pack("<I", 1))
        serving = Serving(read, 0)
        wait_for(lambda: Path(NAME).is_block_device())
        settle()
        descriptor = os.open(NAME, os.O_RDWR | os.O_DIRECT)
        serving.pause(lambda: os.preadv(descriptor, [bytes_of(0)], 0))
        for code, seen in [(errno.ENODATA, errno.ENODATA), (errno.EPIPE, errno.EIO)]:
            fetched = later(os.preadv, descriptor, [bytes_of(0)], 4096)
            read.ack(read.fetch()[2], code)
            assert fetched.join() == seen, fetched.error
        buffer = bytes_of(0)
        fetched = later(os.preadv, descriptor, [buffer], 8192)
        packet = read.fetch()
        read.close()
        read = Port("r")
        assert read.fetch() == packet
        # The new one has not asked for errors.
        fails(errno.EINVAL, os.write, read.file, bytes(16))
        read.memory[packet[2]:packet[2] + 4096] = bytes([8]) * 4096
        read.ack(packet[2])
        assert fetched.join() is None and buffer[:] == bytes([8]) * 4096
        os.close(descriptor)
        write.close()
        read.close()


def a_packet_that_cannot_be_copied_stays():
    with disk() as (write, descriptor):
        os.pwrite(descriptor, bytes_of(1), 0)
        flush = later(os.fsync, descriptor)
        assert write.has_packet(30)
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.read(write.file, ctypes.c_void_p(8), 16) == -1
        assert ctypes.get_errno() == errno.EFAULT
        assert libc.write(write.file, ctypes.c_void_p(8), 8) == -1
        assert ctypes.get_errno() == errno.EFAULT
        chunk = write.fetch()
        assert chunk == (0, 1), chunk
        write.ack(chunk[0])
        write.ack(write.fetch()[0])
        assert flush.join() is None


def a_flush_waits_for_every_queue():
    with device(hw_queues=2):
        put("power", 1)
        ports = [Port(kind, queue) for queue in range(2) for kind in "wr"]
        serving = [Serving(port) for port in ports if port.is_read]
        first, second = [port for port in ports if not port.is_read]
        wait_for(lambda: Path(NAME).is_block_device())
        settle()
        descriptor = os.open(NAME, os.O_RDWR | os.O_DIRECT)
        for cpu in range(2):
            os.sched_setaffinity(0, {cpu})
            os.pwrite(descriptor, bytes_of(cpu), 4096 * cpu)
        os.sched_setaffinity(0, {0, 1})
        # A write with FUA is a write and a flush.
        flush = later(os.pwritev, descriptor, [bytes_of(3)], 65536, os.RWF_DSYNC)
        tokens, counts = [], []
        for port in [first, second]:
            while (packet := port.fetch())[0] < 2**32:
                counts.append(packet[1])
                port.ack(packet[0])
            tokens.append(packet[0])
        assert tokens[0] == tokens[1] and sum(counts) == 3, (tokens, counts)
        second.ack(tokens[1])
        time.sleep(0.3)
        assert flush.is_alive()
        first.ack(tokens[0])
        # The kernel flushes once more for RWF_DSYNC.
        while flush.is_alive():
            for port in [first, second]:
                if port.has_packet(0.1):
                    port.ack(port.fetch()[0])
        assert flush.join() is None
        os.close(descriptor)
        settle()
        stop = threading.Thread(target=put, args=("power", 0))
        stop.start()
        assert first.fetch() == second.fetch() == (END, 0)
        stop.join()
        for thread in serving:
            thread.join()
        for port in ports:
            port.close()


def a_disk_with_power_grows():
    with disk() as (write, descriptor):
        put("size", 2 << 20)
        assert os.lseek(descriptor, 0, os.SEEK_END) == 2 << 20
        fails(errno.EINVAL, put, "size", 1 << 20)
        fails(errno.EINVAL, put, "size", (2 << 20) + 100)
        os.pwrite(descriptor, bytes_of(1), (2 << 20) - 4096)
        assert get("size") == str(2 << 20)


def opening_and_closing_in_a_storm_leaves_nothing():
    with device(hw_queues=1):
        put("power", 1)
        until = time.monotonic() + 3

        def storm(kind):
            while time.monotonic() < until:
                try:
                    port = Port(kind)
                except OSError as error:
                    assert error.errno == errno.EBUSY, error
                    continue
                port.close()

        storms = [threading.Thread(target=storm, args=(kind,)) for kind in "wwrr"]
        for thread in storms:
            thread.start()
        for thread in storms:
            thread.join()
        held = Port("w")
    # Without its device, it says so.
    assert held.fetch() == (END, 0)
    held.close()


def main():
    for check in [values_are_judged_together_when_power_goes_on, queues_are_as_many_as_processors,
                  wrong_calls_are_errors, records_split_at_areas_and_count_up,
                  ranges_are_records_without_bytes, a_read_waits_for_the_writes_before_it,
                  age_hands_a_chunk_over, a_write_waits_for_a_chunk,
                  failures_reach_the_flush_and_the_read, what_was_fetched_comes_again_in_order,
                  a_failed_read_fails_and_the_rest_comes_again,
                  a_packet_that_cannot_be_copied_stays, a_flush_waits_for_every_queue,
                  a_disk_with_power_grows, opening_and_closing_in_a_storm_leaves_nothing]:
        from_s = time.monotonic()
        check()
        print(f"{check.__name__}: {time.monotonic() - from_s:.1f} s", flush=True)


if __name__ == "__main__":
    main()
