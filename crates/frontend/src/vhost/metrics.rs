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
        let value = |counter: &AtomicU64| counter.load(Relaxed);
        DoorCounts {
            connections: value(&self.connections),
            connections_total: value(&self.connections_total),
            connections_cut: 0,
            connections_refused: 0,
            reads: value(&self.reads),
            writes: value(&self.writes),
            flushes: value(&self.flushes),
            discards: value(&self.discards),
            write_zeroes: value(&self.write_zeroes),
            others: value(&self.others),
            bytes_in: value(&self.bytes_in),
            bytes_out: value(&self.bytes_out),
            errors: value(&self.errors),
            in_flight: value(&self.in_flight),
            protocol_violations: value(&self.violations),
            receives_awake: 0,
        }
    }
}
