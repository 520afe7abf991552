//! How a link joins a connection, in the longest packets that get through, and is probed.
//!
//! Invariants: a link carries requests only after its join was answered, in packets as long as the
//! join. Longer packets are tried now and then, ever less often.
//!
//! Not here: how carriers are opened (`crate::threads`), the handshake (`connect`).

use std::sync::Arc;

use sawmill_format::link::PACKET_BYTES_MIN;
use sawmill_format::link::statement::{Note, NoteKind};

use super::{Control, ControlAction};
use crate::carrier::{BROADCAST, Peer};
use crate::clock::{MS, SECOND};
use crate::connection::Route;
use crate::initiator::{Initiator, LiveConnection};
use crate::session::handshake::TOKEN_BYTES;
use crate::session::proof::Proof;

const JOIN_NS_FIRST: u64 = 20 * MS;
const JOIN_NS_MAX: u64 = 250 * MS;
/// Joins of one length without an answer before a shorter one is tried.
const JOINS_PER_LENGTH_MAX: u32 = 3;
/// Interval of probes on an idle link: the target keeps the connection, and a dead link is detected
/// before it is used.
pub(super) const KEEP_ALIVE_EVERY_NS: u64 = 5 * SECOND;
/// The most pings between attempts to join a link with longer packets: about five minutes.
const LONGER_PINGS_MAX: u32 = 64;

/// The carrier of a link, and the state of its join.
#[derive(Default)]
pub(super) struct LinkJoin {
    pub(super) route: Option<Route>,
    attempt: Option<JoinAttempt>,
    is_joined: bool,
    next_ping_at_ns: u64,
    /// The cookie that a target under load wants with the hello of this token, and when the hello
    /// may be sent again.
    pub(super) cookie: Option<([u8; TOKEN_BYTES], Proof)>,
    pub(super) next_cookie_at_ns: u64,
    /// The longest packets of the link as it was joined, which may be shorter than its carrier
    /// allows.
    packet_bytes: usize,
    /// Pings until longer packets are tried, and the number last time.
    longer_in: u32,
    longer_after: u32,
}

/// An attempt to join. For a link that is joined and in use, it tries longer packets.
struct JoinAttempt {
    token: u64,
    packet_bytes: usize,
    join_count: u32,
    next_at_ns: u64,
    /// The packet length that the link keeps unless the first join is answered.
    kept_bytes: Option<usize>,
}

impl LinkJoin {
    /// A link on this route that has to join.
    pub(super) fn over(route: Option<Route>) -> Self {
        LinkJoin { route, ..LinkJoin::default() }
    }

    /// When it has something to send next.
    pub(super) fn deadline_ns(&self) -> Option<u64> {
        self.route.as_ref()?;
        let attempt_at_ns = self.attempt.as_ref().map(|attempt| attempt.next_at_ns);
        let ping = self.is_joined.then_some(self.next_ping_at_ns);
        attempt_at_ns.into_iter().chain(ping).min()
    }

    /// A link that was joined while its route was down may have ended with any length, so longer
    /// packets are tried now and then, ever less often.
    fn try_longer(&mut self, now: u64, token: impl FnOnce() -> u64) {
        let Some(route) = self.route.as_ref().filter(|route| route.peer != Peer::Stream) else {
            return;
        };
        if self.attempt.is_some() || self.packet_bytes >= route.packet_bytes_max {
            return;
        }
        self.longer_in = self.longer_in.saturating_sub(1);
        if self.longer_in == 0 {
            self.longer_after = (self.longer_after * 2).min(LONGER_PINGS_MAX);
            self.longer_in = self.longer_after;
            let (packet_bytes, kept_bytes) = (route.packet_bytes_max, Some(self.packet_bytes));
            self.attempt = Some(JoinAttempt {
                token: token(),
                packet_bytes,
                join_count: 0,
                next_at_ns: now,
                kept_bytes,
            });
        }
    }
}

