//! Ends another thread's wait for descriptors: an eventfd.
//!
//! Invariant: a wake that began before the wait, or during it, ends it; several before it count as
//! one. Not here: what is done then.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::event::{EventfdFlags, eventfd};

/// Ends another thread's wait for descriptors. Clones are the same waker.
#[derive(Clone, Debug)]
pub struct Waker(Arc<OwnedFd>);

impl Waker {
    /// A new one, not woken yet. Fails if the process has no more descriptors.
    pub fn new() -> io::Result<Self> {
        Ok(Waker(Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)))
    }

    /// Ends the current wait for it, or the next one.
    pub fn wake(&self) {
        // A full counter is a wake already on its way.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// To be called by the thread that was woken, before it checks for work.
    pub fn clear(&self) {
        let _ = rustix::io::read(&self.0, &mut [0u8; 8]);
    }

    /// The descriptor that a wake makes readable, for a ring that watches it.
    #[must_use]
    pub fn descriptor(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.0)
    }
}

impl AsFd for Waker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;

    #[test]
    fn wakes_before_a_wait_count_as_one() {
        let waker = Waker::new().unwrap();
        let is_woken = || {
            let mut fds = [PollFd::new(&waker, PollFlags::IN)];
            poll(&mut fds, Some(&Timespec::default())).unwrap() == 1
        };
        assert!(!is_woken());
        (0..3).for_each(|_| waker.clone().wake());
        assert!(is_woken());
        waker.clear();
        assert!(!is_woken());
    }
}
