//! How a server quiesces and resumes: which threads pause, and how that is awaited.
//!
//! `is_pausing` asks every thread of the server to pause. The accepting thread pauses immediately;
//! a connection's thread when its client's requests are answered (replies may be unsent). Both
//! report to the registry, and wait for `released`. A client in the middle of its handshake does
//! not delay this: its thread pauses after the handshake, before its first request.
//!
//! Invariant: a paused thread touches no socket and no device. Not here: what is handed to another
//! process.

use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use sawmill_device::{Error, ErrorKind, Result};

use super::outbox::ClientChannel;
use super::server::{Entry, NbdState, Registry};
use super::session::PausedConnection;

/// Time for clients in their handshake to finish it, so that they are included.
const HANDSHAKE_TIME_MAX: Duration = Duration::from_millis(20);

impl Entry {
    fn is_quiet(&self) -> bool {
        // A connection that is ending accepts nothing; its last replies may still be sent.
        let ends = || self.channel.is_stopping() && self.channel.in_flight() == 0;
        self.export.is_none() || self.connection.is_some() || ends()
    }
}

impl Registry {
    /// Whether no thread accepts requests, and all accepted ones are answered.
    pub(super) fn is_quiet(&self) -> bool {
        self.is_accepting_held && self.entries.values().all(Entry::is_quiet)
    }

    fn is_settled(&self) -> bool {
        self.is_quiet()
            && self
                .entries
                .values()
                .all(|entry| entry.connection.is_some() || entry.channel.is_stopping())
    }
}

impl NbdState {
    /// Whether threads must pause.
    #[inline]
    pub(super) fn is_pausing(&self) -> bool {
        self.is_pausing.load(Relaxed)
    }

    /// Pauses the thread of a connection that is still.
    pub(super) fn hold(&self, id: u64, channel: &ClientChannel, connection: PausedConnection) {
        let mut registry = self.registry.lock();
        // A pause that is already over must not leave a mark.
        if !self.is_pausing() {
            return;
        }
        if let Some(entry) = registry.entries.get_mut(&id) {
            entry.connection = Some(connection);
        }
        self.changed.notify_all();
        while self.is_pausing() && !channel.is_stopping() {
            self.released.wait(&mut registry);
        }
        if let Some(entry) = registry.entries.get_mut(&id) {
            entry.connection = None;
        }
    }

    /// Pauses the accepting thread.
    pub(super) fn hold_accepting(&self) {
        let mut registry = self.registry.lock();
        if !self.is_pausing() {
            return;
        }
        registry.is_accepting_held = true;
        self.changed.notify_all();
        while self.is_pausing() && !self.is_stopping.load(Relaxed) {
            self.released.wait(&mut registry);
        }
        registry.is_accepting_held = false;
    }

    /// Makes paused threads check whether they must still pause.
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
        // Under the registry's lock, as every change of it: a thread between its check and its wait
        // would otherwise miss the end of the pause.
        self.is_pausing.store(true, Relaxed);
        self.waker.wake();
        let mut was_woken = false;
        loop {
            if self.is_stopping.load(Relaxed) {
                return Err(Error::new(ErrorKind::Closed, "nbd: the server is stopping"));
            }
            // Until then another connection may arrive; its thread checks before its first request.
            if registry.is_accepting_held && !was_woken {
                registry.entries.values().for_each(|entry| entry.channel.waker.wake());
                was_woken = true;
            }
            let is_quiet = registry.is_quiet();
            // A client in its handshake has no request in flight, so the door is quiet without it.
            // It gets a little time, because it must reconnect if it is not included.
            let until = if is_quiet { deadline.min(start + HANDSHAKE_TIME_MAX) } else { deadline };
            if registry.is_settled() || (is_quiet && Instant::now() >= until) {
                return Ok(());
            }
            if self.changed.wait_until(&mut registry, until).timed_out()
                && !is_quiet
                && !registry.is_quiet()
            {
                break;
            }
        }
        // The obstacle is named before the release: afterward its requests may be answered.
        let error = obstacle(&registry, patience);
        self.end_pause(&mut registry);
        Err(error)
    }

    /// See [`crate::QuietDoor::resume`].
    pub(super) fn resume(&self) {
        self.end_pause(&mut self.registry.lock());
    }

    fn end_pause(&self, registry: &mut Registry) {
        self.is_pausing.store(false, Relaxed);
        self.released.notify_all();
        // A thread that is not paused yet waits for answers, and may receive again meanwhile.
        let busy = registry.entries.values().filter(|entry| entry.connection.is_none());
        busy.for_each(|entry| entry.channel.waker.wake());
    }
}

/// What prevented the door from becoming quiet.
fn obstacle(registry: &Registry, patience: Duration) -> Error {
    let busy = |entry: &&Entry| !entry.is_quiet();
    let in_flight: u64 =
        registry.entries.values().filter(busy).map(|entry| entry.channel.in_flight()).sum();
    let text = match registry.entries.values().find(busy) {
        Some(Entry { export: Some(export), peer, .. }) => format!(
            "nbd: {in_flight} requests are not answered after {patience:?}, the first of them by \
             export {:?} to {peer}; the door resumes",
            export.name
        ),
        _ => format!("nbd: the door is not quiet after {patience:?}; it resumes"),
    };
    Error::new(ErrorKind::Unavailable, text)
}
