//! Connections to a host that have not sent anything yet: a few at a time, for a short time.
//!
//! Each has a thread of the host, so their number is bounded. When one too many arrives, the one
//! that has been silent longest is closed: silent connections cannot keep out those that send
//! immediately.
//!
//! Invariant: the socket of every connection here is open. Not here: their messages (`attach`,
//! `ask`).

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::net::{Shutdown, shutdown};

/// The most silent connections.
const SILENT_CONNECTIONS_MAX: usize = 32;
/// The most connections: the driver, the next one, questions being answered, and silent ones.
const CONNECTIONS_MAX: usize = 128;
/// Time for a connection to send its first packet.
pub(super) const FIRST_PACKET_TIME_MAX: Duration = Duration::from_secs(10);

/// The silent connections of a host, and the count of all its connections.
#[derive(Default)]
pub(super) struct Greeting {
    /// Bounded by [`SILENT_CONNECTIONS_MAX`].
    silent: Mutex<VecDeque<(u64, OwnedFd)>>,
    next: AtomicU64,
    connections: AtomicUsize,
}

/// A connection's place, until dropped.
pub(super) struct ConnectionSlot<'a>(&'a Greeting);

impl Greeting {
    /// Reserves a place for one more connection.
    pub(super) fn enter(&self) -> Option<ConnectionSlot<'_>> {
        let place = ConnectionSlot(self);
        // If there is no place, `place` is dropped here, and its drop takes the count back.
        (self.connections.fetch_add(1, Ordering::AcqRel) < CONNECTIONS_MAX).then_some(place)
    }

    /// Adds a silent connection. Returns an error if no descriptor is left.
    pub(super) fn wait_for(
        self: &Arc<Self>,
        socket: &OwnedFd,
    ) -> std::io::Result<SilentConnection> {
        // A duplicate, to shut the connection down while its thread waits in `recv` on its own.
        let duplicate = socket.try_clone()?;
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let mut silent = self.silent.lock();
        if silent.len() >= SILENT_CONNECTIONS_MAX
            && let Some((_, oldest)) = silent.pop_front()
        {
            // Its thread notices that it has ended.
            let _ = shutdown(&oldest, Shutdown::Both);
        }
        silent.push_back((number, duplicate));
        Ok(SilentConnection { greeting: Arc::clone(self), number })
    }

    fn forget(&self, number: u64) -> bool {
        let mut silent = self.silent.lock();
        let at = silent.iter().position(|(other, _)| *other == number);
        at.map(|at| silent.remove(at)).is_some()
    }
}

/// A connection that has not sent anything yet, until dropped.
pub(super) struct SilentConnection {
    greeting: Arc<Greeting>,
    number: u64,
}

impl SilentConnection {
    /// Ends the wait when it has sent something or disconnected. `false`: the host had closed it.
    pub(super) fn has_spoken(self) -> bool {
        self.greeting.forget(self.number)
    }
}

impl Drop for SilentConnection {
    fn drop(&mut self) {
        self.greeting.forget(self.number);
    }
}

impl Drop for ConnectionSlot<'_> {
    fn drop(&mut self) {
        self.0.connections.fetch_sub(1, Ordering::AcqRel);
    }
}
