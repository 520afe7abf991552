//! The NBD server as a door: counted, quiesced, handed over, taken over.
//!
//! Invariant: of two processes with the same sockets, only one reads and writes them. A server that
//! took over stays quiet until it is resumed (until then it is *on trial*), and one that was
//! released never touches them again. Not here: how threads pause (`pause`), and the facts
//! (`hand_over`).

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use sawmill_device::{Error, ErrorKind, Result};

use super::budget::{BudgetBuffer, ConnectionBudget};
use super::hand_over::HandedConnection;
use super::listener::Listener;
use super::options::NbdOptions;
use super::outbox::ClientChannel;
use super::peer_identity::PeerIdentity;
use super::server::{Client, Entry, Export, NbdServer, NbdState, StartMode};
use super::session::{InputBacklog, Session};
use crate::{Door, DoorCounts, DoorPiece, ExportStatus, QuietDoor, Stop};

/// Time for a thread from the end of a handshake to its pause.
const QUIET_TIME_MAX: Duration = Duration::from_secs(1);

impl NbdServer {
    /// Takes over the listener and the connections of another process, which no longer takes
    /// requests from them and releases them. Clients notice nothing. `options.listen` must match
    /// the listener.
    ///
    /// A connection is dropped with a logged reason if its export is not among `exports`, or no
    /// longer matches what its client was shown (smaller, read-only, fewer features). Returns
    /// `Invalid` if a piece is missing, or has a missing or wrong fact; `Unavailable` if the system
    /// refuses. Nothing has changed then.
    pub fn take_over(
        options: NbdOptions,
        exports: Vec<Export>,
        pieces: Vec<DoorPiece>,
    ) -> Result<Self> {
        let (server, quiet_door) = Self::take_over_quiet(options, exports, pieces)?;
        quiet_door.resume();
        Ok(server)
    }

    /// As [`NbdServer::take_over`], but the server stays quiet until it is resumed. If it is
    /// dropped before that, everything stays with the other process.
    pub fn take_over_quiet(
        options: NbdOptions,
        exports: Vec<Export>,
        pieces: Vec<DoorPiece>,
    ) -> Result<(Self, Box<dyn QuietDoor>)> {
        let mut listener = None;
        let mut connections = Vec::new();
        for piece in pieces {
            match piece.what.as_str() {
                "listener" if listener.is_none() => listener = Some(Listener::of(piece, &options)?),
                "connection" => connections.push(HandedConnection::of(piece)?),
                other => return Err(invalid(format!("a second or unknown piece {other:?}"))),
            }
        }
        let (listener, metrics) =
            listener.ok_or_else(|| invalid("the listener is missing".into()))?;
        // Everything that can be wrong with the pieces is found before the server exists: the
        // caller goes back to the other process, which has not let go of anything.
        options.check()?;
        let server = NbdServer::new(options, listener, metrics, StartMode::OnTrial)?;
        for export in exports {
            server.add_export(export)?;
        }
        for connection in connections {
            server.adopt(connection);
        }
        let quiet_door = Box::new(QuietNbdDoor(Arc::clone(&server.shared)));
        Ok((server, quiet_door))
    }

    /// Takes over one connection, or logs why not.
    fn adopt(&self, connection: HandedConnection) {
        let HandedConnection { export: name, peer, connection: paused_connection, unsent, socket } =
            connection;
        let export = self.shared.exports.all().into_iter().find(|export| export.name == name);
        let Some(export) = export else {
            tracing::warn!(
                peer,
                name,
                "nbd: a connection was not taken over: its export is not served"
            );
            return;
        };
        // The client was shown a size and abilities once and keeps relying on them; NBD has no
        // message that takes one back.
        let geometry = match paused_connection.geometry_on(&export.device.geometry()) {
            Ok(geometry) => geometry,
            Err(reason) => {
                tracing::warn!(
                    peer,
                    name,
                    reason,
                    "nbd: a connection was not taken over: its export has changed"
                );
                return;
            }
        };
        let session = Session {
            device: export.device.clone(),
            geometry,
            style: paused_connection.style,
            block_status: paused_connection.block_status,
        };
        let channel = match ClientChannel::new(socket) {
            Ok(channel) => Arc::new(channel),
            Err(error) => {
                tracing::warn!(peer, %error, "nbd: a connection was not taken over: setup failed");
                return;
            }
        };
        // The other process has admitted it.
        let connection_budget = self.shared.options.budget.adopt();
        channel.queue_unsent(BudgetBuffer::from(&connection_budget, unsent));
        let peer_identity = PeerIdentity::of(&channel.socket);
        let entry = Entry {
            channel: channel.clone(),
            peer: peer.clone(),
            peer_identity,
            export: Some(export),
            connection: None,
        };
        let id = self.shared.registry.lock().enter(entry);
        self.shared.spawn(
            id,
            peer,
            channel,
            Some((session, paused_connection.backlog, connection_budget)),
        );
    }
}

