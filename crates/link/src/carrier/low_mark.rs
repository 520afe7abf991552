//! Decides when the receiver of a stream waits for many bytes instead of the next ones: like
//! interrupt moderation of a network card, but for the waiting thread.
//!
//! The kernel wakes a receiver for each segment, and a wake-up may cost both ends more than the
//! segment's bytes. So while bytes come in a steady flow, the receiver is woken for
//! [`LOW_MARK_BYTES`], or after [`WAIT_TIME_MAX`]. Each such wait shows whether the flow is steady:
//! if time ended it, the sender had nothing more to send, probably because it waited for us. Then
//! many more bytes must come before the next one, and more after each such failure, so a sender
//! with few requests in flight is not delayed.
//!
//! Invariant: no wait for many bytes is longer than [`WAIT_TIME_MAX`]. Not here: the socket, and
//! naps of frames, which have time stamps (`pace`).

use std::time::Duration;

/// Six of the largest segments, and more than 64 requests of 4 KiB: with no more than those in
/// flight, a wait would only cost time.
pub(super) const LOW_MARK_BYTES: usize = 384 << 10;
/// The time in which 10 Gb/s carry that much. A slower network needs no fewer wake-ups, and a small
/// packet beside a flow waits no longer.
pub(super) const WAIT_TIME_MAX: Duration = Duration::from_micros(300);
/// The bytes of a flow before the first try, and at most after failures.
const FLOW_BYTES_MIN: u64 = 4 << 20;
const FLOW_BYTES_MAX: u64 = 1 << 30;

/// The flow so far.
#[derive(Debug)]
pub(super) struct LowMark {
    /// Bytes since the last wait that failed.
    flow_bytes: u64,
    /// How many are needed before the next try.
    needed_bytes: u64,
}

impl LowMark {
    pub(super) fn new() -> Self {
        LowMark { flow_bytes: 0, needed_bytes: FLOW_BYTES_MIN }
    }

    /// Whether to wait for many bytes.
    pub(super) fn is_worth_it(&self) -> bool {
        self.flow_bytes >= self.needed_bytes
    }

    /// Bytes were read.
    pub(super) fn took(&mut self, bytes: usize) {
        self.flow_bytes = self.flow_bytes.saturating_add(bytes as u64);
    }

    /// A wait for many bytes is over: they came, or its whole time passed.
    pub(super) fn waited(&mut self, has_come: bool) {
        if has_come {
            // Slowly, so that bursts that each end with a wait in vain do not count as a flow.
            self.needed_bytes = (self.needed_bytes - self.needed_bytes / 8).max(FLOW_BYTES_MIN);
        } else {
            self.needed_bytes = (self.needed_bytes * 4).min(FLOW_BYTES_MAX);
            self.flow_bytes = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(bytes: u64) -> LowMark {
        let mut low_mark = LowMark::new();
        low_mark.took(usize::try_from(bytes).unwrap());
        low_mark
    }

    #[test]
    fn a_flow_must_have_shown_itself_before_a_wait_for_many_bytes() {
        assert!(!after(FLOW_BYTES_MIN - 1).is_worth_it());
        let mut low_mark = after(FLOW_BYTES_MIN);
        for _ in 0..100 {
            assert!(low_mark.is_worth_it());
            low_mark.waited(true);
        }
    }

    #[test]
    fn a_wait_in_vain_makes_the_next_one_rarer_up_to_a_limit() {
        let mut low_mark = after(FLOW_BYTES_MIN);
        let mut needed_bytes = FLOW_BYTES_MIN;
        for _ in 0..10 {
            low_mark.waited(false);
            needed_bytes = (needed_bytes * 4).min(FLOW_BYTES_MAX);
            low_mark.took(usize::try_from(needed_bytes - 1).unwrap());
            assert!(!low_mark.is_worth_it());
            low_mark.took(1);
            assert!(low_mark.is_worth_it());
        }
        assert_eq!(needed_bytes, FLOW_BYTES_MAX);
    }
}
