"""What a machine was busy with while a load ran: its cores, its disk, and the clients.

Shares are of the time that the load took: 1 is always; of cores and clients: one core. Starting and
ending the client counts, so a share may be a little above. Not here: what the load is (`suite/`).
"""

import os
import resource
from pathlib import Path

from harness.machine import busy_s

# Of the kernel's counts, whatever the disk's own are.
SECTOR_BYTES = 512


def disk_counts(folder):
    """How long the disk below a folder had something to do, in seconds, and the bytes that it read
    and wrote; 0 where the kernel has no count."""
    device = os.stat(folder).st_dev
    try:
        counts = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat").read_text()
    except OSError:
        return {"disk_busy": 0.0, "disk_read_bytes_s": 0, "disk_written_bytes_s": 0}
    found = [int(word) for word in counts.split()]
    return {"disk_busy": found[9] / 1e3, "disk_read_bytes_s": found[2] * SECTOR_BYTES,
            "disk_written_bytes_s": found[6] * SECTOR_BYTES}


def waited_s():
    """How long somebody waited for a core; 0 where the kernel does not tell (no PSI)."""
    try:
        some = Path("/proc/pressure/cpu").read_text().split("\n", 1)[0]
    except OSError:
        return 0.0
    return int(some.rpartition("total=")[2]) / 1e6


def ended_children_s():
    """Processor time of the children that have ended: fio's, while servers run."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


class Busy:
    """Begins to watch when it is made."""

    def __init__(self, folder):
        self.folder = folder
        self.since = self.counts()

    def counts(self):
        return {"cores_busy": busy_s(), "cores_awaited": waited_s(),
                "clients_busy": ended_children_s(), **disk_counts(self.folder)}

    def found(self, passed_s):
        """Shares of the seconds that the load took, and bytes a second of the disk."""
        now = self.counts()
        return {name: (now[name] - self.since[name]) / passed_s for name in now}
