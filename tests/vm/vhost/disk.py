#!/usr/bin/env python3
# a guest of QEMU on `serve --vhost-user` sees its server killed and replaced, growth, and no error
# set: quick
# where: host
# seconds: 300 1800
"""A real guest on the vhost-user door: QEMU boots Debian's newer kernel with it as its disk.

    tests/vm/vhost/disk.py [--quick] [--kills N] [--handoffs N] [--keep]

The disk is a volume in a folder. The guest makes an ext4 file system, and runs fio with
verification, round after round, while the server is killed (kill -9) and started again, and gives
way to a new process, by turns. The volume grows, once under a guest at work and once while QEMU has
no server, and the guest's kernel must notice that. In the end the guest grows and checks its file
system, and its kernel's log must not know of any error. Between two blows the guest must have got
on: nothing here waits for a time.

QEMU offers the guest a packed ring as well, which the door does not have: the guest must do
without. The guest sees the host's files read-only, for its programs.

The lab runs this as `vhost/disk` (tests/vm/run.py); what needs it is installed by
tests/setup/prepare.sh vm. Not here: guests that mean harm (crates/frontend/tests/vhost).
"""

import argparse
import json
import lzma
import os
import pathlib
import re
import select
import selectors
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time

REPOSITORY = pathlib.Path(__file__).resolve().parents[3]
KERNEL = REPOSITORY / ".prepared/kernel"
SAWMILL = pathlib.Path(os.environ.get("SAWMILL_BINARY", REPOSITORY / "target/release/sawmill"))
MIB = 1 << 20
SIZE_BYTES = 256 * MIB
GROWN_BYTES = [384 * MIB, 512 * MIB]
SECTOR_BYTES = 512
GUEST_MEMORY = "512M"
MODULES = ["9p", "9pnet_virtio", "virtio_blk", "crc32c_generic", "ext4"]
KERNEL_OPTIONS = "console=ttyS0 quiet panic=-1 mitigations=off nokaslr cryptomgr.notests nowatchdog"
# The number of this feature, whose place in the guest's list says whether it was agreed on.
RING_PACKED = 34
# Requests that must be answered between two blows, as the guest's kernel counts them.
PROGRESS = 100
# Only a hang takes this long.
PATIENCE_S = 420

INIT = """#!/bin/busybox sh
/bin/busybox mkdir -p /proc /sys /dev /host
/bin/busybox --install -s /bin
export PATH=/bin:/sbin:/usr/bin:/usr/sbin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
for module in /modules/*; do insmod $module; done
mount -t 9p -o trans=virtio,version=9p2000.L,ro,cache=none,msize=262144 host /host || poweroff -f
for name in proc sys dev; do mount --bind /$name /host/$name; done
mount -t tmpfs tmp /host/mnt
mkdir /host/mnt/disk
chroot /host /bin/sh WORK/guest.sh
echo "GUEST-EXIT $?"
poweroff -f
"""

GUEST = """
fail() { echo "GUEST-FAILED $1"; dmesg | tail -n 40; exit 1; }
grep -q vda /proc/partitions || fail "there is no disk"
echo; echo "DISK $(cat /sys/block/vda/size) $(cat /sys/block/vda/serial)" \\
    "queues $(ls /sys/block/vda/mq | wc -l) discard \
$(cat /sys/block/vda/queue/discard_max_bytes)" \\
    "features $(cat /sys/block/vda/device/features) cache $(cat /sys/block/vda/queue/write_cache)"
mkfs.ext4 -q -F -b 4096 /dev/vda || fail "mkfs"
mount -t ext4 -o discard /dev/vda /mnt/disk || fail "mount"
(while sleep 0.3; do
    set -- $(cat /sys/block/vda/stat); echo "STAT $(($1 + $5)) $(cat /sys/block/vda/size)"
done) &
watcher=$!
round=0
while ! test -e WORK/stop; do
    round=$((round + 1))
    fio --name=verify --directory=/mnt/disk --size=FILE_SIZE --rw=randwrite --bsrange=4k-64k \\
        --ioengine=libaio --iodepth=16 --numjobs=2 --direct=1 --verify=crc32c --verify_fatal=1 \
--fsync=64 \\
        --randseed=$round --verify_state_save=0 --eta=never --group_reporting \
--output=/mnt/fio.log ||
        { cat /mnt/fio.log; fail "fio, round $round"; }
    echo "ROUND $round"
done
kill $watcher
before=$(stat -f -c %b /mnt/disk)
resize2fs /dev/vda 2>&1 || fail "resize2fs"
after=$(stat -f -c %b /mnt/disk)
test "$after" -gt "$before" || fail "the file system did not grow: $before blocks, now $after"
rm -f /mnt/disk/verify*
fstrim /mnt/disk || fail "fstrim"
umount /mnt/disk || fail "umount"
fsck.ext4 -f -n /dev/vda || fail "fsck"
dmesg | grep -E 'I/O error|EXT4-fs (error|warning)|blk_update|blocked for more|\
BUG:|WARNING:|Oops' &&
    fail "the kernel's log has errors"
exit 0
"""


