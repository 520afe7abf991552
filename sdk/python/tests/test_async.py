"""The same with coroutines."""

import asyncio
import errno
import select
import threading
import unittest

import sawmill
from sawmill.wire import COMMAND, Control, Kind
from test_batch import ChunkDisk, hand_out
from test_plain import Case, Ram


class AsyncRam(Ram):
    """A disk whose methods are coroutines."""

    async def attached(self, options):
        self.calls.append("attached")

    async def read(self, offset, buffer):
        await asyncio.sleep(0)
        buffer[:] = self.bytes[offset : offset + len(buffer)]

    async def write(self, offset, data, fua):
        if offset == 4096:
            raise OSError(errno.ENOSPC, "full")
        if offset == 8192:
            raise ValueError("deep inside")
        Ram.write(self, offset, data, fua)


class Coroutines(Case):
    def serve(self, device, work, cancel=False, **options):
        """Runs a driver in an event loop, and `work` as its host.
        Returns what `serve_async` did."""
        hosts = []

        def host():
            hosts.append(self.host.welcome())
            work(hosts[0])

        async def driver():
            thread = threading.Thread(target=host)
            thread.start()
            try:
                return await sawmill.serve_async(device, opened=None, **options)
            finally:
                await asyncio.to_thread(thread.join)
                hosts[0].vanish()

        return asyncio.run(driver())

    def test_methods_may_be_coroutines(self):
        device = AsyncRam()

        def work(host):
            self.assertEqual(host.queues[0].write(0, b"x" * 512), 0)
            self.assertEqual(host.queues[0].read(0, 1024), b"x" * 512 + bytes(512))
            self.assertEqual(host.queues[0].write(4096, b"x" * 512), errno.ENOSPC)
            self.assertEqual(host.queues[0].write(8192, b"x" * 512), errno.EIO)
            host.finish()

        self.assertEqual(self.serve(device, work), "ended")
        self.assertEqual(device.calls[0], "attached")

    def test_plain_methods_do_as_well(self):
        def work(host):
            self.assertEqual(host.queues[0].write(0, b"x" * 512), 0)
            host.finish(reason="replaced")

        self.assertEqual(self.serve(Ram(), work), "replaced")

    def test_all_commands_are_under_way_at_once(self):
        class Meeting(Ram):
            met = 0

            async def read(self, offset, buffer):
                Meeting.met += 1
                while Meeting.met < 50:
                    await asyncio.sleep(0)

        def work(host):
            numbers = {host.queues[0].send(Kind.READ, 0, 512) for _ in range(50)}
            host.queues[0].send(Kind.END, number=0)
            self.assertEqual({host.queues[0].answer()[0] for _ in range(50)}, numbers)
            self.assertTrue(host.queues[0].is_closed())

        self.serve(Meeting(), work)

    def test_unread_answers_wait(self):
        class Quick(Ram):
            async def read(self, offset, buffer):
                pass

        def work(host):
            queue, count = host.queues[0], 2000
            for start in range(0, count, 100):
                commands = [(Kind.READ, 0, start + n, 0, 512, 0, 0, 0, 0) for n in range(100)]
                queue.socket.send(b"".join(COMMAND.pack(*command) for command in commands))
            # More than a socket holds.
            poll = select.poll()
            poll.register(queue.socket, select.POLLIN)
            poll.poll()
            self.assertEqual(sorted(queue.answer()[0] for _ in range(count)), list(range(count)))
            host.finish()

        self.serve(Quick(), work)

    def test_chunks_come_to_coroutines_and_a_flush_follows_them(self):
        class Slow(ChunkDisk):
            async def write_chunk(self, chunk):
                for _ in range(10):
                    await asyncio.sleep(0)
                ChunkDisk.write_chunk(self, chunk)

            async def flush(self):
                self.received.append("flush")

        device = Slow()

        def work(host):
            queue = host.writes[0]
            hand_out(queue, [(0, 1, b"a" * 512)])
            flush = queue.send(Kind.FLUSH)
            self.assertEqual([queue.answer()[0] for _ in range(2)], [1, flush])
            host.finish()

        self.serve(device, work)
        self.assertEqual(device.received[-1], "flush")

    def test_a_host_that_dies_is_reported_clearly(self):
        with self.assertRaises(sawmill.HostGone):
            self.serve(AsyncRam(), lambda host: host.vanish())

    def test_a_violation_is_reported_clearly(self):
        with self.assertRaisesRegex(sawmill.ProtocolError, "past the end"):
            self.serve(AsyncRam(), lambda host: host.queues[0].send(Kind.READ, 1 << 20, 512))

    def test_coroutines_that_write_plainly_are_none_for_chunks(self):
        with self.assertRaisesRegex(TypeError, "coroutine"):
            sawmill.start(AsyncRam())
        with self.assertRaisesRegex(TypeError, "coroutine"):
            asyncio.run(sawmill.serve_async(AsyncRam(), mode="batch"))

    def test_a_canceled_driver_ends_its_device_in_order(self):
        messages = []

        async def driver():
            opened = asyncio.Event()
            work = asyncio.create_task(
                sawmill.serve_async(AsyncRam(), opened=lambda doors: opened.set())
            )
            host = await asyncio.to_thread(self.host.welcome)
            await opened.wait()
            work.cancel()

            def end():
                messages.append(host.receive_message()[0])
                host.queues[0].read(0, 512)
                host.finish()

            await asyncio.to_thread(end)
            with self.assertRaises(asyncio.CancelledError):
                await work

        asyncio.run(driver())
        self.assertEqual(messages, [Control.LEAVE])


if __name__ == "__main__":
    unittest.main()
