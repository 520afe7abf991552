//! A set of grains of a payload: one bit for each 128 bytes. It says what has arrived, and what
//! must be sent (again), in a fixed space, whatever the sizes of the packets are.
//!
//! Invariant: no allocation after `new`; `count` is the number of set bits.
//!
//! Not here: the bytes themselves (the places of `initiator` and `target`), putting grains into
//! packets (`unsent_pieces`).

use sawmill_format::link::GRAIN_BYTES;

/// A set of grains.
pub(crate) struct GrainSet {
    /// Bits in groups of 64.
    groups: Box<[u64]>,
    count: u32,
}

/// The number of grains in `bytes` bytes, rounded up.
pub(crate) fn grains_of(bytes: usize) -> u32 {
    bytes.div_ceil(GRAIN_BYTES) as u32
}

impl GrainSet {
    /// The empty set for payloads of up to `payload_bytes_max` bytes.
    pub(crate) fn new(payload_bytes_max: usize) -> Self {
        GrainSet { groups: vec![0; payload_bytes_max.div_ceil(GRAIN_BYTES * 64)].into(), count: 0 }
    }

    pub(crate) fn count(&self) -> u32 {
        self.count
    }

    /// Removes all grains.
    pub(crate) fn clear(&mut self) {
        if self.count > 0 {
            self.groups.fill(0);
            self.count = 0;
        }
    }

    /// The bits of group `index` in grains `[from, to)`.
    fn mask(index: u32, from: u32, to: u32) -> u64 {
        let (low, high) = (from.max(index * 64) - index * 64, to.min(index * 64 + 64) - index * 64);
        (u64::MAX >> (64 - (high - low))) << low
    }

    fn each(&mut self, from: u32, to: u32, mut change: impl FnMut(&mut u64, u64)) {
        if from >= to {
            return;
        }
        for index in from / 64..to.div_ceil(64) {
            let mask = Self::mask(index, from, to);
            let group = &mut self.groups[index as usize];
            let before = group.count_ones();
            change(group, mask);
            self.count = self.count + group.count_ones() - before;
        }
    }

    /// Inserts `[from, to)`.
    pub(crate) fn insert(&mut self, from: u32, to: u32) {
        self.each(from, to, |group, mask| *group |= mask);
    }

    /// Removes `[from, to)`.
    pub(crate) fn remove(&mut self, from: u32, to: u32) {
        self.each(from, to, |group, mask| *group &= !mask);
    }

    /// The end of the last grain in the set.
    pub(crate) fn end(&self) -> u32 {
        let last = self.groups.iter().rposition(|group| *group != 0);
        last.map_or(0, |index| index as u32 * 64 + 64 - self.groups[index].leading_zeros())
    }

    /// The first grain in the set, and the first after it that is not.
    pub(crate) fn first_run(&self) -> Option<(u32, u32)> {
        let index = self.groups.iter().position(|group| *group != 0)?;
        let first = index as u32 * 64 + self.groups[index].trailing_zeros();
        let mut end = first;
        while let Some(group) = self.groups.get(end as usize / 64) {
            let ones = (group >> (end % 64)).trailing_ones();
            end += ones;
            if ones == 0 || !end.is_multiple_of(64) {
                break;
            }
        }
        Some((first, end))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn grains_are_a_set(
            steps in prop::collection::vec((any::<bool>(), 0u32..300, 0u32..300), 1..60),
        ) {
            let (mut grains, mut model) = (GrainSet::new(300 * GRAIN_BYTES), BTreeSet::new());
            for (insert, a, b) in steps {
                let (from, to) = (a.min(b), a.max(b));
                if insert {
                    grains.insert(from, to);
                    model.extend(from..to);
                } else {
                    grains.remove(from, to);
                    model.retain(|grain| !(from..to).contains(grain));
                }
                prop_assert_eq!(grains.count() as usize, model.len());
                let run = model.first().map(|&first| {
                    (first, (first..).find(|grain| !model.contains(grain)).expect("a set ends"))
                });
                prop_assert_eq!(grains.first_run(), run);
                prop_assert_eq!(grains.end(), model.last().map_or(0, |last| last + 1));
            }
        }
    }
}
