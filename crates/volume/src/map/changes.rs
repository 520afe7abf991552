//! Which pages of a group changed since the group was last written: what the next delta holds.
//!
//! Invariants: every changed byte lies in a range, or the whole group counts as changed. A range
//! may also cover bytes that did not change: a delta holds what the map says of them, too. The
//! list has at most [`MAP_CHANGES_MAX`] ranges.
//!
//! Not here: the map, and whether a delta is worthwhile (`freeze`).

use super::PAGE_BYTES;
use crate::limits::MAP_CHANGES_MAX;

/// Pages of a group, from the first to before the last.
pub(super) type PageRange = std::ops::Range<u32>;

/// The changes of one group.
#[derive(Default)]
pub(super) struct Changes {
    /// In the order of the changes: they may overlap.
    ranges: Vec<PageRange>,
    is_whole: bool,
}

impl Changes {
    /// Bytes `start..end` of the group changed.
    pub(super) fn add(&mut self, start: u64, end: u64) {
        if self.is_whole {
            return;
        }
        let page = u64::from(PAGE_BYTES);
        let range = (start / page) as u32..end.div_ceil(page) as u32;
        match self.ranges.last_mut() {
            // Sequential writes, and one that comes again.
            Some(last) if last.start <= range.start && range.start <= last.end => {
                last.end = last.end.max(range.end);
            }
            _ => self.ranges.push(range),
        }
        if self.ranges.len() > MAP_CHANGES_MAX {
            self.join();
            if self.ranges.len() > MAP_CHANGES_MAX / 2 {
                self.add_all();
            }
        }
    }

    /// Everything changed.
    pub(super) fn add_all(&mut self) {
        *self = Changes { ranges: Vec::new(), is_whole: true };
    }

    /// Sorted, and joined where they touch; `None` if everything changed.
    pub(super) fn sorted(&mut self) -> Option<&[PageRange]> {
        self.join();
        (!self.is_whole).then_some(&self.ranges)
    }

    pub(super) fn heap_bytes(&self) -> usize {
        self.ranges.capacity() * size_of::<PageRange>()
    }

    fn join(&mut self) {
        self.ranges.sort_unstable_by_key(|range| range.start);
        self.ranges.dedup_by(|next, before| {
            let touches = next.start <= before.end;
            if touches {
                before.end = before.end.max(next.end);
            }
            touches
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = PAGE_BYTES as u64;

    #[test]
    fn changes_are_whole_pages_sorted_and_joined() {
        let mut changes = Changes::default();
        changes.add(9 * PAGE, 10 * PAGE);
        changes.add(10 * PAGE, 10 * PAGE + 1);
        changes.add(5, 6);
        changes.add(PAGE, 2 * PAGE);
        changes.add(4 * PAGE - 1, 4 * PAGE + 1);
        assert_eq!(changes.sorted(), Some(&[0..2, 3..5, 9..11][..]));
    }

    #[test]
    fn changes_that_are_too_many_are_the_whole_group() {
        let mut changes = Changes::default();
        for number in 0..=MAP_CHANGES_MAX as u64 {
            // The same few again and again, until they stand in no order.
            changes.add(number % 7 * 2 * PAGE, (number % 7 * 2 + 1) * PAGE);
        }
        assert_eq!(changes.sorted().map(<[_]>::len), Some(7));
        for number in 0..=MAP_CHANGES_MAX as u64 {
            changes.add(number * 2 * PAGE, (number * 2 + 1) * PAGE);
        }
        assert_eq!(changes.sorted(), None);
        assert_eq!(changes.heap_bytes(), 0);
    }
}
