//! Claims on the blocks of changes: a claim waits for earlier claims with which it cannot share a
//! block.
//!
//! Invariants: overlapping claims share their blocks unless one of them wants to be alone; a claim
//! waits only for older ones, so the oldest never waits and every claim gets its blocks when the
//! older ones have left. A claim of whole blocks costs no search while no claim wants to be alone.
//! Places are reused: no allocation once warm. Not here: locks, and what a claim is for.

use std::ops::Range;

struct Claim<W> {
    blocks: Range<u64>,
    /// It shares no block with any other claim.
    alone: bool,
    /// How many older claims it waits for.
    before: usize,
    /// Younger claims that wait for this one.
    after: Vec<usize>,
    work: Option<W>,
}

/// The claims of changes in progress or waiting; `W` is the work of a waiting one.
pub(super) struct Claims<W> {
    places: Vec<Option<Claim<W>>>,
    free: Vec<usize>,
    /// Claims that want to be alone.
    alone: usize,
    waiting: usize,
}

impl<W> Claims<W> {
    pub(super) fn new() -> Self {
        Claims { places: Vec::new(), free: Vec::new(), alone: 0, waiting: 0 }
    }

    /// Claims blocks. Returns the claim's number, and whether it has them: if not, call `wait`
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
        self.places[number] = Some(Claim { blocks, alone, before, after: Vec::new(), work: None });
        (number, before == 0)
    }

    /// Sets the work that the claim does when it has its blocks.
    pub(super) fn wait(&mut self, number: usize, work: W) {
        if let Some(claim) = &mut self.places[number] {
            claim.work = Some(work);
            self.waiting += 1;
        }
    }

    /// Releases the blocks, and passes the work of each claim that has its blocks now to `ready`,
    /// oldest first. Returns whether the released claim was alone.
    pub(super) fn leave(&mut self, number: usize, mut ready: impl FnMut(W)) -> bool {
        let Some(claim) = self.places[number].take() else { return false };
        self.free.push(number);
        self.alone -= usize::from(claim.alone);
        for after in claim.after {
            let Some(next) = &mut self.places[after] else { continue };
            next.before -= 1;
            if next.before == 0
                && let Some(work) = next.work.take()
            {
                self.waiting -= 1;
                ready(work);
            }
        }
        claim.alone
    }

    pub(super) fn waiting(&self) -> usize {
        self.waiting
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leave(claims: &mut Claims<&'static str>, number: usize) -> Vec<&'static str> {
        let mut ready = Vec::new();
        claims.leave(number, |work| ready.push(work));
        ready
    }

    #[test]
    fn whole_blocks_share_and_edges_do_not() {
        let mut claims = Claims::new();
        let (first, free) = claims.enter(0..8, false);
        assert!(free);
        assert!(claims.enter(4..12, false).1, "whole blocks beside whole blocks");
        let (edge, free) = claims.enter(7..8, true);
        assert!(!free, "both of them hold block 7");
        claims.wait(edge, "edge");
        assert!(claims.enter(8..16, false).1, "beside it");
        assert!(leave(&mut claims, first).is_empty(), "the second still holds it");
        assert_eq!(leave(&mut claims, 1), ["edge"]);
        assert_eq!(claims.waiting(), 0);
    }

    #[test]
    fn a_claim_that_waits_is_not_overtaken() {
        let mut claims = Claims::new();
        let (first, _) = claims.enter(0..1, false);
        let (edge, free) = claims.enter(0..1, true);
        assert!(!free);
        claims.wait(edge, "edge");
        let (late, free) = claims.enter(0..1, false);
        assert!(!free, "it could share with the first, but the edge was here before it");
        claims.wait(late, "late");
        assert_eq!(claims.waiting(), 2);
        assert_eq!(leave(&mut claims, first), ["edge"]);
        assert_eq!(leave(&mut claims, edge), ["late"]);
    }

    #[test]
    fn places_are_used_again() {
        let mut claims: Claims<()> = Claims::new();
        for _ in 0..1000 {
            let (number, free) = claims.enter(0..1, true);
            assert!(free);
            claims.leave(number, |()| ());
        }
        assert_eq!(claims.places.len(), 1);
    }
}
