"""A plain driver with its host: commands, errors, the life cycle."""

import errno
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import unittest
from unittest import mock

import sawmill
from mock_host import MockHost
from sawmill import wire
from sawmill.wire import AGAIN, FUA, NO_UNMAP, COMMAND, Control, Kind


# The start of a program: a device N.
NULL = "import sawmill\nclass N:\n def read(self, o, b): b[:] = bytes(len(b))\n"


class Ram(sawmill.Device):
    """A disk in memory that records its requests."""

    size = "1M"

    def __init__(self):
        self.bytes = bytearray(1 << 20)
        self.calls = []

    def read(self, offset, buffer):
        buffer[:] = self.bytes[offset : offset + len(buffer)]

    def write(self, offset, data, fua):
        self.calls.append(("write", offset, len(data), fua))
        self.bytes[offset : offset + len(data)] = data


class Able(Ram):
    """A disk with every ability."""

    can_fua = True

    def flush(self):
        self.calls.append(("flush",))

    def discard(self, offset, length):
        self.calls.append(("discard", offset, length))

    def write_zeroes(self, offset, length, no_unmap):
        self.calls.append(("write_zeroes", offset, length, no_unmap))


class Case(unittest.TestCase):
    """A mock host, and drivers that are attached to it."""

    def setUp(self):
        self.host = MockHost()
        self.addCleanup(self.host.close)
        patch = mock.patch.dict(os.environ, {"SAWMILL_DRIVER": str(self.host.path)})
        patch.start()
        self.addCleanup(patch.stop)
        logging.getLogger("sawmill").setLevel(logging.CRITICAL)
        self.addCleanup(logging.getLogger("sawmill").setLevel, logging.NOTSET)

    def start(self, device, driver=None, host=None):
        """A driver and its host, which know each other."""
        welcomed = []
        thread = threading.Thread(target=lambda: welcomed.append(self.host.welcome(**(host or {}))))
        thread.start()
        handle = sawmill.start(device, **(driver or {}))
        thread.join()
        return handle, welcomed[0]


class Commands(Case):
    def test_what_was_written_is_read(self):
        handle, host = self.start(Ram())
        self.assertEqual(host.queues[0].write(512, b"x" * 1024), 0)
        self.assertEqual(
            host.queues[0].read(0, 2048, offset=4096), bytes(512) + b"x" * 1024 + bytes(512)
        )
        host.finish()
        self.assertTrue(handle.wait())
        self.assertEqual(handle.outcome, "ended")

    def test_every_command_reaches_its_method_with_what_it_says(self):
        device = Able()
        _, host = self.start(device)
        queue = host.queues[0]
        queue.write(0, b"a" * 512, flags=FUA | AGAIN)
        queue.does(Kind.FLUSH)
        queue.does(Kind.DISCARD, 512, 1024)
        queue.does(Kind.WRITE_ZEROES, 1024, 512, flags=NO_UNMAP)
        queue.does(Kind.WRITE_ZEROES, 1024, 512)
        calls = [("write", 0, 512, True), ("flush",), ("discard", 512, 1024)]
        calls += [("write_zeroes", 1024, 512, True), ("write_zeroes", 1024, 512, False)]
        self.assertEqual(device.calls, calls)
        host.finish()

    def test_the_methods_that_a_device_has_say_what_it_can(self):
        _, host = self.start(Able())
        names = ("can_flush", "can_fua", "can_discard", "can_write_zeroes")
        abilities = {name: host.hello[name] for name in names}
        self.assertEqual(set(abilities.values()), {"1"})
        self.assertNotIn("read_only", host.hello)
        host.finish()

        class Reader:
            options = sawmill.Options(size="2K")

            def read(self, offset, buffer):
                buffer[:] = bytes(len(buffer))

        _, host = self.start(Reader())
        self.assertEqual((host.hello["read_only"], host.hello["size"]), ("1", "2048"))
        self.assertEqual({host.hello[name] for name in abilities if name != "can_fua"}, {"0"})
        host.finish()

    def test_many_commands_in_one_packet_are_each_answered_once(self):
        _, host = self.start(Ram(), driver={"threads": 4})
        queue = host.queues[0]
        commands = [(Kind.READ, 0, n, 0, 512, 512 * n, 0, 0, 0) for n in range(100)]
        queue.socket.send(b"".join(COMMAND.pack(*command) for command in commands))
        self.assertEqual(sorted(queue.answer() for _ in commands), [(n, 0) for n in range(100)])
        host.finish()

    def test_threads_carry_out_commands_side_by_side(self):
        both = threading.Barrier(2, timeout=60)

        class Meeting(Ram):
            def read(self, offset, buffer):
                both.wait()

        _, host = self.start(Meeting(), driver={"threads": 2})
        numbers = {host.queues[0].send(Kind.READ, 0, 512) for _ in range(2)}
        self.assertEqual({host.queues[0].answer()[0] for _ in range(2)}, numbers)
        host.finish()

    def test_an_answer_waits_for_the_method(self):
        entered, go_on = threading.Event(), threading.Event()

        class Slow(Ram):
            def write(self, offset, data, fua):
                entered.set()
                go_on.wait()

        _, host = self.start(Slow())
        host.queues[0].send(Kind.WRITE, 0, 512)
        entered.wait()
        host.queues[0].socket.setblocking(False)
        with self.assertRaises(BlockingIOError):
            host.queues[0].socket.recv(64)
        host.queues[0].socket.settimeout(60)
        go_on.set()
        self.assertEqual(host.queues[0].answer(), (1, 0))
        host.finish()


