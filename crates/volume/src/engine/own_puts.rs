//! The put ids of this attachment's checkpoints that something may still refer to: a stale writer
//! must not mistake its successor's parts for garbage of its own.
//!
//! Invariant: bounded by what checkpoints and cuts name, and by the newest [`PUTS_KEPT_MAX`]. What
//! nothing names was deleted long before it is forgotten here, unless lists have hidden it from
//! [`PUTS_KEPT_MAX`] consecutive checkpoints: then the next attachment deletes it.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use sawmill_format::ids::PutId;

/// This many of the newest are kept although nothing names them, because they may be garbage that
/// still exists.
const PUTS_KEPT_MAX: u64 = 64;

/// The put ids of this attachment's checkpoints, each with its checkpoint's number.
#[derive(Default)]
pub(super) struct OwnPuts {
    numbers: HashMap<PutId, u64>,
    known: Arc<HashSet<PutId>>,
}

impl OwnPuts {
    /// Checkpoint `number` is durable. Forgets puts that are neither in `named` nor among the
    /// newest.
    pub(super) fn add(
        &mut self,
        put_id: PutId,
        number: u64,
        named: impl FnOnce() -> HashSet<PutId>,
    ) {
        self.numbers.insert(put_id, number);
        // Not each time, because it iterates over everything that is named.
        if self.numbers.len() as u64 > 2 * PUTS_KEPT_MAX && number.is_multiple_of(PUTS_KEPT_MAX) {
            let named = named();
            self.numbers
                .retain(|put_id, own| *own + PUTS_KEPT_MAX > number || named.contains(put_id));
        }
        self.known = Arc::new(self.numbers.keys().copied().collect());
    }

    pub(super) fn known(&self) -> Arc<HashSet<PutId>> {
        Arc::clone(&self.known)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn puts_that_nothing_names_are_forgotten_and_named_ones_are_not() {
        let id = |number: u64| PutId(u128::from(number).to_le_bytes());
        let mut puts = OwnPuts::default();
        for number in 1..10_000 {
            puts.add(id(number), number, || HashSet::from([id(3), id(5)]));
            let known = puts.known();
            assert!(known.len() as u64 <= 4 * PUTS_KEPT_MAX, "{} puts", known.len());
            assert!([3, 5, number].iter().all(|put| *put > number || known.contains(&id(*put))));
            assert!(number < PUTS_KEPT_MAX || known.contains(&id(number + 1 - PUTS_KEPT_MAX)));
        }
    }
}
