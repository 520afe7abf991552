//! Turns records into a segment: coalesced, in address order, cut into sealed frames, with a
//! header.
//!
//! Invariants: every payload byte is verified against its record's checksum while it is copied; the
//! header names the exact span of journal positions covered; the result depends only on the
//! arguments.
//!
//! Not here: which record wins (`coalesce`); age and demand, which seal a segment before it is
//! full, and the put (`engine::log_tail`); the data of a moved segment (`gc::gather`).

use std::sync::Arc;

use bytes::Bytes;
use sawmill_format::journal::RecordOperation;
use sawmill_format::segment::{
    ExtentKind, FRAME_HEAD_BYTES, FrameIdentity, SegmentExtent, SegmentHeader, frame_seal,
    raw_frames,
};

use super::buffers::Buffers;
use super::coalesce::coalesce;
use super::resident::ResidentPiece;
use crate::journal::{Journal, JournalRead, Reach};
use crate::record::Record;
use crate::store_calls::cannot_encode;
use crate::{Error, ErrorKind, Result, limits};

/// Whether a segment of this size takes no more records. The record that fills it is still in it,
/// so it may hold up to a record more than `segment_bytes`.
pub(crate) fn is_full(payload_bytes: u64, records: usize, segment_bytes: u32) -> bool {
    payload_bytes >= u64::from(segment_bytes) || records >= limits::SEGMENT_RECORDS_MAX
}

/// A built segment, ready to be put.
pub(crate) struct BuiltSegment {
    pub(crate) header: SegmentHeader,
    /// Header and frames.
    pub(crate) object: Bytes,
    pub(crate) header_bytes: u32,
    /// Where each run of the segment's data still is in the journal, by data offset.
    pub(crate) resident: Vec<ResidentPiece>,
    /// Payload bytes that later records of the segment made unnecessary.
    pub(crate) coalesced_bytes: u64,
}

/// The layout of a segment: everything but its bytes.
pub(crate) struct SegmentLayout {
    pub(crate) header: SegmentHeader,
    /// Where each run of the segment's data comes from, by data offset.
    pub(crate) pieces: Vec<ResidentPiece>,
    /// Payload bytes that later records of the segment made unnecessary.
    pub(crate) coalesced_bytes: u64,
}

/// Decides what the segment of `records` holds and where. `header` comes with its identity, marks
/// and times filled in.
pub(crate) fn lay_out(records: &[Arc<Record>], mut header: SegmentHeader) -> Result<SegmentLayout> {
    let remnants = coalesce(records);
    let payload_bytes: u64 = records.iter().map(|record| record.payload_bytes()).sum();
    let mut pieces = Vec::new();
    let mut data_bytes = 0u64;
    for remnant in &remnants {
        let kind = match remnant.record.operation {
            RecordOperation::Write => ExtentKind::Data,
            RecordOperation::Zero => ExtentKind::Zero,
            _ => ExtentKind::Discard,
        };
        let data_offset = if kind == ExtentKind::Data { data_bytes as u32 } else { 0 };
        push_extent(&mut header.extents, remnant.address, remnant.length, data_offset, kind);
        if kind == ExtentKind::Data {
            pieces.push(ResidentPiece {
                data_offset,
                length: remnant.length as u32,
                record_offset: remnant.offset() as u32,
                record: remnant.record.clone(),
            });
            data_bytes += remnant.length;
        }
    }
    header.data_bytes = data_bytes;
    header.frames = raw_frames(data_bytes, header.frame_bytes).map_err(|error| {
        Error::caused(ErrorKind::Internal, "the records do not fit a segment", error)
    })?;
    Ok(SegmentLayout { header, pieces, coalesced_bytes: payload_bytes - data_bytes })
}

/// Builds the segment of `records`. `header` as for [`lay_out`].
pub(crate) fn build(
    records: &[Arc<Record>],
    journal: &Journal,
    buffers: &Buffers,
    header: SegmentHeader,
) -> Result<BuiltSegment> {
    let SegmentLayout { header, pieces: resident, coalesced_bytes } = lay_out(records, header)?;
    let encoded = header.encode().map_err(cannot_encode)?;
    let header_bytes = encoded.len();
    // Block-aligned, so that a store on a local disk can take it without another copy.
    let mut buffer = buffers.take(header_bytes + header.body_bytes() as usize);
    let (head, body) = buffer.bytes_mut().split_at_mut(header_bytes);
    head.copy_from_slice(&encoded);
    let back = journal.read_back(header.position_start, header.position_end, buffers)?;
    let reach = back.as_ref().map_or(Reach::Device, Reach::ReadBack);
    fill_body(&resident, journal, reach, &header, body)?;
    Ok(BuiltSegment {
        header_bytes: header_bytes as u32,
        object: Bytes::from_owner(buffer),
        resident,
        coalesced_bytes,
        header,
    })
}

