//! Counts what passes through: requests, bytes, errors, requests in flight and latency, per
//! operation.
//!
//! Invariants: no lock, and no counter shared by two operations; a request leaves `in_flight`
//! before its outcome is delivered. Not here: names and text of metrics.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use crate::{BlockDevice, Geometry, Operation, Request};

/// Buckets of the latency histogram. Bucket 0 counts latencies under 1 µs, bucket `i` those in
/// `[2^(i-1), 2^i)` µs, the last one also everything above.
pub const LATENCY_BUCKETS: usize = 32;

const fn index(operation: Operation) -> usize {
    match operation {
        Operation::Read => 0,
        Operation::Write => 1,
        Operation::Flush => 2,
        Operation::Discard => 3,
        Operation::WriteZeroes => 4,
        Operation::Prefetch => 5,
        Operation::Allocation => 6,
    }
}

/// The counters of one operation, on cache lines of their own.
#[derive(Default)]
#[repr(align(128))]
struct Counters {
    submitted: AtomicU64,
    completed: AtomicU64,
    bytes: AtomicU64,
    errors: AtomicU64,
    latency_ns: AtomicU64,
    latency: [AtomicU64; LATENCY_BUCKETS],
}

/// What one operation has seen so far.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OperationSnapshot {
    /// Which operation.
    pub operation: Operation,
    /// Requests answered, with success or error.
    pub requests: u64,
    /// Lengths of the requests answered with success, summed.
    pub bytes: u64,
    /// Requests answered with an error.
    pub errors: u64,
    /// Requests submitted and not yet answered.
    pub in_flight: u64,
    /// Latencies of the answered requests, summed, in nanoseconds.
    pub latency_ns: u64,
    /// The answered requests by latency, see [`LATENCY_BUCKETS`].
    pub latency: [u64; LATENCY_BUCKETS],
}

impl OperationSnapshot {
    /// The latency in µs that at least the fraction `quantile` (0 to 1) of the requests did not
    /// exceed, rounded up to a power of two. Zero when there was no request.
    #[must_use]
    pub fn latency_us(&self, quantile: f64) -> u64 {
        let total: u64 = self.latency.iter().sum();
        let rank = ((total as f64 * quantile).ceil() as u64).clamp(u64::from(total > 0), total);
        let mut total_so_far = 0;
        for (bucket, count) in self.latency.iter().enumerate() {
            total_so_far += count;
            if total_so_far >= rank && rank > 0 {
                return 1 << bucket;
            }
        }
        0
    }
}

/// A snapshot of a [`Meter`]. If it is taken while requests pass, the numbers of one operation may
/// be off by those requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MeterSnapshot {
    /// One entry per operation.
    pub operations: [OperationSnapshot; Operation::ALL.len()],
}

impl MeterSnapshot {
    /// The numbers of one operation.
    #[must_use]
    pub fn of(&self, operation: Operation) -> &OperationSnapshot {
        &self.operations[index(operation)]
    }
}

/// The device `D`, counted.
pub struct Meter<D> {
    inner: D,
    counters: Arc<[Counters; Operation::ALL.len()]>,
}

impl<D: BlockDevice> Meter<D> {
    /// Counts what passes to `inner` from now on.
    #[must_use]
    pub fn new(inner: D) -> Self {
        Meter { inner, counters: Arc::default() }
    }

    /// The numbers so far.
    #[must_use]
    pub fn snapshot(&self) -> MeterSnapshot {
        let operations = Operation::ALL.map(|operation| {
            let counters = &self.counters[index(operation)];
            // Completed first: what is submitted in between must not make the difference negative.
            let requests = counters.completed.load(Relaxed);
            OperationSnapshot {
                operation,
                requests,
                bytes: counters.bytes.load(Relaxed),
                errors: counters.errors.load(Relaxed),
                in_flight: counters.submitted.load(Relaxed).saturating_sub(requests),
                latency_ns: counters.latency_ns.load(Relaxed),
                latency: std::array::from_fn(|bucket| counters.latency[bucket].load(Relaxed)),
            }
        });
        MeterSnapshot { operations }
    }