def newc(name, mode, content):
    """One entry of a cpio archive."""
    fields = [0, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name) + 1, 0]
    head = b"070701" + b"".join(b"%08x" % field for field in fields) + name.encode() + b"\0"
    pad = lambda data: data + b"\0" * (-len(data) % 4)
    return pad(head) + pad(content)


def modules(version):
    """Paths of the modules with all they need, in the order to load them."""
    paths = []
    for module in MODULES:
        command = ["modprobe", "-n", "--show-depends", "-d", KERNEL, "-S", version, module]
        plan = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True,
                              env=dict(os.environ,
                                       PATH=f"{os.environ['PATH']}:/usr/sbin:/sbin")).stdout
        for line in plan.splitlines():
            if line.startswith("insmod") and line.split()[1] not in paths:
                paths.append(line.split()[1])
    return paths


def initramfs(version, work):
    """A root for the guest: busybox, a few modules, and the way to the host's files."""
    archive = newc("bin", stat.S_IFDIR | 0o755, b"") + newc("modules", stat.S_IFDIR | 0o755, b"")
    archive += newc("bin/busybox", stat.S_IFREG | 0o755,
                    pathlib.Path(shutil.which("busybox")).read_bytes())
    archive += newc("init", stat.S_IFREG | 0o755, INIT.replace("WORK", str(work)).encode())
    for number, path in enumerate(modules(version)):
        content = pathlib.Path(path).read_bytes()
        if path.endswith(".xz"):
            content = lzma.decompress(content)
        archive += newc(f"modules/{number:02}", stat.S_IFREG | 0o644, content)
    (work / "initramfs").write_bytes(archive + newc("TRAILER!!!", 0, b""))


