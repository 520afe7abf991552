//! Range locks on the blocks of changes: a lock waits for earlier locks with which it cannot share
//! a block.
//!
//! Invariants: overlapping locks share their blocks unless one of them wants to be alone; a lock
//! waits only for older ones, so the oldest never waits and every lock gets its blocks when the
//! older ones have left. A lock of whole blocks costs no search while no lock wants to be alone.
//! Places are reused: no allocation once warm. Not here: what a lock is for.

use std::ops::Range;

struct RangeLock<W> {
    blocks: Range<u64>,
    /// It shares no block with any other lock.
    alone: bool,
    /// How many older locks it waits for.
    before: usize,
    /// Younger locks that wait for this one.
    after: Vec<usize>,
    work: Option<W>,
}

/// The locks of changes in progress or waiting; `W` is the work of a waiting one.
pub(super) struct RangeLocks<W> {
    places: Vec<Option<RangeLock<W>>>,
    free: Vec<usize>,
    /// Locks that want to be alone.
    alone: usize,
    waiting: usize,
}

impl<W> RangeLocks<W> {
    pub(super) fn new() -> Self {
        RangeLocks { places: Vec::new(), free: Vec::new(), alone: 0, waiting: 0 }
    }

    /// Locks blocks. Returns the number of the lock, and whether it has them: if not, call `wait`
    /// next.
    pub(super) fn enter(&mut self, blocks: Range<u64>, alone: bool) -> (usize, bool) {
        let number = self.free.pop().unwrap_or_else(|| {
            self.places.push(None);
            self.places.len() - 1
        });
        let mut before = 0;
        if alone || self.alone > 0 {
            for other in self.places.iter_mut().flatten() {
                let overlap = other.blocks.start < blocks.end && blocks.start < other.blocks.end;
                if overlap && (alone || other.alone) {
                    other.after.push(number);
                    before += 1;
                }
            }
        }
        self.alone += usize::from(alone);
        self.places[number] =
            Some(RangeLock { blocks, alone, before, after: Vec::new(), work: None });
        (number, before == 0)
    }

    /// Sets the work that the lock does when it has its blocks.
    pub(super) fn wait(&mut self, number: usize, work: W) {
        if let Some(range_lock) = &mut self.places[number] {
            range_lock.work = Some(work);
            self.waiting += 1;
        }
    }

    /// Releases the blocks, and passes the work of each lock that has its blocks now to `ready`,
    /// oldest first. Returns whether the released lock was alone.
    pub(super) fn leave(&mut self, number: usize, mut ready: impl FnMut(W)) -> bool {
        let Some(range_lock) = self.places[number].take() else { return false };
        self.free.push(number);
        self.alone -= usize::from(range_lock.alone);
        for after in range_lock.after {
            let Some(next) = &mut self.places[after] else { continue };
            next.before -= 1;
            if next.before == 0
                && let Some(work) = next.work.take()
            {
                self.waiting -= 1;
                ready(work);
            }
        }
        range_lock.alone
    }

    pub(super) fn waiting(&self) -> usize {
        self.waiting
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leave(range_locks: &mut RangeLocks<&'static str>, number: usize) -> Vec<&'static str> {
        let mut ready = Vec::new();
        range_locks.leave(number, |work| ready.push(work));
        ready
    }

    #[test]
    fn whole_blocks_share_and_edges_do_not() {
        let mut range_locks = RangeLocks::new();
        let (first, free) = range_locks.enter(0..8, false);
        assert!(free);
        assert!(range_locks.enter(4..12, false).1, "whole blocks beside whole blocks");
        let (edge, free) = range_locks.enter(7..8, true);
        assert!(!free, "both of them hold block 7");
        range_locks.wait(edge, "edge");
        assert!(range_locks.enter(8..16, false).1, "beside it");
        assert!(leave(&mut range_locks, first).is_empty(), "the second still holds it");
        assert_eq!(leave(&mut range_locks, 1), ["edge"]);
        assert_eq!(range_locks.waiting(), 0);
    }

    #[test]
    fn a_claim_that_waits_is_not_overtaken() {
        let mut range_locks = RangeLocks::new();
        let (first, _) = range_locks.enter(0..1, false);
        let (edge, free) = range_locks.enter(0..1, true);
        assert!(!free);
        range_locks.wait(edge, "edge");
        let (late, free) = range_locks.enter(0..1, false);
        assert!(!free, "it could share with the first, but the edge was here before it");
        range_locks.wait(late, "late");
        assert_eq!(range_locks.waiting(), 2);
        assert_eq!(leave(&mut range_locks, first), ["edge"]);
        assert_eq!(leave(&mut range_locks, edge), ["late"]);
    }

    #[test]
    fn places_are_used_again() {
        let mut range_locks: RangeLocks<()> = RangeLocks::new();
        for _ in 0..1000 {
            let (number, free) = range_locks.enter(0..1, true);
            assert!(free);
            range_locks.leave(number, |()| ());
        }
        assert_eq!(range_locks.places.len(), 1);
    }
}
