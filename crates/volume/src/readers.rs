//! Which reads are in flight, by generation, so that an object is deleted only after every read
//! that may have looked it up has ended.
//!
//! Invariant: a read counts in the generation that was current when it began; a generation has
//! passed when it is not current and its count is zero, and at most two generations are counted at
//! a time.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// See the head of this file.
#[derive(Default)]
pub(crate) struct Readers {
    generation: AtomicU64,
    counts: [AtomicUsize; 2],
}

/// A read in flight.
pub(crate) struct ReadGuard {
    readers: Arc<Readers>,
    slot: usize,
}

impl Readers {
    /// Counts a read that begins.
    pub(crate) fn enter(self: &Arc<Self>) -> ReadGuard {
        loop {
            let generation = self.generation.load(Ordering::SeqCst);
            let slot = (generation % 2) as usize;
            self.counts[slot].fetch_add(1, Ordering::SeqCst);
            if self.generation.load(Ordering::SeqCst) == generation {
                return ReadGuard { readers: self.clone(), slot };
            }
            self.counts[slot].fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Starts a new generation if the one before the current one has passed; returns the generation
    /// to wait for.
    pub(crate) fn advance(&self) -> u64 {
        let current = self.generation.load(Ordering::SeqCst);
        let other = ((current + 1) % 2) as usize;
        if self.counts[other].load(Ordering::SeqCst) == 0 {
            self.generation.store(current + 1, Ordering::SeqCst);
        }
        current
    }

    /// Whether every read of `generation` and before has ended.
    pub(crate) fn passed(&self, generation: u64) -> bool {
        let current = self.generation.load(Ordering::SeqCst);
        current > generation + 1
            || (current > generation
                && self.counts[(generation % 2) as usize].load(Ordering::SeqCst) == 0)
    }
}

impl Drop for ReadGuard {
    fn drop(&mut self) {
        self.readers.counts[self.slot].fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_generation_passes_only_when_its_reads_have_ended() {
        let readers = Arc::new(Readers::default());
        let old = readers.enter();
        let generation = readers.advance();
        let new = readers.enter();
        assert!(!readers.passed(generation));
        drop(old);
        assert!(readers.passed(generation));
        let next = readers.advance();
        assert!(!readers.passed(next));
        drop(new);
        assert!(readers.passed(next));
    }
}
