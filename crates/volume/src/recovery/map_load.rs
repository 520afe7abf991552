//! The map that a checkpoint names, from its parts: fetched some at a time, and loaded by several
//! threads while the next ones come.
//!
//! Invariants: a map part is loaded only if it has the identity and the CRC that the root names; a
//! part of another checkpoint never is. Groups lie apart from one another, so the order in which
//! threads load them changes nothing. Deltas come after all groups, the oldest first, and only for
//! groups whose part is older (`map::freeze`). Only the caller's thread talks to the store.
//!
//! Not here: maps that are not loaded at once (`map_hold`), which checkpoint (`checkpoint`), and
//! the fall to the one before when a part is damaged (`stored`).

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{Builder, available_parallelism, scope};

use bytes::Bytes;
use parking_lot::Mutex;
use sawmill_format::checkpoint::{Checkpoint, PartEntry};
use sawmill_format::ids::VolumeId;
use sawmill_format::map_part::{PartIdentity, part_crc, part_key};
use sawmill_store::{Class, ObjectStore};

use super::checkpoint::without_map;
use crate::map::part::extents_in;
use crate::map::{GROUP_BYTES, MapExtent};
use crate::store_calls::{self, Answer};
use crate::view::View;
use crate::{Error, ErrorKind, Result};

/// Parts fetched at once.
const PARTS_PARALLEL_MAX: usize = 16;
/// Parts that are shorter together are loaded without more threads: these would cost more.
const THREADS_FROM_BYTES: u64 = 1 << 20;

/// Loads the map and the table of segments a checkpoint names.
pub(crate) fn load(store: &dyn ObjectStore, checkpoint: &Checkpoint) -> Result<View> {
    let view = without_map(checkpoint)?;
    let (map, volume_id) = (&view.map, checkpoint.volume_id);
    let (groups, deltas) = split(&checkpoint.parts);
    let load_group = |fetched: FetchedPart<'_>| {
        let extents = fetched.extents()?;
        map.import(&extents).map_err(|error| fetched.impossible(error))?;
        map.mark_clean(fetched.part.group);
        Ok(())
    };
    PartFetch { store, volume_id, take: &load_group }.in_any_order(groups)?;
    let written = written(groups);
    let load_delta = |fetched: FetchedPart<'_>| {
        let (number, extents) = (fetched.part.number, fetched.extents()?);
        let loaded = needed(&written, number, &extents)
            .try_for_each(|(_, extents)| map.overlay(number, extents));
        loaded.map_err(|error| fetched.impossible(error))
    };
    PartFetch { store, volume_id, take: &load_delta }.in_order(deltas)?;
    Ok(view)
}

fn threads_max() -> usize {
    available_parallelism().map_or(1, usize::from).min(PARTS_PARALLEL_MAX)
}

/// The parts of groups, and the deltas, which stand behind them.
pub(super) fn split(parts: &[PartEntry]) -> (&[PartEntry], &[PartEntry]) {
    parts.split_at(parts.partition_point(|part| !part.is_delta()))
}

/// The checkpoint that wrote each group.
pub(super) fn written(groups: &[PartEntry]) -> HashMap<u64, u64> {
    groups.iter().map(|part| (part.group, part.number)).collect()
}

/// What a delta says of each group that was not written whole since.
pub(super) fn needed<'a>(
    written: &'a HashMap<u64, u64>,
    delta: u64,
    extents: &'a [MapExtent],
) -> impl Iterator<Item = (u64, &'a [MapExtent])> {
    let of_group = |extent: &MapExtent| extent.address / GROUP_BYTES;
    extents
        .chunk_by(move |one, next| of_group(one) == of_group(next))
        .map(move |extents| (extents.first().map_or(0, of_group), extents))
        .filter(move |(group, _)| written.get(group).is_none_or(|number| *number < delta))
}

/// A part that was fetched, and is the object that the checkpoint names.
pub(super) struct FetchedPart<'a> {
    pub(super) part: &'a PartEntry,
    pub(super) identity: PartIdentity,
    pub(super) bytes: Bytes,
}

impl FetchedPart<'_> {
    pub(super) fn extents(&self) -> Result<Vec<MapExtent>> {
        extents_in(&self.bytes, &self.identity, "nothing was changed")
    }

    /// The error that it says what cannot be.
    pub(super) fn impossible(
        &self,
        error: impl std::error::Error + Send + Sync + 'static,
    ) -> Error {
        damaged(&self.identity, &error.to_string()).with_source(error)
    }
}