/// Adds an extent, joined with the last one where they continue each other.
fn push_extent(
    extents: &mut Vec<SegmentExtent>,
    address: u64,
    length: u64,
    data_offset: u32,
    kind: ExtentKind,
) {
    if let Some(last) = extents.last_mut() {
        let follows = last.address + last.length == address && last.kind == kind;
        let data_follows = kind != ExtentKind::Data
            || u64::from(last.data_offset) + last.length == u64::from(data_offset);
        if follows && data_follows {
            last.length += length;
            return;
        }
    }
    extents.push(SegmentExtent { address, length, data_offset, kind });
}

/// Copies all payload into the body, and seals each frame as soon as it is full: its bytes are in
/// the processor's cache then.
fn fill_body(
    pieces: &[ResidentPiece],
    journal: &Journal,
    reach: Reach,
    header: &SegmentHeader,
    body: &mut [u8],
) -> Result<()> {
    let frame_bytes = u64::from(header.frame_bytes);
    let mut sealed = 0;
    for piece in pieces {
        let mut offset = u64::from(piece.record_offset);
        for span in
            body_spans(header.frame_bytes, u64::from(piece.data_offset), u64::from(piece.length))
        {
            let into = &mut body[span];
            if journal.read(&piece.record, offset, into, reach)? != JournalRead::Done {
                let position = piece.record.position;
                let text = format!(
                    "journal record at position {position} was given up before it was stored"
                );
                return Err(Error::new(ErrorKind::Internal, text));
            }
            offset += into.len() as u64;
        }
        // The pieces follow each other.
        let data_end = u64::from(piece.data_offset) + u64::from(piece.length);
        let is_last = data_end == header.data_bytes;
        while sealed < header.frames.len()
            && (is_last || (sealed as u64 + 1) * frame_bytes <= data_end)
        {
            seal_frame(header, sealed, body);
            sealed += 1;
        }
    }
    Ok(())
}

/// Where `length` bytes of a segment's data from `data_offset` on lie in its body, frame by frame:
/// each frame has room for its head in front.
pub(crate) fn body_spans(
    frame_bytes: u32,
    data_offset: u64,
    length: u64,
) -> impl Iterator<Item = std::ops::Range<usize>> {
    let (frame_bytes, end) = (u64::from(frame_bytes), data_offset + length);
    let mut at = data_offset;
    std::iter::from_fn(move || {
        (at < end).then(|| {
            let frame = at / frame_bytes;
            let part = end.min((frame + 1) * frame_bytes) - at;
            let start = (at + (frame + 1) * FRAME_HEAD_BYTES as u64) as usize;
            at += part;
            start..start + part as usize
        })
    })
}

/// Seals every frame of a body whose data is in place.
pub(crate) fn seal_frames(header: &SegmentHeader, body: &mut [u8]) {
    for frame in 0..header.frames.len() {
        seal_frame(header, frame, body);
    }
}