class Errors(Case):
    def outcome(self, error):
        class Bad(Ram):
            def write(self, offset, data, fua):
                raise error

        _, host = self.start(Bad())
        errno_of_write = host.queues[0].write(0, b"x" * 512)
        self.assertEqual(host.queues[0].read(0, 512), bytes(512), "the driver goes on")
        host.finish()
        return errno_of_write

    def test_an_oserror_is_the_errno_of_the_request(self):
        self.assertEqual(self.outcome(OSError(errno.ENOSPC, "full")), errno.ENOSPC)
        self.assertEqual(self.outcome(PermissionError(errno.EROFS, "no")), errno.EROFS)

    def test_any_other_exception_is_an_io_error(self):
        strange = (OSError("no number"), OSError(-5, "x"), OSError(1 << 40, "x"))
        for error in (ValueError("x"), *strange, SystemExit(3)):
            self.assertEqual(self.outcome(error), errno.EIO, error)

    def test_an_exception_is_logged_with_its_traceback(self):
        logging.getLogger("sawmill").setLevel(logging.NOTSET)
        with self.assertLogs("sawmill") as logged:
            self.outcome(ZeroDivisionError("deep inside"))
        self.assertIn("WRITE 1 of 512 bytes at 0 failed", logged.output[0])
        self.assertIn("ZeroDivisionError: deep inside", logged.output[0])

    def test_a_method_that_says_it_did_less_has_failed(self):
        class Short(Ram):
            def read(self, offset, buffer):
                return len(buffer) - 1

            def write(self, offset, data, fua):
                return len(data)

        _, host = self.start(Short())
        self.assertEqual(host.queues[0].does(Kind.READ, 0, 512), errno.EIO)
        self.assertEqual(host.queues[0].write(0, b"x" * 512), 0)
        host.finish()

    def test_memory_that_was_kept_cannot_be_used_after_the_answer(self):
        class Keeper(Ram):
            memory = None

            def read(self, offset, buffer):
                Keeper.memory = buffer
                buffer[:] = bytes(len(buffer))

        _, host = self.start(Keeper())
        host.queues[0].read(0, 512)
        with self.assertRaises(ValueError):
            Keeper.memory[0] = 1
        host.finish()

    def test_the_bytes_of_a_write_cannot_be_changed(self):
        class Meddler(Ram):
            def write(self, offset, data, fua):
                data[0] = 1

        _, host = self.start(Meddler())
        self.assertEqual(host.queues[0].write(0, b"x" * 512), errno.EIO)
        self.assertEqual(host.queues[0].memory[:1], b"x")
        host.finish()


