//! The newest checkpoint, and what it says besides the map.
//!
//! The list of checkpoints may lag, but numbers are consecutive, so the next ones are read by name.
//! A checkpoint that cannot be read is passed over; rolling forward from the one before takes
//! longer, but leads to the same result.
//!
//! Not here: the map that it names (`map_load`), and writing one (`engine::checkpoint`).

use std::collections::HashMap;

use bytes::Bytes;
use parking_lot::Mutex;
use sawmill_format::checkpoint::{
    Checkpoint, CheckpointIdentity, checkpoint_key, checkpoint_prefix, kept_key,
    parse_checkpoint_key,
};
use sawmill_format::ids::{PutId, VolumeId};
use sawmill_store::{Blocking, Class, ObjectStore};

use crate::cuts::{CutBook, Lineage};
pub(crate) use crate::map::part::sequence32;
use crate::map::{DATA_SPACE_BYTES, ObjectMap};
use crate::segment::table::{SegmentInfo, SegmentTable};
use crate::store_calls::{self, store_error};
use crate::view::View;
use crate::{Error, ErrorKind, Result, limits};

/// A list that shows only checkpoints deleted since is asked for again this often.
const LIST_AGAIN_MAX: u32 = 3;

/// A checkpoint found.
pub(crate) struct NewestCheckpoint {
    pub(crate) checkpoint: Checkpoint,
    /// The highest number in use, which may belong to one that cannot be read.
    pub(crate) number_max: u64,
    /// What was passed over.
    pub(crate) notes: Vec<String>,
}

/// Finds the newest checkpoint that can be read.
pub(crate) fn newest(store: &dyn ObjectStore, volume_id: VolumeId) -> Result<NewestCheckpoint> {
    newest_below(store, volume_id, u64::MAX)
}

/// Finds the newest checkpoint below `bound` that can be read. `number_max` is the highest of all.
pub(crate) fn newest_below(
    store: &dyn ObjectStore,
    volume_id: VolumeId,
    bound: u64,
) -> Result<NewestCheckpoint> {
    for lists_left in (0..LIST_AGAIN_MAX).rev() {
        let listed = Blocking(store).list(&checkpoint_prefix(volume_id), Class::Read);
        let listed = listed.map_err(|error| store_error(&error))?;
        let mut numbers: Vec<u64> = listed
            .iter()
            .filter_map(|object| parse_checkpoint_key(&object.key))
            // The highest possible number is never valid: none could follow it.
            .filter(|(id, number)| *id == volume_id && *number < u64::MAX)
            .map(|(_, number)| number)
            .collect();
        numbers.sort_unstable();
        let vanished = if lists_left > 0 { Vanished::ListAgain } else { Vanished::TakeOlder };
        if let Some(found) = newest_of(store, volume_id, numbers, bound, vanished)? {
            return Ok(found);
        }
    }
    let text = format!(
        "volume {volume_id} has no checkpoint that can be read below {}: nothing was changed; \
         restore that folder, or check that the store's listing is right",
        checkpoint_prefix(volume_id)
    );
    Err(Error::new(ErrorKind::Corrupt, text))
}

/// What follows if the last checkpoint is gone.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Vanished {
    /// A writer has deleted it, and the list hides its successors: `None`.
    ListAgain,
    /// It was lost.
    TakeOlder,
}

/// The newest checkpoint by a list and what lies beyond it.
///
/// The last one is read after the next number was found free. A writer deletes them one by one, the
/// oldest first, so what is still there then has never had a successor.
fn newest_of(
    store: &dyn ObjectStore,
    volume_id: VolumeId,
    mut numbers: Vec<u64>,
    bound: u64,
    vanished: Vanished,
) -> Result<Option<NewestCheckpoint>> {
    let mut notes = Vec::new();
    // Ask beyond the list, which may lag. Number 1 is written at creation.
    let mut next = numbers.last().map_or(1, |last| last + 1);
    while get_or_nothing(store, volume_id, next)?.is_some() {
        numbers.push(next);
        next += 1;
    }
    let number_max = next - 1;
    numbers.retain(|number| *number < bound);
    while let Some(number) = numbers.pop() {
        let Some(bytes) = get_or_nothing(store, volume_id, number)? else {
            if number == number_max && vanished == Vanished::ListAgain {
                return Ok(None);
            }
            continue;
        };
        let identity = CheckpointIdentity { volume_id, number };
        let mut decoded = Checkpoint::decode(&bytes, &identity);
        // It may have been garbled on the way.
        if decoded.is_err()
            && let Some(bytes) = get_or_nothing(store, volume_id, number)?
        {
            decoded = Checkpoint::decode(&bytes, &identity);
        }
        match decoded {
            Ok(checkpoint) => return Ok(Some(NewestCheckpoint { checkpoint, number_max, notes })),
            // A newer version's checkpoint is not damage: skipping it would undo its content.
            Err(error @ sawmill_format::FormatError::Version { .. }) => {
                let key = checkpoint_key(volume_id, number);
                return Err(Error::caused(ErrorKind::Invalid, key, error));
            }
            Err(error) => {
                let note = format!("{} cannot be read: {error}", checkpoint_key(volume_id, number));
                tracing::warn!("{note}; using the one before it");
                notes.push(note);
            }
        }
    }
    Ok(None)
}

