//! The end of a volume that others may need: its name goes at once, its data with the last pin.
//!
//! Order, and why: the word that it is deleted, then its name goes, then pins are asked for. A clone puts its
//! pin first and looks for the name after; so either it finds no name, or its pin is found. Whoever lets go
//! of the last pin looks for that word and removes what is left; of two that let go at once, the later sees
//! both.
//!
//! Invariant: the last fence stays for ever, so that a writer that wakes up learns that it is shut out.

use std::collections::HashSet;

use bytes::Bytes;
use sawmill_format::ids::{PutId, VolumeId};
use sawmill_format::kept::{LineageEntry, Pin, pin_key, released_key, tombstone_key};
use sawmill_format::segment::{encoded_len, parse_segment_key, segment_key};
use sawmill_store::{Blocking, Class, ObjectInfo, ObjectStore, PutOutcome};

use crate::ask::{self, store_error};
use crate::names::{self, Deleted};
use crate::world::World;
use crate::{Error, ErrorKind, Result};

/// A clone, and where it has pins.
pub(crate) struct Kin<'a> {
    pub(crate) clone_id: VolumeId,
    pub(crate) lineage: &'a [LineageEntry],
}

/// Lets go of all pins of a clone, and buries ancestors that were deleted and that nobody needs any more.
pub(crate) fn let_go(world: &dyn World, store: &dyn ObjectStore, kin: &Kin<'_>) -> Result<Deleted> {
    let mut deleted = Deleted { objects: 0, bytes: 0, pinned_by: Vec::new() };
    for entry in kin.lineage.iter().filter(|entry| entry.pin > 0) {
        if ask::get(store, &pin_key(entry.volume_id, entry.pin), None, Class::Read)?.is_none() {
            // Let go of before, and buried since.
            continue;
        }
        let word = word(world, entry.volume_id, kin.clone_id, entry.pin, 0, "")?;
        put(store, &released_key(entry.volume_id, entry.pin), word)?;
        let key = tombstone_key(entry.volume_id);
        let Some(bytes) = ask::get(store, &key, None, Class::Read)? else { continue };
        let word = Pin::decode(&bytes, entry.volume_id, 0)
            .map_err(|error| Error::new(ErrorKind::Corrupt, format!("{key}: {error}")))?;
        if has_a_name(store, entry.volume_id)? {
            // Whoever deleted it died before its name went: it lives.
            continue;
        }
        let buried = bury(store, entry.volume_id, word.through_sequence, false)?;
        deleted.objects += buried.objects;
        deleted.bytes += buried.bytes;
    }
    Ok(deleted)
}

/// Whether any name still leads to a volume. A record that cannot be read might.
fn has_a_name(store: &dyn ObjectStore, volume_id: VolumeId) -> Result<bool> {
    let named = names::list(store)?;
    Ok(named.iter().any(|listed| !listed.record.as_ref().is_ok_and(|record| record.volume_id != volume_id)))
}

/// Says that a volume is deleted; its last fence is `fence`, or 0 when it could not be fenced.
pub(crate) fn put_tombstone(
    world: &dyn World,
    store: &dyn ObjectStore,
    volume_id: VolumeId,
    fence: u64,
    name: &str,
) -> Result<()> {
    put(store, &tombstone_key(volume_id), word(world, volume_id, volume_id, 0, fence, name)?).map(drop)
}

/// Removes everything of a volume without a name but its last fence, or `all_fences`, unless somebody has
/// pinned it.
pub(crate) fn bury(
    store: &dyn ObjectStore,
    volume_id: VolumeId,
    fence: u64,
    all_fences: bool,
) -> Result<Deleted> {
    let mut deleted = Deleted { objects: 0, bytes: 0, pinned_by: pinned_by(store, volume_id)? };
    if !deleted.pinned_by.is_empty() {
        return Ok(deleted);
    }
    let ask = Blocking(store);
    let mut kept: HashSet<String> = (fence > 0).then(|| segment_key(volume_id, fence)).into_iter().collect();
    let convert = |error: sawmill_store::StoreError| store_error(&error);
    let objects = ask.list(&format!("{volume_id}/"), Class::Upload).map_err(convert)?;
    // A delete that was tried before may have put its fence further on.
    let last = objects.iter().filter_map(|object| parse_segment_key(&object.key)).map(|(_, last)| last).max();
    kept.extend(last.filter(|_| fence > 0).map(|last| segment_key(volume_id, last)));
    // Nothing else in the log is so small.
    let is_fence = |object: &ObjectInfo| {
        object.size_bytes == encoded_len(0, 0, 0) as u64 && parse_segment_key(&object.key).is_some()
    };
    let stays = |object: &ObjectInfo| kept.contains(&object.key) || all_fences && is_fence(object);
    let doomed: Vec<_> = objects.into_iter().filter(|object| !stays(object)).collect();
    for objects in doomed.chunks(1000) {
        let keys = objects.iter().map(|object| object.key.clone()).collect();
        ask.delete(keys, Class::Upload).map_err(convert)?;
        deleted.objects += objects.len() as u64;
        deleted.bytes += objects.iter().map(|object| object.size_bytes).sum::<u64>();
    }
    Ok(deleted)
}

/// The names of the clones that need a volume, as they were when they were made.
pub(crate) fn pinned_by(store: &dyn ObjectStore, volume_id: VolumeId) -> Result<Vec<String>> {
    let mut names = Vec::new();
    let mut slot = 1;
    loop {
        let key = pin_key(volume_id, slot);
        let Some(bytes) = ask::get(store, &key, None, Class::Read)? else { return Ok(names) };
        if ask::get(store, &released_key(volume_id, slot), None, Class::Read)?.is_none() {
            // One that cannot be read still holds.
            names.push(Pin::decode(&bytes, volume_id, slot).map_or(key, |pin| pin.name));
        }
        slot += 1;
    }
}

fn word(
    world: &dyn World,
    volume_id: VolumeId,
    clone_id: VolumeId,
    slot: u64,
    fence: u64,
    name: &str,
) -> Result<Vec<u8>> {
    let put_id = PutId(world.random()?);
    let through_sequence = fence;
    Ok(Pin { volume_id, put_id, slot, clone_id, number: 0, through_sequence, name: name.to_owned() }.encode())
}

fn put(store: &dyn ObjectStore, key: &str, body: Vec<u8>) -> Result<PutOutcome> {
    Blocking(store).put(key, Bytes::from(body), Class::Upload).map_err(|error| store_error(&error))
}