fn damaged(identity: &PartIdentity, what: &str) -> Error {
    let text = format!("{}: {what}; nothing was changed", part_key(identity));
    Error::new(ErrorKind::Corrupt, text)
}

/// How the parts of a map are read, and what takes them.
pub(super) struct PartFetch<'a> {
    pub(super) store: &'a dyn ObjectStore,
    pub(super) volume_id: VolumeId,
    pub(super) take: &'a (dyn Fn(FetchedPart<'_>) -> Result<()> + Sync),
}

impl PartFetch<'_> {
    /// Takes `parts` one after the other.
    pub(super) fn in_order(&self, parts: &[PartEntry]) -> Result<()> {
        for parts in parts.chunks(PARTS_PARALLEL_MAX) {
            for (part, answer) in parts.iter().zip(self.fetch(parts)) {
                self.settle(part, self.one(part, answer))?;
            }
        }
        Ok(())
    }

    /// Takes `parts` in any order.
    pub(super) fn in_any_order(&self, parts: &[PartEntry]) -> Result<()> {
        let mut chunks = parts.chunks(PARTS_PARALLEL_MAX);
        let mut next = chunks.next().map(|parts| (parts, self.fetch(parts)));
        while let Some((parts, answers)) = next {
            let bytes: u64 = parts.iter().map(|part| u64::from(part.bytes)).sum();
            let threads = if bytes < THREADS_FROM_BYTES { 0 } else { threads_max() };
            let slots: Vec<_> =
                answers.into_iter().map(|answer| Mutex::new(Slot::Fetched(answer))).collect();
            let taken = AtomicUsize::new(0);
            let work = || {
                while let Some((part, slot)) = next_of(parts, &slots, &taken) {
                    let mut slot = slot.lock();
                    if let Slot::Fetched(answer) =
                        std::mem::replace(&mut *slot, Slot::Taken(Ok(())))
                    {
                        *slot = Slot::Taken(self.one(part, answer));
                    }
                }
            };
            next = scope(|scope| {
                for _ in 0..threads {
                    // Without a thread the others do its work.
                    let _ = Builder::new().spawn_scoped(scope, work);
                }
                let next = chunks.next().map(|parts| (parts, self.fetch(parts)));
                work();
                next
            });
            for (part, slot) in parts.iter().zip(slots) {
                if let Slot::Taken(outcome) = slot.into_inner() {
                    self.settle(part, outcome)?;
                }
            }
        }
        Ok(())
    }

    fn identity(&self, part: &PartEntry) -> PartIdentity {
        let PartEntry { group, number, put_id, .. } = *part;
        PartIdentity { volume_id: self.volume_id, group, number, put_id }
    }

    fn fetch(&self, parts: &[PartEntry]) -> Vec<Answer> {
        let get = |part: &PartEntry| {
            store_calls::want_named(part_key(&self.identity(part)), part.bytes, Class::Read)
        };
        store_calls::get_each(self.store, parts.iter().map(get).collect())
    }

    /// Reads a damaged part once more: it may have been garbled on the way.
    fn settle(&self, part: &PartEntry, outcome: Result<()>) -> Result<()> {
        match outcome {
            Err(error) if error.kind() == ErrorKind::Corrupt => {
                let again = self.fetch(std::slice::from_ref(part)).pop();
                self.one(part, again.unwrap_or(Ok(None)))
            }
            outcome => outcome,
        }
    }

    /// Verifies and takes one part.
    fn one(&self, part: &PartEntry, answer: Answer) -> Result<()> {
        let identity = self.identity(part);
        let gone = || damaged(&identity, "the checkpoint names it and it is gone");
        let bytes = answer?.ok_or_else(gone)?;
        if part_crc(&bytes) != part.crc {
            return Err(damaged(&identity, "it is not the object the checkpoint names"));
        }
        (self.take)(FetchedPart { part, identity, bytes })
    }
}

/// A part of a chunk: as it was fetched, then what became of it.
enum Slot {
    Fetched(Answer),
    Taken(Result<()>),
}

/// The next part that no thread has taken.
fn next_of<'a>(
    parts: &'a [PartEntry],
    slots: &'a [Mutex<Slot>],
    taken: &AtomicUsize,
) -> Option<(&'a PartEntry, &'a Mutex<Slot>)> {
    let index = taken.fetch_add(1, Ordering::Relaxed);
    parts.get(index).zip(slots.get(index))
}
