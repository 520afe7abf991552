//! Who has connected to a host and has not said yet what for: a few at a time, for a short time.
//!
//! Each of them has a thread of the host, so there is a bound, and for one more the one that has been silent
//! longest has to go: nobody who speaks at once is kept out by others who do not.
//!
//! Invariant: who is here has its socket still open. Not here: what is said (`attach`, `ask`).

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::net::{Shutdown, shutdown};

/// Who may be silent at a time.
const SILENT_MAX: usize = 32;
/// Connections at a time: the driver, the next one, questions that are being answered, and the silent.
const CONNECTIONS_MAX: usize = 128;
/// How long a connection may take to say what it is for.
pub(super) const WITHIN: Duration = Duration::from_secs(10);

/// See the head of this file.
#[derive(Default)]
pub(super) struct Greeting {
    silent: Mutex<VecDeque<(u64, OwnedFd)>>,
    next: AtomicU64,
    connections: AtomicUsize,
}

/// A connection's place, until dropped.
pub(super) struct Place<'a>(&'a Greeting);

impl Greeting {
    /// A place for one more connection.
    pub(super) fn enter(&self) -> Option<Place<'_>> {
        let place = Place(self);
        (self.connections.fetch_add(1, Ordering::AcqRel) < CONNECTIONS_MAX).then_some(place)
    }

    /// Notes a connection that has said nothing yet. Errors: no descriptor is left.
    pub(super) fn wait_for(self: &Arc<Self>, socket: &OwnedFd) -> std::io::Result<Silent> {
        let kept = socket.try_clone()?;
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let mut silent = self.silent.lock();
        if silent.len() >= SILENT_MAX
            && let Some((_, oldest)) = silent.pop_front()
        {
            // Its thread finds it ended.
            let _ = shutdown(&oldest, Shutdown::Both);
        }
        silent.push_back((number, kept));
        Ok(Silent { greeting: Arc::clone(self), number })
    }

    fn forget(&self, number: u64) -> bool {
        let mut silent = self.silent.lock();
        let at = silent.iter().position(|(other, _)| *other == number);
        at.map(|at| silent.remove(at)).is_some()
    }
}

/// A connection that has said nothing yet, until dropped.
pub(super) struct Silent {
    greeting: Arc<Greeting>,
    number: u64,
}

impl Silent {
    /// It has said something, or gone. `false`: it had to go.
    pub(super) fn spoke(self) -> bool {
        self.greeting.forget(self.number)
    }
}

impl Drop for Silent {
    fn drop(&mut self) {
        self.greeting.forget(self.number);
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.connections.fetch_sub(1, Ordering::AcqRel);
    }
}
