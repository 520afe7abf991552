//! Which slot is given up next: two queues, so that a scan passes through and the hot set stays.
//!
//! A frame enters *probation*, a tenth of the slots. If it is hit on a later visit before it
//! reaches the end, it moves to *main*; if not, it is evicted, and only a fingerprint of it is
//! kept. A frame whose fingerprint is met again was given up too early and enters main at once. At
//! the end of main a frame that was hit since gets another round. (The policy is known as S3-FIFO.)
//!
//! Invariant: a slot is in exactly one of the three lists, or in the hands of one thread that fills
//! it. Not here: what the slots hold.

use super::index::{Index, place};

const NIL: u32 = u32::MAX;
/// Slots given another round before one is taken regardless: bounds the time of one eviction.
const ROUNDS_MAX: u32 = 128;

/// The list that a slot is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tier {
    Free = 0,
    Probation = 1,
    Main = 2,
    /// None: a thread is filling it.
    Held = 3,
}

#[derive(Clone, Copy)]
struct Link {
    older: u32,
    newer: u32,
}

#[derive(Clone, Copy)]
struct List {
    oldest: u32,
    newest: u32,
    len: u32,
}

/// The lists of slots and the fingerprints of what was given up.
pub(super) struct Eviction {
    links: Box<[Link]>,
    tiers: Box<[Tier]>,
    lists: [List; 3],
    probation_slots: u32,
    /// Fingerprints of frames given up from probation, by hash; a newer one takes an older one's
    /// place.
    ghosts: Box<[u32]>,
}

impl Eviction {
    /// All of `slots` are free.
    pub(super) fn new(slots: u32) -> Self {
        let mut eviction = Eviction {
            links: vec![Link { older: NIL, newer: NIL }; slots as usize].into(),
            tiers: vec![Tier::Held; slots as usize].into(),
            lists: [List { oldest: NIL, newest: NIL, len: 0 }; 3],
            probation_slots: probation_slots(slots),
            ghosts: vec![0; slots.max(1) as usize].into(),
        };
        (0..slots).for_each(|slot| eviction.push(Tier::Free, slot));
        eviction
    }

    /// Bytes of memory used.
    pub(super) fn memory_bytes(&self) -> usize {
        size_of_val(&*self.links) + size_of_val(&*self.tiers) + size_of_val(&*self.ghosts)
    }

    /// Takes a slot out of the lists: a free one, or the next to be given up. The flag is set if it
    /// holds a frame. `None` when every slot is being filled. `hash_of` gives the hash of the frame
    /// in a slot.
    pub(super) fn take(
        &mut self,
        index: &Index,
        hash_of: impl Fn(u32) -> u64,
    ) -> Option<(u32, bool)> {
        if let Some(slot) = self.pop(Tier::Free) {
            return Some((slot, false));
        }
        let mut rounds = 0;
        loop {
            let probation = self.len(Tier::Probation);
            let tier = if probation > self.probation_slots || self.len(Tier::Main) == 0 {
                Tier::Probation
            } else {
                Tier::Main
            };
            let slot = self.pop(tier)?;
            if rounds < ROUNDS_MAX && index.take_visited(slot) {
                rounds += 1;
                self.push(Tier::Main, slot);
                continue;
            }
            if tier == Tier::Probation {
                let hash = hash_of(slot);
                self.ghosts[place(hash, self.ghosts.len())] = fingerprint(hash);
            }
            return Some((slot, true));
        }
    }

    /// Puts a slot that was just filled into the queue where its frame belongs.
    pub(super) fn admit(&mut self, slot: u32, hash: u64) {
        let ghost = &mut self.ghosts[place(hash, self.ghosts.len())];
        let known = *ghost == fingerprint(hash);
        if known {
            *ghost = 0;
        }
        self.push(if known { Tier::Main } else { Tier::Probation }, slot);
    }