/// Seals a frame whose data is in place.
fn seal_frame(header: &SegmentHeader, frame: usize, body: &mut [u8]) {
    let entry = &header.frames[frame];
    let start = entry.body_offset as usize;
    let (head, data) =
        body[start..start + entry.stored_bytes as usize].split_at_mut(FRAME_HEAD_BYTES);
    let identity = FrameIdentity {
        volume_id: header.volume_id,
        sequence: header.sequence,
        epoch: header.epoch,
        frame: frame as u32,
    };
    let mut sealed = [0u8; FRAME_HEAD_BYTES];
    frame_seal(&identity, data, &mut sealed);
    head.copy_from_slice(&sealed);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use sawmill_format::ids::{PutId, VolumeId};
    use sawmill_format::segment::{SegmentIdentity, SegmentKind, frame_open};
    use sawmill_sys::StagingFile;

    use super::*;
    use crate::disk::Disk;
    use crate::journal::Start;

    const SPACE_BYTES: usize = 4000;

    /// Nothing is ever written to it: the ring holds all.
    struct NoDisk;

    impl Disk for NoDisk {
        fn size_bytes(&self) -> u64 {
            0
        }
        fn read_at(&self, _: u64, _: &mut [u8]) -> std::io::Result<()> {
            Err(std::io::ErrorKind::UnexpectedEof.into())
        }
        fn read_now(&self, _: u64, _: &mut [u8]) -> std::io::Result<()> {
            Err(std::io::ErrorKind::UnexpectedEof.into())
        }
        fn write_at(&self, _: u64, _: &[u8]) -> std::io::Result<()> {
            Err(std::io::ErrorKind::StorageFull.into())
        }
        fn sync(&self) -> std::io::Result<()> {
            Ok(())
        }

        fn has_name(&self) -> bool {
            true
        }
    }

    fn header(frame_bytes: u32, position_end: u64) -> SegmentHeader {
        SegmentHeader {
            volume_id: VolumeId([1; 16]),
            put_id: PutId([2; 16]),
            sequence: 5,
            epoch: 1,
            previous_sequence: 4,
            stored_through: 4,
            checkpoint_number: 0,
            position_start: 0,
            position_end,
            wall_unix_ms: 0,
            next_sequence: 6,
            kind: SegmentKind::Data,
            frame_bytes,
            data_bytes: 0,
            extents: Vec::new(),
            frames: Vec::new(),
            origins: Vec::new(),
            size_bytes: 0,
        }
    }

    /// What an object records for each byte: the kind of its extent, and the byte.
    fn read_back(object: &[u8]) -> Vec<Option<(ExtentKind, u8)>> {
        let identity = SegmentIdentity { volume_id: VolumeId([1; 16]), sequence: 5 };
        let header = SegmentHeader::decode(object, &identity).unwrap();
        let body = &object[header.header_bytes() as usize..];
        assert_eq!(body.len() as u64, header.body_bytes());
        let mut data = Vec::new();
        for (frame, entry) in header.frames.iter().enumerate() {
            let stored = &body[entry.body_offset as usize..][..entry.stored_bytes as usize];
            let (volume_id, epoch) = (header.volume_id, header.epoch);
            let place = FrameIdentity { volume_id, sequence: 5, epoch, frame: frame as u32 };
            data.extend_from_slice(frame_open(&place, stored).unwrap());
        }
        let mut space = vec![None; SPACE_BYTES];
        for extent in &header.extents {
            for at in 0..extent.length as usize {
                let is_data = extent.kind == ExtentKind::Data;
                let byte = if is_data { data[extent.data_offset as usize + at] } else { 0 };
                space[extent.address as usize + at] = Some((extent.kind, byte));
            }
        }
        space
    }

    /// Borders that meet, or miss by one, as often as not.
    fn places() -> impl Strategy<Value = u64> {
        prop_oneof![0u64..12, 500u64..512, 0u64..3000]
    }

    fn lengths() -> impl Strategy<Value = u64> {
        prop_oneof![1u64..8, 500u64..512, 1u64..1000]
    }

    proptest! {
        #[test]
        fn an_object_holds_at_each_byte_what_was_written_last(
            writes in prop::collection::vec((places(), lengths(), 0u8..6), 1..40),
            frame_bytes in prop_oneof![Just(1u32), 2u32..600, Just(4096), Just(65536)],
        ) {
            let folder = tempfile::tempdir().unwrap();
            let file = StagingFile::create(&folder.path().join("staging"), 128 << 10).unwrap();
            let (ring, _consumer) = file.into_ring(0, &[]);
            let start = Start {
                tag: 1, epoch: 1, capacity_bytes: 1 << 20, first_lap_end: 1 << 20, position: 0,
                trim: 0, segments_end: 0, stored_sequence: 0, unstored_records: 0,
                unstored_records_max: usize::MAX,
            };
            let journal = Journal::new(ring, Arc::new(NoDisk), &start);
            let mut model = vec![None; SPACE_BYTES];
            let (mut records, mut written_bytes) = (Vec::new(), 0);
            for (number, (address, length, operation)) in writes.into_iter().enumerate() {
                let (operation, kind) = match operation {
                    0 => (RecordOperation::Discard, ExtentKind::Discard),
                    1 => (RecordOperation::Zero, ExtentKind::Zero),
                    _ => (RecordOperation::Write, ExtentKind::Data),
                };
                let byte = |at: u64| (number as u64 * 37 + at) as u8;
                let fill =
                    |into: &mut [u8]| (0..).zip(into).for_each(|(at, into)| *into = byte(at));
                records.push(journal.append(operation, address, length, fill, |_| ()).unwrap());
                for at in 0..length {
                    let byte = if kind == ExtentKind::Data { byte(at) } else { 0 };
                    model[(address + at) as usize] = Some((kind, byte));
                }
                written_bytes += if kind == ExtentKind::Data { length } else { 0 };
            }
            let end = journal.ring.next();
            let built =
                build(&records, &journal, &Buffers::default(), header(frame_bytes, end)).unwrap();
            prop_assert_eq!(read_back(&built.object), model);
            prop_assert_eq!(built.header.data_bytes + built.coalesced_bytes, written_bytes);
            let resident: u64 = built.resident.iter().map(|piece| u64::from(piece.length)).sum();
            prop_assert_eq!(resident, built.header.data_bytes);
            prop_assert_eq!(built.object.len() as u64, built.header.object_bytes());
        }
    }
}
