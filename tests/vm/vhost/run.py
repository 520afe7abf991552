#!/usr/bin/env python3
"""A real guest on the vhost-user door: QEMU boots Debian's kernel with the door's socket as its disk.

    tests/vm/vhost/run.py [--kills N] [--handoffs N] [--door PROGRAM] [--keep]

The guest makes an ext4 file system, and runs fio with verification, round after round, while the process
behind the socket is killed (kill -9) and started again N times, and hands over to another process N times.
In the end the guest checks the file system, and its kernel log must not know of any error. Between two blows
the guest must have got on: nothing here waits for a time.

The process behind the socket is the example `vhost_memory` with a file (`cargo build --release -p
sawmill-frontend --example vhost_memory`). The guest sees the host's files read-only, for its programs.
"""

import argparse
import lzma
import os
import pathlib
import re
import selectors
import shutil
import stat
import subprocess
import sys
import tempfile
import time

REPOSITORY = pathlib.Path(__file__).resolve().parents[3]
DISK_BYTES = 512 << 20
GUEST_MEMORY = "768M"
MODULES = ["9p", "9pnet_virtio", "virtio_blk", "crc32c_generic", "ext4"]
# Requests that must be answered between two blows, as the guest's kernel counts them.
PROGRESS = 100
# Nothing takes this long, unless it hangs.
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
    "queues $(ls /sys/block/vda/mq | wc -l) cache $(cat /sys/block/vda/queue/write_cache)" \\
    "discard $(cat /sys/block/vda/queue/discard_max_bytes)"
mkfs.ext4 -q -F /dev/vda || fail "mkfs"
mount -t ext4 -o discard /dev/vda /mnt/disk || fail "mount"
(while sleep 0.3; do set -- $(cat /sys/block/vda/stat); echo "STAT $(($1 + $5))"; done) &
watcher=$!
round=0
while ! test -e WORK/stop; do
    round=$((round + 1))
    fio --name=verify --directory=/mnt/disk --size=SIZE --rw=randwrite --bsrange=4k-64k --ioengine=libaio \\
        --iodepth=16 --numjobs=2 --direct=1 --verify=crc32c --verify_fatal=1 --fsync=64 --randseed=$round \\
        --verify_state_save=0 --eta=never --group_reporting --output=/mnt/fio.log ||
        { cat /mnt/fio.log; fail "fio, round $round"; }
    echo "ROUND $round"
done
kill $watcher
rm -f /mnt/disk/verify*
fstrim /mnt/disk || fail "fstrim"
umount /mnt/disk || fail "umount"
fsck.ext4 -f -n /dev/vda || fail "fsck"
dmesg | grep -E 'I/O error|EXT4-fs (error|warning)|blk_update|blocked for more|BUG:|WARNING:|Oops' &&
    fail "the kernel's log has errors"
exit 0
"""


def newc(name, mode, content):
    """One entry of a cpio archive."""
    fields = [0, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name) + 1, 0]
    head = b"070701" + b"".join(b"%08x" % field for field in fields) + name.encode() + b"\0"
    pad = lambda data: data + b"\0" * (-len(data) % 4)
    return pad(head) + pad(content)


def modules(kernel):
    """Paths of the modules with all they need, in the order to load them."""
    paths = []
    for module in MODULES:
        plan = subprocess.run(["modprobe", "-n", "--show-depends", "-S", kernel, module], check=True,
                              stdout=subprocess.PIPE, text=True).stdout
        for line in plan.splitlines():
            if line.startswith("insmod") and line.split()[1] not in paths:
                paths.append(line.split()[1])
    return paths


def initramfs(kernel, work):
    """A root for the guest: busybox, a few modules, and the way to the host's files."""
    archive = newc("bin", stat.S_IFDIR | 0o755, b"") + newc("modules", stat.S_IFDIR | 0o755, b"")
    archive += newc("bin/busybox", stat.S_IFREG | 0o755, pathlib.Path(shutil.which("busybox")).read_bytes())
    archive += newc("init", stat.S_IFREG | 0o755, INIT.replace("WORK", str(work)).encode())
    for number, path in enumerate(modules(kernel)):
        content = pathlib.Path(path).read_bytes()
        if path.endswith(".xz"):
            content = lzma.decompress(content)
        archive += newc(f"modules/{number:02}", stat.S_IFREG | 0o644, content)
    (work / "initramfs").write_bytes(archive + newc("TRAILER!!!", 0, b""))


