//! Deletes what a replica's newer checkpoints no longer need, by the rule of the source's engine:
//! the newest two checkpoints stay readable with all their cuts; older roots are deleted first,
//! then parts, copies and segments.
//!
//! Invariants: fences stay (a writer from before a fail-back may wake up), and so does what a clone
//! has pinned here. No deleted name could be used by a promoted history, so a late sweep does no
//! harm. If there is a newer root than the caller knows, nothing is deleted, because another
//! history may need it.
//!
//! Not here: what a checkpoint needs (`objects`), when to sweep (`copier`), and the deletes at the
//! source (`engine::cleanup`).

use std::collections::HashSet;

use sawmill_format::checkpoint::{
    Checkpoint, checkpoint_key, checkpoint_prefix, kept_prefix, parse_checkpoint_key,
    parse_kept_key,
};
use sawmill_format::ids::{PutId, VolumeId};
use sawmill_format::kept_block::{Pin, parse_pin_number, pin_key, pin_prefix, released_prefix};
use sawmill_format::map_part::{map_prefix, parse_part_key};
use sawmill_format::segment::{SegmentKind, parse_segment_key, segment_key, segment_prefix};
use sawmill_store::{Blocking, Class, ObjectStore};

use super::objects::{self, part_keys};
use crate::recovery::checkpoint as checkpoints;
use crate::recovery::roll_forward::headers;
use crate::store_calls::{self, store_error};
use crate::{Error, ErrorKind, Result, limits};

/// Deletes what the newest two checkpoints of a replica do not need. `root` is the newest.
/// `is_allowed` is called before each group of deletes. Returns the number of deleted objects.
pub(super) fn sweep(
    store: &dyn ObjectStore,
    root: &Checkpoint,
    is_allowed: &dyn Fn() -> Result<()>,
) -> Result<u64> {
    let id = root.volume_id;
    let numbers = list(store, &checkpoint_prefix(id), |key| Some(parse_checkpoint_key(key)?.1))?;
    if numbers.iter().any(|number| *number > root.number && *number < u64::MAX)
        || numbers.iter().all(|number| *number >= root.number)
    {
        return Ok(0);
    }
    let before = match checkpoints::newest_below(store, id, root.number) {
        Ok(before) => before,
        // There is no readable checkpoint before it, so no object is certainly superseded.
        Err(error) if error.kind() == ErrorKind::Corrupt => return Ok(0),
        Err(error) => return Err(error),
    };
    let before = before.checkpoint;
    let roots = numbers.into_iter().filter(|number| *number < before.number);
    let mut deleted =
        delete(store, roots.map(|number| checkpoint_key(id, number)).collect(), is_allowed)?;
    let mut cuts: HashSet<(u64, PutId)> = HashSet::new();
    let mut parts: HashSet<String> = HashSet::new();
    for root in [root, &before] {
        cuts.extend(objects::cuts(root).iter().map(|cut| (cut.number, cut.put_id)));
        parts.extend(part_keys(root));
    }
    for cut in &cuts {
        if let Some((kept, _)) = objects::kept_root(store, id, *cut)? {
            parts.extend(part_keys(&kept));
        }
    }
    let listed = Blocking(store).list(&map_prefix(id), Class::Background);
    let is_old = |key: &String| {
        parse_part_key(key).is_some_and(|part| part.number < root.number) && !parts.contains(key)
    };
    let old = listed.map_err(|error| store_error(&error))?.into_iter().map(|object| object.key);
    deleted += delete(store, old.filter(is_old).collect(), is_allowed)?;
    let kept = list(store, &kept_prefix(id), |key| {
        let (_, number, put_id) = parse_kept_key(key)?;
        (!cuts.contains(&(number, put_id)) && number < root.number).then(|| key.to_owned())
    })?;
    deleted += delete(store, kept, is_allowed)?;
    let segments = old_segments(store, root, &before)?;
    deleted += delete(store, segments, is_allowed)?;
    Ok(deleted)
}

/// Segments before the older checkpoint that neither of the two needs, except fences.
fn old_segments(
    store: &dyn ObjectStore,
    root: &Checkpoint,
    before: &Checkpoint,
) -> Result<Vec<String>> {
    let id = root.volume_id;
    let needed: HashSet<u64> =
        [root, before].into_iter().flat_map(objects::needed).map(|entry| entry.sequence).collect();
    let bound = root.next_sequence.min(before.next_sequence);
    let pinned = pinned_through(store, id)?;
    let is_old =
        |sequence: &u64| *sequence < bound && *sequence > pinned && !needed.contains(sequence);
    let mut found: Vec<u64> =
        list(store, &segment_prefix(id), |key| Some(parse_segment_key(key)?.1))?;
    found.retain(is_old);
    let mut keys = Vec::new();
    for sequences in found.chunks(limits::ROLL_FORWARD_PARALLEL_MAX) {
        for (sequence, header) in sequences.iter().zip(headers(store, id, sequences)) {
            if header?.is_some_and(|header| header.kind != SegmentKind::Fence) {
                keys.push(segment_key(id, *sequence));
            }
        }
    }
    Ok(keys)
}

/// The last sequence that a clone here may need.
fn pinned_through(store: &dyn ObjectStore, id: VolumeId) -> Result<u64> {
    let released: HashSet<u64> =
        list(store, &released_prefix(id), parse_pin_number)?.into_iter().collect();
    let mut through = 0;
    for pin_number in list(store, &pin_prefix(id), parse_pin_number)? {
        if released.contains(&pin_number) {
            continue;
        }
        if let Some(bytes) =
            store_calls::get(store, &pin_key(id, pin_number), None, Class::Background)?
        {
            // An unreadable pin protects everything.
            through = through.max(
                Pin::decode(&bytes, id, pin_number).map_or(u64::MAX, |pin| pin.through_sequence),
            );
        }
    }
    Ok(through)
}

fn list<T>(
    store: &dyn ObjectStore,
    prefix: &str,
    pick: impl Fn(&str) -> Option<T>,
) -> Result<Vec<T>> {
    let listed =
        Blocking(store).list(prefix, Class::Background).map_err(|error| store_error(&error))?;
    Ok(listed.iter().filter_map(|object| pick(&object.key)).collect())
}

fn delete(
    store: &dyn ObjectStore,
    keys: Vec<String>,
    is_allowed: &dyn Fn() -> Result<()>,
) -> Result<u64> {
    let count = keys.len() as u64;
    for keys in keys.chunks(1000) {
        is_allowed()?;
        let deleted = Blocking(store).delete(keys.to_vec(), Class::Background);
        deleted.map_err(|error: sawmill_store::StoreError| -> Error { store_error(&error) })?;
    }
    Ok(count)
}
