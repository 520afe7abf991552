//! TCP: for networks that block datagrams or lose too many.
//!
//! Invariants: the stream holds whole packets only. The rest of a packet that the kernel did not
//! accept stays with the sender and is sent first; a waiting receiver sends it even if nothing else
//! is sent. An invalid length ends the stream, because the start of the next packet is unknown
//! then. Both halves share one connection; it closes when both are dropped. Not here: reconnecting,
//! and when a receiver waits for many bytes (`low_mark`).

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, Shutdown, SocketFlags, SocketType, sockopt,
};
use sawmill_sys::Spin;
use sawmill_sys::net::{bind_to_interface, wake_for};

use super::low_mark::{LOW_MARK_BYTES, LowMark, WAIT_TIME_MAX};
use super::wait::{Interest, is_readable, wait_for};
use super::{
    Burst, PACKET_BYTES_MAX, PACKET_BYTES_MIN, Peer, Receiver, Sender, WakeReasons, Waker,
    declared_bytes, wrong_peer,
};

/// The most bytes per read.
const READ_BYTES_MAX: usize = 8 * PACKET_BYTES_MAX;
/// A silent peer is probed after this time, and again at this interval. This many probes without an
/// answer, or data unacknowledged for as long, end the stream.
const KEEPALIVE_DELAY: Duration = Duration::from_secs(5);
const KEEPALIVE_EVERY: Duration = Duration::from_secs(2);
const KEEPALIVE_PROBES_MAX: u32 = 3;
const UNACKNOWLEDGED_MS_MAX: u32 = 11_000;
const CONNECTIONS_PENDING_MAX: i32 = 64;

struct StreamState {
    descriptor: OwnedFd,
    waker: Arc<Waker>,
    /// The rest of a packet that the kernel accepted in part.
    rest: Mutex<UnsentBytes>,
    has_rest: AtomicBool,
    /// Wakes a waiting receiver when there is a rest to send.
    nudge: Waker,
}

struct UnsentBytes {
    bytes: Box<[u8]>,
    start: usize,
    end: usize,
}

/// Sends packets into a stream.
#[derive(Clone)]
pub struct StreamSender {
    connection: Arc<StreamState>,
}

/// Receives packets from a stream.
pub struct StreamReceiver {
    connection: Arc<StreamState>,
    inbox: Box<[u8]>,
    /// The start of a packet that was read and not passed on yet.
    start: usize,
    end: usize,
    has_ended: bool,
    spin: Spin,
    low_mark: LowMark,
    /// Whether the socket has the low mark now.
    is_marked: bool,
    /// The last read filled its room: more may be there.
    has_more: bool,
}

/// An accepted stream: its halves, and the peer's address.
pub type AcceptedStream = (StreamSender, StreamReceiver, SocketAddr);

/// Connects within `timeout`.
///
/// Errors: ECONNREFUSED, no route, `TimedOut`, ENODEV for an unknown interface.
pub fn connect(
    to: SocketAddr,
    interface: Option<&str>,
    timeout: Duration,
) -> io::Result<(StreamSender, StreamReceiver)> {
    let descriptor = open(&to, interface)?;
    match rustix::net::connect(&descriptor, &to) {
        Ok(()) => (),
        Err(Errno::INPROGRESS) => {
            let timeout = Timespec::try_from(timeout).map_err(io::Error::other)?;
            let mut polled = [PollFd::new(&descriptor, PollFlags::OUT)];
            if rustix::io::retry_on_intr(|| poll(&mut polled, Some(&timeout)))? == 0 {
                return Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    format!("{to} does not answer"),
                ));
            }
            sockopt::socket_error(&descriptor)??;
        }
        Err(error) => return Err(error.into()),
    }
    halves(descriptor)
}

/// Waits for streams.
pub struct StreamListener {
    descriptor: OwnedFd,
    waker: Arc<Waker>,
}

