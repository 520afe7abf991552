//! One listening socket, the exports behind it, and the connections in front of it.
//!
//! Invariants: a connection is in the registry from before its thread runs until that thread has let go of
//! the device; a removed export has no connection left. Not here: what is said on a connection, how a server
//! becomes quiet (`pause`), and how it is handed over (`door`).

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;

use parking_lot::{Condvar, Mutex, RwLock};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno as OsError;
use rustix::net::{SocketFlags, accept_with, getpeername, sockopt};
use sawmill_device::{BlockDevice, Error, ErrorKind, Result};

use super::connection::{Connection, End, Session, Unread};
use super::door::Opening;
use super::handshake::negotiate;
use super::listener::Listener;
use super::metrics::NbdMetrics;
use super::options::{Listen, NbdOptions, STRING_BYTES_MAX};
use super::outbox::Link;
use super::pause::Held;
use crate::Door;

/// A device under a name.
#[derive(Clone)]
pub struct Export {
    /// What clients ask for; the first export also answers to the empty name. At most 4096 bytes.
    pub name: String,
    /// Shown by clients that list exports; may be empty. At most 4096 bytes.
    pub description: String,
    /// What is served.
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

    /// The export of this name; the empty name stands for the first.
    pub(super) fn find(&self, name: &str) -> Option<Arc<Export>> {
        let exports = self.0.read();
        let exact = exports.iter().find(|export| export.name == name);
        exact.or_else(|| exports.first().filter(|_| name.is_empty())).cloned()
    }

    fn contains(&self, export: &Arc<Export>) -> bool {
        self.0.read().iter().any(|known| Arc::ptr_eq(known, export))
    }
}

/// A connection, as the server sees it.
pub(super) struct Entry {
    pub(super) link: Arc<Link>,
    pub(super) peer: String,
    /// `None` during the handshake.
    pub(super) export: Option<Arc<Export>>,
    /// What it is while its thread is held.
    pub(super) held: Option<Held>,
}

#[derive(Default)]
pub(super) struct Registry {
    pub(super) entries: BTreeMap<u64, Entry>,
    next: u64,
    /// The counts of connections that are gone, of those never taken up, and of another process before this
    /// one.
    past: NbdMetrics,
    /// The accepting thread is held.
    pub(super) accepting_held: bool,
}

impl Registry {
    /// Adds a connection and returns its number.
    pub(super) fn enter(&mut self, entry: Entry) -> u64 {
        self.next += 1;
        self.entries.insert(self.next, entry);
        self.next
    }
}

pub(super) struct Shared {
    pub(super) options: NbdOptions,
    pub(super) listener: Listener,
    pub(super) exports: Exports,
    pub(super) registry: Mutex<Registry>,
    /// A connection has left the registry, or a thread is held.
    pub(super) changed: Condvar,
    pub(super) stopping: AtomicBool,
    /// Threads shall hold; changed under the registry's lock.
    pub(super) pausing: AtomicBool,
    /// Held threads shall look again.
    pub(super) released: Condvar,
    /// Taken over from another process, which may still take it back.
    pub(super) on_trial: AtomicBool,
    /// Wakes the accepting thread.
    wake: OwnedFd,
}

/// A running NBD server. Dropped, it stops at once, as by [`NbdServer::stop_now`].
pub struct NbdServer {
    pub(super) shared: Arc<Shared>,
    pub(super) accepting: Mutex<Option<JoinHandle<()>>>,
}

impl NbdServer {
    /// Listens and begins to accept clients. Exports may come and go while it runs.
    ///
    /// Errors: `Invalid` for an address that cannot be used or must not (not loopback, without
    /// `insecure_listen`); `Unavailable` where the address is taken or the system refuses.
    pub fn start(options: NbdOptions) -> Result<Self> {
        options.check()?;
        let listener = Listener::open(&options)?;
        Self::new(options, listener, NbdMetrics::default(), false)
    }

