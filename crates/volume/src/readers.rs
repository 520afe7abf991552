//! Which reads are in flight, by the period in which they began, so that an object is deleted only
//! after every read that may have looked it up has ended.
//!
//! Invariant: a read counts in the period that was current when it began; a period has passed when
//! it is not current and its count is zero, and at most two periods are counted at a time.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Counts the reads in flight of the current period and of the one before.
#[derive(Default)]
pub(crate) struct Readers {
    period: AtomicU64,
    counts: [AtomicUsize; 2],
}

/// A read in flight.
pub(crate) struct ReadGuard {
    readers: Arc<Readers>,
    index: usize,
}

impl Readers {
    /// Counts a read that begins.
    pub(crate) fn enter(self: &Arc<Self>) -> ReadGuard {
        loop {
            let period = self.period.load(Ordering::SeqCst);
            let index = (period % 2) as usize;
            self.counts[index].fetch_add(1, Ordering::SeqCst);
            if self.period.load(Ordering::SeqCst) == period {
                return ReadGuard { readers: self.clone(), index };
            }
            self.counts[index].fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Starts a new period if the one before the current one has passed; returns the period to wait
    /// for.
    pub(crate) fn advance(&self) -> u64 {
        let current = self.period.load(Ordering::SeqCst);
        let other = ((current + 1) % 2) as usize;
        if self.counts[other].load(Ordering::SeqCst) == 0 {
            self.period.store(current + 1, Ordering::SeqCst);
        }
        current
    }

    /// Whether every read of `period` and before has ended.
    pub(crate) fn passed(&self, period: u64) -> bool {
        let current = self.period.load(Ordering::SeqCst);
        current > period + 1
            || (current > period && self.counts[(period % 2) as usize].load(Ordering::SeqCst) == 0)
    }
}

impl Drop for ReadGuard {
    fn drop(&mut self) {
        self.readers.counts[self.index].fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_period_passes_only_when_its_reads_have_ended() {
        let readers = Arc::new(Readers::default());
        let old = readers.enter();
        let period = readers.advance();
        let new = readers.enter();
        assert!(!readers.passed(period));
        drop(old);
        assert!(readers.passed(period));
        let next = readers.advance();
        assert!(!readers.passed(next));
        drop(new);
        assert!(readers.passed(next));
    }
}
