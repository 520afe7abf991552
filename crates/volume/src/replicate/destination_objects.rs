//! What the destination holds, as far as it is known.
//!
//! Invariant: a listed name proves nothing. Lists lag, the name may belong to a fence or another
//! history, and a late delete of another process may remove it. A segment counts once this copier
//! has put it, or compared it with the source's record of it.
//!
//! Not here: how missing objects are handled (`copier`).

use std::collections::{HashMap, HashSet};

use sawmill_format::checkpoint::{
    SegmentEntry, checkpoint_prefix, kept_prefix, parse_checkpoint_key,
};
use sawmill_format::ids::VolumeId;
use sawmill_format::map_part::map_prefix;
use sawmill_format::segment::{SegmentHeader, parse_segment_key, segment_key, segment_prefix};
use sawmill_store::{Blocking, Class, ObjectStore};

use super::objects::{differ, is_named};
use crate::recovery::checkpoint as checkpoints;
use crate::recovery::roll_forward::headers;
use crate::store_calls::{self, store_error};
use crate::{Error, ErrorKind, Result, limits};

/// The segments of the replica, by how far each name can be trusted.
#[derive(Default)]
pub(super) struct DestinationObjects {
    /// Listed, and neither compared nor put yet.
    listed: HashSet<u64>,
    /// Compared, or put.
    sure: HashSet<u64>,
    /// The live segments as the newest checkpoint there records them: a copier compared them before
    /// it put that.
    named: HashMap<u64, SegmentEntry>,
}

impl DestinationObjects {
    /// Reads what the destination has.
    pub(super) fn read(destination: &dyn ObjectStore, id: VolumeId) -> Result<DestinationObjects> {
        let listed = keys(destination, &segment_prefix(id))?;
        let listed = listed.iter().filter_map(|key| Some(parse_segment_key(key)?.1)).collect();
        let named = match roots(destination, id)?.is_empty() {
            true => HashMap::new(),
            false => match checkpoints::newest(destination, id) {
                Ok(newest) => {
                    let live = newest.checkpoint.segments.into_iter().filter(|entry| !entry.dead);
                    live.map(|entry| (entry.sequence, entry)).collect()
                }
                // Then everything is compared.
                Err(error) if error.kind() == ErrorKind::Corrupt => HashMap::new(),
                Err(error) => return Err(error),
            },
        };
        Ok(DestinationObjects { listed, sure: HashSet::new(), named })
    }

    /// Whether that segment is there and correct, as far as is known.
    pub(super) fn is_sure(&self, sequence: u64) -> bool {
        self.sure.contains(&sequence)
    }

    /// Whether an object with that name was listed, and not compared.
    pub(super) fn is_unsure(&self, sequence: u64) -> bool {
        self.listed.contains(&sequence)
    }

    /// The segment was put.
    pub(super) fn note(&mut self, sequence: u64) {
        self.listed.remove(&sequence);
        self.sure.insert(sequence);
    }

    /// Compares the listed segments with a checkpoint of the source.
    ///
    /// Errors: `Corrupt` if another object has the name.
    pub(super) fn compare(
        &mut self,
        destination: &dyn ObjectStore,
        id: VolumeId,
        entries: &[SegmentEntry],
    ) -> Result<()> {
        let mut unsure = Vec::new();
        for entry in entries.iter().filter(|entry| self.listed.contains(&entry.sequence)) {
            let same = |named: &SegmentEntry| {
                (named.epoch, named.wall_unix_ms, named.object_bytes)
                    == (entry.epoch, entry.wall_unix_ms, entry.object_bytes)
            };
            match self.named.get(&entry.sequence).is_some_and(same) {
                true => {
                    self.sure.insert(entry.sequence);
                }
                false => unsure.push(*entry),
            }
        }
        for entries in unsure.chunks(limits::ROLL_FORWARD_PARALLEL_MAX) {
            let sequences: Vec<u64> = entries.iter().map(|entry| entry.sequence).collect();
            for (entry, header) in entries.iter().zip(headers(destination, id, &sequences)) {
                match header? {
                    Some(header) if is_named(&header, entry) => {
                        self.sure.insert(entry.sequence);
                    }
                    Some(_) => return Err(differ(&segment_key(id, entry.sequence))),
                    None => {}
                }
            }
        }
        for entry in entries {
            self.listed.remove(&entry.sequence);
        }
        Ok(())
    }

    /// The same for a segment that was read at the source. Returns true if that very put is there.
    pub(super) fn compare_one(
        &mut self,
        destination: &dyn ObjectStore,
        header: &SegmentHeader,
    ) -> Result<bool> {
        let sequence = header.sequence;
        if self.listed.remove(&sequence)
            && let Some(stored_header) = header_of(destination, header.volume_id, sequence)?
        {
            if stored_header.put_id != header.put_id {
                // The segment still has that name, whatever happens.
                self.listed.insert(sequence);
                return Err(differ(&segment_key(header.volume_id, sequence)));
            }
            self.sure.insert(sequence);
        }
        Ok(self.sure.contains(&sequence))
    }
}

/// A segment's header, if it exists.
pub(super) fn header_of(
    store: &dyn ObjectStore,
    id: VolumeId,
    sequence: u64,
) -> Result<Option<SegmentHeader>> {
    headers(store, id, &[sequence]).pop().unwrap_or(Ok(None))
}

/// The objects of `needed` that are not at the destination. A list shows which may be missing; a
/// read shows whether they are.
pub(super) fn missing(
    destination: &dyn ObjectStore,
    id: VolumeId,
    needed: &HashSet<String>,
) -> Result<Vec<String>> {
    let mut listed = HashSet::new();
    for prefix in [segment_prefix(id), map_prefix(id), kept_prefix(id)] {
        listed.extend(keys(destination, &prefix)?);
    }
    let unlisted: Vec<String> = needed.difference(&listed).cloned().collect();
    let mut missing = Vec::new();
    for keys in unlisted.chunks(limits::ROLL_FORWARD_PARALLEL_MAX) {
        let ranges = keys.iter().map(|key| (key.clone(), Some(0..16))).collect();
        for (key, answer) in
            keys.iter().zip(store_calls::get_all(destination, ranges, Class::Background))
        {
            if answer?.is_none() {
                missing.push(key.clone());
            }
        }
    }
    Ok(missing)
}

/// The numbers of the checkpoints at the destination.
pub(super) fn roots(destination: &dyn ObjectStore, id: VolumeId) -> Result<Vec<u64>> {
    let keys = keys(destination, &checkpoint_prefix(id))?;
    let numbers = keys.iter().filter_map(|key| Some(parse_checkpoint_key(key)?.1));
    Ok(numbers.filter(|number| *number < u64::MAX).collect())
}

pub(super) fn keys(destination: &dyn ObjectStore, prefix: &str) -> Result<HashSet<String>> {
    let listed = Blocking(destination).list(prefix, Class::Background);
    let listed = listed.map_err(|error| -> Error { store_error(&error) })?;
    Ok(listed.into_iter().map(|object| object.key).collect())
}
