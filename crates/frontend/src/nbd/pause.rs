//! How a server becomes quiet and goes on: who is held, and who waits for that.
//!
//! `pausing` asks every thread of the server to hold. The accepting thread holds at once; a connection's
//! thread when what its client asked for is answered (replies may be unsent); both tell the registry, and
//! wait for `released`. A client in the middle of its handshake is no obstacle: it holds when it is
//! through, before its first request.
//!
//! Invariant: a held thread touches no socket and no device. Not here: what is told to another process.

use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use sawmill_device::{Error, ErrorKind, Result};

use super::outbox::Link;
use super::server::{Entry, Registry, Shared};
use super::session::Held;

/// Clients in their handshake have this long to be through, so that they come along.
const HANDSHAKE_GRACE: Duration = Duration::from_millis(20);

impl Entry {
    fn is_quiet(&self) -> bool {
        // One that ends takes nothing more; its last replies may go out meanwhile.
        let ends = || self.link.is_stopping() && self.link.in_flight() == 0;
        self.export.is_none() || self.held.is_some() || ends()
    }
}

impl Registry {
    /// Nobody takes requests, and all that were taken are answered.
    pub(super) fn is_quiet(&self) -> bool {
        self.accepting_held && self.entries.values().all(Entry::is_quiet)
    }

    fn is_settled(&self) -> bool {
        self.is_quiet() && self.entries.values().all(|entry| entry.held.is_some() || entry.link.is_stopping())
    }
}

impl Shared {
    /// Whether threads shall hold.
    #[inline]
    pub(super) fn is_pausing(&self) -> bool {
        self.pausing.load(Relaxed)
    }

    /// Holds the thread of a connection that is still.
    pub(super) fn hold(&self, id: u64, link: &Link, held: Held) {
        let mut registry = self.registry.lock();
        // A pause that is over already shall not leave a mark.
        if !self.is_pausing() {
            return;
        }
        if let Some(entry) = registry.entries.get_mut(&id) {
            entry.held = Some(held);
        }
        self.changed.notify_all();
        while self.is_pausing() && !link.is_stopping() {
            self.released.wait(&mut registry);
        }
        if let Some(entry) = registry.entries.get_mut(&id) {
            entry.held = None;
        }
    }

    /// Holds the accepting thread.
    pub(super) fn hold_accepting(&self) {
        let mut registry = self.registry.lock();
        if !self.is_pausing() {
            return;
        }
        registry.accepting_held = true;
        self.changed.notify_all();
        while self.is_pausing() && !self.stopping.load(Relaxed) {
            self.released.wait(&mut registry);
        }
        registry.accepting_held = false;
    }

    /// Makes held threads look again whether they still have to.
    pub(super) fn nudge(&self) {
        let registry = self.registry.lock();
        self.released.notify_all();
        drop(registry);
    }

    /// See [`crate::Door::quiesce`].
    pub(super) fn quiesce(&self, patience: Duration) -> Result<()> {
        let start = Instant::now();
        let deadline = start + patience;
        let mut registry = self.registry.lock();
        self.pausing.store(true, Relaxed);
        self.waker.wake();
        let mut woken = false;
        loop {
            if self.stopping.load(Relaxed) {
                return Err(Error::new(ErrorKind::Closed, "nbd: the server is stopping"));
            }
            // Before that another connection may come; its own thread looks before its first request.
            if registry.accepting_held && !woken {
                registry.entries.values().for_each(|entry| entry.link.waker.wake());
                woken = true;
            }
            let quiet = registry.is_quiet();
            let until = if quiet { deadline.min(start + HANDSHAKE_GRACE) } else { deadline };
            if registry.is_settled() || (quiet && Instant::now() >= until) {
                return Ok(());
            }
            if self.changed.wait_until(&mut registry, until).timed_out() && !quiet && !registry.is_quiet() {
                break;
            }
        }
        let error = obstacle(&registry, patience);
        self.release(&mut registry);
        Err(error)
    }

    /// See [`crate::Door::resume`].
    pub(super) fn resume(&self) {
        self.release(&mut self.registry.lock());
    }

    fn release(&self, _registry: &mut Registry) {
        self.pausing.store(false, Relaxed);
        self.released.notify_all();
    }
}

/// What a door waited for in vain.
fn obstacle(registry: &Registry, patience: Duration) -> Error {
    let busy = |entry: &&Entry| !entry.is_quiet();
    let in_flight: u64 = registry.entries.values().filter(busy).map(|entry| entry.link.in_flight()).sum();
    let text = match registry.entries.values().find(busy) {
        Some(Entry { export: Some(export), peer, .. }) => format!(
            "nbd: {in_flight} requests are not answered after {patience:?}, the first of them by export {:?} \
             to {peer}; the door resumes",
            export.name
        ),
        _ => format!("nbd: the door is not quiet after {patience:?}; it resumes"),
    };
    Error::new(ErrorKind::Unavailable, text)
}
