//! The age of the oldest accepted write that is not stored. Beyond the age that the user allows,
//! writes and flushes wait.
//!
//! Invariant: everything from a mark's position up to the next mark was accepted at the mark's time
//! or later.

use std::collections::VecDeque;
use std::time::Duration;

use parking_lot::Mutex;

/// Marks per limit: the age is known to within this fraction of it.
const MARKS_MAX: u32 = 8;

/// Makes writes and flushes wait while the oldest unstored write is older than the user allows.
pub(crate) struct AgeLimit {
    age_max: Option<Duration>,
    /// Positions of the log and times, oldest first.
    /// Bounded by [`MARKS_MAX`] and one more: writes wait once the oldest mark is too old.
    marks: Mutex<VecDeque<(u64, Duration)>>,
}

impl AgeLimit {
    /// Everything before `stored` is in the store; older writes that are not count from now.
    pub(crate) fn new(age_max: Option<Duration>, stored: u64, now: Duration) -> Self {
        AgeLimit { age_max, marks: Mutex::new(VecDeque::from([(stored, now)])) }
    }

    /// Whether there is a limit.
    pub(crate) fn is_limited(&self) -> bool {
        self.age_max.is_some()
    }

    /// Notes that something is about to be accepted at `position` or after it.
    pub(crate) fn note(&self, position: u64, now: Duration) {
        let Some(age_max) = self.age_max else { return };
        let mut marks = self.marks.lock();
        if marks.back().is_none_or(|(_, at)| now.saturating_sub(*at) >= age_max / MARKS_MAX) {
            marks.push_back((position, now));
        }
    }

    /// Whether something between `stored` and `end` is too old.
    pub(crate) fn is_too_old(&self, stored: u64, end: u64, now: Duration) -> bool {
        let Some(age_max) = self.age_max else { return false };
        let mut marks = self.marks.lock();
        while marks.get(1).is_some_and(|(position, _)| *position <= stored) {
            marks.pop_front();
        }
        stored < end && marks.front().is_some_and(|(_, at)| now.saturating_sub(*at) >= age_max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_age_is_that_of_the_oldest_that_is_not_stored() {
        let second = Duration::from_secs(1);
        let unstored = AgeLimit::new(Some(8 * second), 0, second);
        unstored.note(0, 10 * second);
        unstored.note(100, 12 * second);
        assert!(
            !unstored.is_too_old(0, 200, 17 * second) && unstored.is_too_old(0, 200, 18 * second)
        );
        assert!(
            !unstored.is_too_old(100, 200, 19 * second)
                && unstored.is_too_old(100, 200, 20 * second)
        );
        assert!(!unstored.is_too_old(200, 200, 60 * second), "all is stored");
        unstored.note(200, 60 * second);
        assert!(!unstored.is_too_old(200, 300, 61 * second));
    }

    #[test]
    fn without_a_limit_nothing_is_too_old() {
        let unstored = AgeLimit::new(None, 0, Duration::ZERO);
        assert!(!unstored.is_too_old(0, 1, Duration::MAX));
    }
}
