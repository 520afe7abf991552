//! A large map, held: its parts are fetched and verified, and each group is loaded when it is first
//! needed. Loading takes most of the time: a volume of 100 million extents would wait for it.
//!
//! Invariants: what an open refuses, or passes over for an older checkpoint, is the same whether a
//! map is held or loaded: a part that is gone, is another one, or has a wrong CRC. Deltas are
//! decoded at once, as each is for many groups.
//!
//! Not here: loading a group (`map::load`), and small maps (`map_load`).

use std::collections::BTreeMap;

use parking_lot::Mutex;
use sawmill_format::checkpoint::{Checkpoint, PartEntry};
use sawmill_format::map_part::{part_first_address, verify_part};
use sawmill_store::ObjectStore;

use super::checkpoint::without_map;
use super::map_load::{FetchedPart, PartFetch, load, needed, split, written};
use crate::map::GROUP_BYTES;
use crate::map::held::{HeldGroup, HeldPart};
use crate::view::View;
use crate::{Error, ErrorKind, Result};

/// When the map of a checkpoint is loaded.
#[derive(Clone, Copy)]
pub(crate) enum LoadTime {
    /// Before anything else.
    AtOnce,
    /// Each group when it is first needed, if the parts have so many bytes together.
    WhenNeeded { from_bytes: u64 },
}

impl LoadTime {
    /// The view of a checkpoint.
    pub(crate) fn view(self, store: &dyn ObjectStore, checkpoint: &Checkpoint) -> Result<View> {
        let bytes: u64 = checkpoint.parts.iter().map(|part| u64::from(part.bytes)).sum();
        match self {
            LoadTime::WhenNeeded { from_bytes } if bytes >= from_bytes => hold(store, checkpoint),
            _ => load(store, checkpoint),
        }
    }
}

/// The table of segments that a checkpoint names, and its map, of which nothing is loaded.
pub(crate) fn hold(store: &dyn ObjectStore, checkpoint: &Checkpoint) -> Result<View> {
    let volume_id = checkpoint.volume_id;
    let (groups, deltas) = split(&checkpoint.parts);
    let held: Mutex<BTreeMap<u64, HeldGroup>> = Mutex::default();
    let hold_part = |fetched: FetchedPart<'_>| {
        let FetchedPart { part, identity, ref bytes } = fetched;
        verify_part(bytes, &identity).map_err(|error| fetched.impossible(error))?;
        let bytes = bytes.clone();
        let part = HeldPart { identity, bytes, extents: part.extents };
        held.lock().entry(identity.group).or_default().part = Some(part);
        Ok(())
    };
    PartFetch { store, volume_id, take: &hold_part }.in_any_order(groups)?;
    if !groups.iter().all(|part| has_usual_place(&held.lock(), part)) {
        return load(store, checkpoint);
    }
    let written = written(groups);
    let hold_delta = |fetched: FetchedPart<'_>| {
        let (number, extents) = (fetched.part.number, fetched.extents()?);
        let mut held = held.lock();
        for (group, extents) in needed(&written, number, &extents) {
            held.entry(group).or_default().deltas.push((number, extents.to_vec()));
        }
        Ok(())
    };
    PartFetch { store, volume_id, take: &hold_delta }.in_order(deltas)?;
    let view = without_map(checkpoint)?;
    for (group, content) in held.into_inner() {
        let is_empty = content.part.as_ref().is_none_or(|part| part.extents == 0);
        if is_empty && content.deltas.is_empty() {
            continue;
        }
        if !view.map.hold(group, content) {
            let text = format!(
                "checkpoint {} has a part of map group {group}, which is past the end of the \
                 disk; nothing was changed",
                checkpoint.number
            );
            return Err(Error::new(ErrorKind::Corrupt, text));
        }
    }
    Ok(view)
}

/// Another writer may give groups another size (`docs/format/map_part.md`): then a group's number
/// does not tell which bytes it is for.
fn has_usual_place(held: &BTreeMap<u64, HeldGroup>, part: &PartEntry) -> bool {
    let bytes = held.get(&part.group).and_then(|group| group.part.as_ref());
    let first = bytes.and_then(|part| part_first_address(&part.bytes).ok());
    first.is_some() && first == part.group.checked_mul(GROUP_BYTES)
}
