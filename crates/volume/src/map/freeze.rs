//! What a checkpoint writes of the map: groups whole, or one delta with what changed in many of
//! them.
//!
//! A group of which much changed is written whole. What changed here and there goes into the delta,
//! so that a checkpoint puts bytes in proportion to the change and not to the map. Deltas add up:
//! each checkpoint also writes some of the groups whole that the oldest deltas are for, and names a
//! delta no longer when no group needs it.
//!
//! Invariants:
//! 1. A group is what its newest whole part says, and over it, in order, what the deltas of greater
//!    numbers say of its addresses.
//! 2. `delta_since` of a group is the oldest delta over its newest whole part; 0: none. So no delta
//!    older than all of these is needed.
//! 3. While deltas are named, a group that became empty keeps a part without extents: older deltas
//!    must not fill it again.
//! 4. Nothing is marked clean before everything is encoded: a group that is clean and in no
//!    checkpoint would be missing from the next one.
//! 5. A held group without changes is what the checkpoint before says, and stays so without being
//!    loaded. Its deltas count as those of any other.
//!
//! Not here: the objects (`part`), putting them (`engine::checkpoint`), reading them
//! (`recovery::checkpoint`).

use std::collections::{BTreeMap, BTreeSet};

use sawmill_format::checkpoint::{CheckpointIdentity, PartEntry};
use sawmill_format::ids::PutId;
use sawmill_format::map_part::{HOLE_SEQUENCE, PartIdentity, delta_group};

use super::part::MapPart;
use super::{GROUP_BYTES, Location, MapExtent, MapPiece, ObjectMap};
use crate::Result;
use crate::limits::{AttachmentBounds, MAP_DELTAS_MAX};

/// A group is written whole when at least one in so many of its extents changed.
const WHOLE_FROM_SHARE: u64 = 4;
/// Groups are taken out of deltas when these have more than one in so many of the map's bytes.
const DELTAS_SHARE: u64 = 16;
/// As many bytes of groups are then written whole for each byte of the new delta. So deltas stay
/// below about an eighth of the map.
const WHOLE_BYTES_PER_DELTA_BYTE: u64 = 8;
/// About what a change takes in a delta.
const CHANGE_BYTES: u64 = 12;

/// The map of one checkpoint.
pub(crate) struct FrozenMap {
    /// All parts that it names.
    pub(crate) parts: Vec<PartEntry>,
    /// Those that must be put.
    pub(crate) objects: Vec<MapPart>,
}

/// Encodes what changed since the checkpoint with the parts `before`. Nobody may change the map
/// meanwhile. What is held and changed, or is written, is loaded first.
pub(crate) fn freeze_map(
    map: &ObjectMap,
    before: &[PartEntry],
    checkpoint: CheckpointIdentity,
    put_id: PutId,
    bounds: &AttachmentBounds,
) -> Result<FrozenMap> {
    while map.may_have_changes_waiting() {
        map.load_next_changed();
    }
    let plan = Plan::make(map, before, bounds.map_delta_from_bytes);
    // Some may be held and unchanged: they are taken out of deltas.
    plan.all().iter().try_for_each(|group| map.load(group * GROUP_BYTES, GROUP_BYTES))?;
    if let Some(error) = map.broken() {
        return Err(error);
    }
    let freezing = Freezing { map, before, checkpoint, put_id, bounds };
    let without_delta = Plan { changed: BTreeMap::new(), whole: plan.all() };
    match plan.changed.is_empty() {
        true => freezing.encode(&plan),
        // A delta that is too long is no reason to fail.
        false => freezing.encode(&plan).or_else(|_| freezing.encode(&without_delta)),
    }
}

/// Which groups are written, and how.
struct Plan {
    /// With what changed in them, for the delta.
    changed: BTreeMap<u64, Vec<(u64, u64)>>,
    whole: BTreeSet<u64>,
}

impl Plan {
    fn make(map: &ObjectMap, before: &[PartEntry], delta_from_bytes: u64) -> Plan {
        let bases: BTreeMap<u64, &PartEntry> =
            before.iter().filter(|part| !part.is_delta()).map(|part| (part.group, part)).collect();
        let mut plan = Plan { changed: BTreeMap::new(), whole: BTreeSet::new() };
        let mut spared_bytes = 0;
        for group in map.dirty_groups() {
            let base = bases.get(&group);
            let changed = map.export_changes(group).zip(base).filter(|(ranges, base)| {
                ranges.len() as u64 * WHOLE_FROM_SHARE < u64::from(base.extents)
            });
            let Some((ranges, base)) = changed else {
                plan.whole.insert(group);
                continue;
            };
            spared_bytes += u64::from(base.bytes);
            plan.changed.insert(group, ranges);
        }
        if spared_bytes < delta_from_bytes {
            plan.whole = plan.all();
            plan.changed.clear();
        }
        plan.take_out_of_deltas(map, before, &bases);
        plan
    }

