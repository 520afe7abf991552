//! The copied objects: read from the source, verified by the format's own checksums, and put
//! unchanged.
//!
//! Invariant: nothing is put that was not verified; an existing object with the name is left alone.
//!
//! Not here: which objects are copied, and in which order (`copier`), and which are there already
//! (`destination_objects`).

use std::borrow::Cow;
use std::collections::BTreeMap;

use bytes::Bytes;
use sawmill_format::FormatError;
use sawmill_format::checkpoint::{
    Checkpoint, CheckpointIdentity, PartEntry, SegmentEntry, checkpoint_key, kept_key,
};
use sawmill_format::ids::{PutId, VolumeId};
use sawmill_format::kept_block::{CutEntry, CutKind};
use sawmill_format::map_part::{PartIdentity, decode_part, part_crc, part_key};
use sawmill_format::segment::{
    FrameIdentity, SegmentHeader, SegmentIdentity, frame_open, segment_key,
};
use sawmill_store::{Blocking, Class, ObjectStore, PutOutcome};

use crate::cuts::needs;
use crate::store_calls::{self, store_error};
use crate::{Error, ErrorKind, Result};

/// A verified object, or `None` if it does not exist.
pub(super) type ObjectLookup<T> = Result<Option<(T, Bytes)>>;

/// Reads an object in full. Damage must be read twice before it is believed.
fn read<T>(
    store: &dyn ObjectStore,
    key: &str,
    decode: impl Fn(&Bytes) -> Result<T>,
) -> ObjectLookup<T> {
    store_calls::again_if_damaged(|| {
        let Some(bytes) = store_calls::get(store, key, None, Class::Background)? else {
            return Ok(None);
        };
        let value = decode(&bytes).map_err(|error| {
            let text =
                format!("{key}: {error}; it is not copied; run `sawmill check` on the source");
            Error::new(error.kind(), text).with_source(error)
        })?;
        Ok(Some((value, bytes)))
    })
}

/// What is wrong with an object that [`read`] names.
fn wrong(what: impl Into<Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::Corrupt, what)
}

/// The same in the words of its format.
fn unreadable(error: FormatError) -> Error {
    wrong(error.to_string()).with_source(error)
}

/// A segment with all its frames verified.
pub(super) fn segment(
    store: &dyn ObjectStore,
    volume_id: VolumeId,
    sequence: u64,
) -> ObjectLookup<SegmentHeader> {
    read(store, &segment_key(volume_id, sequence), |bytes| {
        let identity = SegmentIdentity { volume_id, sequence };
        let header = SegmentHeader::decode(bytes, &identity).map_err(unreadable)?;
        let wanted = header.object_bytes();
        if bytes.len() as u64 != wanted {
            let text = format!("it has {} bytes, and its header says {wanted}", bytes.len());
            return Err(wrong(text));
        }
        let body = &bytes[header.header_bytes() as usize..];
        for (frame, entry) in header.frames.iter().enumerate() {
            let epoch = header.epoch;
            let identity = FrameIdentity { volume_id, sequence, epoch, frame: frame as u32 };
            let start = entry.body_offset as usize;
            let part = body.get(start..start + entry.stored_bytes as usize);
            let part = part.ok_or_else(|| wrong(format!("frame {frame} lies past its end")))?;
            frame_open(&identity, part).map_err(|error| {
                Error::caused(ErrorKind::Corrupt, format!("frame {frame}"), error)
            })?;
        }
        Ok(header)
    })
}

/// A checkpoint's root, if it is from that very put.
pub(super) fn root(
    store: &dyn ObjectStore,
    volume_id: VolumeId,
    number: u64,
    put_id: PutId,
) -> ObjectLookup<Checkpoint> {
    let found = root_at(store, &checkpoint_key(volume_id, number), volume_id, number)?;
    Ok(found.filter(|(root, _)| root.put_id == put_id))
}

