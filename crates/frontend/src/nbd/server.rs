//! One listening socket, the exports behind it, and the connections to it.
//!
//! Invariants: a connection is in the registry from before its thread runs until that thread has
//! released the device. A removed export has no connection left. Not here: how a connection starts
//! (`reception`), its messages, how a server quiesces (`pause`), and how it is handed over
//! (`door`).

use std::collections::BTreeMap;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;

use parking_lot::{Condvar, Mutex, RwLock};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, PercentEncode, percent_encode};
use sawmill_device::{BlockDevice, Error, ErrorKind, Result};
use sawmill_nbd_proto::STRING_BYTES_MAX;
use sawmill_sys::Waker;

use super::complaints::Complaints;
use super::listener::Listener;
use super::metrics::NbdMetrics;
use super::options::{Listen, NbdOptions};
use super::outbox::ClientChannel;
use super::peer_identity::PeerIdentity;
use super::session::PausedConnection;

/// A device under a name.
#[derive(Clone)]
pub struct Export {
    /// The name that clients request; the first export also has the empty name. At most 4096 bytes.
    pub name: String,
    /// Shown by clients that list exports; may be empty. At most 4096 bytes.
    pub description: String,
    /// The device.
    pub device: Arc<dyn BlockDevice>,
}

/// A connected client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Client {
    /// Its address; for a Unix socket, its process and user.
    pub peer: String,
    /// The export it chose; `None` during the handshake.
    pub export: Option<String>,
}

/// The exports of a server, in the order they were added.
#[derive(Default)]
pub(super) struct Exports(RwLock<Vec<Arc<Export>>>);

impl Exports {
    pub(super) fn all(&self) -> Vec<Arc<Export>> {
        self.0.read().clone()
    }

    /// The export with this name; the empty name means the first.
    pub(super) fn find(&self, name: &str) -> Option<Arc<Export>> {
        let exports = self.0.read();
        // An export whose own name is empty comes before the first one.
        let exact = exports.iter().find(|export| export.name == name);
        exact.or_else(|| exports.first().filter(|_| name.is_empty())).cloned()
    }

    pub(super) fn contains(&self, export: &Arc<Export>) -> bool {
        self.0.read().iter().any(|known| Arc::ptr_eq(known, export))
    }
}

/// A connection, as the server sees it.
pub(super) struct Entry {
    pub(super) channel: Arc<ClientChannel>,
    pub(super) peer: String,
    pub(super) peer_identity: PeerIdentity,
    /// `None` during the handshake.
    pub(super) export: Option<Arc<Export>>,
    /// Its state while its thread is paused.
    pub(super) connection: Option<PausedConnection>,
}

#[derive(Default)]
pub(super) struct Registry {
    pub(super) entries: BTreeMap<u64, Entry>,
    next: u64,
    /// The counters of connections that are gone, of those never taken over, and of another process
    /// before this one.
    pub(super) past: NbdMetrics,
    /// Whether the accepting thread is paused.
    pub(super) is_accepting_held: bool,
}

impl Registry {
    /// Adds a connection and returns its number.
    pub(super) fn enter(&mut self, entry: Entry) -> u64 {
        self.next += 1;
        self.entries.insert(self.next, entry);
        self.next
    }
}

pub(super) struct NbdState {
    pub(super) options: NbdOptions,
    pub(super) listener: Listener,
    pub(super) exports: Exports,
    pub(super) registry: Mutex<Registry>,
    /// A connection has left the registry, or a thread has paused.
    pub(super) changed: Condvar,
    pub(super) is_stopping: AtomicBool,
    /// Threads must pause; changed under the registry's lock.
    pub(super) is_pausing: AtomicBool,
    /// Paused threads must check again.
    pub(super) released: Condvar,
    pub(super) complaints: Complaints,
    /// Taken over from another process, which may still roll that back.
    pub(super) is_on_trial: AtomicBool,
    /// Wakes the accepting thread.
    pub(super) waker: Waker,
    pub(super) accepting: Mutex<Option<JoinHandle<()>>>,
}

