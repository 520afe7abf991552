//! Log messages about peers: at most a few per second.
//!
//! Invariant: omitted messages are counted, and the next one reports their number. Not here: the
//! texts.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// The most messages until they are counted anew.
const MESSAGES_MAX: u32 = 5;
const RECOUNT_EVERY: Duration = Duration::from_secs(1);

/// Limits the log lines that clients can cause, so that a hostile one does not fill a disk with
/// them.
#[derive(Default)]
pub(super) struct Complaints(Mutex<State>);

#[derive(Default)]
struct State {
    since: Option<Instant>,
    count: u32,
    left_out: u64,
}

impl Complaints {
    /// Logs a message unless there were too many. `callback` gets the number of omitted messages
    /// before it.
    pub(super) fn log(&self, callback: impl FnOnce(u64)) {
        if let Some(left_out) = self.0.lock().next(Instant::now()) {
            callback(left_out);
        }
    }
}

impl State {
    fn next(&mut self, now: Instant) -> Option<u64> {
        if self.since.is_none_or(|since| now.duration_since(since) >= RECOUNT_EVERY) {
            (self.since, self.count) = (Some(now), 0);
        }
        if self.count == MESSAGES_MAX {
            self.left_out += 1;
            return None;
        }
        self.count += 1;
        Some(std::mem::take(&mut self.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_many_complaints_a_few_are_logged_and_the_rest_are_counted() {
        let mut state = State::default();
        let start = Instant::now();
        let counts: Vec<_> = (0..1000).filter_map(|_| state.next(start)).collect();
        assert_eq!(counts, [0; MESSAGES_MAX as usize]);
        let later_counts: Vec<_> =
            (0..10).filter_map(|_| state.next(start + RECOUNT_EVERY)).collect();
        assert_eq!(later_counts, [1000 - u64::from(MESSAGES_MAX), 0, 0, 0, 0]);
    }
}
