//! A set of bytes of one page (BASS §3.1: a page's list of dirty segments): a few runs in place or,
//! for more runs, one bit per byte. So a set is bounded whatever is written, and most sets need no
//! extra memory.
//!
//! Invariants: runs are in order, not empty, and do not touch; those after `count` are zero. A set
//! with bits keeps them until it is cleared. Not here: what the bytes are.

use std::ops::Range;

use super::PAGE_BYTES;

/// Runs in place: as many as take the space of a `Vec`.
const RUNS_MAX: usize = 5;
const GROUP_BITS: usize = u64::BITS as usize;

type Run = (u16, u16);
type Bits = [u64; PAGE_BYTES / GROUP_BITS];

/// Some bytes of a page.
#[derive(Clone, Debug)]
pub(super) enum ByteSet {
    Few { count: u8, runs: [Run; RUNS_MAX] },
    Many(Box<Bits>),
}

impl Default for ByteSet {
    fn default() -> Self {
        ByteSet::Few { count: 0, runs: [(0, 0); RUNS_MAX] }
    }
}

impl ByteSet {
    pub(super) fn is_empty(&self) -> bool {
        self.next(0, true) == PAGE_BYTES
    }

    /// Removes all bytes.
    pub(super) fn clear(&mut self) {
        *self = ByteSet::default();
    }

    /// The number of bytes in the set.
    pub(super) fn bytes(&self) -> u64 {
        match self {
            ByteSet::Few { runs, .. } => {
                runs.iter().map(|(start, end)| u64::from(end - start)).sum()
            }
            ByteSet::Many(bits) => bits.iter().map(|group| u64::from(group.count_ones())).sum(),
        }
    }

    pub(super) fn runs(&self) -> impl Iterator<Item = Range<usize>> + Clone + '_ {
        self.alternate(0..PAGE_BYTES, true)
    }

    /// The runs of a range that are not in the set, in order.
    pub(super) fn gaps(&self, range: Range<usize>) -> impl Iterator<Item = Range<usize>> + '_ {
        self.alternate(range, false)
    }

    /// Whether all bytes of a range are in the set.
    pub(super) fn covers(&self, range: &Range<usize>) -> bool {
        self.next(range.start, false) >= range.end
    }

    /// Adds a range. Returns the number of new bytes.
    pub(super) fn insert(&mut self, range: Range<usize>) -> u64 {
        debug_assert!(range.start < range.end && range.end <= PAGE_BYTES);
        if let ByteSet::Few { count, runs } = self {
            let (start, end) = (range.start as u16, range.end as u16);
            let list = &runs[..usize::from(*count)];
            let first = list.partition_point(|run| run.1 < start);
            let met = first..first + list[first..].partition_point(|run| run.0 <= end);
            let known_bytes: u64 =
                list[met.clone()].iter().map(|run| u64::from(run.1 - run.0)).sum();
            let merged = match (list[met.clone()].first(), list[met.clone()].last()) {
                (Some(head), Some(tail)) => (start.min(head.0), end.max(tail.1)),
                _ => (start, end),
            };
            if self.replace(met, &[merged]) {
                return u64::from(merged.1 - merged.0) - known_bytes;
            }
        }
        self.change_bits(|bits| {
            groups_of(range).fold(0, |new, (index, mask)| {
                let added = mask & !bits[index];
                bits[index] |= mask;
                new + u64::from(added.count_ones())
            })
        })
    }

    /// Removes a range.
    pub(super) fn remove(&mut self, range: Range<usize>) {
        if let ByteSet::Few { count, runs } = self {
            let (start, end) = (range.start as u16, range.end as u16);
            let list = &runs[..usize::from(*count)];
            let first = list.partition_point(|run| run.1 <= start);
            let met = first..first + list[first..].partition_point(|run| run.0 < end);
            let (Some(head), Some(tail)) = (list[met.clone()].first(), list[met.clone()].last())
            else {
                return;
            };
            let (head, tail) = ((head.0, start), (end, tail.1));
            let fits = match (head.0 < head.1, tail.0 < tail.1) {
                (true, true) => self.replace(met, &[head, tail]),
                (true, false) => self.replace(met, &[head]),
                (false, true) => self.replace(met, &[tail]),
                (false, false) => self.replace(met, &[]),
            };
            if fits {
                return;
            }
        }
        self.change_bits(|bits| groups_of(range).for_each(|(index, mask)| bits[index] &= !mask));
    }

    /// Replaces runs with others. Returns whether there was room.
    fn replace(&mut self, old: Range<usize>, new: &[Run]) -> bool {
        let ByteSet::Few { count, runs } = self else { return false };
        let new_count = usize::from(*count) - old.len() + new.len();
        if new_count > RUNS_MAX {
            return false;
        }
        runs.copy_within(old.end..usize::from(*count), old.start + new.len());
        runs[old.start..old.start + new.len()].copy_from_slice(new);
        runs[new_count..].fill((0, 0));
        *count = new_count as u8;
        true
    }

    /// Converts to bits first if necessary.
    fn change_bits<T>(&mut self, change: impl FnOnce(&mut Bits) -> T) -> T {
        let mut bits = match std::mem::take(self) {
            ByteSet::Many(bits) => bits,
            few => {
                let mut bits: Box<Bits> = Box::new([0; PAGE_BYTES / GROUP_BITS]);
                few.runs().flat_map(groups_of).for_each(|(index, mask)| bits[index] |= mask);
                bits
            }
        };
        let result = change(&mut bits);
        *self = ByteSet::Many(bits);
        result
    }

    /// The first byte from `at` on that is in the set (or is not); the end of the page if there is
    /// none.
    fn next(&self, at: usize, is_in: bool) -> usize {
        match self {
            ByteSet::Few { count, runs } => {
                let run = runs[..usize::from(*count)].iter().find(|run| usize::from(run.1) > at);
                let (start, end) =
                    run.map_or((PAGE_BYTES, PAGE_BYTES), |run| (run.0.into(), run.1.into()));
                match (is_in, start <= at) {
                    (true, _) => at.max(start),
                    (false, true) => end,
                    (false, false) => at,
                }
            }
            ByteSet::Many(bits) => {
                let flip = if is_in { 0 } else { u64::MAX };
                let group_of = |index: usize| {
                    let from = if index == at / GROUP_BITS {
                        u64::MAX << (at % GROUP_BITS)
                    } else {
                        u64::MAX
                    };
                    (bits[index] ^ flip) & from
                };
                let found = (at / GROUP_BITS..bits.len()).find(|index| group_of(*index) != 0);
                found.map_or(PAGE_BYTES, |index| {
                    index * GROUP_BITS + group_of(index).trailing_zeros() as usize
                })
            }
        }
    }

    /// The runs of a range that are in the set (or are not), in order.
    fn alternate(
        &self,
        range: Range<usize>,
        is_in: bool,
    ) -> impl Iterator<Item = Range<usize>> + Clone + '_ {
        let mut at = range.start;
        std::iter::from_fn(move || {
            let start = self.next(at, is_in);
            at = self.next(start, !is_in).min(range.end);
            (start < range.end).then_some(start..at)
        })
    }
}