/// The root that a cut starts from: its copy, or the original while that is one of the newest.
pub(super) fn kept_root(
    store: &dyn ObjectStore,
    volume_id: VolumeId,
    cut: (u64, PutId),
) -> ObjectLookup<Checkpoint> {
    let (number, put_id) = cut;
    match root_at(store, &kept_key(volume_id, number, put_id), volume_id, number)? {
        Some(found) => Ok(Some(found)),
        None => root(store, volume_id, number, put_id),
    }
}

fn root_at(
    store: &dyn ObjectStore,
    key: &str,
    volume_id: VolumeId,
    number: u64,
) -> ObjectLookup<Checkpoint> {
    read(store, key, |bytes| {
        Checkpoint::decode(bytes, &CheckpointIdentity { volume_id, number }).map_err(unreadable)
    })
}

/// The identity of the part that an entry names.
pub(super) fn part_identity(volume_id: VolumeId, entry: &PartEntry) -> PartIdentity {
    PartIdentity { volume_id, group: entry.group, number: entry.number, put_id: entry.put_id }
}

/// The keys of the parts that a root names.
pub(super) fn part_keys(root: &Checkpoint) -> impl Iterator<Item = String> {
    root.parts.iter().map(|part| part_key(&part_identity(root.volume_id, part)))
}

/// A part of the map.
pub(super) fn part(
    store: &dyn ObjectStore,
    volume_id: VolumeId,
    entry: &PartEntry,
) -> ObjectLookup<()> {
    let identity = part_identity(volume_id, entry);
    read(store, &part_key(&identity), |bytes| {
        if part_crc(bytes) != entry.crc {
            return Err(wrong("it is not the object the checkpoint names"));
        }
        decode_part(bytes, &identity).map(drop).map_err(unreadable)
    })
}

/// Whether a segment is the one that a checkpoint names.
pub(super) fn is_named(header: &SegmentHeader, entry: &SegmentEntry) -> bool {
    let sizes = (header.data_bytes, header.object_bytes(), header.header_bytes());
    (header.epoch, header.wall_unix_ms) == (entry.epoch, entry.wall_unix_ms)
        && sizes == (entry.data_bytes, entry.object_bytes, u64::from(entry.header_bytes))
}

/// The error for two different objects with one name.
pub(super) fn differ(key: &str) -> Error {
    let text = format!(
        "{key} holds other bytes at the destination than at the source: it is damaged there, or \
         the two are no longer the same volume; nothing was changed. If you do not need the \
         destination as it is, `sawmill delete` the volume there and replicate again"
    );
    Error::new(ErrorKind::Corrupt, text)
}

/// Puts an object unchanged; the same bytes may already be there.
pub(super) fn put(store: &dyn ObjectStore, key: &str, bytes: Bytes) -> Result<()> {
    let outcome =
        Blocking(store).put(key, bytes, Class::Upload).map_err(|error| store_error(&error))?;
    if outcome == PutOutcome::Created {
        return Ok(());
    }
    Err(differ(key))
}

/// The cuts of a checkpoint that a replica keeps too. Clones stay with the source, and so do their
/// pins.
pub(super) fn cuts(root: &Checkpoint) -> Vec<CutEntry> {
    root.kept.cuts.iter().filter(|cut| cut.kind != CutKind::Pin).cloned().collect()
}

/// The segments that a checkpoint requires: those with live data, those that it is the first to
/// find dead (the one before may need them), and those that its cuts can reach.
pub(super) fn needed(root: &Checkpoint) -> Vec<SegmentEntry> {
    let since: BTreeMap<u64, u64> =
        root.kept.dead.iter().map(|entry| (entry.sequence, entry.since)).collect();
    let cuts = cuts(root);
    let is_needed = |entry: &&SegmentEntry| {
        let since = since.get(&entry.sequence).copied().unwrap_or(root.number);
        !entry.dead || needs(&cuts, entry.sequence, since)
    };
    root.segments.iter().filter(is_needed).copied().collect()
}