/// Returns no bytes for an object that cannot be a checkpoint (far too long, or not a file): it is
/// passed over like any other unreadable one.
fn get_or_nothing(
    store: &dyn ObjectStore,
    volume_id: VolumeId,
    number: u64,
) -> store_calls::Answer {
    match get(store, volume_id, number) {
        Err(error) if error.kind() == ErrorKind::Corrupt => {
            tracing::warn!("{error}");
            Ok(Some(Bytes::new()))
        }
        answer => answer,
    }
}

fn get(store: &dyn ObjectStore, volume_id: VolumeId, number: u64) -> store_calls::Answer {
    store_calls::get(store, &checkpoint_key(volume_id, number), None, Class::Read)
}

/// Reads one checkpoint, by number or the newest.
pub(crate) fn read(
    store: &dyn ObjectStore,
    volume_id: VolumeId,
    number: Option<u64>,
) -> Result<Checkpoint> {
    let Some(number) = number else { return Ok(newest(store, volume_id)?.checkpoint) };
    let key = checkpoint_key(volume_id, number);
    let bytes = get(store, volume_id, number)?
        .ok_or_else(|| Error::new(ErrorKind::NotFound, format!("there is no checkpoint {key}")))?;
    Checkpoint::decode(&bytes, &CheckpointIdentity { volume_id, number })
        .map_err(|error| Error::caused(ErrorKind::Corrupt, key, error))
}

/// The table of segments and the cuts a checkpoint names, with an empty map.
pub(crate) fn without_map(checkpoint: &Checkpoint) -> Result<View> {
    if checkpoint.size_bytes > limits::SIZE_BYTES_MAX {
        // The map is made for a size before anything is in it.
        let key = checkpoint_key(checkpoint.volume_id, checkpoint.number);
        let text = format!(
            "{key}: {} bytes are not a valid volume size; nothing was changed",
            checkpoint.size_bytes
        );
        return Err(Error::new(ErrorKind::Corrupt, text));
    }
    let dead: HashMap<u64, u64> =
        checkpoint.kept.dead.iter().map(|entry| (entry.sequence, entry.since)).collect();
    let mut loaded = Vec::with_capacity(checkpoint.segments.len());
    for entry in &checkpoint.segments {
        if entry.data_bytes > DATA_SPACE_BYTES
            || entry.live_bytes > entry.data_bytes
            || entry.object_bytes > 2 * DATA_SPACE_BYTES
        {
            let key = checkpoint_key(checkpoint.volume_id, checkpoint.number);
            let text = format!(
                "{key}: its entry for segment {} is impossible; nothing was changed",
                entry.sequence
            );
            return Err(Error::new(ErrorKind::Corrupt, text));
        }
        let info = SegmentInfo {
            epoch: entry.epoch,
            header_bytes: entry.header_bytes,
            data_bytes: entry.data_bytes,
            live_bytes: entry.live_bytes,
            object_bytes: entry.object_bytes,
            wall_unix_ms: entry.wall_unix_ms,
            dead_since: match entry.live_bytes {
                0 => dead.get(&entry.sequence).copied().unwrap_or(checkpoint.number),
                _ => 0,
            },
            is_settled: false,
        };
        loaded.push((sequence32(entry.sequence)?, info));
    }
    let ancestral = checkpoint.kept.lineage.last().map_or(0, |last| last.through_sequence);
    Ok(View {
        map: ObjectMap::new(checkpoint.size_bytes),
        segments: SegmentTable::loaded(sequence32(ancestral)?, loaded),
        cuts: Mutex::new(CutBook::of(checkpoint)),
        lineage: Lineage::new(&checkpoint.kept.lineage),
    })
}

/// The checkpoint of a cut: its kept copy, or the original while that is among the newest.
pub(crate) fn kept_root(
    store: &dyn ObjectStore,
    volume_id: VolumeId,
    number: u64,
    put_id: PutId,
) -> Result<Checkpoint> {
    let identity = CheckpointIdentity { volume_id, number };
    let mut damage = None;
    for key in [kept_key(volume_id, number, put_id), checkpoint_key(volume_id, number)] {
        let Some(bytes) = store_calls::get(store, &key, None, Class::Read)? else { continue };
        match Checkpoint::decode(&bytes, &identity) {
            // A late root of a fenced writer may have the number of a checkpoint that was deleted.
            Ok(root) if root.put_id == put_id => return Ok(root),
            Ok(_) => {}
            Err(error) => damage = Some(Error::caused(ErrorKind::Corrupt, key, error)),
        }
    }
    Err(damage.unwrap_or_else(|| {
        let text = format!("checkpoint {number} of the cut is gone: the cut is no longer kept");
        Error::new(ErrorKind::NotFound, text)
    }))
}