impl StreamListener {
    /// Listens on this address, on one interface only if it is given.
    ///
    /// Errors: EADDRINUSE, EADDRNOTAVAIL, ENODEV for an unknown interface.
    pub fn open(local: SocketAddr, interface: Option<&str>) -> io::Result<Self> {
        let descriptor = open(&local, interface)?;
        sockopt::set_socket_reuseaddr(&descriptor, true)?;
        rustix::net::bind(&descriptor, &local)?;
        rustix::net::listen(&descriptor, CONNECTIONS_PENDING_MAX)?;
        Ok(StreamListener { descriptor, waker: Arc::new(Waker::new()?) })
    }

    /// Where it listens.
    pub fn local(&self) -> io::Result<SocketAddr> {
        Ok(SocketAddr::try_from(rustix::net::getsockname(&self.descriptor)?)?)
    }

    /// Ends a wait from another thread.
    #[must_use]
    pub fn waker(&self) -> Arc<Waker> {
        self.waker.clone()
    }

    /// Waits at most `wait` (`None`: without limit) for a stream. Returns none if the time ran out
    /// or the waker was called.
    ///
    /// Errors: EMFILE, ENFILE, ENOMEM: none of them ends the listener.
    pub fn accept(&self, wait: Option<Duration>) -> io::Result<Option<AcceptedStream>> {
        let ready = wait_for(self.descriptor.as_fd(), &self.waker, None, wait, Interest::Readable)?;
        if ready.waker || !ready.readable {
            return Ok(None);
        }
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        match rustix::net::acceptfrom_with(&self.descriptor, flags) {
            Ok((descriptor, Some(from))) => {
                let (sender, receiver) = halves(descriptor)?;
                Ok(Some((sender, receiver, SocketAddr::try_from(from)?)))
            }
            // The peer left before it was accepted.
            Ok((_, None)) | Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED | Errno::PROTO) => {
                Ok(None)
            }
            Err(error) => Err(error.into()),
        }
    }
}

fn open(address: &SocketAddr, interface: Option<&str>) -> io::Result<OwnedFd> {
    let family = if address.is_ipv6() { AddressFamily::INET6 } else { AddressFamily::INET };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let descriptor = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
    if let Some(name) = interface {
        bind_to_interface(&descriptor, name)?;
    }
    Ok(descriptor)
}

fn halves(descriptor: OwnedFd) -> io::Result<(StreamSender, StreamReceiver)> {
    sockopt::set_tcp_nodelay(&descriptor, true)?;
    sockopt::set_socket_keepalive(&descriptor, true)?;
    sockopt::set_tcp_keepidle(&descriptor, KEEPALIVE_DELAY)?;
    sockopt::set_tcp_keepintvl(&descriptor, KEEPALIVE_EVERY)?;
    sockopt::set_tcp_keepcnt(&descriptor, KEEPALIVE_PROBES_MAX)?;
    sockopt::set_tcp_user_timeout(&descriptor, UNACKNOWLEDGED_MS_MAX)?;
    let rest =
        UnsentBytes { bytes: vec![0; PACKET_BYTES_MAX].into_boxed_slice(), start: 0, end: 0 };
    let connection = Arc::new(StreamState {
        descriptor,
        waker: Arc::new(Waker::new()?),
        rest: Mutex::new(rest),
        has_rest: AtomicBool::new(false),
        nudge: Waker::new()?,
    });
    let inbox = vec![0; READ_BYTES_MAX].into_boxed_slice();
    let receiver = StreamReceiver {
        connection: connection.clone(),
        inbox,
        start: 0,
        end: 0,
        has_ended: false,
        spin: Spin::new(),
        low_mark: LowMark::new(),
        is_marked: false,
        has_more: false,
    };
    Ok((StreamSender { connection }, receiver))
}

impl StreamState {
    /// Writes what the kernel accepts; 0 if it has no room.
    fn write(&self, bytes: &[u8]) -> io::Result<usize> {
        loop {
            match rustix::net::send(
                &self.descriptor,
                bytes,
                SendFlags::NOSIGNAL | SendFlags::DONTWAIT,
            ) {
                Err(Errno::INTR) => (),
                Err(Errno::AGAIN | Errno::NOBUFS) => return Ok(0),
                result => return Ok(result?),
            }
        }
    }