    /// The device inside.
    pub fn inner(&self) -> &D {
        &self.inner
    }
}

impl<D: BlockDevice> BlockDevice for Meter<D> {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn submit(&self, request: Request) {
        let (operation, length) = (index(request.operation), request.length);
        self.counters[operation].submitted.fetch_add(1, Relaxed);
        let counters = Arc::clone(&self.counters);
        let started = Instant::now();
        self.inner.submit(request.then(move |outcome, asker| {
            let counters = &counters[operation];
            let latency = started.elapsed();
            match &outcome {
                Ok(_) => counters.bytes.fetch_add(length, Relaxed),
                Err(_) => counters.errors.fetch_add(1, Relaxed),
            };
            counters
                .latency_ns
                .fetch_add(u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX), Relaxed);
            counters.latency[bucket(latency)].fetch_add(1, Relaxed);
            counters.completed.fetch_add(1, Relaxed);
            asker.complete(outcome);
        }));
    }
}

fn bucket(latency: Duration) -> usize {
    let us = latency.as_micros();
    ((u128::BITS - us.leading_zeros()) as usize).min(LATENCY_BUCKETS - 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layer::{Decision, Fault};
    use crate::{BlockDeviceExt, MemoryDevice};

    #[test]
    fn every_request_is_counted_once_under_its_own_operation() {
        let device = Meter::new(MemoryDevice::new(1 << 20));
        device.write_at(0, &[1; 100]).expect("in range");
        device.write_at(50, &[1; 11]).expect("in range");
        device.read_at(0, 7).expect("in range");
        device.read_at(1 << 20, 1).expect_err("out of range");
        device.flush().expect("always");
        let snapshot = device.snapshot();
        let numbers = |operation| {
            let counts = snapshot.of(operation);
            (
                counts.requests,
                counts.bytes,
                counts.errors,
                counts.in_flight,
                counts.latency.iter().sum::<u64>(),
            )
        };
        assert_eq!(numbers(Operation::Write), (2, 111, 0, 0, 2));
        assert_eq!(numbers(Operation::Read), (2, 7, 1, 0, 2));
        assert_eq!(numbers(Operation::Flush), (1, 0, 0, 0, 1));
        assert_eq!(numbers(Operation::Discard), (0, 0, 0, 0, 0));
        assert_eq!(
            snapshot.operations.each_ref().map(|counts| index(counts.operation)),
            [0, 1, 2, 3, 4, 5, 6]
        );
    }

    #[test]
    fn a_request_is_in_flight_until_it_is_answered_even_when_it_is_lost() {
        let device =
            Meter::new(Fault::new(MemoryDevice::new(1 << 20), |_: &Request| Decision::Hold));
        device.submit(Request::with_bytes(
            Operation::Write,
            0,
            Default::default(),
            vec![0; 10],
            |_, _| (),
        ));
        assert_eq!(device.snapshot().of(Operation::Write).in_flight, 1);
        drop(device.inner().take_held());
        let counts = device.snapshot().of(Operation::Write).clone();
        assert_eq!((counts.in_flight, counts.requests, counts.errors, counts.bytes), (0, 1, 1, 0));
    }

    #[test]
    fn latencies_fall_into_the_bucket_of_their_power_of_two() {
        let at = |ns| bucket(Duration::from_nanos(ns));
        assert_eq!(
            [at(0), at(999), at(1_000), at(1_999), at(2_000), at(4_000)],
            [0, 0, 1, 1, 2, 3]
        );
        assert_eq!(bucket(Duration::MAX), LATENCY_BUCKETS - 1);
        let mut latency = [0; LATENCY_BUCKETS];
        (latency[3], latency[7]) = (99, 1);
        let none = Meter::new(MemoryDevice::new(1)).snapshot().of(Operation::Read).clone();
        assert_eq!(none.latency_us(0.5), 0);
        let counts = OperationSnapshot { latency, ..none };
        assert_eq!([0.0, 0.5, 0.99, 1.0].map(|q| counts.latency_us(q)), [8, 8, 8, 128]);
    }
}