/// How a server starts.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum StartMode {
    /// With a listener of its own.
    Serving,
    /// With what it took over from another process, which may still roll that back: it is quiet
    /// until it is resumed.
    OnTrial,
}

/// Removes the Unix socket of a server that does not start.
fn discard(listener: &Listener, start_mode: StartMode) {
    // On trial, the other process still accepts on that file, and clients find it there.
    if start_mode == StartMode::Serving {
        listener.remove();
    }
}

/// A running NBD server. Dropping it is [`Stop::Now`](crate::Stop::Now).
pub struct NbdServer {
    pub(super) shared: Arc<NbdState>,
}

impl NbdServer {
    /// Listens and starts to accept clients. Exports may come and go while it runs.
    ///
    /// Errors: `Invalid` for an address that is unusable or not allowed (not loopback, without
    /// `insecure_listen`); `Unavailable` if the address is taken or the system refuses.
    pub fn start(options: NbdOptions) -> Result<Self> {
        options.check()?;
        let listener = Listener::open(&options)?;
        Self::new(options, listener, NbdMetrics::default(), StartMode::Serving)
    }

    /// A server behind this listener.
    pub(super) fn new(
        options: NbdOptions,
        listener: Listener,
        metrics: NbdMetrics,
        start_mode: StartMode,
    ) -> Result<Self> {
        let system = |error: std::io::Error| {
            Error::caused(ErrorKind::Unavailable, "nbd: cannot start the server", error)
        };
        let waker = match Waker::new() {
            Ok(waker) => waker,
            Err(error) => {
                discard(&listener, start_mode);
                return Err(system(error));
            }
        };
        let shared = Arc::new(NbdState {
            options,
            listener,
            exports: Exports::default(),
            registry: Mutex::new(Registry { past: metrics, ..Registry::default() }),
            changed: Condvar::new(),
            is_stopping: AtomicBool::new(false),
            is_pausing: AtomicBool::new(start_mode == StartMode::OnTrial),
            released: Condvar::new(),
            complaints: Complaints::default(),
            is_on_trial: AtomicBool::new(start_mode == StartMode::OnTrial),
            waker,
            accepting: Mutex::default(),
        });
        let accepting = shared.clone();
        let thread = std::thread::Builder::new()
            .name("nbd-accept".into())
            .spawn(move || accepting.accept_all());
        match thread {
            Ok(thread) => {
                *shared.accepting.lock() = Some(thread);
                Ok(NbdServer { shared })
            }
            Err(error) => {
                discard(&shared.listener, start_mode);
                Err(system(error))
            }
        }
    }

