//! What of the object map is in no checkpoint yet, and which deltas its groups need.
//!
//! Invariant: a change is counted in its group after it was made, and its pages are in `changed`
//! before it is counted. So what is marked clean was exported whole.
//!
//! Not here: the map itself (`object`), and what a checkpoint writes of it (`freeze`).

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

use sawmill_format::map_part::HOLE_SEQUENCE;

use super::changes::Changes;
use super::object::{Group, ObjectMap};
use super::runs::ReplacedBytes;
use super::{GROUP_BYTES, MapExtent, MapLoadError, PAGE_BYTES};

impl ObjectMap {
    /// Groups changed since they were last marked clean, in order.
    pub fn dirty_groups(&self) -> Vec<u64> {
        self.present().filter(|(_, group)| group.is_dirty()).map(|(number, _)| number).collect()
    }

    /// The last export of the group is durable. Changes since that export keep the group dirty.
    pub fn mark_clean(&self, number: u64) {
        if let Some(group) = self.group(number) {
            let exported = group.changes_exported.load(Ordering::Acquire);
            let mut changed = group.changed.lock();
            if group.changes.load(Ordering::Acquire) == exported {
                *changed = Changes::default();
            }
            group.changes_clean.store(exported, Ordering::Release);
        }
    }

    /// Where the group changed since it was last marked clean, sorted; `None` if everywhere. As an
    /// export, in that it can be marked clean afterwards.
    pub(super) fn export_changes(&self, number: u64) -> Option<Vec<(u64, u64)>> {
        let group = self.group(number)?;
        group.changes_exported.store(group.changes.load(Ordering::Acquire), Ordering::Release);
        let at = |page: u32| number * GROUP_BYTES + u64::from(page) * u64::from(PAGE_BYTES);
        let mut changed = group.changed.lock();
        let ranges = changed.sorted()?.iter();
        Some(ranges.map(|range| (at(range.start), at(range.end))).collect())
    }

    /// The oldest delta over the newest whole part of each group that is in one.
    pub(super) fn delta_since(&self) -> BTreeMap<u64, u64> {
        let since = |group: &Group| group.delta_since.load(Ordering::Relaxed);
        let all = self.present().map(|(number, group)| (number, since(group)));
        all.filter(|(_, since)| *since > 0).collect()
    }

    /// The groups that are in a delta, those in the oldest first.
    pub(super) fn groups_in_deltas(&self) -> Vec<u64> {
        let mut groups: Vec<_> =
            self.delta_since().into_iter().map(|(group, since)| (since, group)).collect();
        groups.sort_unstable();
        groups.into_iter().map(|(_, group)| group).collect()
    }

    /// All others are in no delta.
    pub(super) fn set_delta_since(&self, since: &BTreeMap<u64, u64>) {
        for (number, group) in self.present() {
            let since = since.get(&number).copied().unwrap_or(0);
            group.delta_since.store(since, Ordering::Relaxed);
        }
    }

    /// Makes every group that is present dirty, so that the next checkpoint writes all of them.
    pub fn mark_all_dirty(&self) {
        for (_, group) in self.present() {
            group.note_whole();
        }
    }

    /// Makes these groups dirty, whether they hold anything or not.
    pub fn mark_dirty(&self, numbers: &[u64]) {
        for number in numbers {
            if let Some(entry) = self.groups.entry(*number) {
                entry.get_or_init(Group::new).note_whole();
            }
        }
    }

    /// Loads the part of a delta that is for one group, over what is mapped. As [`import`], except
    /// that extents without a segment make holes.
    ///
    /// [`import`]: Self::import
    pub(crate) fn overlay(&self, delta: u64, extents: &[MapExtent]) -> Result<(), MapLoadError> {
        for (index, &extent) in extents.iter().enumerate() {
            let MapExtent { address, length, .. } = extent;
            if u64::from(extent.sequence) != HOLE_SEQUENCE {
                let error = |error| MapLoadError { index, ..error };
                self.import(&[extent]).map_err(error)?;
            } else {
                self.unmap_clean(address, length);
            }
            if let Some(entry) = self.groups.entry(address / GROUP_BYTES) {
                let since = &entry.get_or_init(Group::new).delta_since;
                let _ = since.compare_exchange(0, delta, Ordering::Relaxed, Ordering::Relaxed);
            }
        }
        Ok(())
    }

    /// As a removal, but no change.
    fn unmap_clean(&self, address: u64, length: u64) {
        let end = self.clamped_end(address, length);
        self.each_occupied(address, end, |group, index, _, from, to| {
            let bytes = self.reshape(group, index, &mut |area| {
                let mut ignored = |_, _| {};
                let mut replaced = ReplacedBytes::new(&mut ignored);
                area.replace(from, to, None, &mut replaced);
                replaced.finish()
            });
            self.mapped_bytes.fetch_sub(bytes, Ordering::Relaxed);
        });
    }
}