    fn all(&self) -> BTreeSet<u64> {
        self.changed.keys().chain(&self.whole).copied().collect()
    }

    /// Adds groups that the oldest deltas are for.
    fn take_out_of_deltas(
        &mut self,
        map: &ObjectMap,
        before: &[PartEntry],
        bases: &BTreeMap<u64, &PartEntry>,
    ) {
        let bytes_of = |part: &PartEntry| u64::from(part.bytes);
        let deltas: Vec<&PartEntry> = before.iter().filter(|part| part.is_delta()).collect();
        let delta_count = deltas.len() as u64;
        let delta_bytes: u64 = deltas.iter().map(|part| bytes_of(part)).sum();
        let map_bytes: u64 = bases.values().map(|part| bytes_of(part)).sum();
        // What came since groups were last written whole counts: one whole group may be more than
        // a single delta is worth.
        let written = bases.values().map(|part| part.number).max().unwrap_or(0);
        let newer = || deltas.iter().filter(|part| part.number > written);
        let changes: u64 = self.changed.values().map(|ranges| ranges.len() as u64).sum();
        let mut budget_bytes = 0;
        if delta_bytes * DELTAS_SHARE > map_bytes {
            let newer_bytes: u64 = newer().map(|part| bytes_of(part)).sum();
            budget_bytes += (newer_bytes + changes * CHANGE_BYTES) * WHOLE_BYTES_PER_DELTA_BYTE;
        }
        if delta_count > MAP_DELTAS_MAX / 2 {
            budget_bytes += newer().count() as u64 * map_bytes / (MAP_DELTAS_MAX / 2);
        }
        // However small: one more.
        let mut is_urgent = delta_count >= MAP_DELTAS_MAX;
        for group in map.groups_in_deltas() {
            let base_bytes = bases.get(&group).map_or(0, |base| bytes_of(base));
            if base_bytes > budget_bytes && !is_urgent {
                return;
            }
            is_urgent = false;
            budget_bytes = budget_bytes.saturating_sub(base_bytes);
            self.changed.remove(&group);
            self.whole.insert(group);
        }
    }
}

/// What encoding needs besides a plan.
struct Freezing<'a> {
    map: &'a ObjectMap,
    before: &'a [PartEntry],
    checkpoint: CheckpointIdentity,
    put_id: PutId,
    bounds: &'a AttachmentBounds,
}

impl Freezing<'_> {
    fn encode(&self, plan: &Plan) -> Result<FrozenMap> {
        let (map, number) = (self.map, self.checkpoint.number);
        // The oldest delta that a group needs from now on.
        let mut since = map.delta_since();
        since.retain(|group, _| !plan.whole.contains(group));
        for group in plan.changed.keys() {
            since.entry(*group).or_insert(number);
        }
        let needed_from = since.values().copied().min().unwrap_or(u64::MAX);
        let stays = |part: &&PartEntry| match part.is_delta() {
            true => part.number >= needed_from,
            false => !plan.whole.contains(&part.group),
        };
        let mut parts: Vec<PartEntry> = self.before.iter().filter(stays).copied().collect();
        let has_deltas = needed_from < u64::MAX;
        let mut objects = Vec::new();
        for &group in &plan.whole {
            let extents = map.export_group(group);
            if !extents.is_empty() || has_deltas {
                objects.push(self.part(group, extents)?);
            }
        }
        if !plan.changed.is_empty() {
            objects.push(self.part(delta_group(number), self.delta(plan))?);
        }
        parts.extend(objects.iter().map(|part| part.entry));
        parts.sort_by_key(|part| part.group);
        plan.all().iter().for_each(|group| map.mark_clean(*group));
        map.set_delta_since(&since);
        Ok(FrozenMap { parts, objects })
    }

    fn part(&self, group: u64, extents: Vec<MapExtent>) -> Result<MapPart> {
        let CheckpointIdentity { volume_id, number } = self.checkpoint;
        let identity = PartIdentity { volume_id, group, number, put_id: self.put_id };
        MapPart::encode(&identity, extents, self.bounds.map_part_bytes_max)
    }

    /// What the map says of all that changed.
    fn delta(&self, plan: &Plan) -> Vec<MapExtent> {
        let mut extents = Vec::new();
        for (start, end) in plan.changed.values().flatten() {
            self.map.lookup(*start, end - start, &mut |piece| extents.push(of_delta(piece)));
        }
        extents
    }
}

fn of_delta(piece: MapPiece) -> MapExtent {
    let MapPiece { address, length, location } = piece;
    let hole = Location { sequence: HOLE_SEQUENCE as u32, data_offset: 0 };
    let Location { sequence, data_offset } = location.unwrap_or(hole);
    MapExtent { address, length, sequence, data_offset }
}