    /// Adds an export. Returns `Invalid` for a name that is taken, or a text that is too long or
    /// has a NUL.
    pub fn add_export(&self, export: Export) -> Result<()> {
        let texts = [("name", &export.name), ("description", &export.description)];
        for (what, text) in texts {
            if text.len() > STRING_BYTES_MAX || text.contains('\0') {
                let text = format!(
                    "nbd: the {what} of export {:?} has {} bytes or a NUL; the limit is \
                    {STRING_BYTES_MAX}",
                    export.name.chars().take(40).collect::<String>(),
                    text.len()
                );
                return Err(Error::new(ErrorKind::Invalid, text));
            }
        }
        let mut exports = self.shared.exports.0.write();
        if exports.iter().any(|known| known.name == export.name) {
            let text = format!(
                "nbd: export {:?} exists already; remove it or choose another name",
                export.name
            );
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        exports.push(Arc::new(export));
        Ok(())
    }

    /// Removes an export, and waits until its clients' requests in flight are answered and their
    /// connections closed. Errors: `NotFound`.
    pub fn remove_export(&self, name: &str) -> Result<()> {
        let export = {
            let mut exports = self.shared.exports.0.write();
            let Some(position) = exports.iter().position(|export| export.name == name) else {
                return Err(Error::new(
                    ErrorKind::NotFound,
                    format!("nbd: no export is named {name:?}"),
                ));
            };
            // The name goes first. A handshake that has found the export looks again under the
            // registry's lock (`begin`), so none begins after the connections below were stopped.
            exports.remove(position)
        };
        let serves = |entry: &Entry| {
            entry.export.as_ref().is_some_and(|chosen| Arc::ptr_eq(chosen, &export))
        };
        let mut registry = self.shared.registry.lock();
        registry
            .entries
            .values()
            .filter(|entry| serves(entry))
            .for_each(|entry| entry.channel.stop());
        self.shared.released.notify_all();
        while registry.entries.values().any(serves) {
            self.shared.changed.wait(&mut registry);
        }
        Ok(())
    }

    /// The actual address: for TCP port 0, with the port that was free.
    #[must_use]
    pub fn address(&self) -> &Listen {
        &self.shared.listener.address
    }

    /// The NBD URI of the export with this name, for clients on this machine.
    #[must_use]
    pub fn uri(&self, name: &str) -> String {
        let name = percent_encoded(name.as_bytes());
        match self.address() {
            Listen::Unix(path) => {
                let path = std::path::absolute(path).unwrap_or_else(|_| path.clone());
                format!(
                    "nbd+unix:///{name}?socket={}",
                    percent_encoded(path.as_os_str().as_bytes())
                )
            }
            Listen::Tcp(address) => format!("nbd://{address}/{name}"),
        }
    }

    /// The counters since the start.
    #[must_use]
    pub fn metrics(&self) -> NbdMetrics {
        self.shared.metrics()
    }

    /// The clients connected now, oldest first.
    #[must_use]
    pub fn clients(&self) -> Vec<Client> {
        let client = |entry: &Entry| Client {
            peer: entry.peer.clone(),
            export: entry.export.as_ref().map(|export| export.name.clone()),
        };
        self.shared.registry.lock().entries.values().map(client).collect()
    }
}

impl Drop for NbdServer {
    fn drop(&mut self) {
        self.shared.end(ClientChannel::close);
    }
}

impl NbdState {
    pub(super) fn metrics(&self) -> NbdMetrics {
        let registry = self.registry.lock();
        let mut metrics = registry.past;
        for entry in registry.entries.values() {
            metrics.connections += 1;
            metrics.handshakes += u64::from(entry.export.is_none());
            entry.channel.counters.add_to(&mut metrics);
            metrics.in_flight += entry.channel.in_flight();
        }
        metrics
    }

    /// Stops accepting, ends every connection and waits for that. A second call returns together
    /// with the first.
    pub(super) fn end(&self, how: impl Fn(&ClientChannel)) {
        // On trial, everything belongs to another process and must not be ended.
        if self.is_on_trial.load(Relaxed) {
            return self.release();
        }
        self.is_stopping.store(true, Relaxed);
        self.waker.wake();
        self.nudge();
        if let Some(thread) = self.accepting.lock().take() {
            let _ = thread.join();
            self.listener.remove();
        }
        // After the accepting thread has ended, so no connection enters the registry behind this.
        self.registry.lock().entries.values().for_each(|entry| how(&entry.channel));
        self.nudge();
        self.wait_until_all_left();
    }

    pub(super) fn wait_until_all_left(&self) {
        let mut registry = self.registry.lock();
        while !registry.entries.is_empty() {
            self.changed.wait(&mut registry);
        }
    }
}

/// Removes a connection from the registry when its thread ends, however it ends.
pub(super) struct RegistryGuard {
    pub(super) shared: Arc<NbdState>,
    pub(super) id: u64,
}

impl Drop for RegistryGuard {
    fn drop(&mut self) {
        let mut registry = self.shared.registry.lock();
        if let Some(entry) = registry.entries.remove(&self.id) {
            // Requests in flight keep the channel and its socket open; the client must learn of the
            // end before a slow device has answered them.
            entry.channel.close();
            entry.channel.counters.add_to(&mut registry.past);
        }
        drop(registry);
        self.shared.changed.notify_all();
    }
}

/// Characters that need no encoding in a URI (RFC 3986).
const PLAIN: &AsciiSet =
    &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~').remove(b'/');

/// Encodes everything except letters, digits and `-._~/` as `%XX`, for a URI.
pub(super) fn percent_encoded(bytes: &[u8]) -> PercentEncode<'_> {
    percent_encode(bytes, PLAIN)
}
