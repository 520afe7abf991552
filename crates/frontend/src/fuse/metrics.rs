//! What a FUSE door counts.
//!
//! Not here: names and labels for a monitoring system.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::DoorCounts;

/// A snapshot of what a door counted since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FuseMetrics {
    /// Reads taken.
    pub reads: u64,
    /// Writes taken.
    pub writes: u64,
    /// Syncs taken.
    pub flushes: u64,
    /// Punched holes.
    pub discards: u64,
    /// Zeroed ranges.
    pub write_zeroes: u64,
    /// All else: names, attributes, seeks.
    pub others: u64,
    /// Bytes of writes' payload.
    pub bytes_in: u64,
    /// Bytes of reads' data.
    pub bytes_out: u64,
    /// Requests answered with an error by the device.
    pub errors: u64,
    /// Requests that came for the second time, after another server's death.
    pub resent: u64,
    /// Requests given to the device and not answered yet.
    pub in_flight: u64,
    /// Requests that could not be understood.
    pub malformed: u64,
}

impl FuseMetrics {
    /// The same under the names that all doors share.
    #[must_use]
    pub fn counts(&self, mounted: bool) -> DoorCounts {
        DoorCounts {
            connections: u64::from(mounted),
            connections_total: 1,
            reads: self.reads,
            writes: self.writes,
            flushes: self.flushes,
            discards: self.discards,
            write_zeroes: self.write_zeroes,
            others: self.others,
            bytes_in: self.bytes_in,
            bytes_out: self.bytes_out,
            errors: self.errors,
            in_flight: self.in_flight,
            protocol_violations: self.malformed,
            ..DoorCounts::default()
        }
    }
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
    pub(super) fn snapshot(&self, in_flight: u64) -> FuseMetrics {
        let of = |counter: &AtomicU64| counter.load(Relaxed);
        FuseMetrics {
            reads: of(&self.reads),
            writes: of(&self.writes),
            flushes: of(&self.flushes),
            discards: of(&self.discards),
            write_zeroes: of(&self.write_zeroes),
            others: of(&self.others),
            bytes_in: of(&self.bytes_in),
            bytes_out: of(&self.bytes_out),
            errors: of(&self.errors),
            resent: of(&self.resent),
            in_flight,
            malformed: of(&self.malformed),
        }
    }
}

/// One more.
pub(super) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Relaxed);
}