    /// A server behind this listener; on trial it is quiet until it is resumed.
    pub(super) fn new(
        options: NbdOptions,
        listener: Listener,
        counted: NbdMetrics,
        on_trial: bool,
    ) -> Result<Self> {
        let system = |error: std::io::Error| {
            Error::new(ErrorKind::Unavailable, format!("nbd: the server could not be started: {error}"))
        };
        let wake = match eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK) {
            Ok(wake) => wake,
            Err(error) => {
                listener.remove_unless(on_trial);
                return Err(system(error.into()));
            }
        };
        let shared = Arc::new(Shared {
            options,
            listener,
            exports: Exports::default(),
            registry: Mutex::new(Registry { past: counted, ..Registry::default() }),
            changed: Condvar::new(),
            stopping: AtomicBool::new(false),
            pausing: AtomicBool::new(on_trial),
            released: Condvar::new(),
            on_trial: AtomicBool::new(on_trial),
            wake,
        });
        let accepting = shared.clone();
        let thread =
            std::thread::Builder::new().name("nbd-accept".into()).spawn(move || accepting.accept_all());
        match thread {
            Ok(thread) => Ok(NbdServer { shared, accepting: Mutex::new(Some(thread)) }),
            Err(error) => {
                shared.listener.remove_unless(on_trial);
                Err(system(error))
            }
        }
    }

    /// Shows a device. Errors: `Invalid` for a name that is taken, or a text that is too long or has a NUL.
    pub fn add_export(&self, export: Export) -> Result<()> {
        let texts = [("name", &export.name), ("description", &export.description)];
        for (what, text) in texts {
            if text.len() > STRING_BYTES_MAX || text.contains('\0') {
                let text = format!(
                    "nbd: the {what} of export {:?} has {} bytes or a NUL; the limit is {STRING_BYTES_MAX}",
                    export.name.chars().take(40).collect::<String>(),
                    text.len()
                );
                return Err(Error::new(ErrorKind::Invalid, text));
            }
        }
        let mut exports = self.shared.exports.0.write();
        if exports.iter().any(|known| known.name == export.name) {
            let text =
                format!("nbd: export {:?} exists already; remove it or choose another name", export.name);
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        exports.push(Arc::new(export));
        Ok(())
    }

    /// Hides a device again and waits until its clients' requests in flight are answered and their
    /// connections closed. Errors: `NotFound`.
    pub fn remove_export(&self, name: &str) -> Result<()> {
        let export = {
            let mut exports = self.shared.exports.0.write();
            let Some(position) = exports.iter().position(|export| export.name == name) else {
                return Err(Error::new(ErrorKind::NotFound, format!("nbd: no export is named {name:?}")));
            };
            exports.remove(position)
        };
        let serves = |entry: &Entry| entry.export.as_ref().is_some_and(|chosen| Arc::ptr_eq(chosen, &export));
        let mut registry = self.shared.registry.lock();
        registry.entries.values().filter(|entry| serves(entry)).for_each(|entry| entry.link.stop());
        self.shared.released.notify_all();
        while registry.entries.values().any(serves) {
            self.shared.changed.wait(&mut registry);
        }
        Ok(())
    }

    /// The address in effect: for TCP port 0, with the port that was free.
    #[must_use]
    pub fn address(&self) -> &Listen {
        &self.shared.listener.address
    }

    /// The NBD URI under which clients on this machine find the export of this name.
    #[must_use]
    pub fn uri(&self, name: &str) -> String {
        let name = percent_encoded(name.as_bytes());
        match self.address() {
            Listen::Unix(path) => {
                let path = std::path::absolute(path).unwrap_or_else(|_| path.clone());
                format!("nbd+unix:///{name}?socket={}", percent_encoded(path.as_os_str().as_bytes()))
            }
            Listen::Tcp(address) => format!("nbd://{address}/{name}"),
        }
    }

    /// What was counted since the start.
    #[must_use]
    pub fn metrics(&self) -> NbdMetrics {
        let registry = self.shared.registry.lock();
        let mut metrics = registry.past;
        for entry in registry.entries.values() {
            metrics.connections += 1;
            entry.link.counters.add_to(&mut metrics);
            metrics.in_flight += entry.link.in_flight();
        }
        metrics
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

    /// Stops accepting, lets requests in flight finish and their replies go out, closes every connection and
    /// waits for that. A second call returns when the first would.
    pub fn stop(&self) {
        self.end(Link::stop);
    }

    /// Closes every connection at once. Requests in flight go on in their devices; nobody hears of them.
    pub fn stop_now(&self) {
        self.end(Link::close);
    }

    fn end(&self, how: impl Fn(&Link)) {
        // What is on trial is another process's, and not to be ended.
        if self.shared.on_trial.load(Relaxed) {
            return Door::let_go(self);
        }
        self.shared.stopping.store(true, Relaxed);
        self.shared.wake_accepting();
        self.shared.nudge();
        if let Some(thread) = self.accepting.lock().take() {
            let _ = thread.join();
            self.shared.listener.remove();
        }
        self.shared.registry.lock().entries.values().for_each(|entry| how(&entry.link));
        self.shared.nudge();
        self.shared.wait_until_all_left();
    }
}

impl Drop for NbdServer {
    fn drop(&mut self) {
        self.stop_now();
    }
}

impl Shared {
    pub(super) fn wake_accepting(&self) {
        // A full counter is a wake already on its way.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    pub(super) fn wait_until_all_left(&self) {
        let mut registry = self.registry.lock();
        while !registry.entries.is_empty() {
            self.changed.wait(&mut registry);
        }
    }

    fn accept_all(self: &Arc<Self>) {
        let mut pause = None;
        while !self.stopping.load(Relaxed) {
            if self.is_pausing() {
                self.hold_accepting();
                continue;
            }
            let mut fds =
                [PollFd::new(&self.wake, PollFlags::IN), PollFd::new(self.listener.socket(), PollFlags::IN)];
            // While the system has no room for another connection, asking at once again would only spin.
            let asked = if pause.is_some() { 1 } else { 2 };
            let _ = poll(&mut fds[..asked], pause.as_ref());
            let woken = fds[0].revents().contains(PollFlags::IN);
            pause = None;
            if woken {
                // It carries no news beyond having been written to.
                let _ = rustix::io::read(&self.wake, &mut [0; 8]);
                continue;
            }
            match accept_with(self.listener.socket(), SocketFlags::CLOEXEC) {
                Ok(socket) => self.take_up(socket),
                Err(OsError::AGAIN | OsError::INTR | OsError::CONNABORTED) => (),
                Err(error) => {
                    tracing::warn!(%error, "nbd: a connection could not be accepted; trying again in 100 ms");
                    pause = Some(Timespec { tv_sec: 0, tv_nsec: 100_000_000 });
                }
            }
        }
    }

    fn take_up(self: &Arc<Self>, socket: OwnedFd) {
        let peer = peer_of(&socket);
        let is_tcp = matches!(self.listener.address, Listen::Tcp(_));
        if is_tcp && let Err(error) = sockopt::set_tcp_nodelay(&socket, true) {
            tracing::warn!(%peer, %error, "nbd: TCP_NODELAY could not be set; replies may be slow");
        }
        let link = match Link::new(socket) {
            Ok(link) => Arc::new(link),
            Err(error) => {
                tracing::warn!(%peer, %error, "nbd: a connection could not be set up");
                return;
            }
        };
        let id = {
            let mut registry = self.registry.lock();
            registry.past.connections_total += 1;
            if registry.entries.len() >= self.options.connections_max {
                registry.past.connections_refused += 1;
                let limit = self.options.connections_max;
                tracing::warn!(%peer, limit, "nbd: a connection was refused: too many are open");
                return;
            }
            registry.enter(Entry { link: link.clone(), peer: peer.clone(), export: None, held: None })
        };
        self.spawn(id, peer, link, None);
    }

    /// Gives a connection in the registry its thread.
    pub(super) fn spawn(self: &Arc<Self>, id: u64, peer: String, link: Arc<Link>, opening: Opening) {
        let leave = Leave { shared: self.clone(), id };
        let serve = move || {
            let end = leave.shared.serve(id, &peer, link, opening);
            if let End::Violation(_) = end {
                leave.shared.registry.lock().past.protocol_violations += 1;
            }
            report(&peer, &end);
        };
        if let Err(error) = std::thread::Builder::new().name(format!("nbd-{id}")).spawn(serve) {
            tracing::warn!(%error, "nbd: no thread for a connection");
        }
    }

    /// The life of one connection, on its own thread.
    fn serve(self: &Arc<Self>, id: u64, peer: &str, link: Arc<Link>, opening: Opening) -> End {
        let (session, unread) = match opening {
            Some(begun) => begun,
            None => match self.begin(id, peer, &link) {
                Ok(session) => (session, Unread::default()),
                Err(end) => return end,
            },
        };
        Connection::new(id, self.clone(), link, session, unread).run()
    }

    /// The handshake of a connection.
    fn begin(&self, id: u64, peer: &str, link: &Link) -> Result<Session, End> {
        let (export, session) = negotiate(link, &self.exports, self.options.handshake_time_max)?;
        let mut registry = self.registry.lock();
        // The export may have been removed since the client found it.
        if !self.exports.contains(&export) {
            return Err(End::Stopping);
        }
        tracing::debug!(peer, export = export.name, style = ?session.style, "nbd: a client is connected");
        if let Some(entry) = registry.entries.get_mut(&id) {
            entry.export = Some(export);
        }
        Ok(session)
    }
}

/// Takes a connection off the registry when its thread ends, however it ends.
struct Leave {
    shared: Arc<Shared>,
    id: u64,
}

impl Drop for Leave {
    fn drop(&mut self) {
        let mut registry = self.shared.registry.lock();
        if let Some(entry) = registry.entries.remove(&self.id) {
            entry.link.close();
            entry.link.counters.add_to(&mut registry.past);
        }
        drop(registry);
        self.shared.changed.notify_all();
    }
}

fn report(peer: &str, end: &End) {
    match end {
        End::Violation(violation) => {
            let reason = &*violation.0;
            tracing::warn!(peer, reason, "nbd: connection closed: the client broke the protocol");
        }
        End::Broken(error) => tracing::info!(peer, %error, "nbd: connection lost"),
        End::Died => tracing::info!(peer, "nbd: the client closed the connection inside a request"),
        End::Disconnect | End::Closed | End::Stopping | End::LetGo => {
            tracing::debug!(peer, ?end, "nbd: connection closed")
        }
    }
}

fn peer_of(socket: &OwnedFd) -> String {
    let address = getpeername(socket).ok().flatten();
    let inet = address.and_then(|address| std::net::SocketAddr::try_from(address).ok());
    if let Some(inet) = inet {
        return inet.to_string();
    }
    match sockopt::socket_peercred(socket) {
        Ok(peer) => format!("process {} of user {}", peer.pid.as_raw_nonzero(), peer.uid.as_raw()),
        Err(_) => "unknown".into(),
    }
}

/// Everything but letters, digits and `-._~/` as `%XX`, for a URI.
pub(super) fn percent_encoded(bytes: &[u8]) -> String {
    let mut out = String::with_capacity(bytes.len());
    for &byte in bytes {
        if byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte) {
            out.push(byte.into());
        } else {
            // Writing to a string cannot fail.
            let _ = write!(out, "%{byte:02X}");
        }
    }
    out
}
