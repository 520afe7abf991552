//! Which cell is given up next: two queues, so that a scan passes through and the hot set stays.
//!
//! A frame enters *probation*, a tenth of the cells. If it is hit on a later visit before it
//! reaches the end, it moves to *main*; if not, it is evicted, and only a fingerprint of it is
//! kept. A frame whose fingerprint is met again was given up too early and enters main at once. At
//! the end of main a frame that was hit since gets another round. (The policy is known as S3-FIFO.)
//!
//! Invariant: a cell is in exactly one of the three lists, or in the hands of one thread that fills
//! it. Not here: what the cells hold.

use super::index::{Index, place};

const NIL: u32 = u32::MAX;
/// Cells given another round before one is taken regardless: bounds the time of one eviction.
const ROUNDS_MAX: u32 = 128;
/// The same for a frame that nobody has read yet: it can wait, and must not take what was hit.
const SPARE_ROUNDS_MAX: u32 = 1 << 16;

/// The list that a cell is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tier {
    Free = 0,
    Probation = 1,
    Main = 2,
    /// None: a thread is filling it.
    Held = 3,
}

#[derive(Clone, Copy)]
struct Neighbors {
    older: u32,
    newer: u32,
}

#[derive(Clone, Copy)]
struct List {
    oldest: u32,
    newest: u32,
    len: u32,
}

/// The lists of cells and the fingerprints of what was given up.
pub(super) struct Eviction {
    neighbors: Box<[Neighbors]>,
    tiers: Box<[Tier]>,
    lists: [List; 3],
    probation_cells: u32,
    /// Fingerprints of frames given up from probation, by hash; a newer one takes an older one's
    /// place.
    ghosts: Box<[u32]>,
}

impl Eviction {
    /// All of `cells` are free.
    pub(super) fn new(cells: u32) -> Self {
        let mut eviction = Eviction {
            neighbors: vec![Neighbors { older: NIL, newer: NIL }; cells as usize].into(),
            tiers: vec![Tier::Held; cells as usize].into(),
            lists: [List { oldest: NIL, newest: NIL, len: 0 }; 3],
            probation_cells: probation_cells(cells),
            ghosts: vec![0; cells.max(1) as usize].into(),
        };
        (0..cells).for_each(|cell| eviction.push(Tier::Free, cell));
        eviction
    }

    /// Bytes of memory used.
    pub(super) fn memory_bytes(&self) -> usize {
        size_of_val(&*self.neighbors) + size_of_val(&*self.tiers) + size_of_val(&*self.ghosts)
    }

    /// Takes a cell out of the lists: a free one, or the next to be given up. The flag is set if it
    /// holds a frame. `None` when every cell is being filled. `hash_of` gives the hash of the frame
    /// in a cell.
    pub(super) fn take(
        &mut self,
        index: &Index,
        hash_of: impl Fn(u32) -> u64,
    ) -> Option<(u32, bool)> {
        if let Some(cell) = self.pop(Tier::Free) {
            return Some((cell, false));
        }
        let mut rounds = 0;
        loop {
            let probation = self.len(Tier::Probation);
            let tier = if probation > self.probation_cells || self.len(Tier::Main) == 0 {
                Tier::Probation
            } else {
                Tier::Main
            };
            let cell = self.pop(tier)?;
            if rounds < ROUNDS_MAX && index.take_visited(cell) {
                rounds += 1;
                self.push(Tier::Main, cell);
                continue;
            }
            self.remember(tier, hash_of(cell));
            return Some((cell, true));
        }
    }

    /// Remembers a frame that leaves probation, in case it comes back.
    fn remember(&mut self, tier: Tier, hash: u64) {
        if tier == Tier::Probation {
            self.ghosts[place(hash, self.ghosts.len())] = fingerprint(hash);
        }
    }

    /// As [`take`](Self::take), for a frame that nobody has read yet: no frame that was hit since
    /// eviction last looked gives up its cell, and main keeps half of all cells.
    pub(super) fn take_spare(
        &mut self,
        index: &Index,
        hash_of: impl Fn(u32) -> u64,
    ) -> Option<(u32, bool)> {
        if let Some(cell) = self.pop(Tier::Free) {
            return Some((cell, false));
        }
        for _ in 0..self.filled().min(SPARE_ROUNDS_MAX) {
            let tier = if self.len(Tier::Probation) > self.probation_cells {
                Tier::Probation
            } else if self.len(Tier::Main) > self.main_cells_min() {
                Tier::Main
            } else {
                return None;
            };
            let cell = self.pop(tier)?;
            // It stays visited: many of these calls follow each other.
            if index.is_visited(cell) {
                self.push(Tier::Main, cell);
                continue;
            }
            self.remember(tier, hash_of(cell));
            return Some((cell, true));
        }
        None
    }

    /// Puts a cell from `take_spare`, now filled, into main: somebody will come for its frame, and
    /// what passes through probation meanwhile is not to push it out.
    pub(super) fn admit_spare(&mut self, cell: u32) {
        self.push(Tier::Main, cell);
    }

