//! Reads each segment and each map part that is needed, once, a few at a time, and verifies every
//! byte.
//!
//! Invariant: only damage is listed. A store that does not answer ends the check with its error.
//!
//! Not here: which objects are needed (`kept_list`), and whether damage still counts when the
//! volume has advanced (`super`).

use std::borrow::Cow;
use std::collections::BTreeMap;

use bytes::Bytes;
use sawmill_format::ids::VolumeId;
use sawmill_format::map_part::{HOLE_SEQUENCE, PartIdentity, decode_part, part_crc, part_key};
use sawmill_format::segment::{
    FrameIdentity, SegmentHeader, SegmentIdentity, frame_open, segment_key,
};
use sawmill_store::{Class, Get, ObjectStore};

use super::CheckReport;
use super::damage::{DamageList, Verified, undecodable};
use super::kept_list::{KeptList, KeptPart, KeptSegment};
use crate::recovery::stored::StoredVolume;
use crate::store_calls::{self, want, want_named};
use crate::{Error, ErrorKind, Result};

/// Objects fetched at once. Each may have the length of a whole segment, and a server that checks
/// its own volume has users to serve.
const FETCHES_PARALLEL_MAX: usize = 4;

/// An error of kind `Corrupt`, for a known object. It names no key: the list of damage is sorted by
/// keys.
fn damaged(what: impl Into<Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::Corrupt, what)
}

/// Reads an object once more when it is damaged: a transfer may have damaged it, and then the store
/// has it whole. `answer` is that of the first read.
fn verified<T>(
    store: &dyn ObjectStore,
    get: &Get,
    answer: store_calls::Answer,
    verify: impl Fn(&Bytes) -> Result<T>,
) -> Result<Verified<T>> {
    let mut first = Some(answer);
    Verified::of(store_calls::again_if_damaged(|| {
        let answer = first.take().unwrap_or_else(|| store_calls::get_again(store, get));
        verify(&answer?.ok_or_else(|| damaged("it is gone"))?)
    }))
}

/// Reads all map parts that are needed, each once, however many states share it.
pub(super) fn parts(
    store: &dyn ObjectStore,
    list: &KeptList,
    damage: &mut DamageList,
) -> Result<()> {
    let parts: Vec<_> = list.parts.iter().collect();
    for chunk in parts.chunks(FETCHES_PARALLEL_MAX) {
        let identity = |(group, number, put_id): &(u64, u64, _)| PartIdentity {
            volume_id: list.volume_id,
            group: *group,
            number: *number,
            put_id: *put_id,
        };
        let get = |(name, part): &(&_, &KeptPart)| {
            want_named(part_key(&identity(name)), part.length_bytes, Class::Background)
        };
        let gets: Vec<_> = chunk.iter().map(get).collect();
        let answers = store_calls::get_each(store, gets.clone());
        for (((name, part), get), answer) in chunk.iter().zip(&gets).zip(answers) {
            let check = |bytes: &Bytes| check_part(list, &identity(name), part, bytes);
            if let Verified::Damaged(error) = verified(store, get, answer, check)? {
                damage.add(&get.key, error, &list.names(&part.state_ranges).collect::<Vec<_>>());
            }
        }
    }
    Ok(())
}

fn check_part(
    list: &KeptList,
    identity: &PartIdentity,
    part: &KeptPart,
    bytes: &Bytes,
) -> Result<()> {
    // Its checkpoint names the bytes: any other part under this key is damage, also an intact one.
    if part_crc(bytes) != part.crc {
        return Err(damaged("it is not the object that its checkpoint names"));
    }
    for extent in decode_part(bytes, identity).map_err(undecodable)? {
        // What a newer delta covers may be gone, and is read by nobody.
        if part.is_covered || extent.sequence == HOLE_SEQUENCE {
            continue;
        }
        // A clone's map names segments of its ancestors.
        let owner = list.lineage.owner(list.volume_id, extent.sequence);
        let segment = list.segments.get(&(owner, extent.sequence));
        let sequence = extent.sequence;
        let segment = segment.ok_or_else(|| {
            damaged(format!("it names segment {sequence}, and no table of segments does"))
        })?;
        if u64::from(extent.data_offset) + extent.length > segment.data_bytes {
            return Err(damaged(format!("it names bytes past the end of segment {sequence}")));
        }
    }
    Ok(())
}