/// How a connection starts: with a handshake, or in the middle.
pub(super) type ResumeState = Option<(Session, InputBacklog, Arc<ConnectionBudget>)>;

fn invalid(text: String) -> Error {
    Error::new(ErrorKind::Invalid, format!("nbd hand-over: {text}"))
}

impl Door for NbdServer {
    fn kind(&self) -> &'static str {
        "nbd"
    }

    fn address(&self) -> String {
        self.shared.listener.address.to_string()
    }

    fn export(&self, name: &str) -> ExportStatus {
        let has_it = |client: &Client| client.export.as_deref() == Some(name);
        let clients = self.clients().into_iter().filter(has_it);
        ExportStatus { address: self.uri(name), peers: clients.map(|client| client.peer).collect() }
    }

    fn counts(&self) -> DoorCounts {
        let metrics = self.metrics();
        let requests = metrics.requests;
        DoorCounts {
            connections: metrics.connections,
            connections_total: metrics.connections_total,
            connections_refused: metrics.connections_refused,
            connections_cut: metrics.connections_cut,
            reads: requests.read,
            writes: requests.write,
            flushes: requests.flush,
            discards: requests.trim,
            write_zeroes: requests.write_zeroes,
            others: requests.cache + requests.block_status + requests.unknown,
            bytes_in: metrics.written_bytes,
            bytes_out: metrics.read_bytes,
            errors: metrics.errors,
            in_flight: metrics.in_flight,
            protocol_violations: metrics.protocol_violations,
            receives_awake: metrics.receives_awake,
        }
    }

    /// A client that does not read its replies does not delay this: they stay unsent. A client in
    /// its handshake has 20 ms to finish and be included. Otherwise it continues after
    /// [`QuietDoor::resume`], or [`QuietDoor::release`] closes it and it must reconnect. New
    /// clients wait in the system's queue.
    fn quiesce(&self, patience: Duration) -> Result<Box<dyn QuietDoor>> {
        self.shared.quiesce(patience)?;
        Ok(Box::new(QuietNbdDoor(Arc::clone(&self.shared))))
    }

    fn resized(&self) -> Result<()> {
        let text = "users of this door see a new size only after they reopen it";
        Err(Error::new(ErrorKind::Refused, text))
    }

    /// Waits until all connections are closed. A second call returns together with the first.
    fn stop(&self, how: Stop) {
        match how {
            Stop::Drained => self.shared.end(ClientChannel::stop),
            Stop::Now => self.shared.end(ClientChannel::close),
        }
    }
}

struct QuietNbdDoor(Arc<NbdState>);

impl QuietDoor for QuietNbdDoor {
    /// One `listener`, and a `connection` for each client; `docs/format/hand_over.md` says where
    /// their facts are described. Returns `Invalid` if the door is not quiet.
    fn hand_over(&self) -> Result<Vec<DoorPiece>> {
        let shared = &self.0;
        let metrics = shared.metrics();
        let registry = shared.registry.lock();
        if !shared.is_pausing() || !registry.is_quiet() {
            return Err(invalid("the door is not quiet; quiesce it first".into()));
        }
        let mut pieces = vec![shared.listener.piece(&metrics)?];
        for Entry { channel, peer, export, connection: paused_connection, .. } in
            registry.entries.values()
        {
            if let (Some(export), Some(paused_connection)) = (export, paused_connection) {
                pieces.push(HandedConnection::piece(
                    &export.name,
                    peer,
                    paused_connection,
                    &channel.unsent(),
                    &channel.socket,
                )?);
            }
        }
        Ok(pieces)
    }

    /// Closes the connections of clients that were not handed over (in their handshake, or ending).
    fn release(self: Box<Self>) {
        self.0.release();
    }

    fn resume(self: Box<Self>) {
        // First: a thread that goes on must not find a door that still belongs to another process.
        self.0.is_on_trial.store(false, Relaxed);
        self.0.resume();
    }
}

impl NbdState {
    /// See [`QuietDoor::release`].
    pub(super) fn release(&self) {
        {
            let mut registry = self.registry.lock();
            // A thread that has just finished its handshake is on its way to its pause.
            while self.is_pausing() && !registry.is_quiet() && !self.is_on_trial.load(Relaxed) {
                if self.changed.wait_for(&mut registry, QUIET_TIME_MAX).timed_out() {
                    break;
                }
            }
            let is_quiet = self.is_pausing() && registry.is_quiet();
            // On trial, nothing was taken yet, whether the threads know that or not.
            if !is_quiet && !self.is_on_trial.load(Relaxed) {
                tracing::error!("nbd: cannot hand over a door that is not quiet; it resumes");
                return;
            }
            self.is_stopping.store(true, Relaxed);
            registry.entries.values().for_each(|entry| entry.channel.release());
        }
        self.waker.wake();
        self.nudge();
        if let Some(thread) = self.accepting.lock().take() {
            let _ = thread.join();
        }
        self.wait_until_all_left();
    }
}