    /// Sends the rest. Returns whether none is left.
    fn flush(&self, rest: &mut UnsentBytes) -> io::Result<bool> {
        while rest.start < rest.end {
            match self.write(&rest.bytes[rest.start..rest.end])? {
                0 => return Ok(false),
                written => rest.start += written,
            }
        }
        self.has_rest.store(false, Ordering::Release);
        Ok(true)
    }

    fn end(&self) {
        // If it has ended already, there is nothing to do.
        let _ = rustix::net::shutdown(&self.descriptor, Shutdown::Both);
    }
}

impl StreamSender {
    /// Counts the packets that `written` bytes from packet `from` on cover, the last perhaps in
    /// part. What is missing of it becomes the rest.
    fn taken(&self, rest: &mut UnsentBytes, burst: &Burst, from: usize, written: usize) -> usize {
        let (mut at, mut covered) = (from, 0);
        while covered < written {
            let packet = burst.packet(at);
            covered += packet.len();
            at += 1;
            if covered > written {
                let missing = &packet[packet.len() - (covered - written)..];
                rest.bytes[..missing.len()].copy_from_slice(missing);
                (rest.start, rest.end) = (0, missing.len());
                self.connection.has_rest.store(true, Ordering::Release);
                self.connection.nudge.wake();
            }
        }
        at - from
    }
}

impl Sender for StreamSender {
    fn packet_bytes_max(&self, _: &Peer) -> usize {
        PACKET_BYTES_MAX
    }

    fn send(&self, to: &Peer, burst: &Burst, from: usize) -> io::Result<usize> {
        if *to != Peer::Stream {
            return Err(wrong_peer("a stream", to));
        }
        let longest = (from..burst.len()).map(|index| burst.packet(index).len()).max();
        if longest.is_some_and(|longest| longest > PACKET_BYTES_MAX) {
            return Err(Errno::MSGSIZE.into());
        }
        let mut rest = self.connection.rest.lock();
        let mut at = from;
        while at < burst.len() && self.connection.flush(&mut rest)? {
            match self.connection.write(burst.span(at, burst.len())) {
                Ok(0) => break,
                Ok(written) => at += self.taken(&mut rest, burst, at, written),
                // Some packets were sent; the error returns with the next one.
                Err(_) if at > from => break,
                Err(error) => return Err(error),
            }
        }
        Ok(at - from)
    }
}

impl StreamReceiver {
    /// Passes on the whole packets that were read. Returns whether their lengths are valid.
    fn hand_on(
        &mut self,
        reasons: &mut WakeReasons,
        each: &mut dyn FnMut(&Peer, &mut [u8]),
    ) -> bool {
        loop {
            let unread = &mut self.inbox[self.start..self.end];
            let Some(length) = declared_bytes(unread) else { return true };
            if !(PACKET_BYTES_MIN..=PACKET_BYTES_MAX).contains(&length) {
                reasons.malformed += 1;
                return false;
            }
            let Some(packet) = unread.get_mut(..length) else { return true };
            self.start += length;
            reasons.packets += 1;
            each(&Peer::Stream, packet);
        }
    }