class Server:
    """`sawmill serve` of one volume: at any time one process, which may be another than before."""

    def __init__(self, work):
        self.work, self.process, self.handle = work, 0, None
        self.environment = dict(os.environ, SAWMILL_STORE=f"file://{work}/store", HOME=str(work),
                                XDG_STATE_HOME=f"{work}/state", XDG_RUNTIME_DIR=f"{work}/run")
        (work / "run").mkdir(mode=0o700)
        (work / "server.log").touch()
        self.sawmill("create", "disk", "--size", str(SIZE_BYTES))
        self.serve()

    def sawmill(self, *words):
        """Runs a command that must succeed; returns its output."""
        result = subprocess.run([SAWMILL, *words], env=self.environment, stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT, text=True)
        if result.returncode != 0:
            sys.exit(f"FAILED: sawmill {' '.join(words)}: {result.stdout}{self.last_words()}")
        return result.stdout

    def serve(self):
        words = ["serve", "disk", "--vhost-user", self.work / "disk.sock",
                 "--journal", self.work / "journal", "--journal-bytes", "64M",
                 "--cache-bytes", "64M", "--staging", self.work / "run"]
        with open(self.work / "server.log", "a") as log:
            child = subprocess.Popen([SAWMILL, *words], env=self.environment,
                                     stdout=subprocess.PIPE, stderr=log, start_new_session=True)
        self.follow(child.pid)
        if not child.stdout.readline():
            sys.exit(f"FAILED: the server ended before it was ready{self.last_words()}")

    def follow(self, process):
        self.process, self.handle = process, os.pidfd_open(process)

    def wait_for_end(self, handle):
        if not select.select([handle], [], [], PATIENCE_S)[0]:
            sys.exit(f"FAILED: a server did not end{self.last_words()}")
        os.close(handle)

    def end(self, how):
        """By a signal. Nothing to one that has ended."""
        handle, self.handle = self.handle, None
        if handle is not None:
            signal.pidfd_send_signal(handle, how)
            self.wait_for_end(handle)

    def kill(self):
        self.end(signal.SIGKILL)
        self.serve()

    def hand_over(self):
        before = self.handle
        report = json.loads(self.sawmill("handoff", "disk", "--json"))
        if report["lost_doors"]:
            sys.exit(f"FAILED: a hand-off lost {report['lost_doors']}{self.last_words()}")
        self.follow(report["pid"])
        self.wait_for_end(before)
        return f"{report['stall_ms']} ms"

    def last_words(self):
        lines = (self.work / "server.log").read_text().splitlines()
        return "\n".join(["; the server's log ends:", *lines[-20:]])


class DiedInBoot(Exception):
    """The guest's kernel died before it had the disk."""


class Guest:
    """QEMU, and what the guest says on its console."""

    def __init__(self, version, work, queues):
        command = [
            "qemu-system-x86_64", "-M", "q35,memory-backend=mem", "-accel", "tcg,thread=multi",
            "-cpu", "Nehalem,+rdrand", "-m", GUEST_MEMORY,
            "-object", f"memory-backend-memfd,id=mem,size={GUEST_MEMORY},share=on",
            "-smp", "2", "-nographic", "-no-reboot", "-nodefaults", "-serial", "stdio",
            "-kernel", KERNEL / f"boot/vmlinuz-{version}", "-initrd", work / "initramfs",
            "-append", KERNEL_OPTIONS,
            "-chardev", f"socket,id=door,path={work}/disk.sock,reconnect=1",
            "-device", f"vhost-user-blk-pci,chardev=door,num-queues={queues},packed=on",
            "-virtfs",
            "local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap",
        ]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                        stderr=subprocess.STDOUT)
        os.set_blocking(self.process.stdout.fileno(), False)
        self.output_lines, self.rest, self.is_up = [], b"", False
        # What the watcher in the guest has reported: how often, requests answered, the disk's size.
        self.looks, self.answered, self.sectors = 0, 0, 0
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.process.stdout, selectors.EVENT_READ)

    def listen(self, until):
        """Reads what the guest says until `until(line)`; sees to it that it goes on at all."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            while b"\n" in self.rest:
                line, self.rest = self.rest.split(b"\n", 1)
                line = line.decode(errors="replace").strip()
                if match := re.fullmatch(r"STAT (\d+) (\d+)", line):
                    self.answered, self.sectors = int(match[1]), int(match[2])
                    self.looks += 1
                else:
                    self.output_lines.append(line)
                    print("guest:", line, flush=True)
                self.is_up |= line.startswith("DISK")
                if "Kernel panic" in line and not self.is_up:
                    raise DiedInBoot(line)
                if line.startswith("GUEST-FAILED") or "Kernel panic" in line:
                    self.fail(line)
                if until(line):
                    return line
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not self.selector.select(left_s):
                self.fail(f"the guest was silent, or did not get on, for {PATIENCE_S} s")
            more = self.process.stdout.read()
            if more == b"":
                self.fail("QEMU has ended")
            self.rest += more or b""

    def fail(self, why):
        self.process.kill()
        sys.exit(f"FAILED: {why}")

    def gets_on(self):
        """Waits until it has had another PROGRESS requests answered from now on."""
        self.rest += self.process.stdout.read() or b""
        stale = self.looks + self.rest.count(b"STAT") + 1
        self.listen(lambda _: self.looks > stale)
        goal = self.answered + PROGRESS
        self.listen(lambda _: self.answered >= goal)

    def see_what_it_got(self, queues):
        """The disk as the guest's kernel reports it."""
        line = self.listen(lambda line: line.startswith("DISK"))
        features = line.partition("features ")[2].split()[0]
        if not line.startswith(f"DISK {SIZE_BYTES // SECTOR_BYTES} disk queues {queues} "):
            self.fail(f"another disk than was made: {line}")
        if features[RING_PACKED] != "0" or not line.endswith("cache write back"):
            self.fail(f"the guest believes in what the door has not, or not in what it has: {line}")


