//! Counts a client's requests to its store, their errors and their latency: requests cost money.
//!
//! Invariants: every attempt that ended counts as a request, because the store bills every attempt.
//! "Not found" is an answer, not an error. `unavailable_since` is the time of the first failure
//! after the last answer; an invalid call is neither.
//!
//! Not here: when an attempt is repeated or cut (`client`, `progress`), and the names of metrics
//! (the binary).

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;

use crate::{StoreError, StoreErrorKind};

/// Buckets of a latency histogram. Bucket `i` counts attempts that took less than 2^i microseconds
/// and no less than 2^(i-1); the last one counts all slower ones too.
pub const LATENCY_BUCKETS: usize = 32;

/// The four kinds of calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CallKind {
    /// Fetch an object or a part of it.
    Get,
    /// Create an object.
    Put,
    /// List objects. Counts one request per 1000 objects, as stores page their lists.
    List,
    /// Delete objects, many per request where the store can.
    Delete,
}

/// Numbers of one kind of call since the client was made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CallMetrics {
    /// Attempts that have ended, well or not: what the store bills.
    pub requests: u64,
    /// Attempts that failed ("not found" is not a failure).
    pub errors: u64,
    /// Attempts that repeated an earlier one of the same call.
    pub retries: u64,
    /// Attempts that were cut, because none of their bytes moved.
    pub stalls: u64,
    /// Bytes received in bodies.
    pub bytes_in: u64,
    /// Bytes sent in bodies, repeated ones too.
    pub bytes_out: u64,
    /// Attempts by duration; see [`LATENCY_BUCKETS`].
    pub latency: [u64; LATENCY_BUCKETS],
}

/// All numbers of a client at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MeterSnapshot {
    /// Fetches.
    pub get: CallMetrics,
    /// Creations.
    pub put: CallMetrics,
    /// Lists.
    pub list: CallMetrics,
    /// Deletions.
    pub delete: CallMetrics,
    /// The last failed attempt: when (milliseconds since 1970) and what.
    pub last_error: Option<(u64, String)>,
    /// Since when (milliseconds since 1970) attempts have failed; `None` while the store answers.
    pub unavailable_since: Option<u64>,
}

#[derive(Default)]
struct Counters {
    requests: AtomicU64,
    errors: AtomicU64,
    retries: AtomicU64,
    stalls: AtomicU64,
    bytes_in: AtomicU64,
    bytes_out: AtomicU64,
    latency: [AtomicU64; LATENCY_BUCKETS],
}

#[derive(Default)]
struct Health {
    last_error: Option<(u64, String)>,
    unavailable_since: Option<u64>,
}

/// Counts attempts. Cheap enough for every request: a few relaxed adds, and a lock held briefly.
#[derive(Default)]
pub(crate) struct Meter {
    kinds: [Counters; 4],
    health: Mutex<Health>,
}

/// One finished attempt.
pub(crate) struct Attempt<'a> {
    pub(crate) kind: CallKind,
    pub(crate) is_retry: bool,
    pub(crate) is_stalled: bool,
    pub(crate) bytes_in: u64,
    pub(crate) bytes_out: u64,
    pub(crate) took: Duration,
    pub(crate) error: Option<&'a StoreError>,
}

impl Meter {
    /// Counts an attempt.
    pub(crate) fn record(&self, attempt: &Attempt<'_>) {
        let counters = &self.kinds[attempt.kind as usize];
        // Relaxed, because no decision depends on one counter's order with another.
        counters.requests.fetch_add(1, Relaxed);
        counters.retries.fetch_add(u64::from(attempt.is_retry), Relaxed);
        counters.stalls.fetch_add(u64::from(attempt.is_stalled), Relaxed);
        counters.bytes_in.fetch_add(attempt.bytes_in, Relaxed);
        counters.bytes_out.fetch_add(attempt.bytes_out, Relaxed);
        counters.latency[bucket(attempt.took)].fetch_add(1, Relaxed);
        let mut health = self.health.lock();
        // One lock for both fields, so that a status never shows an outage without its error.
        match attempt.error {
            Some(error) if error.kind() != StoreErrorKind::NotFound => {
                counters.errors.fetch_add(1, Relaxed);
                let now = unix_ms();
                health.last_error = Some((now, error.to_string()));
                // An invalid call tells nothing about the store.
                if error.kind() != StoreErrorKind::Invalid {
                    health.unavailable_since.get_or_insert(now);
                }
            }
            // "Not found" comes here too: a store that can say so is available.
            _ => health.unavailable_since = None,
        }
    }

    /// Counts further requests that one call of the backend made, such as the pages of a list.
    pub(crate) fn add_requests(&self, kind: CallKind, requests: u64) {
        self.kinds[kind as usize].requests.fetch_add(requests, Relaxed);
    }

    /// All numbers now.
    pub(crate) fn snapshot(&self) -> MeterSnapshot {
        let stats = |kind: CallKind| {
            let counters = &self.kinds[kind as usize];
            CallMetrics {
                requests: counters.requests.load(Relaxed),
                errors: counters.errors.load(Relaxed),
                retries: counters.retries.load(Relaxed),
                stalls: counters.stalls.load(Relaxed),
                bytes_in: counters.bytes_in.load(Relaxed),
                bytes_out: counters.bytes_out.load(Relaxed),
                latency: std::array::from_fn(|index| counters.latency[index].load(Relaxed)),
            }
        };
        let health = self.health.lock();
        MeterSnapshot {
            get: stats(CallKind::Get),
            put: stats(CallKind::Put),
            list: stats(CallKind::List),
            delete: stats(CallKind::Delete),
            last_error: health.last_error.clone(),
            unavailable_since: health.unavailable_since,
        }
    }
}

/// The histogram bucket for a duration.
fn bucket(took: Duration) -> usize {
    let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
    let bits = (u64::BITS - micros.leading_zeros()) as usize;
    bits.min(LATENCY_BUCKETS - 1)
}

fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attempt(error: Option<&StoreError>) -> Attempt<'_> {
        let took = Duration::from_micros(100);
        Attempt {
            kind: CallKind::Get,
            is_retry: false,
            is_stalled: false,
            bytes_in: 7,
            bytes_out: 0,
            took,
            error,
        }
    }

    #[test]
    fn buckets_are_powers_of_two_of_microseconds() {
        let buckets = [0, 1, 2, 3, 4, 1_000_000].map(|us| bucket(Duration::from_micros(us)));
        assert_eq!(buckets, [0, 1, 2, 2, 3, 20]);
        assert_eq!(bucket(Duration::MAX), LATENCY_BUCKETS - 1);
    }

    #[test]
    fn failing_since_is_set_by_the_first_failure_and_cleared_by_an_answer() {
        let meter = Meter::default();
        let down = StoreError::new(StoreErrorKind::Unavailable, "down");
        let absent = StoreError::new(StoreErrorKind::NotFound, "absent");
        meter.record(&attempt(Some(&down)));
        let since = meter.snapshot().unavailable_since;
        meter.record(&attempt(Some(&down)));
        assert!(since.is_some());
        assert_eq!(meter.snapshot().unavailable_since, since);
        meter.record(&attempt(Some(&absent)));
        let now = meter.snapshot();
        assert_eq!(now.unavailable_since, None);
        assert_eq!(now.last_error.unwrap().1, "down");
        assert_eq!((now.get.requests, now.get.errors, now.get.bytes_in), (3, 2, 21));
        assert_eq!(now.get.latency[7], 3);
    }
}
