//! The counters of a FUSE door.
//!
//! Not here: names and labels for a monitoring system.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::DoorCounts;

/// A snapshot of the counters of a door since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FuseMetrics {
    /// The counters that all doors have. A connection is a mount; a flush is a sync, a discard a
    /// punched hole; other requests are for names, attributes, seeks; a violation is a request that
    /// cannot be parsed.
    pub counts: DoorCounts,
    /// Requests that were resent after the death of another server.
    pub resent: u64,
}

/// The counters of one door.
#[derive(Default)]
pub(super) struct Counters {
    pub(super) reads: AtomicU64,
    pub(super) writes: AtomicU64,
    pub(super) flushes: AtomicU64,
    pub(super) discards: AtomicU64,
    pub(super) write_zeroes: AtomicU64,
    pub(super) others: AtomicU64,
    pub(super) bytes_in: AtomicU64,
    pub(super) bytes_out: AtomicU64,
    pub(super) errors: AtomicU64,
    pub(super) resent: AtomicU64,
    pub(super) malformed: AtomicU64,
}

impl Counters {
    pub(super) fn snapshot(&self, connections: u64, in_flight: u64) -> FuseMetrics {
        let of = |counter: &AtomicU64| counter.load(Relaxed);
        let counts = DoorCounts {
            connections,
            connections_total: 1,
            connections_cut: 0,
            connections_refused: 0,
            reads: of(&self.reads),
            writes: of(&self.writes),
            flushes: of(&self.flushes),
            discards: of(&self.discards),
            write_zeroes: of(&self.write_zeroes),
            others: of(&self.others),
            bytes_in: of(&self.bytes_in),
            bytes_out: of(&self.bytes_out),
            errors: of(&self.errors),
            in_flight,
            protocol_violations: of(&self.malformed),
            receives_awake: 0,
        };
        FuseMetrics { counts, resent: of(&self.resent) }
    }
}

/// Increments a counter.
pub(super) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Relaxed);
}
