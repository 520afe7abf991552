"""A host that breaks the protocol gets a closed connection, the driver's program a clear error,
and nothing crashes."""

import os
import random
import socket
import threading
import unittest

import sawmill
from mock_host import DEFAULTS, MEMORY_BYTES
from sawmill import wire
from sawmill.wire import KIND, COMMAND, Control, Kind
from test_plain import Able, Case, Ram


class HandshakeViolations(Case):
    """Packets before ATTACHED."""

    def raises(self, text, send):
        """What `start` raises when the host sends this after HELLO."""

        def host():
            control, _ = self.host.accept()
            send(control)
            control.close()

        thread = threading.Thread(target=host)
        thread.start()
        before = len(os.listdir("/proc/self/fd"))
        with self.assertRaisesRegex(sawmill.SawmillError, text):
            sawmill.start(Ram())
        thread.join()
        self.assertLessEqual(len(os.listdir("/proc/self/fd")), before + 1, "descriptors leak")

    def welcome(self, control, **facts):
        facts_of_welcome = {"protocol": 1, "name": "disk", "generation": 1} | DEFAULTS | facts
        control.send(wire.encode(Control.WELCOME, facts_of_welcome))

    def test_malformed_packets(self):
        self.raises("of 3 bytes", lambda control: control.send(b"\1\0\0"))
        self.raises("unknown kind 99", lambda control: control.send(KIND.pack(99)))
        self.raises("not text", lambda control: control.send(KIND.pack(2) + b"a=\xff\n"))
        self.raises("the line 'size'", lambda control: control.send(KIND.pack(2) + b"size"))
        self.raises(
            "too long", lambda control: control.send(KIND.pack(2) + b"a=" + b"x" * 70_000 + b"\n")
        )
        self.raises("closed the connection", lambda control: None)

    def test_packets_out_of_turn(self):
        self.raises(
            "FINISH, expected WELCOME", lambda control: control.send(KIND.pack(Control.FINISH))
        )
        self.raises(
            "ATTACHED, expected WELCOME", lambda control: control.send(KIND.pack(Control.ATTACHED))
        )

        def twice(control):
            self.welcome(control)
            self.welcome(control)

        self.raises("WELCOME, expected QUEUE", twice)

    def test_a_welcome_that_makes_no_sense(self):
        self.raises("protocol 2", lambda control: self.welcome(control, protocol=2))
        self.raises("mode=fast", lambda control: self.welcome(control, mode="fast"))
        self.raises("size=-1", lambda control: self.welcome(control, size=-1))
        self.raises("size=1e9", lambda control: self.welcome(control, size="1e9"))
        self.raises("not a number", lambda control: self.welcome(control, size="9" * 5000))
        batch = {"mode": "batch", "collision_area_size": 0}
        self.raises("invalid chunk sizes", lambda control: self.welcome(control, **batch))

    def test_queues_that_make_no_sense(self):
        def queue(descriptors, **facts):
            def send(control):
                self.welcome(control)
                packet = wire.encode(Control.QUEUE, {"queue": 0, "memory_bytes": 4096} | facts)
                one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                memory = os.memfd_create("small")
                os.ftruncate(memory, 4096)
                socket.send_fds(
                    control, [packet], [one.fileno(), memory, memory, memory][:descriptors]
                )
                control.send(KIND.pack(Control.ATTACHED))
                one.close()
                other.close()
                os.close(memory)

            return send

        self.raises("with 1 descriptors", queue(1))
        self.raises("with 3 descriptors", queue(3))
        self.raises("out of turn", queue(2, queue=1))
        self.raises("another size", queue(2, memory_bytes=4097))
        self.raises("another size", queue(2, memory_bytes=0))
        self.raises("memory_bytes=x", queue(2, memory_bytes="x"))

        def welcome_with_one(control):
            socket.send_fds(control, [KIND.pack(Control.WELCOME)], [control.fileno()])

        self.raises("WELCOME with descriptors", welcome_with_one)

        def none(control):
            self.welcome(control)
            control.send(KIND.pack(Control.ATTACHED))

        self.raises("without queues", none)


class CommandViolations(Case):
    """Packets after ATTACHED."""

    def raises(self, text, send, device=Able):
        handle, host = self.start(device())
        send(host)
        with self.assertRaisesRegex(sawmill.ProtocolError, text):
            handle.wait()
        self.assertTrue(all(queue.is_closed() for queue in host.all()))
        host.vanish()

    def command(self, text, kind, address=0, length=0, device=Able, **more):
        self.raises(text, lambda host: host.queues[0].send(kind, address, length, **more), device)

    def test_unknown_and_unsupported_commands(self):
        self.command("kind 0", 0)
        self.command("kind 77", 77)
        self.command("CHUNK 1", Kind.CHUNK, 0, 512)
        self.command("FLUSH 1", Kind.FLUSH, device=Ram)
        self.command("DISCARD 1", Kind.DISCARD, 0, 512, device=Ram)

    def test_commands_outside_of_the_device_or_the_memory(self):
        self.command("past the end", Kind.READ, 1 << 20, 512)
        self.command("past the end", Kind.WRITE, (1 << 64) - 512, 1024)
        self.command("past the end", Kind.DISCARD, 0, (1 << 20) + 1)
        self.command("outside of the queue's memory", Kind.READ, 0, 512, offset=MEMORY_BYTES - 511)
        self.command("outside of the queue's memory", Kind.WRITE, 0, 512, offset=(1 << 64) - 1)

    def test_packets_that_hold_no_whole_commands(self):
        for bytes_ in (1, 63, 65, 127):
            self.raises(
                "no whole commands", lambda host, n=bytes_: host.queues[0].socket.send(b"\1" * n)
            )

    def test_packets_of_commands_that_are_too_long(self):
        flushes = COMMAND.pack(Kind.FLUSH, 0, 1, 0, 0, 0, 0, 0, 0) * (
            wire.PACKET_BYTES_MAX // COMMAND.size + 1
        )
        self.raises("too long", lambda host: host.queues[0].socket.send(flushes))

    def test_control_packets_that_do_not_belong_here(self):
        self.raises("WELCOME after ATTACHED", lambda host: host.send_message(Control.WELCOME))
        self.raises("HELLO after ATTACHED", lambda host: host.send_message(Control.HELLO))

    def test_commands_of_any_bytes_never_kill_the_program(self):
        dice = random.Random("commands")
        for _ in range(60):
            handle, host = self.start(Able(), driver={"threads": 2})
            queue = host.queues[0]
            small = lambda: dice.choice([0, 1, 512, 4096, 1 << 20, dice.getrandbits(64)])
            for _ in range(dice.randrange(1, 40)):
                words = [dice.randrange(9), dice.getrandbits(3), *(small() for _ in range(7))]
                try:
                    queue.socket.send(COMMAND.pack(*words))
                except OSError:
                    break
            host.vanish()
            try:
                handle.wait()
            except (sawmill.HostGone, sawmill.ProtocolError):
                pass


if __name__ == "__main__":
    unittest.main()
