//! The counters of a ublk door.
//!
//! Each queue counts on its own [`Counters`], written by its own thread, so that queues share no
//! cache line. Not here: names and labels for a monitoring system.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use sawmill_device::Operation;

use crate::DoorCounts;

/// The counters of one queue.
#[derive(Default)]
pub(super) struct Counters {
    reads: AtomicU64,
    writes: AtomicU64,
    flushes: AtomicU64,
    discards: AtomicU64,
    write_zeroes: AtomicU64,
    others: AtomicU64,
    bytes_in: AtomicU64,
    bytes_out: AtomicU64,
    errors: AtomicU64,
    violations: AtomicU64,
    in_flight: AtomicU64,
}

/// Adds with a plain store, because only the queue's own thread counts.
fn add(counter: &AtomicU64, count: u64) {
    counter.store(counter.load(Relaxed).wrapping_add(count), Relaxed);
}

impl Counters {
    /// A request was accepted.
    pub(super) fn taken(&self, operation: Operation, length: u64) {
        add(&self.in_flight, 1);
        match operation {
            Operation::Read => add(&self.reads, 1),
            Operation::Write => {
                add(&self.writes, 1);
                add(&self.bytes_in, length);
            }
            Operation::Flush => add(&self.flushes, 1),
            Operation::Discard => add(&self.discards, 1),
            Operation::WriteZeroes => add(&self.write_zeroes, 1),
            Operation::Prefetch | Operation::Allocation => add(&self.others, 1),
        }
    }

    /// A request was refused before it reached the device. In flight too, until `answered`, through
    /// which a refusal goes like any result.
    pub(super) fn refused(&self) {
        add(&self.in_flight, 1);
        add(&self.others, 1);
        add(&self.violations, 1);
    }

    /// A request is answered; `read_bytes` were sent.
    pub(super) fn answered(&self, result: i32, read_bytes: u64) {
        // Minus one, as the sum wraps around.
        add(&self.in_flight, u64::MAX);
        add(&self.bytes_out, read_bytes);
        add(&self.errors, u64::from(result < 0));
    }

    /// Adds these counts to a door's.
    pub(super) fn add_to(&self, counts: &mut DoorCounts) {
        for (sum, counter) in [
            (&mut counts.reads, &self.reads),
            (&mut counts.writes, &self.writes),
            (&mut counts.flushes, &self.flushes),
            (&mut counts.discards, &self.discards),
            (&mut counts.write_zeroes, &self.write_zeroes),
            (&mut counts.others, &self.others),
            (&mut counts.bytes_in, &self.bytes_in),
            (&mut counts.bytes_out, &self.bytes_out),
            (&mut counts.errors, &self.errors),
            (&mut counts.protocol_violations, &self.violations),
            (&mut counts.in_flight, &self.in_flight),
        ] {
            *sum += counter.load(Relaxed);
        }
    }
}
