//! What the records of a segment leave at each address: later records win. A segment is atomic, so
//! order inside it is free; across segments nothing is ever coalesced.
//!
//! Not here: what a later segment covers of an earlier one (`recovery::apply`).

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::record::Record;

/// A part of a record that no later record of the segment covers.
#[derive(Clone)]
pub(crate) struct Remnant {
    pub(crate) address: u64,
    pub(crate) length: u64,
    pub(crate) record: Arc<Record>,
}

impl Remnant {
    /// Where the remnant begins in its record's payload.
    pub(crate) fn offset(&self) -> u64 {
        self.address - self.record.address
    }
}

/// The remnants of `records` (in order of position), sorted by address, disjoint.
pub(crate) fn coalesce(records: &[Arc<Record>]) -> Vec<Remnant> {
    let mut kept: BTreeMap<u64, Remnant> = BTreeMap::new();
    for record in records {
        if record.length == 0 {
            continue;
        }
        cut(&mut kept, record.address, record.address + record.length);
        let remnant =
            Remnant { address: record.address, length: record.length, record: record.clone() };
        kept.insert(record.address, remnant);
    }
    kept.into_values().collect()
}

/// Removes `[start, end)` from the remnants.
fn cut(kept: &mut BTreeMap<u64, Remnant>, start: u64, end: u64) {
    if let Some((_, before)) = kept.range_mut(..start).next_back() {
        let before_end = before.address + before.length;
        if before_end > start {
            before.length = start - before.address;
            if before_end > end {
                let record = before.record.clone();
                kept.insert(end, Remnant { address: end, length: before_end - end, record });
            }
        }
    }
    while let Some((&address, covered)) = kept.range(start..end).next() {
        let covered_end = covered.address + covered.length;
        let Some(mut remnant) = kept.remove(&address) else { break };
        if covered_end > end {
            remnant.address = end;
            remnant.length = covered_end - end;
            kept.insert(end, remnant);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use sawmill_format::journal::RecordOperation;

    use super::*;

    proptest! {
        #[test]
        fn the_last_record_wins_at_every_byte(
            writes in prop::collection::vec((0u64..200, 1u64..60), 0..40),
        ) {
            let mut model = vec![None; 300];
            let mut records = Vec::new();
            for (position, (address, length)) in writes.iter().enumerate() {
                let position = position as u64;
                let write = RecordOperation::Write;
                records.push(Arc::new(Record::new(position, write, *address, *length, 0)));
                model[*address as usize..(*address + *length) as usize].fill(Some(position));
            }
            let mut found = vec![None; 300];
            let mut end = 0;
            for remnant in coalesce(&records) {
                prop_assert!(remnant.address >= end && remnant.length > 0);
                end = remnant.address + remnant.length;
                prop_assert!(remnant.offset() + remnant.length <= remnant.record.length);
                found[remnant.address as usize..end as usize].fill(Some(remnant.record.position));
            }
            prop_assert_eq!(found, model);
        }
    }
}