impl JoinAttempt {
    /// Chooses the length of the next join, and when one more follows.
    fn plan_next_join(&mut self, route: &Route, now: u64) {
        if self.join_count > 0 && route.peer != Peer::Stream {
            self.packet_bytes = match self.kept_bytes {
                Some(kept_bytes) => kept_bytes,
                None if self.join_count.is_multiple_of(JOINS_PER_LENGTH_MAX) => {
                    shorter(self.packet_bytes, route.packet_bytes_max)
                }
                None => self.packet_bytes,
            };
        }
        self.join_count += 1;
        self.next_at_ns = now + (JOIN_NS_FIRST << self.join_count.min(6)).min(JOIN_NS_MAX);
    }
}

impl Control {
    pub(super) fn carrier_opened(&mut self, of: &Initiator, index: usize, route: Route) {
        self.joins[index] = LinkJoin::over(Some(route));
        self.attempt.is_wanted |= of.live().is_none();
    }

    /// What was in flight on the link uses other links.
    pub(super) fn carrier_lost(&mut self, of: &Initiator, index: usize) {
        self.joins[index] = LinkJoin::default();
        if let Some(live) = of.live() {
            live.connection.close_link(index);
        }
    }

    pub(super) fn note(&mut self, live: &LiveConnection, peer: Peer, note: &Note, now: u64) {
        let index = usize::from(note.link);
        let Some(join) = self.joins.get_mut(index) else { return };
        match note.kind {
            NoteKind::Joined => {
                let Some(attempt) = join.attempt.take_if(|attempt| attempt.token == note.token)
                else {
                    return;
                };
                let packet_bytes =
                    attempt.packet_bytes.min(note.packet_bytes as usize).max(PACKET_BYTES_MIN);
                if !join.is_joined {
                    (join.longer_in, join.longer_after) = (1, 1);
                }
                (join.is_joined, join.packet_bytes) = (true, packet_bytes);
                join.next_ping_at_ns = now + KEEP_ALIVE_EVERY_NS;
                let Some(mut route) = join.route.clone() else { return };
                if route.peer == BROADCAST {
                    // The broadcast reached all stations; this one proved the key.
                    route.peer = peer;
                }
                live.connection.open_link(index, route, packet_bytes);
            }
            NoteKind::Leave => {
                join.is_joined = false;
                join.attempt = None;
                live.connection.close_link(index);
            }
            NoteKind::Join | NoteKind::Ping => {}
        }
    }

    /// Joins link `index`, and probes it if it is silent or idle.
    pub(super) fn maintain_link(&mut self, live: &LiveConnection, index: usize, now: u64) {
        let Some(route) = self.joins[index].route.clone() else { return };
        let random = &mut self.random;
        let join = &mut self.joins[index];
        if join.is_joined {
            if now >= join.next_ping_at_ns {
                join.next_ping_at_ns = now + KEEP_ALIVE_EVERY_NS;
                live.connection.ping(index);
                join.try_longer(now, || random.id());
            }
        } else if join.attempt.is_none() {
            let (token, packet_bytes) = (random.id(), route.packet_bytes_max);
            join.attempt = Some(JoinAttempt {
                token,
                packet_bytes,
                join_count: 0,
                next_at_ns: now,
                kept_bytes: None,
            });
        }
        let Some(attempt) = join.attempt.as_mut().filter(|attempt| now >= attempt.next_at_ns)
        else {
            return;
        };
        attempt.plan_next_join(&route, now);
        let note = Note {
            kind: NoteKind::Join,
            link: index as u8,
            packet_bytes: attempt.packet_bytes as u32,
            token: attempt.token,
        };
        let is_stream = route.peer == Peer::Stream;
        let packet_bytes = if is_stream { PACKET_BYTES_MIN } else { attempt.packet_bytes };
        let connection = Arc::clone(&live.connection);
        self.acts.push(ControlAction::SayNote { connection, index, route, note, packet_bytes });
    }
}

/// The next length to try on a route: the usual lengths of Ethernet, then from the start again.
fn shorter(packet_bytes: usize, most: usize) -> usize {
    const USUAL: [usize; 4] = [8900, 4000, 1420, PACKET_BYTES_MIN];
    USUAL.into_iter().find(|usual| *usual < packet_bytes).unwrap_or(most)
}