    /// How many cells `take_spare` gives before it comes to those that it has given.
    pub(super) fn spare(&self, index: &Index) -> u32 {
        let (mut probation, mut main) = (0, 0);
        for (cell, tier) in (0..).zip(&self.tiers) {
            match tier {
                Tier::Probation if !index.is_visited(cell) => probation += 1,
                Tier::Main if !index.is_visited(cell) => main += 1,
                _ => {}
            }
        }
        let of_main = self.len(Tier::Main).saturating_sub(self.main_cells_min());
        self.len(Tier::Free)
            + u32::saturating_sub(probation, self.probation_cells)
            + of_main.min(main)
    }

    fn main_cells_min(&self) -> u32 {
        self.tiers.len() as u32 / 2
    }

    /// Puts a cell that was just filled into the queue where its frame belongs.
    pub(super) fn admit(&mut self, cell: u32, hash: u64) {
        let ghost = &mut self.ghosts[place(hash, self.ghosts.len())];
        let known = *ghost == fingerprint(hash);
        if known {
            *ghost = 0;
        }
        self.push(if known { Tier::Main } else { Tier::Probation }, cell);
    }

    /// Puts a free cell, restored from a saved index, into `tier`.
    pub(super) fn restore(&mut self, cell: u32, tier: Tier) {
        self.unlink(cell);
        self.push(tier, cell);
    }

    /// Makes a cell free, wherever it is.
    pub(super) fn free(&mut self, cell: u32) {
        self.unlink(cell);
        self.push(Tier::Free, cell);
    }

    /// Where a cell is.
    pub(super) fn tier(&self, cell: u32) -> Tier {
        self.tiers[cell as usize]
    }

    /// How many cells hold frames.
    pub(super) fn filled(&self) -> u32 {
        self.len(Tier::Probation) + self.len(Tier::Main)
    }

    /// The cells of a list, oldest first.
    pub(super) fn oldest_first(&self, tier: Tier) -> impl Iterator<Item = u32> {
        let first = Some(self.lists[tier as usize].oldest).filter(|cell| *cell != NIL);
        std::iter::successors(first, |cell| {
            Some(self.neighbors[*cell as usize].newer).filter(|cell| *cell != NIL)
        })
    }

    fn len(&self, tier: Tier) -> u32 {
        self.lists[tier as usize].len
    }

    fn push(&mut self, tier: Tier, cell: u32) {
        let list = &mut self.lists[tier as usize];
        self.neighbors[cell as usize] = Neighbors { older: list.newest, newer: NIL };
        match list.newest {
            NIL => list.oldest = cell,
            newest => self.neighbors[newest as usize].newer = cell,
        }
        list.newest = cell;
        list.len += 1;
        self.tiers[cell as usize] = tier;
    }

    fn pop(&mut self, tier: Tier) -> Option<u32> {
        let cell = Some(self.lists[tier as usize].oldest).filter(|cell| *cell != NIL)?;
        self.unlink(cell);
        Some(cell)
    }

    fn unlink(&mut self, cell: u32) {
        let tier = std::mem::replace(&mut self.tiers[cell as usize], Tier::Held);
        if tier == Tier::Held {
            return;
        }
        let Neighbors { older, newer } = self.neighbors[cell as usize];
        let list = &mut self.lists[tier as usize];
        match older {
            NIL => list.oldest = newer,
            older => self.neighbors[older as usize].newer = newer,
        }
        match newer {
            NIL => list.newest = older,
            newer => self.neighbors[newer as usize].older = older,
        }
        list.len -= 1;
    }
}

/// The share of the cells that new frames pass through.
pub(super) fn probation_cells(cells: u32) -> u32 {
    cells / 10
}

/// The fingerprint kept of a frame. Odd, so that it is never the 0 of an empty place.
fn fingerprint(hash: u64) -> u32 {
    hash as u32 | 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cell_is_in_the_list_its_tier_says() {
        let mut eviction = Eviction::new(100);
        let (index, _turn) = Index::new(100, 0);
        let mut random = 7_u64;
        for _ in 0..10_000 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let cell = (random >> 33) as u32 % 100;
            match (random >> 60) % 4 {
                0 => index.visit(cell),
                1 => eviction.free(cell),
                _ => {
                    let (cell, _) =
                        eviction.take(&index, u64::from).expect("no reader holds a cell");
                    assert_eq!(eviction.tier(cell), Tier::Held);
                    eviction.admit(cell, random);
                }
            }
            let mut cell_count = 0;
            for tier in [Tier::Free, Tier::Probation, Tier::Main] {
                cell_count += eviction.len(tier);
                assert_eq!(eviction.oldest_first(tier).count() as u32, eviction.len(tier));
                assert!(eviction.oldest_first(tier).all(|cell| eviction.tier(cell) == tier));
            }
            assert_eq!(cell_count, 100);
        }
    }

    #[test]
    fn no_cell_is_given_twice() {
        let mut eviction = Eviction::new(3);
        let (index, _turn) = Index::new(3, 0);
        let cells: Vec<_> = std::iter::from_fn(|| eviction.take(&index, u64::from)).collect();
        assert_eq!(cells, [(0, false), (1, false), (2, false)]);
    }
}