class LifeCycle(Case):
    def test_what_is_under_way_is_answered_before_an_end_is_obeyed(self):
        entered, go_on = threading.Event(), threading.Event()

        class Slow(Ram):
            def write(self, offset, data, fua):
                entered.set()
                go_on.wait()

        for threads in (1, 3):
            entered.clear()
            go_on.clear()
            handle, host = self.start(Slow(), driver={"threads": threads})
            queue = host.queues[0]
            queue.send(Kind.WRITE, 0, 512)
            entered.wait()
            host.send_message(Control.FINISH, reason="replaced")
            queue.send(Kind.END, number=0)
            # With a spare thread, one of them gets END before the write is done.
            while threads > 1 and not handle._inboxes[0].is_ended:
                time.sleep(0)
            go_on.set()
            self.assertEqual(queue.answer(), (1, 0))
            self.assertTrue(queue.is_closed())
            handle.wait()
            self.assertEqual(handle.outcome, "replaced")
            host.vanish()

    def test_a_handle_ends_the_device_and_waits_until_it_has_ended(self):
        handle, host = self.start(Ram())
        self.assertEqual(handle.doors, [("nbd", "nbd+unix:///?socket=/somewhere")])
        messages = []

        def finish():
            messages.append(host.receive_message())
            host.finish()
            messages.append("nothing more")

        finisher = threading.Thread(target=finish)
        finisher.start()
        with handle:
            self.assertIn("disk", repr(handle))
            handle.leave()
        finisher.join()
        self.assertEqual(messages, [(Control.LEAVE, [("outcome", "ended")]), "nothing more"])
        self.assertEqual(handle.outcome, "ended")

    def test_a_handle_can_fail_its_device(self):
        handle, host = self.start(Ram())
        failer = threading.Thread(target=handle.fail, args=("out of\npa\0per",))
        failer.start()
        facts = self.assertLeaves(host, "failed")
        self.assertEqual(facts.get("message"), "out of pa per", "one line of text")
        host.vanish()
        failer.join()

    def assertLeaves(self, host, outcome):
        kind, facts = host.receive_message()
        self.assertEqual((kind, facts.get("outcome")), (Control.LEAVE, outcome))
        return facts

    def test_a_host_that_dies_is_reported_clearly(self):
        handle, host = self.start(Ram())
        host.vanish()
        with self.assertRaisesRegex(sawmill.HostGone, "the host is gone"):
            handle.wait()

    def test_a_host_that_closes_the_control_connection_alone_is_gone(self):
        handle, host = self.start(Ram())
        host.control.close()
        with self.assertRaisesRegex(sawmill.HostGone, "the host is gone"):
            handle.wait()
        host.vanish()

    def test_queues_end_in_order_after_the_control_connection_when_that_was_announced(self):
        handle, host = self.start(Ram())
        host.send_message(Control.FINISH, reason="replaced")
        host.control.close()
        handle._listener.join()
        self.assertEqual(host.queues[0].write(0, b"x" * 512), 0)
        host.queues[0].send(Kind.END, number=0)
        self.assertTrue(host.queues[0].is_closed())
        handle.wait()
        self.assertEqual(handle.outcome, "replaced")
        host.vanish()

    def test_a_host_that_dies_while_a_method_runs_is_waited_out(self):
        entered, go_on = threading.Event(), threading.Event()

        class Slow(Ram):
            def write(self, offset, data, fua):
                entered.set()
                go_on.wait()

        handle, host = self.start(Slow())
        host.queues[0].send(Kind.WRITE, 0, 512)
        entered.wait()
        host.vanish()
        self.assertFalse(handle.wait(0.0), "a method still runs")
        go_on.set()
        with self.assertRaises(sawmill.HostGone):
            handle.wait()

    def test_attached_is_called_before_the_first_command_and_after_the_welcome(self):
        class Told(Ram):
            def attached(self, options):
                self.calls.append(options.size)

        device = Told()
        _, host = self.start(device, host={"size": 4096})
        host.queues[0].write(0, b"x" * 512)
        self.assertEqual(device.calls, [4096, ("write", 0, 512, False)])
        host.finish()

    def test_a_refusal_has_its_errno_and_its_reason(self):
        refuser = threading.Thread(target=self.refuse)
        refuser.start()
        with self.assertRaisesRegex(sawmill.Refused, "has a driver") as refusal:
            sawmill.start(Ram())
        self.assertEqual(refusal.exception.errno, errno.EBUSY)
        refuser.join()

    def refuse(self):
        control, _ = self.host.accept()
        control.send(
            wire.encode(Control.REFUSED, {"errno": errno.EBUSY, "message": "disk has a driver"})
        )
        control.close()

    def test_without_a_host_the_error_says_where_none_listens(self):
        with mock.patch.dict(os.environ, {"SAWMILL_DRIVER": "/nowhere/driver"}):
            with self.assertRaisesRegex(sawmill.NoHost, "/nowhere/driver"):
                sawmill.start(Ram())

    def test_signals_end_the_device_in_order(self):
        opened = "opened = lambda doors: print('open', flush=True)\n"
        program = NULL + opened + "print(sawmill.serve(N(), opened=opened))"
        coroutines = NULL + opened + "import asyncio\n"
        coroutines += "print(asyncio.run(sawmill.serve_async(N(), opened=opened)))"
        attempts = [
            (program, signal.SIGTERM),
            (program, signal.SIGINT),
            (coroutines, signal.SIGTERM),
        ]
        for program, number in attempts:
            driver = subprocess.Popen(
                [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
            )
            host = self.host.welcome()
            self.assertEqual(driver.stdout.readline(), "open\n")
            driver.send_signal(number)
            self.assertLeaves(host, "ended")
            self.assertEqual(
                host.queues[0].read(0, 512), bytes(512), "it serves until it is ended"
            )
            host.finish()
            self.assertEqual((driver.communicate()[0], driver.returncode), ("ended\n", 0))

    def test_a_program_that_ends_ends_its_device(self):
        program = NULL + "d = sawmill.start(N())"
        driver = subprocess.Popen([sys.executable, "-c", program])
        host = self.host.welcome()
        self.assertLeaves(host, "ended")
        host.finish()
        self.assertEqual(driver.wait(), 0)


class Options(Case):
    def test_arguments_come_before_options_and_options_before_attributes(self):
        device = Ram()
        device.options = sawmill.Options(size="8K", blocksize=4096)
        device.queue_depth = 7
        _, host = self.start(device, driver={"size": "4K"})
        hello_sizes = (host.hello["size"], host.hello["blocksize"], host.hello["queue_depth"])
        self.assertEqual(hello_sizes, ("4096", "4096", "7"))
        host.finish()

    def test_options_that_make_no_sense_are_named(self):
        for options, error, text in (
            ({"sise": 1}, TypeError, "'sise' is not an option"),
            ({"size": "12Q"}, ValueError, "'12Q' is not a size"),
            ({"size": -1}, ValueError, "size"),
            ({"blocksize": "512"}, ValueError, "blocksize: '512'"),
            ({"can_flush": True}, TypeError, "can_flush is requested"),
            ({"threads": 0}, ValueError, "thread"),
        ):
            with self.assertRaisesRegex(error, text):
                sawmill.start(Ram(), **options)
        with self.assertRaisesRegex(TypeError, "no method `read`"):
            sawmill.start(object())

    def test_sizes_are_read_as_people_write_them(self):
        sizes = {"64M": 64 << 20, "2g": 2 << 30, "512": 512, 4096: 4096, "1T": 1 << 40}
        self.assertEqual([sawmill.size_bytes(text) for text in sizes], list(sizes.values()))
        for text in ("", "M", "1.5G", "-1", "٣", True, None):
            with self.assertRaises(ValueError):
                sawmill.size_bytes(text)


if __name__ == "__main__":
    unittest.main()
