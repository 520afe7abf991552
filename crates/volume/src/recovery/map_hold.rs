//! A large map, held: its parts are fetched and read through, and each group is loaded when it is
//! first needed. Loading takes most of the time: a volume of 100 million extents would wait for it.
//!
//! Invariants: what an open refuses, or passes over for an older checkpoint, is the same whether a
//! map is held or loaded. So a map in which anything is unusual is loaded at once: what cannot be
//! loaded later, and groups that another writer cut otherwise. Deltas are decoded at once, as each
//! is for many groups.
//!
//! Not here: loading a group (`map::load`), and small maps (`map_load`).

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use sawmill_format::checkpoint::Checkpoint;
use sawmill_store::ObjectStore;

use super::checkpoint::without_map;
use super::map_load::{FetchedPart, PartFetch, load, needed, split, written};
use crate::Result;
use crate::map::held::{HeldGroup, HeldPart};
use crate::map::part::extents_of_group;
use crate::view::View;

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
fn hold(store: &dyn ObjectStore, checkpoint: &Checkpoint) -> Result<View> {
    match hold_usual(store, checkpoint)? {
        Some(view) => Ok(view),
        None => {
            tracing::info!(
                "checkpoint {} has an unusual map: all of it is loaded at once",
                checkpoint.number
            );
            load(store, checkpoint)
        }
    }
}

/// `None` if anything in the map is unusual.
fn hold_usual(store: &dyn ObjectStore, checkpoint: &Checkpoint) -> Result<Option<View>> {
    let volume_id = checkpoint.volume_id;
    let view = without_map(checkpoint)?;
    let (groups, deltas) = split(&checkpoint.parts);
    let held: Mutex<BTreeMap<u64, HeldGroup>> = Mutex::default();
    let is_usual = AtomicBool::new(true);
    let hold_part = |fetched: FetchedPart<'_>| {
        let FetchedPart { identity, ref bytes, .. } = fetched;
        let count = extents_of_group(bytes, &identity, view.map.size_bytes())
            .map_err(|error| fetched.impossible(error))?;
        match count {
            // What the root says of their number is not asked: loading does not ask it either.
            Some(extents) if extents > 0 => {
                let part = HeldPart { identity, bytes: bytes.clone(), extents };
                held.lock().entry(identity.group).or_default().part = Some(part);
            }
            Some(_) => {}
            None => is_usual.store(false, Ordering::Relaxed),
        }
        Ok(())
    };
    PartFetch { store, volume_id, take: &hold_part }.in_any_order(groups)?;
    let written = written(groups);
    let hold_delta = |fetched: FetchedPart<'_>| {
        let (number, extents) = (fetched.part.number, fetched.extents()?);
        let mut held = held.lock();
        for (group, extents) in needed(&written, number, &extents) {
            if !view.map.can_overlay(group, extents) {
                is_usual.store(false, Ordering::Relaxed);
            }
            held.entry(group).or_default().deltas.push((number, extents.to_vec()));
        }
        Ok(())
    };
    if is_usual.load(Ordering::Relaxed) {
        PartFetch { store, volume_id, take: &hold_delta }.in_order(deltas)?;
    }
    if !is_usual.load(Ordering::Relaxed) {
        return Ok(None);
    }
    let mut groups = held.into_inner().into_iter();
    Ok(groups.all(|(group, content)| view.map.hold(group, content)).then_some(view))
}