    /// Reads once, behind the bytes in the inbox; none if nothing is available now.
    fn read(&mut self) -> io::Result<Option<usize>> {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.inbox.len() - self.end < LOW_MARK_BYTES {
            // What is there is less than a packet.
            self.inbox.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let room = &mut self.inbox[self.end..];
        let room_bytes = room.len();
        self.has_more = false;
        match rustix::net::recv(&self.connection.descriptor, room, RecvFlags::DONTWAIT) {
            Err(Errno::AGAIN | Errno::INTR) => Ok(None),
            Err(error) => Err(error.into()),
            Ok((_, read)) => {
                self.has_more = read > 0 && read == room_bytes;
                Ok(Some(read))
            }
        }
    }

    /// Sets the socket's mark for the next wait; returns whether that is for many bytes.
    fn choose_mark(&mut self, may_wait: bool) -> bool {
        let is_for_many = may_wait && self.low_mark.is_worth_it();
        if is_for_many != self.is_marked {
            let bytes = if is_for_many { LOW_MARK_BYTES } else { 1 };
            // A kernel that refuses wakes for each byte, and a wait for many ends by time.
            let _ = wake_for(&self.connection.descriptor, bytes);
            self.is_marked = is_for_many;
        }
        is_for_many
    }

    /// Reads once, and passes on the whole packets; returns the bytes that were read.
    fn take(
        &mut self,
        reasons: &mut WakeReasons,
        each: &mut dyn FnMut(&Peer, &mut [u8]),
    ) -> io::Result<usize> {
        let read = match self.read() {
            Ok(None) => return Ok(0),
            Ok(Some(0)) => {
                let is_torn = self.start < self.end;
                self.connection.end();
                return Err(closed(is_torn));
            }
            Ok(Some(read)) => read,
            Err(error) => {
                self.connection.end();
                return Err(error);
            }
        };
        self.end += read;
        self.low_mark.took(read);
        if !self.hand_on(reasons, each) {
            self.end();
        }
        Ok(read)
    }

    fn end(&mut self) {
        self.has_ended = true;
        self.connection.end();
    }
}

fn malformed() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "the stream carried a packet of an invalid length")
}

fn closed(is_torn: bool) -> io::Error {
    let what = if is_torn {
        "the peer closed the stream in the middle of a packet"
    } else {
        "the peer closed the stream"
    };
    io::Error::new(io::ErrorKind::UnexpectedEof, what)
}

impl Receiver for StreamReceiver {
    fn receive(
        &mut self,
        wait: Option<Duration>,
        writable_too: bool,
        each: &mut dyn FnMut(&Peer, &mut [u8]),
    ) -> io::Result<WakeReasons> {
        if self.has_ended {
            return Err(malformed());
        }
        let (wait_asked, had_more) = (wait, self.has_more);
        // Who waits for room too needs each byte as it comes: it may be what makes room. And who
        // must look at other things sooner would learn nothing.
        let may_wait = !writable_too && wait.is_none_or(|wait| wait >= WAIT_TIME_MAX);
        let waits_for_many = !had_more && self.choose_mark(may_wait);
        let wait = match (had_more, waits_for_many) {
            (true, _) => Some(Duration::ZERO),
            (false, true) => Some(WAIT_TIME_MAX),
            (false, false) => wait,
        };
        let connection = &*self.connection;
        let has_rest = connection.has_rest.load(Ordering::Acquire);
        let socket = connection.descriptor.as_fd();
        let interest = Interest::of(writable_too || has_rest);
        let is_there = !had_more
            && interest == Interest::Readable
            && self.spin.look(wait, || connection.waker.is_called(), || is_readable(socket));
        let wait = if is_there { Some(Duration::ZERO) } else { wait };
        let ready = wait_for(socket, &connection.waker, Some(&connection.nudge), wait, interest)?;
        let mut reasons = WakeReasons { waker: ready.waker, ..WakeReasons::default() };
        if ready.writable {
            // A sender that holds the lock flushes by itself, and receives any error.
            let flush_result =
                connection.rest.try_lock().map(|mut rest| connection.flush(&mut rest));
            reasons.writable = writable_too && !matches!(flush_result, Some(Ok(false)));
        }
        if waits_for_many && (ready.readable || ready.timed_out && !is_there) {
            self.low_mark.waited(ready.readable);
        }
        // With a mark, bytes may be there although the socket is not readable yet.
        let may_have_bytes = ready.readable || ready.failed || self.is_marked || had_more;
        let has_none = may_have_bytes && self.take(&mut reasons, each)? == 0;
        if has_none && waits_for_many && !ready.waker && !ready.writable {
            // The flow has ended, and with it the mark.
            let left = wait_asked.map(|wait| wait.saturating_sub(WAIT_TIME_MAX));
            return self.receive(left, writable_too, each);
        }
        reasons.tell(&mut self.spin);
        Ok(reasons)
    }

    fn set_spin_time_max(&mut self, spin_time_max: Duration) {
        self.spin.set_limit(spin_time_max);
    }

