"""Disks for programs that need files: a loop device with ext4, on a raw file or on a server.

No kernel door is needed: a server's disk becomes a file through FUSE, and that a loop device, with
direct I/O and sectors of 4 KiB everywhere. Beside the raw file, every contestant thus pays for
FUSE, and one that speaks NBD also for nbdfuse. The root of the file system is for everybody.

Not here: what runs on them (`postgres.py`, `databases.py`, `shapes.py`).
"""

import contextlib
import os
from pathlib import Path

from harness import MIB, Sawmill, Server, run, wait_until

SECTOR_BYTES = 4096
# Everything is laid out at once, so that the kernel writes nothing later; and a raw file keeps its
# blocks.
MKFS = ["mkfs.ext4", "-q", "-F", "-E", "nodiscard,lazy_itable_init=0,lazy_journal_init=0"]
# Fields of /sys/block/*/stat.
STAT = {"device_reads": 0, "device_writes": 4, "device_flushes": 15}
STAT_SECTORS = {"device_read_bytes": 2, "device_written_bytes": 6}


class LoopDisk(Server):
    """Subclasses say what `show`s the disk, as a file to attach. It is mounted at `root` while it
    runs."""

    def __init__(self, place, *more, **how):
        super().__init__(place, *more, **how)
        self.file = place.memory / f"{self.name}.disk"
        self.root = place.memory / f"{self.name}.root"
        self.node, self.has_file_system = None, False

    def prepare(self):
        """Makes the disk and its file system. Its blocks were written before where it is a file."""
        self.folder.mkdir(parents=True)
        # PostgreSQL runs as a user who must reach it.
        for folder in (self.place.memory, self.root):
            folder.mkdir(exist_ok=True)
            folder.chmod(0o711)
        self.make()
        with self.running():
            pass

    def start(self):
        shown = self.show()
        self.node = run("losetup", "--find", "--show", "--direct-io=on", "--sector-size",
                        SECTOR_BYTES, shown).strip()
        self.mount()

    def mount(self):
        if not self.has_file_system:
            run(*MKFS, self.node)
            self.has_file_system = True
        run("mount", self.node, self.root)

    def end(self):
        run("umount", self.root)
        self.detach()
        super().end()

    def detach(self):
        if self.node:
            run("losetup", "-d", self.node)

    def abandon(self):
        for step in (lambda: run("umount", "-l", self.root), self.detach, self.hide):
            with contextlib.suppress(OSError):
                step()
        super().abandon()

    def hide(self):
        """Takes the file away again."""

    def check(self):
        """Demands a sound file system, while it is not running."""
        with self.running():
            run("umount", self.root)
            try:
                run("e2fsck", "-fn", self.node)
            finally:
                run("mount", self.node, self.root)

    def device_counters(self):
        words = Path("/sys/block", Path(self.node).name, "stat").read_text().split()
        return ({name: int(words[at]) for name, at in STAT.items()}
                | {name: int(words[at]) * 512 for name, at in STAT_SECTORS.items()})

    def counters(self):
        return self.device_counters()

    def settle(self):
        os.sync()


class RawFile(LoopDisk):
    """The limit: a file on the disk's own file system, without any server."""

    name = "raw"

    def make(self):
        self.file = self.folder / "disk"
        zeroes = bytes(MIB)
        with self.file.open("wb") as file:
            for _ in range(self.size_bytes // MIB):
                file.write(zeroes)
            os.fsync(file.fileno())

    def show(self):
        return self.file


class ShownNbd(LoopDisk):
    """A server of NBD whose export nbdfuse shows as a file."""

    def serve_nbd(self):
        """Starts it; the URI of its export."""
        raise NotImplementedError

    def show(self):
        uri = self.serve_nbd()
        # It mounts itself over a file, which must exist.
        self.file.touch()
        nbdfuse = self.spawn("nbdfuse", self.file, uri)
        wait_until("nbdfuse shows the disk",
                   lambda: nbdfuse.check() or self.file.stat().st_size == self.size_bytes)
        return self.file

    def hide(self):
        run("fusermount3", "-u", self.file)

    def end(self):
        run("umount", self.root)
        self.detach()
        self.hide()
        server, nbdfuse = self.processes
        nbdfuse.end(None)
        server.end()
        self.socket.unlink(missing_ok=True)


class NbdkitFile(ShownNbd, RawFile):
    name, program = "nbdkit-file", "nbdkit"

    def make(self):
        shown = self.file
        super().make()
        self.disk, self.file = self.file, shown

    def serve_nbd(self):
        self.listening("nbdkit", "-f", "-U", self.socket, "file", self.disk)
        return f"nbd+unix:///?socket={self.socket}"


class SawmillNbd(ShownNbd, Sawmill):
    name = "sawmill-nbd"

    def serve_nbd(self):
        Sawmill.start(self)
        return self.ready["uri"]

    def counters(self):
        return Sawmill.counters(self) | self.device_counters()

    def settle(self):
        os.sync()
        Sawmill.settle(self)


class SawmillFuse(LoopDisk, Sawmill):
    name = "sawmill"

    def start(self):
        self.mountpoint = self.place.memory / f"{self.name}.fuse"
        self.mountpoint.mkdir(exist_ok=True)
        self.serve("--fuse", self.mountpoint, "--loop", "--admin", "127.0.0.1:0", "--journal",
                   self.journal, "--cache", self.cache, "--staging", self.place.memory)
        self.node = self.ready["uri"]
        self.mount()

    def detach(self):
        """The server does that itself."""

    def counters(self):
        return Sawmill.counters(self) | self.device_counters()

    def settle(self):
        os.sync()
        Sawmill.settle(self)


NAMES = [kind.name for kind in (RawFile, NbdkitFile, SawmillNbd, SawmillFuse)]


def all_disks(place, binary):
    """With caches no larger than the disk."""
    options = ["--cache-bytes", str(place.size_bytes)]
    return [RawFile(place), NbdkitFile(place), SawmillNbd(place, binary, options),
            SawmillFuse(place, binary, options)]
