"""The five examples, each with a host: reads return what was written,
for any ranges that the protocol allows."""

import errno
import http.server
import importlib.util
import os
import random
import tempfile
import threading
import unittest
from pathlib import Path

from sawmill.wire import Kind
from test_plain import Case

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SIZE = 1 << 20


def example(name):
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Web(http.server.BaseHTTPRequestHandler):
    """A server of one file that supports ranges."""

    content = random.Random("web").randbytes(SIZE - 1000)
    requests = 0

    def do_HEAD(self):
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.content)))
        self.end_headers()

    def do_GET(self):
        Web.requests += 1
        start, end = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        data = self.content[start : end + 1]
        self.send_response(206)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


class Examples(Case):
    def setUp(self):
        super().setUp()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def exercise(self, device, disk, **driver):
        """Random commands, compared with a model; True if the disk holds what the model holds."""
        handle, host = self.start(device, driver=driver)
        queue, dice, can = host.queues[0], random.Random("commands"), host.hello
        for _ in range(300):
            start = dice.randrange(len(disk))
            length = min(dice.choice([1, 511, 512, 4096, 100_000]), len(disk) - start)
            match dice.choice([Kind.READ, Kind.WRITE, Kind.WRITE_ZEROES, Kind.DISCARD, Kind.FLUSH]):
                case Kind.READ:
                    self.assertEqual(
                        queue.read(start, length, offset=4096), disk[start : start + length]
                    )
                case Kind.WRITE:
                    disk[start : start + length] = data = dice.randbytes(length)
                    self.assertEqual(queue.write(start, data), 0)
                case Kind.FLUSH if can["can_flush"] == "1":
                    self.assertEqual(queue.does(Kind.FLUSH), 0)
                case Kind.WRITE_ZEROES if can["can_write_zeroes"] == "1":
                    disk[start : start + length] = bytes(length)
                    self.assertEqual(queue.does(Kind.WRITE_ZEROES, start, length), 0)
                case Kind.DISCARD if can["can_discard"] == "1":
                    self.assertEqual(queue.does(Kind.DISCARD, start, length), 0)
                    disk[start : start + length] = queue.read(start, length)
        self.assertEqual(queue.read(0, len(disk)), disk)
        host.finish()
        handle.wait()

    def test_ram_is_a_disk(self):
        self.exercise(example("ram").Ram("1M"), bytearray(SIZE))

    def test_file_is_a_disk_and_the_file_has_its_bytes(self):
        disk, path = bytearray(SIZE), self.folder / "disk"
        self.exercise(example("file").File(str(path), "1M"), disk)
        self.assertEqual(path.read_bytes(), disk)

    def test_mirror_has_both_sides_and_finds_out_when_they_differ(self):
        disk, one, other = bytearray(SIZE), self.folder / "one", self.folder / "other"
        one.write_bytes(disk)
        other.write_bytes(b"\xff" * SIZE)
        self.exercise(example("mirror").Mirror(one, other), disk)
        self.assertEqual(one.read_bytes(), disk)
        self.assertEqual(other.read_bytes(), bytes(byte ^ 0xFF for byte in disk))
        with other.open("r+b") as side:
            side.seek(5000)
            side.write(bytes([disk[5000]]))
        _, host = self.start(example("mirror").Mirror(one, other))
        self.assertEqual(host.queues[0].does(Kind.READ, 4096, 4096), errno.EIO)
        self.assertEqual(host.queues[0].does(Kind.READ, 8192, 4096), 0)
        host.finish()

    def test_null_reads_zeroes(self):
        handle, host = self.start(example("null").Null("1M"))
        self.assertEqual(host.queues[0].write(0, b"x" * 512), 0)
        host.queues[0].memory[:] = b"x" * SIZE
        self.assertEqual(host.queues[0].read(0, SIZE), bytes(SIZE))
        for kind in (Kind.DISCARD, Kind.WRITE_ZEROES):
            self.assertEqual(host.queues[0].does(kind, 0, SIZE), 0)
        host.finish()

    def test_lazy_copies_once_what_is_read_and_keeps_what_is_written(self):
        web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Web)
        threading.Thread(target=web.serve_forever).start()
        self.addCleanup(web.server_close)
        path, url = self.folder / "copy", f"http://127.0.0.1:{web.server_port}/image"
        disk = bytearray(Web.content[: len(Web.content) // 512 * 512])
        Web.requests = 0
        self.exercise(example("lazy").Lazy(url, str(path)), disk)
        self.assertEqual(Web.requests, 16, "each part of 64 KiB once")
        # Another driver, and no server any more.
        device = example("lazy").Lazy(url, str(path))
        web.shutdown()
        self.exercise(device, disk)
        self.assertEqual(path.read_bytes(), disk)

    def test_lazy_says_an_io_error_when_its_source_is_gone_and_nothing_is_kept(self):
        web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Web)
        threading.Thread(target=web.serve_forever).start()
        device = example("lazy").Lazy(
            f"http://127.0.0.1:{web.server_port}/", str(self.folder / "copy")
        )
        web.shutdown()
        web.server_close()
        _, host = self.start(device)
        self.assertEqual(host.queues[0].does(Kind.READ, 0, 512), errno.EIO)
        self.assertEqual(os.path.getsize(self.folder / "copy.map"), 16)
        self.assertEqual((self.folder / "copy.map").read_bytes(), bytes(16))
        host.finish()

    def test_each_is_under_sixty_lines(self):
        for path in EXAMPLES.glob("*.py"):
            self.assertLess(len(path.read_text().splitlines()), 60, path)


if __name__ == "__main__":
    unittest.main()
