//! Handshakes that were answered and wait for their first sealed packet, with their limits on
//! number and time.
//!
//! A hello may be a replay from a forged address. So only a few entries, and a few handshakes per
//! second, are for senders that have not proved that they receive at their address, by a cookie or
//! by being at the end of a stream. Each proved source has a few entries of its own, and loses its
//! own first.
//!
//! Invariants: the table is bounded; an unproved sender never takes an entry from a proved one; a
//! hello that led to a connection leads to no other one as long as it is remembered.
//!
//! Not here: the content of a hello, how cookies are made (`crate::session::proof`).

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;

use sawmill_format::link::greeting::Hello;

use super::keys::Holder;
use crate::clock::{MS, SECOND};
use crate::session::Seals;
use crate::session::handshake::token_of;
use crate::source::PacketSource;

/// The longest wait of a handshake.
const HANDSHAKE_NS_MAX: u64 = 10 * SECOND;
/// Entries for unproved senders, and the shortest time that each is kept.
const ENTRIES_UNPROVED_MAX: usize = 8;
const STRANGER_NS_MAX: u64 = SECOND;
/// Handshakes per second for them, and the most at once.
const STRANGERS_PER_S: u64 = 32;
/// All entries, and those of one source.
const ENTRIES_MAX: usize = 256;
const ENTRIES_PER_SOURCE_MAX: usize = 8;
/// New entries of a source in this time.
const ENTRIES_NEW_PER_SOURCE_MAX: usize = 4;
const ENTRIES_NEW_NS: u64 = 250 * MS;
/// Remembered hellos that led to a connection.
const HELLOS_SPENT_MAX: usize = 1024;

/// A handshake that was answered.
pub(super) struct HalfOpen {
    pub(super) local: u64,
    /// The holder of its key.
    pub(super) holder: Arc<Holder>,
    pub(super) hello: Hello,
    pub(super) message: Vec<u8>,
    pub(super) welcome: Vec<u8>,
    pub(super) seals: Seals,
    pub(super) since_ns: u64,
    pub(super) links: usize,
    pub(super) places: u16,
    pub(super) place_bytes: u32,
    /// The proved source; none if nothing is proved.
    pub(super) source: Option<PacketSource>,
}

/// All handshakes that wait.
#[derive(Default)]
pub(super) struct HalfOpenTable {
    entries: Vec<HalfOpen>,
    /// Handshakes that unproved senders may have now, and the time of that count.
    tokens: u64,
    counted_at_ns: u64,
    spent: HashSet<[u8; 32]>,
    /// Bounded by [`HELLOS_SPENT_MAX`].
    spent_in_order: VecDeque<[u8; 32]>,
}

impl HalfOpenTable {
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn clear(&mut self) {
        self.entries.clear();
    }

    /// Removes those that have waited for too long.
    pub(super) fn expire(&mut self, now: u64) {
        self.entries.retain(|half| now.saturating_sub(half.since_ns) < HANDSHAKE_NS_MAX);
    }

    /// Finds a repeated hello.
    pub(super) fn find(&self, message: &[u8]) -> Option<&HalfOpen> {
        self.entries.iter().find(|half| half.message == message)
    }

    /// The index of the connection whose first packet this claims to be.
    pub(super) fn position(&self, local: u64) -> Option<usize> {
        self.entries.iter().position(|half| half.local == local)
    }

    pub(super) fn at(&self, index: usize) -> &HalfOpen {
        &self.entries[index]
    }

    /// The handshake has become a connection: its hello is not valid for another one.
    pub(super) fn take(&mut self, index: usize) -> HalfOpen {
        let half = self.entries.remove(index);
        if let Ok(token) = <[u8; 32]>::try_from(token_of(&half.message))
            && self.spent.insert(token)
        {
            self.spent_in_order.push_back(token);
            if self.spent_in_order.len() > HELLOS_SPENT_MAX
                && let Some(oldest) = self.spent_in_order.pop_front()
            {
                self.spent.remove(&oldest);
            }
        }
        half
    }

    /// Whether a hello has already led to a connection.
    pub(super) fn is_spent(&self, message: &[u8]) -> bool {
        self.spent.contains(token_of(message))
    }

    /// Whether another hello may cost a handshake. If so, it is counted.
    pub(super) fn admits(&mut self, source: Option<PacketSource>, now: u64) -> bool {
        match source {
            None => self.admits_stranger(now),
            Some(source) => {
                let own = self.entries.iter().filter(|half| half.source == Some(source));
                own.filter(|half| now.saturating_sub(half.since_ns) < ENTRIES_NEW_NS).count()
                    < ENTRIES_NEW_PER_SOURCE_MAX
            }
        }
    }

    fn admits_stranger(&mut self, now: u64) -> bool {
        let is_old = |half: &HalfOpen| now.saturating_sub(half.since_ns) >= STRANGER_NS_MAX;
        let strangers = self.entries.iter().filter(|half| half.source.is_none());
        if strangers.clone().count() >= ENTRIES_UNPROVED_MAX && !strangers.clone().any(is_old) {
            return false;
        }
        let earned =
            now.saturating_sub(self.counted_at_ns).saturating_mul(STRANGERS_PER_S) / SECOND;
        if earned > 0 || self.counted_at_ns == 0 {
            let all = if self.counted_at_ns == 0 { STRANGERS_PER_S } else { self.tokens + earned };
            (self.tokens, self.counted_at_ns) = (all.min(STRANGERS_PER_S), now.max(1));
        }
        let admits = self.tokens > 0;
        self.tokens -= u64::from(admits);
        admits
    }

    /// Adds an entry, and evicts another handshake if necessary.
    pub(super) fn push(&mut self, half: HalfOpen) {
        match half.source {
            None => self.make_room(ENTRIES_UNPROVED_MAX, |other| other.source.is_none()),
            Some(source) => {
                self.make_room(ENTRIES_PER_SOURCE_MAX, |other| other.source == Some(source))
            }
        }
        if self.entries.len() >= ENTRIES_MAX {
            let count_of = |half: &HalfOpen| {
                self.entries.iter().filter(|other| other.source == half.source).count()
            };
            // Among equals, the first is the oldest.
            let most =
                self.entries.iter().map(|half| (half.source.is_none(), count_of(half))).max();
            let evicted = self
                .entries
                .iter()
                .position(|half| Some((half.source.is_none(), count_of(half))) == most);
            if let Some(index) = evicted {
                self.entries.remove(index);
            }
        }
        self.entries.push(half);
    }

    /// Evicts the oldest handshake that `is_like` accepts if it accepts `most` or more.
    fn make_room(&mut self, most: usize, is_like: impl Fn(&HalfOpen) -> bool) {
        if self.entries.iter().filter(|half| is_like(half)).count() >= most
            && let Some(oldest) = self.entries.iter().position(is_like)
        {
            self.entries.remove(oldest);
        }
    }
}
