//! New connections: accepted, admitted to the handshake, then as clients with memory, or refused.
//!
//! Invariants: clients and handshakes are counted apart, and neither takes what the other has left.
//! No peer can take all of either. However many bad connections there are, the log gets only a few
//! lines per second. Not here: the handshake itself.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with, getpeername, sockopt};

use super::admission;
use super::budget::ConnectionBudget;
use super::connection::Connection;
use super::door::ResumeState;
use super::handshake::negotiate;
use super::options::Listen;
use super::outbox::ClientChannel;
use super::peer_identity::PeerIdentity;
use super::server::{Entry, NbdState, Registry, RegistryGuard};
use super::session::{End, InputBacklog, Session};

/// Why a client is refused.
const TOO_MANY: &str = "too many connections are open, in total or from this peer";
const TOO_LITTLE_MEMORY: &str = "no memory is left for another connection; see --nbd-memory-max";

/// How long to wait for an evicted connection before the next check.
const LEAVE_TIME_MAX: Duration = Duration::from_millis(100);

impl NbdState {
    pub(super) fn accept_all(self: &Arc<Self>) {
        let mut pause = None;
        while !self.is_stopping.load(Relaxed) {
            if self.is_pausing() {
                self.hold_accepting();
                continue;
            }
            let mut fds = [
                PollFd::new(&self.waker, PollFlags::IN),
                PollFd::new(self.listener.socket(), PollFlags::IN),
            ];
            // While the system has no room for another connection, retrying immediately would only
            // spin.
            let fd_count = if pause.is_some() { 1 } else { 2 };
            let _ = poll(&mut fds[..fd_count], pause.as_ref());
            let is_woken = fds[0].revents().contains(PollFlags::IN);
            pause = None;
            if is_woken {
                // The waker carries no data: it only signals.
                self.waker.clear();
                continue;
            }
            match accept_with(self.listener.socket(), SocketFlags::CLOEXEC) {
                Ok(socket) => self.take_up(socket),
                // A client that left while it waited in the system's queue is no reason to pause.
                Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => (),
                Err(error) => {
                    tracing::warn!(%error, "nbd: cannot accept a connection; retrying in 100 ms");
                    pause = Some(Timespec { tv_sec: 0, tv_nsec: 100_000_000 });
                }
            }
        }
    }

    fn take_up(self: &Arc<Self>, socket: OwnedFd) {
        let peer = peer_of(&socket);
        let peer_identity = PeerIdentity::of(&socket);
        // Replies go out in whole bursts. Nagle's algorithm would hold the end of a burst back
        // until the client has acknowledged the rest.
        let is_tcp = matches!(self.listener.address, Listen::Tcp(_));
        if is_tcp && let Err(error) = sockopt::set_tcp_nodelay(&socket, true) {
            tracing::warn!(%peer, %error, "nbd: cannot set TCP_NODELAY; replies may be slow");
        }
        let channel = match ClientChannel::new(socket) {
            Ok(channel) => Arc::new(channel),
            Err(error) => {
                self.complaints.log(|left_out| {
                    tracing::warn!(%peer, %error, left_out, "nbd: cannot set up a connection");
                });
                return;
            }
        };
        let Some(id) = self.admit(&peer, peer_identity, &channel) else { return };
        self.spawn(id, peer, channel, None);
    }

    /// Admits a connection to its handshake; the oldest one of the peer with most handshakes may
    /// be evicted. A peer that could not stay anyway is refused immediately.
    fn admit(
        &self,
        peer: &str,
        peer_identity: PeerIdentity,
        channel: &Arc<ClientChannel>,
    ) -> Option<u64> {
        let mut registry = self.registry.lock();
        registry.past.connections_total += 1;
        if !registry.has_room(peer_identity, self.options.connections_max) {
            registry.past.connections_refused += 1;
            drop(registry);
            // The log may be slow, and every connection needs the registry.
            self.complain(peer, &End::Refused(TOO_MANY));
            return None;
        }
        while registry.haggling(|_| true).count() >= 2 * self.options.handshakes_max {
            // Evicted connections are on their way out; new ones wait in the system's queue.
            if self.is_stopping.load(Relaxed) || self.is_pausing() {
                break;
            }
            self.changed.wait_for(&mut registry, LEAVE_TIME_MAX);
        }
        let haggling: Vec<_> = registry
            .haggling(|entry| !entry.channel.is_stopping())
            .map(|(id, entry)| (*id, entry.peer_identity))
            .collect();
        // Not counting those on their way out: they have been evicted already, and would be chosen
        // again.
        let evicted = admission::evicted(peer_identity, &haggling, self.options.handshakes_max);
        if let Some(entry) = evicted.and_then(|id| registry.entries.get(&id)) {
            entry.channel.close();
            registry.past.connections_cut += 1;
        }
        let (channel, peer) = (channel.clone(), peer.to_owned());
        Some(registry.enter(Entry { channel, peer, peer_identity, export: None, connection: None }))
    }