class Door:
    """The process behind the socket."""

    def __init__(self, program, work):
        self.program, self.work, self.process = program, work, None
        self.start([])

    def start(self, words):
        command = [self.program, self.work / "door.sock", self.work / "disk", self.work / "control"]
        log = open(self.work / "door.log", "a")
        self.process = subprocess.Popen([*command, *words], stdout=subprocess.PIPE, stderr=log)
        if not self.process.stdout.readline():
            sys.exit("the door does not open: " + (self.work / "door.log").read_text())

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.start([])

    def hand_over(self):
        before = self.process
        while not (self.work / "control").exists():
            time.sleep(0.01)
        self.start(["take-over"])
        if before.wait(PATIENCE_S) != 0:
            sys.exit("the process that handed over failed")


class Guest:
    """QEMU, and what the guest says on its console."""

    def __init__(self, kernel, work, queues):
        command = [
            "qemu-system-x86_64", "-M", "q35,memory-backend=mem", "-accel", "tcg,thread=multi", "-cpu", "max",
            "-object", f"memory-backend-memfd,id=mem,size={GUEST_MEMORY},share=on", "-m", GUEST_MEMORY,
            "-smp", "2", "-nographic", "-no-reboot", "-nodefaults", "-serial", "stdio",
            "-kernel", f"/boot/vmlinuz-{kernel}", "-initrd", work / "initramfs",
            "-append", "console=ttyS0 quiet panic=-1",
            "-chardev", f"socket,id=door,path={work}/door.sock,reconnect=1",
            "-device", f"vhost-user-blk-pci,chardev=door,num-queues={queues}",
            "-virtfs", "local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap",
        ]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                        stderr=subprocess.STDOUT)
        os.set_blocking(self.process.stdout.fileno(), False)
        self.said, self.rest, self.answered = [], b"", 0
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.process.stdout, selectors.EVENT_READ)

    def listen(self, until):
        """Reads what the guest says until `until(line)`; sees to it that it goes on at all."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            while b"\n" in self.rest:
                line, self.rest = self.rest.split(b"\n", 1)
                line = line.decode(errors="replace").strip()
                if found := re.match(r"STAT (\d+)$", line):
                    self.answered = int(found[1])
                else:
                    self.said.append(line)
                    print("guest:", line, flush=True)
                if line.startswith("GUEST-FAILED") or "Kernel panic" in line:
                    self.fail(line)
                if until(line):
                    return line
            left = deadline - time.monotonic()
            if left <= 0 or not self.selector.select(left):
                self.fail(f"the guest was silent, or did not get on, for {PATIENCE_S} s")
            more = self.process.stdout.read()
            if more == b"":
                self.fail("QEMU has ended")
            self.rest += more or b""

    def fail(self, why):
        print("\n".join(self.said[-40:]))
        self.process.kill()
        sys.exit(f"FAILED: {why}")

    def gets_on(self):
        """Waits until it has had another PROGRESS requests answered."""
        wanted = self.answered + PROGRESS
        self.listen(lambda _: self.answered >= wanted)


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--kills", type=int, default=10)
    arguments.add_argument("--handoffs", type=int, default=10)
    arguments.add_argument("--queues", type=int, default=2)
    arguments.add_argument("--size", default="12m", help="of each of fio's two files")
    arguments.add_argument("--door", default=REPOSITORY / "target/release/examples/vhost_memory")
    arguments.add_argument("--keep", action="store_true", help="leave the working folder")
    options = arguments.parse_args()
    kernel = sorted(pathlib.Path("/boot").glob("vmlinuz-*"))[-1].name.removeprefix("vmlinuz-")
    work = pathlib.Path(tempfile.mkdtemp(prefix="sawmill-vhost-"))
    with open(work / "disk", "wb") as disk:
        disk.truncate(DISK_BYTES)
    initramfs(kernel, work)
    (work / "guest.sh").write_text(GUEST.replace("WORK", str(work)).replace("SIZE", options.size))
    door = Door(options.door, work)
    guest = Guest(kernel, work, options.queues)
    try:
        guest.listen(lambda line: line.startswith("DISK"))
        for number in range(options.kills):
            guest.gets_on()
            door.kill()
            print(f"killed and started again: {number + 1}", flush=True)
        for number in range(options.handoffs):
            guest.gets_on()
            door.hand_over()
            print(f"handed over: {number + 1}", flush=True)
        guest.gets_on()
        (work / "stop").touch()
        if guest.listen(lambda line: line.startswith("GUEST-EXIT")) != "GUEST-EXIT 0":
            guest.fail("the guest's script failed")
        guest.process.wait(PATIENCE_S)
        print(f"ok: {options.kills} kills, {options.handoffs} hand-offs, {guest.answered} requests answered")
    finally:
        for process in (guest.process, door.process):
            process.kill()
            process.wait()
        if not options.keep:
            shutil.rmtree(work)


if __name__ == "__main__":
    main()
