//! The removal of a volume that others may need: its name goes immediately, its data with the last
//! pin.
//!
//! Order, and why: first the status pin that says deleted, which removes the name (`names`), then
//! pins are read. A clone puts its pin first and checks the name afterwards: so either it finds no
//! name, or its pin is found. The clone that releases the last pin checks for that status pin and
//! removes what is left; if two release at the same time, the later one sees both. Before the first
//! object is removed, the status changes to *removed*, unless another process has already revived
//! the volume: so a list alone never causes a delete.
//!
//! Invariant: the last fence stays forever, so that a writer that wakes up learns that it is
//! fenced. So do the status pins, so that no old name ever means the volume again.
//!
//! Not here: the delete of a volume up to its status pin (`names`), the status pins
//! (`status_pins`), and how a clone puts its pins (`clones`).

use std::collections::HashSet;

use bytes::Bytes;
use sawmill_format::ids::{PutId, VolumeId};
use sawmill_format::kept_block::{
    LineageEntry, Pin, PinnedStatus, pin_key, released_key, status_pin_prefix,
};
use sawmill_format::segment::{encoded_bytes, parse_segment_key, segment_key};
use sawmill_store::{Blocking, Class, ObjectInfo, ObjectStore, PutOutcome};

use super::status_pins::{self, StatusPinContent};
use crate::Result;
use crate::store_calls::{self, cannot_encode, store_error};
use crate::world::World;

/// What a delete removed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeleteReport {
    /// Objects.
    pub objects: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Clones that still need the data: it goes with the last of them.
    pub pinned_by: Vec<String>,
}

/// A clone, and where it has pins.
pub(crate) struct PinHolder<'a> {
    pub(crate) clone_id: VolumeId,
    pub(crate) lineage: &'a [LineageEntry],
}

/// Releases all pins of a clone, and removes deleted ancestors that no clone needs any more.
pub(crate) fn release_pins(
    world: &dyn World,
    store: &dyn ObjectStore,
    kin: &PinHolder<'_>,
) -> Result<DeleteReport> {
    let mut deleted = DeleteReport { objects: 0, bytes: 0, pinned_by: Vec::new() };
    for entry in kin.lineage.iter().filter(|entry| entry.pin > 0) {
        if store_calls::get(store, &pin_key(entry.volume_id, entry.pin), None, Class::Read)?
            .is_none()
        {
            // Released earlier, and removed since.
            continue;
        }
        let pin = Pin {
            volume_id: entry.volume_id,
            put_id: PutId(world.random()?),
            pin_number: entry.pin,
            clone_id: kin.clone_id,
            number: 0,
            through_sequence: 0,
            name: String::new(),
        };
        let bytes = pin.encode().map_err(cannot_encode)?;
        put(store, &released_key(entry.volume_id, entry.pin), bytes)?;
        let removed = remove_objects(world, store, entry.volume_id, KeptFences::Last)?;
        deleted.objects += removed.objects;
        deleted.bytes += removed.bytes;
    }
    Ok(deleted)
}

/// Which fences of a deleted volume stay.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum KeptFences {
    Last,
    All,
}

/// If nothing pins a deleted volume, removes its objects except its status pins and these fences.
pub(crate) fn remove_objects(
    world: &dyn World,
    store: &dyn ObjectStore,
    volume_id: VolumeId,
    fences: KeptFences,
) -> Result<DeleteReport> {
    let mut deleted = DeleteReport { objects: 0, bytes: 0, pinned_by: Vec::new() };
    let newest = status_pins::newest(store, volume_id)?;
    if !newest.is_gone() {
        return Ok(deleted);
    }
    // After the status pin: a clone that pins it from now on finds it gone.
    deleted.pinned_by = pinned_by(store, volume_id)?;
    if !deleted.pinned_by.is_empty() {
        return Ok(deleted);
    }
    let fence = newest.fence;
    if newest.status == PinnedStatus::Deleted {
        let content = StatusPinContent { fence, name: &newest.name };
        let (number, removed) = (newest.number + 1, PinnedStatus::Removed);
        if !status_pins::put(world, store, volume_id, number, removed, content)? {
            // Another process is removing it, or has revived it.
            return Ok(deleted);
        }
    }
    let ask = Blocking(store);
    let mut kept: HashSet<String> =
        (fence > 0).then(|| segment_key(volume_id, fence)).into_iter().collect();
    let convert = |error: sawmill_store::StoreError| store_error(&error);
    let objects = ask.list(&format!("{volume_id}/"), Class::Upload).map_err(convert)?;
    // An earlier attempt to delete may have put its fence further on.
    let last = objects
        .iter()
        .filter_map(|object| parse_segment_key(&object.key))
        .map(|(_, last)| last)
        .max();
    kept.extend(last.filter(|_| fence > 0).map(|last| segment_key(volume_id, last)));
    // Nothing else in the log is so small.
    let is_fence = |object: &ObjectInfo| {
        object.size_bytes == encoded_bytes(0, 0, 0) as u64
            && parse_segment_key(&object.key).is_some()
    };
    let status_pins = status_pin_prefix(volume_id);
    let stays = |object: &ObjectInfo| {
        kept.contains(&object.key)
            || object.key.starts_with(&status_pins)
            || fences == KeptFences::All && is_fence(object)
    };
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
    let mut pin_number = 1;
    loop {
        let key = pin_key(volume_id, pin_number);
        let Some(bytes) = store_calls::get(store, &key, None, Class::Read)? else {
            return Ok(names);
        };
        if store_calls::get(store, &released_key(volume_id, pin_number), None, Class::Read)?
            .is_none()
        {
            // An unreadable pin still holds.
            names.push(Pin::decode(&bytes, volume_id, pin_number).map_or(key, |pin| pin.name));
        }
        pin_number += 1;
    }
}

fn put(store: &dyn ObjectStore, key: &str, body: Vec<u8>) -> Result<PutOutcome> {
    Blocking(store).put(key, Bytes::from(body), Class::Upload).map_err(|error| store_error(&error))
}