/// Reads all segments that are needed.
pub(super) fn segments(
    store: &dyn ObjectStore,
    list: &KeptList,
    report: &mut CheckReport,
    damage: &mut DamageList,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<()> {
    let segments: Vec<_> = list.segments.iter().collect();
    let total = segments.len() as u64;
    for chunk in segments.chunks(FETCHES_PARALLEL_MAX) {
        let key = |(owner, sequence): &(_, u64)| segment_key(*owner, *sequence);
        let get = |(name, _): &(&_, &KeptSegment)| want(key(name), None, Class::Background);
        let gets: Vec<_> = chunk.iter().map(get).collect();
        let answers = store_calls::get_each(store, gets.clone());
        for ((((owner, sequence), segment), get), answer) in chunk.iter().zip(&gets).zip(answers) {
            match verified(store, get, answer, |bytes| {
                check_segment(*owner, *sequence, segment, bytes)
            })? {
                Verified::Intact((frames, bytes)) => {
                    report.frames += frames;
                    report.bytes += bytes;
                }
                Verified::Damaged(error) => damage.add(
                    &get.key,
                    error,
                    &list.names(&segment.state_ranges).collect::<Vec<_>>(),
                ),
            }
        }
        report.segments += chunk.len() as u64;
        progress(report.segments, total);
    }
    Ok(())
}

/// Verifies a segment; returns its frames and bytes.
fn check_segment(
    volume_id: VolumeId,
    sequence: u64,
    known: &KeptSegment,
    bytes: &Bytes,
) -> Result<(u64, u64)> {
    let identity = SegmentIdentity { volume_id, sequence };
    let header = SegmentHeader::decode(bytes, &identity).map_err(undecodable)?;
    // What a reader takes from the table of segments, without a look at the header.
    let agrees = header.epoch == known.epoch
        && header.data_bytes == known.data_bytes
        && header.header_bytes() == known.header_bytes;
    if !agrees {
        return Err(damaged("its header does not agree with the table of segments"));
    }
    // Bytes past the end are damage too: no writer of ours puts them.
    if bytes.len() as u64 != header.object_bytes() {
        return Err(damaged(format!(
            "it has {} bytes, and its header says {}",
            bytes.len(),
            header.object_bytes()
        )));
    }
    let body = &bytes[header.header_bytes() as usize..];
    for (frame, entry) in header.frames.iter().enumerate() {
        let identity = FrameIdentity {
            volume_id,
            sequence: header.sequence,
            epoch: header.epoch,
            frame: frame as u32,
        };
        let start = entry.body_offset as usize;
        let part = body
            .get(start..start + entry.stored_bytes as usize)
            .ok_or_else(|| damaged("a frame lies past its end"))?;
        frame_open(&identity, part)
            .map_err(|error| Error::caused(ErrorKind::Corrupt, format!("frame {frame}"), error))?;
    }
    Ok((header.frames.len() as u64, bytes.len() as u64))
}

/// Compares the map of the present with its table of segments. Garbage collection deletes by these
/// counts: one that is too low would let it delete a segment that is needed.
pub(super) fn counts(stored: &StoredVolume, report: &mut CheckReport, damage: &mut DamageList) {
    let present = ["the volume as it is"];
    let volume_id = stored.record.volume_id;
    let key = |sequence: u32| {
        let sequence = u64::from(sequence);
        segment_key(stored.view.lineage.owner(volume_id, sequence), sequence)
    };
    let mut mapped: BTreeMap<u32, (u64, u64)> = BTreeMap::new();
    for group in stored.view.map.groups() {
        for extent in stored.view.map.export_group(group) {
            report.extents += 1;
            let (bytes, end) = mapped.entry(extent.sequence).or_default();
            *bytes += extent.length;
            *end = (*end).max(u64::from(extent.data_offset) + extent.length);
        }
    }
    for (sequence, info) in stored.view.segments.snapshot() {
        let (bytes, end) = mapped.remove(&sequence).unwrap_or_default();
        if bytes != info.live_bytes || end > info.data_bytes {
            let live = info.live_bytes;
            let what = format!(
                "the map holds {bytes} of its bytes, and its live bytes are counted as {live}"
            );
            damage.add(&key(sequence), &what, &present);
        }
    }
    // What is left has no row in the table.
    for sequence in mapped.keys() {
        damage.add(
            &key(*sequence),
            "the map names it, and the table of segments does not",
            &present,
        );
    }
}