    /// Puts a free slot, restored from a saved index, into `tier`.
    pub(super) fn restore(&mut self, slot: u32, tier: Tier) {
        self.unlink(slot);
        self.push(tier, slot);
    }

    /// Makes a slot free, wherever it is.
    pub(super) fn free(&mut self, slot: u32) {
        self.unlink(slot);
        self.push(Tier::Free, slot);
    }

    /// Where a slot is.
    pub(super) fn tier(&self, slot: u32) -> Tier {
        self.tiers[slot as usize]
    }

    /// How many slots hold frames.
    pub(super) fn filled(&self) -> u32 {
        self.len(Tier::Probation) + self.len(Tier::Main)
    }

    /// The slots of a list, oldest first.
    pub(super) fn oldest_first(&self, tier: Tier) -> impl Iterator<Item = u32> {
        let first = Some(self.lists[tier as usize].oldest).filter(|slot| *slot != NIL);
        std::iter::successors(first, |slot| {
            Some(self.links[*slot as usize].newer).filter(|slot| *slot != NIL)
        })
    }

    fn len(&self, tier: Tier) -> u32 {
        self.lists[tier as usize].len
    }

    fn push(&mut self, tier: Tier, slot: u32) {
        let list = &mut self.lists[tier as usize];
        self.links[slot as usize] = Link { older: list.newest, newer: NIL };
        match list.newest {
            NIL => list.oldest = slot,
            newest => self.links[newest as usize].newer = slot,
        }
        list.newest = slot;
        list.len += 1;
        self.tiers[slot as usize] = tier;
    }

    fn pop(&mut self, tier: Tier) -> Option<u32> {
        let slot = Some(self.lists[tier as usize].oldest).filter(|slot| *slot != NIL)?;
        self.unlink(slot);
        Some(slot)
    }

    fn unlink(&mut self, slot: u32) {
        let tier = std::mem::replace(&mut self.tiers[slot as usize], Tier::Held);
        if tier == Tier::Held {
            return;
        }
        let Link { older, newer } = self.links[slot as usize];
        let list = &mut self.lists[tier as usize];
        match older {
            NIL => list.oldest = newer,
            older => self.links[older as usize].newer = newer,
        }
        match newer {
            NIL => list.newest = older,
            newer => self.links[newer as usize].older = older,
        }
        list.len -= 1;
    }
}

/// The share of the slots that new frames pass through.
pub(super) fn probation_slots(slots: u32) -> u32 {
    slots / 10
}

/// The fingerprint kept of a frame. Odd, so that it is never the 0 of an empty place.
fn fingerprint(hash: u64) -> u32 {
    hash as u32 | 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_slot_is_in_the_list_its_tier_says() {
        let mut eviction = Eviction::new(100);
        let (index, _turn) = Index::new(100, 0);
        let mut random = 7_u64;
        for _ in 0..10_000 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let slot = (random >> 33) as u32 % 100;
            match (random >> 60) % 4 {
                0 => index.visit(slot),
                1 => eviction.free(slot),
                _ => {
                    let (slot, _) =
                        eviction.take(&index, u64::from).expect("no reader holds a slot");
                    assert_eq!(eviction.tier(slot), Tier::Held);
                    eviction.admit(slot, random);
                }
            }
            let mut slot_count = 0;
            for tier in [Tier::Free, Tier::Probation, Tier::Main] {
                slot_count += eviction.len(tier);
                assert_eq!(eviction.oldest_first(tier).count() as u32, eviction.len(tier));
                assert!(eviction.oldest_first(tier).all(|slot| eviction.tier(slot) == tier));
            }
            assert_eq!(slot_count, 100);
        }
    }

    #[test]
    fn no_slot_is_given_twice() {
        let mut eviction = Eviction::new(3);
        let (index, _turn) = Index::new(3, 0);
        let slots: Vec<_> = std::iter::from_fn(|| eviction.take(&index, u64::from)).collect();
        assert_eq!(slots, [(0, false), (1, false), (2, false)]);
    }
}
