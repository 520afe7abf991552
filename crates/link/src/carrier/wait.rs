//! How a receiver waits: for its socket and for a waker, in one poll.
//!
//! Invariant: a wake that started before the wait, or during it, ends it. Not here: what happens
//! then.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;

/// The kernel refuses packets with ENOBUFS while a queue below the socket is full, and does not
/// report when there is room again. So a refused sender retries after this time.
const REFUSAL_DELAY: Duration = Duration::from_millis(1);

/// Ends a wait from another thread. All calls before the next wait count as one.
pub struct Waker {
    event: OwnedFd,
    is_called: AtomicBool,
}

impl Waker {
    pub(super) fn new() -> io::Result<Self> {
        let event = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?;
        Ok(Waker { event, is_called: AtomicBool::new(false) })
    }

    /// Ends the receiver's wait, or the next one. Makes a system call only if it is the first call
    /// since then.
    pub fn wake(&self) {
        if !self.is_called.swap(true, Ordering::AcqRel) {
            // The count cannot overflow: it is read whenever this flag is reset.
            let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
        }
    }

    /// Resets the waker. Returns whether it was called.
    fn take(&self) -> bool {
        // The order matters: a call in between finds the flag set, and is part of the result.
        let _ = rustix::io::read(&self.event, &mut [0u8; 8]);
        self.is_called.swap(false, Ordering::AcqRel)
    }

    pub(super) fn is_called(&self) -> bool {
        self.is_called.load(Ordering::Acquire)
    }

    fn take_if_called(&self) -> bool {
        self.is_called() && self.take()
    }
}

/// The result of a wait.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct WaitOutcome {
    pub(super) readable: bool,
    pub(super) writable: bool,
    pub(super) waker: bool,
    pub(super) failed: bool,
    /// The whole time passed.
    pub(super) timed_out: bool,
}

/// What a wait for a socket ends with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Interest {
    /// Something to read.
    Readable,
    /// Something to read, or room to write.
    ReadableOrWritable,
}

impl Interest {
    pub(super) fn of(writable_too: bool) -> Self {
        if writable_too { Interest::ReadableOrWritable } else { Interest::Readable }
    }
}

/// Waits for the socket, the waker and, if given, another waker that only interrupts.
pub(super) fn wait_for(
    socket: BorrowedFd<'_>,
    waker: &Waker,
    nudge: Option<&Waker>,
    wait: Option<Duration>,
    interest: Interest,
) -> io::Result<WaitOutcome> {
    let events = match interest {
        Interest::Readable => PollFlags::IN,
        Interest::ReadableOrWritable => PollFlags::IN | PollFlags::OUT,
    };
    let also = nudge.unwrap_or(waker);
    let mut polled = [
        PollFd::from_borrowed_fd(socket, events),
        PollFd::new(&waker.event, PollFlags::IN),
        PollFd::new(&also.event, PollFlags::IN),
    ];
    let wait = wait.and_then(|wait| Timespec::try_from(wait).ok());
    let count = if nudge.is_some() { 3 } else { 2 };
    let ready = match poll(&mut polled[..count], wait.as_ref()) {
        // It returns early.
        Err(Errno::INTR) => return Ok(WaitOutcome::default()),
        result => result?,
    };
    let [socket, called, nudged] = polled.map(|polled| polled.revents());
    if nudge.is_some() && nudged.contains(PollFlags::IN) {
        also.take();
    }
    Ok(WaitOutcome {
        readable: socket.contains(PollFlags::IN),
        writable: socket.contains(PollFlags::OUT),
        waker: called.contains(PollFlags::IN) && waker.take(),
        failed: socket.intersects(PollFlags::ERR | PollFlags::HUP | PollFlags::NVAL),
        timed_out: ready == 0,
    })
}

/// Whether a socket has something to read, or to report, now.
pub(super) fn is_readable(socket: BorrowedFd<'_>) -> bool {
    let mut polled = [PollFd::from_borrowed_fd(socket, PollFlags::IN)];
    let now = Timespec::try_from(Duration::ZERO).ok();
    poll(&mut polled, now.as_ref()).is_ok_and(|ready| ready > 0)
}