    fn waker(&self) -> Arc<Waker> {
        self.connection.waker.clone()
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use sawmill_testkit::wait_until;

    use super::*;
    use crate::carrier::PACKET_BYTES_MIN;

    const ANSWER_TIME_MAX: Duration = Duration::from_secs(60);

    /// Both ends of a stream; its second one counts as in the middle of a flow.
    fn in_flow() -> ((StreamSender, StreamReceiver), (StreamSender, StreamReceiver)) {
        let listener = StreamListener::open("127.0.0.1:0".parse().unwrap(), None).unwrap();
        let near = connect(listener.local().unwrap(), None, ANSWER_TIME_MAX).unwrap();
        let (sender, mut receiver, _) = listener.accept(Some(ANSWER_TIME_MAX)).unwrap().unwrap();
        receiver.low_mark.took(1 << 40);
        (near, (sender, receiver))
    }

    fn burst(packet_bytes: usize) -> Burst {
        let mut burst = Burst::new(1, packet_bytes);
        let length = u32::try_from(packet_bytes).unwrap().to_le_bytes();
        burst.space()[4..8].copy_from_slice(&length);
        burst.commit(packet_bytes);
        burst
    }

    /// Receives one packet on a thread of its own, with no limit of time.
    fn receiving(mut receiver: StreamReceiver, writable_too: bool) -> thread::JoinHandle<usize> {
        thread::spawn(move || {
            loop {
                let mut packet_bytes = 0;
                let woken = receiver.receive(None, writable_too, &mut |_, packet| {
                    packet_bytes = packet.len();
                });
                if woken.expect("the stream lives").packets > 0 {
                    return packet_bytes;
                }
            }
        })
    }

    fn no_room_comes(sender: &StreamSender) -> bool {
        let StreamState { descriptor, waker, .. } = &*sender.connection;
        let wait = Some(Duration::from_millis(100));
        let interest = Interest::ReadableOrWritable;
        wait_for(descriptor.as_fd(), waker, None, wait, interest).unwrap().timed_out
    }

    #[test]
    fn few_bytes_in_a_flow_arrive_without_more() {
        let ((sender, _near), (_sender, receiver)) = in_flow();
        let receiving = receiving(receiver, false);
        assert_eq!(sender.send(&Peer::Stream, &burst(PACKET_BYTES_MIN), 0).unwrap(), 1);
        wait_until("the packet came", || receiving.is_finished());
        assert_eq!(receiving.join().unwrap(), PACKET_BYTES_MIN);
    }

    #[test]
    fn few_bytes_in_a_flow_wake_who_waits_for_room_too() {
        let ((sender, _near), (full, mut receiver)) = in_flow();
        // Until no room comes any more: nobody reads at the other end.
        while !no_room_comes(&full) {
            while full.send(&Peer::Stream, &burst(PACKET_BYTES_MAX), 0).unwrap() > 0 {}
        }
        // The nudge for the packet that was sent in part.
        receiver.receive(Some(Duration::ZERO), true, &mut |_, _| ()).unwrap();
        // As after a wait for many bytes.
        assert!(receiver.choose_mark(true));
        let receiving = receiving(receiver, true);
        assert_eq!(sender.send(&Peer::Stream, &burst(PACKET_BYTES_MIN), 0).unwrap(), 1);
        wait_until("the packet came", || receiving.is_finished());
        assert_eq!(receiving.join().unwrap(), PACKET_BYTES_MIN);
        // Not because the stream has ended, for want of acknowledgements.
        assert_eq!(full.send(&Peer::Stream, &burst(PACKET_BYTES_MIN), 0).expect("it lives"), 0);
    }

    #[test]
    fn a_waker_and_the_end_of_a_stream_end_a_wait_for_many_bytes() {
        let ((sender, near), (_sender, mut receiver)) = in_flow();
        receiver.waker().wake();
        let none = &mut |_: &Peer, _: &mut [u8]| panic!("no packet");
        assert!(receiver.receive(None, false, none).unwrap().waker);
        receiver.low_mark.took(1 << 40);
        assert!(receiver.choose_mark(true));
        drop((sender, near));
        let error = receiver.receive(None, false, none).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }
}