/// The groups of bits that a range touches, and its bits in each.
fn groups_of(range: Range<usize>) -> impl Iterator<Item = (usize, u64)> {
    (range.start / GROUP_BITS..range.end.div_ceil(GROUP_BITS)).map(move |index| {
        let first = index * GROUP_BITS;
        let (start, end) =
            (range.start.max(first) - first, range.end.min(first + GROUP_BITS) - first);
        (index, u64::MAX >> (GROUP_BITS - (end - start)) << start)
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn runs(set: &ByteSet) -> Vec<Range<usize>> {
        set.runs().collect()
    }

    #[test]
    fn runs_that_touch_become_one() {
        let mut set = ByteSet::default();
        assert_eq!(set.insert(10..20), 10);
        assert_eq!(set.insert(30..40), 10);
        assert_eq!(set.insert(20..30), 10);
        assert_eq!(runs(&set), [Range { start: 10, end: 40 }]);
        assert_eq!(set.insert(0..4096), 4066);
        assert!(set.covers(&(0..4096)));
        set.remove(1..4095);
        assert_eq!(runs(&set), [0..1, 4095..4096]);
    }

    #[test]
    fn no_set_takes_more_than_a_bit_for_each_byte() {
        let mut set = ByteSet::default();
        (0..2048).for_each(|pair| assert_eq!(set.insert(pair * 2..pair * 2 + 1), 1));
        assert_eq!((set.bytes(), runs(&set).len()), (2048, 2048));
        assert!(size_of::<ByteSet>() <= 24 && size_of::<Bits>() == PAGE_BYTES / 8);
        set.clear();
        assert!(set.is_empty() && matches!(set, ByteSet::Few { .. }), "and it gives that back");
    }

    proptest! {
        #[test]
        fn a_set_equals_a_vector_of_bits(
            steps in prop::collection::vec((any::<bool>(), 0usize..4096, 1usize..600), 1..60),
            first in 0usize..4096, length in 1usize..600,
        ) {
            let (mut set, mut bits) = (ByteSet::default(), vec![false; PAGE_BYTES]);
            for (add, start, length) in steps {
                let range = start..(start + length).min(PAGE_BYTES);
                if add {
                    let new = bits[range.clone()].iter().filter(|bit| !**bit).count() as u64;
                    prop_assert_eq!(set.insert(range.clone()), new);
                } else {
                    set.remove(range.clone());
                }
                bits[range].fill(add);
            }
            let mut bits_of_runs = vec![false; PAGE_BYTES];
            set.runs().for_each(|run| bits_of_runs[run].fill(true));
            prop_assert!(bits_of_runs == bits);
            prop_assert_eq!(set.bytes(), bits.iter().filter(|bit| **bit).count() as u64);
            let all = runs(&set);
            prop_assert!(all.windows(2).all(|pair| pair[0].end < pair[1].start));
            let range = first..(first + length).min(PAGE_BYTES);
            prop_assert_eq!(set.covers(&range), bits[range.clone()].iter().all(|bit| *bit));
            let mut holes = vec![false; PAGE_BYTES];
            set.gaps(range.clone()).for_each(|gap| holes[gap].fill(true));
            prop_assert!(range.into_iter().all(|byte| holes[byte] != bits[byte]));
        }
    }
}
