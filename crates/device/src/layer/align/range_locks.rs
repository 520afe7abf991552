//! Range locks on the blocks of changes: a lock waits for earlier locks with which it cannot share
//! a block.
//!
//! Invariants: overlapping locks share their blocks unless one of them is exclusive; a lock
//! waits only for older ones, so the oldest never waits and every lock gets its blocks when the
//! older ones have left. A lock of whole blocks costs no search while no lock is exclusive.
//! Places are reused: no allocation once warm. Not here: what a lock is for.

use std::ops::Range;

/// Whether a lock shares its blocks with others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LockMode {
    Shared,
    Exclusive,
}

struct RangeLock<W> {
    blocks: Range<u64>,
    mode: LockMode,
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
    exclusive_count: usize,
    waiting: usize,
}

impl<W> RangeLocks<W> {
    pub(super) fn new() -> Self {
        RangeLocks { places: Vec::new(), free: Vec::new(), exclusive_count: 0, waiting: 0 }
    }

    /// Locks blocks. Returns the number of the lock, and whether it has them: if not, call `wait`
    /// next.
    pub(super) fn enter(&mut self, blocks: Range<u64>, mode: LockMode) -> (usize, bool) {
        let number = self.free.pop().unwrap_or_else(|| {
            self.places.push(None);
            self.places.len() - 1
        });
        let mut before = 0;
        let is_exclusive = mode == LockMode::Exclusive;
        if is_exclusive || self.exclusive_count > 0 {
            for other in self.places.iter_mut().flatten() {
                let overlap = other.blocks.start < blocks.end && blocks.start < other.blocks.end;
                if overlap && (is_exclusive || other.mode == LockMode::Exclusive) {
                    other.after.push(number);
                    before += 1;
                }
            }
        }
        self.exclusive_count += usize::from(is_exclusive);
        self.places[number] =
            Some(RangeLock { blocks, mode, before, after: Vec::new(), work: None });
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
    /// oldest first. Returns whether the released lock was exclusive.
    pub(super) fn leave(&mut self, number: usize, mut ready: impl FnMut(W)) -> bool {
        let Some(range_lock) = self.places[number].take() else { return false };
        let was_exclusive = range_lock.mode == LockMode::Exclusive;
        self.free.push(number);
        self.exclusive_count -= usize::from(was_exclusive);
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
        was_exclusive
    }

    pub(super) fn waiting(&self) -> usize {
        self.waiting
    }
}

#[cfg(test)]
mod tests {
    use super::LockMode::{Exclusive, Shared};
    use super::*;

    fn leave(range_locks: &mut RangeLocks<&'static str>, number: usize) -> Vec<&'static str> {
        let mut ready = Vec::new();
        range_locks.leave(number, |work| ready.push(work));
        ready
    }

    #[test]
    fn whole_blocks_share_and_edges_do_not() {
        let mut range_locks = RangeLocks::new();
        let (first, free) = range_locks.enter(0..8, Shared);
        assert!(free);
        assert!(range_locks.enter(4..12, Shared).1, "whole blocks beside whole blocks");
        let (edge, free) = range_locks.enter(7..8, Exclusive);
        assert!(!free, "both of them hold block 7");
        range_locks.wait(edge, "edge");
        assert!(range_locks.enter(8..16, Shared).1, "beside it");
        assert!(leave(&mut range_locks, first).is_empty(), "the second still holds it");
        assert_eq!(leave(&mut range_locks, 1), ["edge"]);
        assert_eq!(range_locks.waiting(), 0);
    }

    #[test]
    fn a_claim_that_waits_is_not_overtaken() {
        let mut range_locks = RangeLocks::new();
        let (first, _) = range_locks.enter(0..1, Shared);
        let (edge, free) = range_locks.enter(0..1, Exclusive);
        assert!(!free);
        range_locks.wait(edge, "edge");
        let (late, free) = range_locks.enter(0..1, Shared);
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
            let (number, free) = range_locks.enter(0..1, Exclusive);
            assert!(free);
            range_locks.leave(number, |()| ());
        }
        assert_eq!(range_locks.places.len(), 1);
    }
}
