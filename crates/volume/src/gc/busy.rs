//! Whether writers are busy: whether their segments are cut faster than [`BUSY_BYTES_PER_S`].
//! Collection then waits for them (`engine::collect`).
//!
//! What is cut adds up and drains at that rate, so neither bursts nor long segments hide a rate or
//! look like one. Invariant: after a pause of a second nobody is busy.

use std::time::Duration;

use crate::limits::BUSY_BYTES_PER_S;

/// Bytes that were cut and have not drained yet, at some time.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct BusyWriters {
    bytes: u64,
    at: Duration,
}

impl BusyWriters {
    /// A segment with so many bytes of data was cut.
    pub(crate) fn note_cut(&mut self, bytes: u64, segment_bytes: u64, now: Duration) {
        let bytes_max = BUSY_BYTES_PER_S + segment_bytes;
        *self = BusyWriters { bytes: (self.bytes_left(now) + bytes).min(bytes_max), at: now };
    }

    /// Whether more is left than one segment brings.
    pub(crate) fn are_busy(&self, segment_bytes: u64, now: Duration) -> bool {
        self.bytes_left(now) > segment_bytes
    }

    fn bytes_left(&self, now: Duration) -> u64 {
        let passed_us = now.saturating_sub(self.at).as_micros();
        let drained_bytes = u128::from(BUSY_BYTES_PER_S) * passed_us / 1_000_000;
        self.bytes.saturating_sub(u64::try_from(drained_bytes).unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The share of 10 s, but for the first, in which writers are busy that cut `count` segments at
    /// once, so many bytes a second.
    fn busy_share(segment_bytes: u64, count: u64, bytes_per_s: u64) -> f64 {
        let mut writers = BusyWriters::default();
        let (mut cut_bytes, mut busy_ms) = (0, 0);
        for ms in 0..10_000 {
            let now = Duration::from_millis(ms);
            while cut_bytes + count * segment_bytes <= bytes_per_s * ms / 1000 {
                (0..count).for_each(|_| writers.note_cut(segment_bytes, segment_bytes, now));
                cut_bytes += count * segment_bytes;
            }
            busy_ms += u64::from(ms >= 1000 && writers.are_busy(segment_bytes, now));
        }
        busy_ms as f64 / 9000.0
    }

    #[test]
    fn the_rate_says_who_is_busy_however_segments_are_cut() {
        let (kib, mib) = (BUSY_BYTES_PER_S >> 16, BUSY_BYTES_PER_S >> 6);
        for (segment_bytes, count) in [(256 * kib, 1), (8 * mib, 1), (8 * mib, 6), (32 * mib, 1)] {
            let fast = busy_share(segment_bytes, count, BUSY_BYTES_PER_S * 2);
            assert!(fast > 0.95, "{segment_bytes} by {count}: {fast}");
        }
        for segment_bytes in [256 * kib, 8 * mib, 64 * mib] {
            let slow = busy_share(segment_bytes, 1, BUSY_BYTES_PER_S * 5 / 8);
            assert!(slow == 0.0, "{segment_bytes}: {slow}");
        }
    }

    #[test]
    fn after_a_pause_of_a_second_nobody_is_busy() {
        let (mut writers, segment_bytes) = (BusyWriters::default(), BUSY_BYTES_PER_S / 8);
        let at = Duration::from_secs(5);
        (0..1000).for_each(|_| writers.note_cut(segment_bytes, segment_bytes, at));
        assert!(writers.are_busy(segment_bytes, at + Duration::from_millis(999)));
        assert!(!writers.are_busy(segment_bytes, at + Duration::from_secs(1)));
        assert!(!writers.are_busy(segment_bytes, Duration::MAX));
    }
}
