//! The entries of a segment table: a list, and what has changed since it was made. Volumes of one
//! process whose lists are equal, such as clones of one base, share one ([`SharedLists`]).
//!
//! Invariants: a list is sorted and never changes; what differs from it is in `changed`. A fold
//! makes a list of its own, so it never reaches another volume.
//!
//! Not here: what an entry means and the totals (`table`).

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

/// What is known of one stored segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SegmentInfo {
    pub(crate) epoch: u64,
    pub(crate) header_bytes: u32,
    pub(crate) data_bytes: u64,
    pub(crate) live_bytes: u64,
    pub(crate) object_bytes: u64,
    pub(crate) wall_unix_ms: u64,
    /// The checkpoint that first found the segment dead; zero while it is live or not yet found.
    pub(crate) dead_since: u64,
    /// It is dead in a second checkpoint too: it only waits to be deleted.
    pub(crate) is_settled: bool,
}

/// A list is made anew when more than this, and more than a quarter of it, has changed.
const CHANGES_MIN: usize = 256;

/// Segments by sequence, sorted. In a box, so that its memory goes with the last volume that holds
/// it: the memory of an `Arc` itself stays until the last `Weak` has gone.
type List = Arc<Box<[(u32, SegmentInfo)]>>;
type WeakList = Weak<Box<[(u32, SegmentInfo)]>>;

/// The lists of the volumes of a process.
#[derive(Default)]
pub struct SharedLists {
    /// Bounded by the open volumes: what no volume holds any more is dropped by the next one.
    known: Mutex<Vec<WeakList>>,
}

impl SharedLists {
    /// How many there are.
    #[must_use]
    pub fn count(&self) -> usize {
        self.known.lock().iter().filter(|list| list.strong_count() > 0).count()
    }

    /// An equal list that another volume holds, or else this one.
    fn share(&self, list: &List) -> List {
        let mut known = self.known.lock();
        known.retain(|other| other.strong_count() > 0);
        let equal = known.iter().filter_map(Weak::upgrade).find(|other| other[..] == list[..]);
        equal.unwrap_or_else(|| {
            known.push(Arc::downgrade(list));
            list.clone()
        })
    }
}

/// The segments of a volume, by sequence.
#[derive(Default)]
pub(super) struct Entries {
    list: List,
    /// `None`: the list has it, and it is gone.
    changed: BTreeMap<u32, Option<SegmentInfo>>,
}

impl Entries {
    /// These entries, in order of their sequences.
    pub(super) fn loaded(entries: Vec<(u32, SegmentInfo)>) -> Self {
        debug_assert!(entries.is_sorted_by_key(|(sequence, _)| *sequence), "in order");
        Entries { list: Arc::new(entries.into()), changed: BTreeMap::new() }
    }

    pub(super) fn get(&self, sequence: u32) -> Option<SegmentInfo> {
        match self.changed.get(&sequence) {
            Some(changed) => *changed,
            None => self.listed(sequence),
        }
    }

    fn listed(&self, sequence: u32) -> Option<SegmentInfo> {
        let index = self.list.binary_search_by_key(&sequence, |(listed, _)| *listed).ok()?;
        Some(self.list[index].1)
    }

    pub(super) fn set(&mut self, sequence: u32, info: SegmentInfo) {
        self.changed.insert(sequence, Some(info));
    }

    pub(super) fn remove(&mut self, sequence: u32) {
        match self.listed(sequence) {
            Some(_) => self.changed.insert(sequence, None),
            None => self.changed.remove(&sequence),
        };
    }

    /// All, in order.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, SegmentInfo)> {
        let mut listed = self.list.iter().peekable();
        let mut changed = self.changed.iter().peekable();
        std::iter::from_fn(move || {
            loop {
                let next_listed = listed.peek().map(|(sequence, _)| *sequence);
                let Some((sequence, info)) = changed
                    .next_if(|(sequence, _)| next_listed.is_none_or(|listed| **sequence <= listed))
                else {
                    return listed.next().copied();
                };
                listed.next_if(|(other, _)| other == sequence);
                if let Some(info) = info {
                    return Some((*sequence, *info));
                }
            }
        })
    }

    /// The highest sequence.
    pub(super) fn newest(&self) -> Option<u32> {
        let is_there = |sequence: &u32| !matches!(self.changed.get(sequence), Some(None));
        let listed = self.list.iter().rev().map(|(sequence, _)| *sequence).find(is_there);
        let changed = self.changed.iter().rev().find(|(_, info)| info.is_some());
        listed.max(changed.map(|(sequence, _)| *sequence))
    }

    /// Makes the list anew if much has changed: a list takes half the memory of as many changes.
    /// Takes as long as a pass over all entries.
    pub(super) fn fold_if_worthwhile(&mut self) {
        if self.changed.len() > CHANGES_MIN.max(self.list.len() / 4) {
            self.fold();
        }
    }

    fn fold(&mut self) {
        // Collected first, because the length of the iterator is not known.
        let all: Vec<_> = self.iter().collect();
        *self = Entries::loaded(all);
    }

    /// Shares the list with volumes that have an equal one.
    pub(super) fn share(&mut self, lists: &SharedLists) {
        self.fold_if_worthwhile();
        self.list = lists.share(&self.list);
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use sawmill_testkit::Dice;

    use super::*;

    fn info(live_bytes: u64) -> SegmentInfo {
        SegmentInfo {
            epoch: 1,
            header_bytes: 4096,
            data_bytes: 1 << 20,
            live_bytes,
            object_bytes: (1 << 20) + 4096,
            wall_unix_ms: 0,
            dead_since: 0,
            is_settled: false,
        }
    }

    #[test]
    fn entries_agree_with_a_map_however_often_they_are_folded_and_shared() {
        let mut dice = Dice::seeded("entries of a segment table");
        let lists = SharedLists::default();
        let (mut entries, mut model) = (Entries::default(), BTreeMap::new());
        for step in 0..20_000 {
            let sequence = dice.below(600) as u32;
            match dice.below(10) {
                0..4 => {
                    entries.remove(sequence);
                    model.remove(&sequence);
                }
                _ => {
                    entries.set(sequence, info(step));
                    model.insert(sequence, info(step));
                }
            }
            match dice.below(500) {
                0 => entries.share(&lists),
                1 => entries.fold(),
                2 => entries.fold_if_worthwhile(),
                _ => {}
            }
            let asked = dice.below(600) as u32;
            assert_eq!(entries.get(asked), model.get(&asked).copied());
            assert_eq!(entries.newest(), model.last_key_value().map(|(sequence, _)| *sequence));
            if step % 100 == 0 {
                let all: Vec<_> = model.iter().map(|(sequence, info)| (*sequence, *info)).collect();
                assert_eq!(entries.iter().collect::<Vec<_>>(), all);
            }
        }
    }

    #[test]
    fn equal_lists_are_shared_until_one_of_them_changes() {
        let lists = SharedLists::default();
        let opened = || {
            let mut entries = Entries::default();
            (1..=1000).for_each(|sequence| entries.set(sequence, info(7)));
            entries.share(&lists);
            entries
        };
        let (mut first, second) = (opened(), opened());
        assert!(Arc::ptr_eq(&first.list, &second.list), "one list for both");
        first.set(5, info(0));
        first.remove(6);
        first.fold();
        assert_eq!((first.get(5), first.get(6)), (Some(info(0)), None));
        assert_eq!((second.get(5), second.get(6)), (Some(info(7)), Some(info(7))));
        drop((first, second));
        assert_eq!(opened().list.len(), 1000);
        assert_eq!(lists.known.lock().len(), 1, "what nobody holds is forgotten");
    }
}
