//! The counters of a vhost-user door. Not here: names and labels for a monitoring system.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use sawmill_device::Operation;

use crate::DoorCounts;

/// The counters of one door, for all its queues.
#[derive(Default)]
pub(super) struct Counters {
    pub(super) connections: AtomicU64,
    pub(super) connections_total: AtomicU64,
    pub(super) bytes_in: AtomicU64,
    pub(super) bytes_out: AtomicU64,
    pub(super) errors: AtomicU64,
    pub(super) in_flight: AtomicU64,
    pub(super) violations: AtomicU64,
    reads: AtomicU64,
    writes: AtomicU64,
    flushes: AtomicU64,
    discards: AtomicU64,
    write_zeroes: AtomicU64,
    others: AtomicU64,
}

impl Counters {
    /// Counts a request; `None` for one that does not go to the device.
    pub(super) fn request(&self, operation: Option<Operation>) {
        let counter = match operation {
            Some(Operation::Read) => &self.reads,
            Some(Operation::Write) => &self.writes,
            Some(Operation::Flush) => &self.flushes,
            Some(Operation::Discard) => &self.discards,
            Some(Operation::WriteZeroes) => &self.write_zeroes,
            Some(Operation::Prefetch | Operation::Allocation) | None => &self.others,
        };
        counter.fetch_add(1, Relaxed);
    }

    pub(super) fn snapshot(&self) -> DoorCounts {
        let now = |counter: &AtomicU64| counter.load(Relaxed);
        DoorCounts {
            connections: now(&self.connections),
            connections_total: now(&self.connections_total),
            connections_cut: 0,
            connections_refused: 0,
            reads: now(&self.reads),
            writes: now(&self.writes),
            flushes: now(&self.flushes),
            discards: now(&self.discards),
            write_zeroes: now(&self.write_zeroes),
            others: now(&self.others),
            bytes_in: now(&self.bytes_in),
            bytes_out: now(&self.bytes_out),
            errors: now(&self.errors),
            in_flight: now(&self.in_flight),
            protocol_violations: now(&self.violations),
        }
    }
}
