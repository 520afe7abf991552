"""MinIO on the loopback, and s3backer on it.

Not here: other stores (`tests/stores`).
"""

import os
import re
import socket
import urllib.request
from pathlib import Path

from harness import Process, Server, Unfit, machine, run, wait_until

USER, PASSWORD = "sawmill-bench", "sawmill-bench-secret"


class Minio:
    """A server of our own with one bucket; its data lies below the place's folder."""

    bucket = "timber"

    def __init__(self, place, program):
        self.folder = place.folder / "minio"
        self.program, self.process, self.endpoint = program, None, None

    def missing(self):
        return "" if self.program else "MinIO is not there (tests/setup/prepare.sh bench builds it)"

    def start(self):
        # On one disk a bucket is a folder of the data folder, so it can be made before the start.
        (self.folder / self.bucket).mkdir(parents=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        self.endpoint = f"http://{address}"
        self.process = Process(
            self.program, "server", "--quiet", "--address", address, self.folder,
            log=self.folder.with_suffix(".log"), env=os.environ | {
                "MINIO_ROOT_USER": USER, "MINIO_ROOT_PASSWORD": PASSWORD, "MINIO_BROWSER": "off",
                "MINIO_UPDATE": "off", "MINIO_PROMETHEUS_AUTH_TYPE": "public"})
        wait_until("MinIO is ready", lambda: self.ask("/minio/health/ready") is not None)

    def ask(self, path):
        self.process.check()
        try:
            with urllib.request.urlopen(self.endpoint + path, timeout=10) as answer:
                return answer.read().decode()
        except OSError:
            return None

    def environment(self):
        return {
            "AWS_ACCESS_KEY_ID": USER, "AWS_SECRET_ACCESS_KEY": PASSWORD, "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": self.endpoint, "AWS_ALLOW_HTTP": "true"}

    def requests(self):
        """Requests by kind since its start, by its own count."""
        text = self.ask("/minio/metrics/v3/api/requests")
        if text is None:
            raise Unfit("MinIO does not report its number of requests")
        pattern = r'^minio_api_requests_total\{name="(\w+)"[^}]*\} (\S+)'
        return {name: float(count) for name, count in re.findall(pattern, text, re.M)}

    def end(self):
        if self.process:
            self.process.end(seconds=30)


class S3backer(Server):
    """s3backer, blocks of 4 KiB, a disk cache of the whole disk,
    through FUSE and nbdkit's file plugin.

    Its disk is an eighth of the others': every block is an object,
    and filling a larger one takes minutes.
    """

    name, title, program = "s3backer", "s3backer on MinIO, through FUSE and nbdkit file", "s3backer"
    # It keeps storing until it is unmounted, and MinIO counts.
    counts_at_end = True

    def __init__(self, place, s3):
        super().__init__(place)
        self.s3 = s3
        self.mount = self.folder / "mount"
        self.size_bytes = place.size_bytes // 8

    def missing(self):
        if why := super().missing() or self.s3.missing():
            return why
        fuse = Path("/dev/fuse")
        can_open = fuse.is_char_device() and os.access(fuse, os.R_OK | os.W_OK)
        return "" if can_open else "/dev/fuse cannot be opened"

    def make(self):
        self.mount.mkdir()
        secret = self.folder / "secret"
        secret.touch(mode=0o600)
        secret.write_text(f"{USER}:{PASSWORD}\n")

    def start(self):
        size = self.size_bytes
        backer = self.spawn(
            "s3backer", "-f", "--quiet", f"--accessFile={self.folder / 'secret'}",
            f"--baseURL={self.s3.endpoint}/", "--authVersion=aws4",
            "--prefix=s3backer/", "--blockSize=4k", f"--size={size}", "--force",
            f"--blockCacheFile={self.folder / 'cache'}", f"--blockCacheSize={size // 4096}",
            self.s3.bucket, self.mount)
        disk = self.mount / "file"
        wait_until("s3backer has mounted",
                   lambda: backer.check() or os.path.ismount(self.mount) and disk.exists())
        self.listening("nbdkit", "-f", "-U", self.socket, "file", disk)

    def end(self):
        backer, door = self.processes
        door.end()
        # Unmounting waits for unstored data, which is why it ends here.
        if os.path.ismount(self.mount):
            run("umount", self.mount)
        backer.end_well(1800, sign=None)
        self.socket.unlink(missing_ok=True)

    def abandon(self):
        super().abandon()
        if os.path.ismount(self.mount):
            run("umount", "--lazy", self.mount)

    def counters(self):
        requests = self.s3.requests()
        return {"puts": requests.get("PutObject", 0), "gets": requests.get("GetObject", 0)}

    def chill(self):
        (self.folder / "cache").unlink(missing_ok=True)
        machine.forget_cached(self.s3.folder / self.s3.bucket)