def blows(kills, handoffs):
    """What happens to the server, in turn."""
    counts = {"kill": kills, "hand-off": handoffs}
    return [blow for n in range(max(kills, handoffs)) for blow, count in counts.items()
            if n < count]


def trouble(guest, server, options):
    """All blows, and among them another size, twice."""
    guest.gets_on()
    grow(guest, server, GROWN_BYTES[0])
    for number, blow in enumerate(blows(options.kills, options.handoffs)):
        outcome = server.kill() if blow == "kill" else server.hand_over()
        print(f"{number + 1}: {blow}", outcome or "", flush=True)
        if number == 0:
            # QEMU connects again in a second, and is to be told then.
            grow(guest, server, GROWN_BYTES[1])
        guest.gets_on()


def grow(guest, server, size_bytes):
    server.sawmill("resize", "disk", str(size_bytes))
    guest.listen(lambda _: guest.sectors == size_bytes // SECTOR_BYTES)
    print(f"the guest's kernel has seen the disk grow to {size_bytes} bytes", flush=True)


def main():
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--quick", action="store_true", default=os.environ.get("SET") == "quick")
    arguments.add_argument("--kills", type=int, default=os.environ.get("VM_KILLS"))
    arguments.add_argument("--handoffs", type=int, default=os.environ.get("VM_HANDOFFS"))
    arguments.add_argument("--queues", type=int, default=2)
    arguments.add_argument("--keep", action="store_true", help="leave the working folder")
    options = arguments.parse_args()
    usual = 2 if options.quick else 10
    options.kills, options.handoffs = (int(n or usual) for n in (options.kills, options.handoffs))
    version = next((KERNEL / "boot").glob("vmlinuz-*"), None)
    if version is None:
        sys.exit("no kernel to boot: run tests/setup/prepare.sh vm")
    version = version.name.removeprefix("vmlinuz-")
    # Ending this program also ends the guest and its server.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("FAILED: ended from outside"))
    work = pathlib.Path(tempfile.mkdtemp(prefix="sawmill-vhost-"))
    initramfs(version, work)
    file_size = "4m" if options.quick else "12m"
    (work / "guest.sh").write_text(GUEST.replace("WORK", str(work)).replace("FILE_SIZE", file_size))
    server = Server(work)
    guest = Guest(version, work, options.queues)
    try:
        try:
            guest.see_what_it_got(options.queues)
        except DiedInBoot as death:
            # An emulated kernel was seen to die of code that another core had just patched.
            print(f"the kernel died before it had the disk ({death}): once more", flush=True)
            guest.process.wait()
            guest = Guest(version, work, options.queues)
            guest.see_what_it_got(options.queues)
        trouble(guest, server, options)
        (work / "stop").touch()
        if guest.listen(lambda line: line.startswith("GUEST-EXIT")) != "GUEST-EXIT 0":
            guest.fail("the guest's script failed")
        guest.process.wait(PATIENCE_S)
        server.end(signal.SIGTERM)
        print(server.sawmill("check", "disk"))
        print(f"{options.kills} kills, {options.handoffs} hand-offs, "
              f"{guest.answered} requests answered")
    finally:
        guest.process.kill()
        guest.process.wait()
        server.end(signal.SIGKILL)
        if options.keep:
            print(f"all of it is in {work}")
        else:
            shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
