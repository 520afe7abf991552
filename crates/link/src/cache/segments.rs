//! A set of bytes of one page, as a list of runs (BASS §3.1: a page's list of dirty segments).
//!
//! Invariants: runs are in order, not empty, and do not touch. Not here: what the bytes are.

use std::ops::Range;

use super::PAGE_BYTES;

/// Some bytes of a page.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Segments(Vec<(u16, u16)>);

impl Segments {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Forgets all, and keeps the list's memory.
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    /// How many bytes are in it.
    pub(super) fn bytes(&self) -> u64 {
        self.0.iter().map(|(start, end)| u64::from(end - start)).sum()
    }

    pub(super) fn runs(&self) -> impl Iterator<Item = Range<usize>> + Clone + '_ {
        self.0.iter().map(|(start, end)| usize::from(*start)..usize::from(*end))
    }

    /// The first run that ends at `start` or behind it.
    fn reaching(&self, start: u16) -> usize {
        self.0.partition_point(|run| run.1 < start)
    }

    /// Adds a range; says how many bytes are new.
    pub(super) fn insert(&mut self, range: Range<usize>) -> u64 {
        debug_assert!(range.start < range.end && range.end <= PAGE_BYTES);
        let (start, end) = (range.start as u16, range.end as u16);
        let first = self.reaching(start);
        let behind = first + self.0[first..].partition_point(|run| run.0 <= end);
        if first == behind {
            self.0.insert(first, (start, end));
            return u64::from(end - start);
        }
        let merged = (start.min(self.0[first].0), end.max(self.0[behind - 1].1));
        let known: u64 = self.0[first..behind].iter().map(|run| u64::from(run.1 - run.0)).sum();
        self.0[first] = merged;
        self.0.drain(first + 1..behind);
        u64::from(merged.1 - merged.0) - known
    }

    /// Takes a range out.
    pub(super) fn remove(&mut self, range: Range<usize>) {
        let (start, end) = (range.start as u16, range.end as u16);
        let first = self.0.partition_point(|run| run.1 <= start);
        let behind = first + self.0[first..].partition_point(|run| run.0 < end);
        if first == behind {
            return;
        }
        let head = (self.0[first].0, start);
        let tail = (end, self.0[behind - 1].1);
        let rest = [head, tail].into_iter().filter(|run| run.0 < run.1);
        self.0.splice(first..behind, rest);
    }

    /// Whether all bytes of a range are in it.
    pub(super) fn covers(&self, range: &Range<usize>) -> bool {
        let run = self.0.get(self.reaching(range.start as u16));
        // A run that only ends where the range starts is followed by a gap.
        run.is_some_and(|run| usize::from(run.0) <= range.start && range.end <= usize::from(run.1))
    }

    /// The parts of a range that are not in it, in order.
    pub(super) fn gaps(&self, range: Range<usize>) -> impl Iterator<Item = Range<usize>> + '_ {
        let (mut at, end) = (range.start, range.end);
        let first = self.reaching(range.start as u16);
        let runs = self.0[first..].iter().copied().chain([(end as u16, end as u16)]);
        runs.filter_map(move |(run_start, run_end)| {
            let gap = at..usize::from(run_start).min(end);
            at = at.max(usize::from(run_end));
            (gap.start < gap.end).then_some(gap)
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn runs(set: &Segments) -> Vec<Range<usize>> {
        set.runs().collect()
    }

    #[test]
    fn runs_that_touch_become_one() {
        let mut set = Segments::default();
        assert_eq!(set.insert(10..20), 10);
        assert_eq!(set.insert(30..40), 10);
        assert_eq!(set.insert(20..30), 10);
        assert_eq!(runs(&set), [Range { start: 10, end: 40 }]);
        assert_eq!(set.insert(0..4096), 4066);
        assert!(set.covers(&(0..4096)));
        set.remove(1..4095);
        assert_eq!(runs(&set), [0..1, 4095..4096]);
    }

    proptest! {
        #[test]
        fn a_set_is_what_a_vector_of_bits_says(
            steps in prop::collection::vec((any::<bool>(), 0usize..4096, 1usize..600), 1..60),
            asked in 0usize..4096, length in 1usize..600,
        ) {
            let (mut set, mut bits) = (Segments::default(), vec![false; PAGE_BYTES]);
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
            let mut seen = vec![false; PAGE_BYTES];
            set.runs().for_each(|run| seen[run].fill(true));
            prop_assert!(seen == bits);
            prop_assert_eq!(set.bytes(), bits.iter().filter(|bit| **bit).count() as u64);
            let all = runs(&set);
            prop_assert!(all.windows(2).all(|pair| pair[0].end < pair[1].start));
            let range = asked..(asked + length).min(PAGE_BYTES);
            prop_assert_eq!(set.covers(&range), bits[range.clone()].iter().all(|bit| *bit));
            let mut holes = vec![false; PAGE_BYTES];
            set.gaps(range.clone()).for_each(|gap| holes[gap].fill(true));
            prop_assert!(range.into_iter().all(|byte| holes[byte] != bits[byte]));
        }
    }
}