/// Sleeps, unless the waker is called. The call is kept: the next wait sees it.
pub(super) fn nap(waker: &Waker, most: Duration) -> io::Result<()> {
    let most = Timespec::try_from(most).ok();
    match poll(&mut [PollFd::new(&waker.event, PollFlags::IN)], most.as_ref()) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// What to wait for, and how long.
#[derive(Clone, Copy)]
pub(super) struct PacketWait {
    /// A packet was received already.
    pub(super) is_there: bool,
    pub(super) wait: Option<Duration>,
    pub(super) writable_too: bool,
}

/// As [`wait_for`], for a socket of datagrams or Ethernet frames: without a system call if
/// `is_there` reports something and nothing else was requested; slower if the kernel refused the
/// last packets.
pub(super) fn wait_for_packets(
    socket: BorrowedFd<'_>,
    waker: &Waker,
    refused: &AtomicBool,
    PacketWait { is_there, wait, writable_too }: PacketWait,
) -> io::Result<WaitOutcome> {
    if is_there && !writable_too {
        return Ok(WaitOutcome {
            readable: true,
            waker: waker.take_if_called(),
            ..WaitOutcome::default()
        });
    }
    let wait = if is_there { Some(Duration::ZERO) } else { wait };
    let ready = if writable_too && refused.swap(false, Ordering::AcqRel) {
        let wait = wait.map_or(REFUSAL_DELAY, |wait| wait.min(REFUSAL_DELAY));
        WaitOutcome {
            writable: true,
            ..wait_for(socket, waker, None, Some(wait), Interest::Readable)?
        }
    } else {
        wait_for(socket, waker, None, wait, Interest::of(writable_too))?
    };
    if ready.failed {
        rustix::net::sockopt::socket_error(socket.as_fd())??;
    }
    Ok(WaitOutcome { readable: ready.readable || is_there, ..ready })
}

/// Sends packets by several calls of `send`, which sends some from the given one on. Returns how
/// many were sent; an error after some of them returns with the next call.
pub(super) fn send_in_pieces(
    packets: Range<usize>,
    refused: &AtomicBool,
    mut send: impl FnMut(usize) -> io::Result<usize>,
) -> io::Result<usize> {
    let mut at = packets.start;
    while at < packets.end {
        match send(at) {
            Ok(sent) => at += sent,
            Err(_) if at > packets.start => break,
            Err(error) => return no_room(error, refused),
        }
    }
    Ok(at - packets.start)
}

/// The meaning of a send error: no room (0), now or because of a refusal; otherwise the error
/// itself.
fn no_room(error: io::Error, refused: &AtomicBool) -> io::Result<usize> {
    match Errno::from_io_error(&error) {
        Some(Errno::AGAIN) => Ok(0),
        Some(Errno::NOBUFS) => {
            refused.store(true, Ordering::Release);
            Ok(0)
        }
        _ => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_ends_the_next_wait_once_however_often_it_was_made() {
        let (waker, idle) = (Waker::new().expect("an eventfd"), Waker::new().expect("an eventfd"));
        let poll_now = || {
            wait_for(idle.event.as_fd(), &waker, None, Some(Duration::ZERO), Interest::Readable)
                .expect("polled")
        };
        assert!(!poll_now().waker);
        waker.wake();
        waker.wake();
        assert!(poll_now().waker);
        assert!(!poll_now().waker);
    }

    #[test]
    fn a_call_from_another_thread_ends_a_wait_without_end() {
        let (waker, idle) = (Waker::new().expect("an eventfd"), Waker::new().expect("an eventfd"));
        std::thread::scope(|scope| {
            scope.spawn(|| waker.wake());
            while !wait_for(idle.event.as_fd(), &waker, None, None, Interest::Readable)
                .expect("polled")
                .waker
            {}
        });
        assert!(!waker.is_called.load(Ordering::Acquire));
    }

    #[test]
    fn a_full_queue_is_no_room_and_any_other_error_is_itself() {
        let refused = AtomicBool::new(false);
        assert_eq!(no_room(Errno::AGAIN.into(), &refused).expect("no error"), 0);
        assert!(!refused.load(Ordering::Acquire));
        assert_eq!(no_room(Errno::NOBUFS.into(), &refused).expect("no error"), 0);
        assert!(refused.load(Ordering::Acquire));
        assert!(no_room(Errno::NETDOWN.into(), &refused).is_err());
    }

    #[test]
    fn a_refused_sender_is_woken_to_retry_though_nothing_happens() {
        let (waker, idle) = (Waker::new().expect("an eventfd"), Waker::new().expect("an eventfd"));
        let refused = AtomicBool::new(true);
        let until = PacketWait { is_there: false, wait: None, writable_too: true };
        let ready = wait_for_packets(idle.event.as_fd(), &waker, &refused, until);
        assert!(ready.expect("polled").writable && !refused.load(Ordering::Acquire));
    }
}