    /// Gives a connection in the registry its thread.
    pub(super) fn spawn(
        self: &Arc<Self>,
        id: u64,
        peer: String,
        channel: Arc<ClientChannel>,
        opening: ResumeState,
    ) {
        let guard = RegistryGuard { shared: self.clone(), id };
        let serve = move || {
            let end = guard.shared.serve(id, &peer, channel, opening);
            guard.shared.count(&end);
            guard.shared.report(&peer, &end);
        };
        if let Err(error) = std::thread::Builder::new().name(format!("nbd-{id}")).spawn(serve) {
            // The entry was removed with the closure that did not run.
            tracing::warn!(%error, "nbd: cannot start a thread for a connection");
        }
    }

    /// The life of one connection, on its own thread.
    fn serve(
        self: &Arc<Self>,
        id: u64,
        peer: &str,
        channel: Arc<ClientChannel>,
        opening: ResumeState,
    ) -> End {
        let (session, unread, connection_budget) = match opening {
            Some(resume_state) => resume_state,
            None => match self.begin(id, peer, &channel) {
                Ok((session, connection_budget)) => {
                    (session, InputBacklog::default(), connection_budget)
                }
                Err(end) => return end,
            },
        };
        Connection::new(id, self.clone(), channel, session, unread, connection_budget).run()
    }

    /// The handshake of a connection.
    fn begin(
        &self,
        id: u64,
        peer: &str,
        channel: &ClientChannel,
    ) -> Result<(Session, Arc<ConnectionBudget>), End> {
        let (export, session) = negotiate(channel, &self.exports, self.options.handshake_time_max)?;
        let mut registry = self.registry.lock();
        // The export may have been removed since the client found it.
        if !self.exports.contains(&export) {
            return Err(End::Stopping);
        }
        let style = session.style;
        tracing::debug!(peer, export = export.name, ?style, "nbd: a client connected");
        let Some(peer_identity) = registry.entries.get(&id).map(|entry| entry.peer_identity) else {
            return Err(End::Stopping);
        };
        if !registry.has_room(peer_identity, self.options.connections_max) {
            return Err(End::Refused(TOO_MANY));
        }
        // Only after the handshake: half-open connections must not use up the memory that is set
        // aside for clients.
        let connection_budget =
            self.options.budget.admit().ok_or(End::Refused(TOO_LITTLE_MEMORY))?;
        if let Some(entry) = registry.entries.get_mut(&id) {
            entry.export = Some(export);
        }
        Ok((session, connection_budget))
    }

    fn count(&self, end: &End) {
        let past = &mut self.registry.lock().past;
        match end {
            End::Violation(_) => past.protocol_violations += 1,
            End::Refused(_) => past.connections_refused += 1,
            End::Stalled => past.connections_cut += 1,
            _ => (),
        }
    }

    fn report(&self, peer: &str, end: &End) {
        match end {
            End::Violation(_) | End::Refused(_) | End::Stalled => self.complain(peer, end),
            End::Broken(error) => self.complaints.log(|left_out| {
                tracing::info!(peer, %error, left_out, "nbd: connection lost");
            }),
            End::Died => self.complaints.log(|left_out| {
                tracing::info!(
                    peer,
                    left_out,
                    "nbd: the client closed the connection inside a request"
                );
            }),
            End::Disconnect | End::Closed | End::Stopping | End::LetGo => {
                tracing::debug!(peer, ?end, "nbd: connection closed")
            }
        }
    }

    fn complain(&self, peer: &str, end: &End) {
        self.complaints.log(|left_out| match end {
            End::Violation(violation) => {
                let reason = &*violation.0;
                tracing::warn!(
                    peer,
                    reason,
                    left_out,
                    "nbd: connection closed: the client broke the protocol"
                );
            }
            End::Refused(reason) => {
                tracing::warn!(peer, reason, left_out, "nbd: refused a connection")
            }
            _ => tracing::warn!(
                peer,
                left_out,
                "nbd: connection closed: others waited for memory, and the client did not read its \
                replies"
            ),
        });
    }
}

impl Registry {
    fn haggling(&self, fits: impl Fn(&Entry) -> bool) -> impl Iterator<Item = (&u64, &Entry)> {
        self.entries.iter().filter(move |(_, entry)| entry.export.is_none() && fits(entry))
    }

    fn has_room(&self, newcomer: PeerIdentity, connections_max: usize) -> bool {
        let clients = self.entries.values().filter(|entry| entry.export.is_some());
        admission::is_admitted(newcomer, clients.map(|entry| entry.peer_identity), connections_max)
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
