//! A batch becomes an object: coalesced, laid out in address order, cut into sealed frames, headed.
//!
//! Invariants: every payload byte is verified against its record's checksum while it is copied; the header
//! names the exact span of journal positions covered; what is built depends on nothing but its arguments.

use std::sync::Arc;

use bytes::Bytes;
use sawmill_format::journal::RecordOperation;
use sawmill_format::segment::{
    ExtentKind, FRAME_HEAD_BYTES, FrameIdentity, SegmentExtent, SegmentHeader, frame_seal, raw_frames,
};

use super::buffers::Buffers;
use super::coalesce::coalesce;
use super::resident::ResidentPiece;
use crate::journal::{Journal, JournalRead, Reach};
use crate::record::Record;
use crate::{Error, ErrorKind, Result};

/// A built segment, ready to be put.
pub(crate) struct Built {
    pub(crate) header: SegmentHeader,
    /// Header and frames.
    pub(crate) object: Bytes,
    pub(crate) header_bytes: u32,
    /// Where each run of the segment's data still is in the journal, by data offset.
    pub(crate) resident: Vec<ResidentPiece>,
    /// Payload bytes that later records of the batch made unnecessary.
    pub(crate) coalesced_bytes: u64,
}

/// Builds the segment of `records`. `header` comes with its identity, marks and times filled in.
pub(crate) fn build(
    records: &[Arc<Record>],
    journal: &Journal,
    buffers: &Buffers,
    mut header: SegmentHeader,
) -> Result<Built> {
    let remnants = coalesce(records);
    let payload_bytes: u64 = records.iter().map(|record| record.payload_bytes()).sum();
    let mut resident = Vec::new();
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
            resident.push(ResidentPiece {
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
        Error::new(ErrorKind::Internal, format!("a batch does not fit a segment: {error}"))
    })?;
    let encoded = header.encode();
    let header_bytes = encoded.len();
    // Block-aligned, so that a store on a local disk can take it without another copy.
    let mut buffer = buffers.take(header_bytes + header.body_bytes() as usize);
    let (head, body) = buffer.bytes_mut().split_at_mut(header_bytes);
    head.copy_from_slice(&encoded);
    let back = journal.read_back(header.position_start, header.position_end, buffers)?;
    let reach = back.as_ref().map_or(Reach::Device, Reach::ReadBack);
    copy_data(&resident, journal, reach, &header, body)?;
    seal_frames(&header, body);
    Ok(Built {
        header_bytes: header_bytes as u32,
        object: Bytes::from_owner(buffer),
        resident,
        coalesced_bytes: payload_bytes - data_bytes,
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
        let data_follows =
            kind != ExtentKind::Data || u64::from(last.data_offset) + last.length == u64::from(data_offset);
        if follows && data_follows {
            last.length += length;
            return;
        }
    }
    extents.push(SegmentExtent { address, length, data_offset, kind });
}

/// Copies all payload into the body, leaving room for each frame's head.
fn copy_data(
    pieces: &[ResidentPiece],
    journal: &Journal,
    reach: Reach,
    header: &SegmentHeader,
    body: &mut [u8],
) -> Result<()> {
    let frame_bytes = u64::from(header.frame_bytes);
    for piece in pieces {
        let mut done = 0u64;
        while done < u64::from(piece.length) {
            let at = u64::from(piece.data_offset) + done;
            let frame = at / frame_bytes;
            let length = (u64::from(piece.length) - done).min((frame + 1) * frame_bytes - at);
            let start = (at + (frame + 1) * FRAME_HEAD_BYTES as u64) as usize;
            let into = &mut body[start..start + length as usize];
            let offset = u64::from(piece.record_offset) + done;
            if journal.read(&piece.record, offset, into, reach)? != JournalRead::Done {
                let position = piece.record.position;
                let text = format!("journal record at position {position} was given up before it was stored");
                return Err(Error::new(ErrorKind::Internal, text));
            }
            done += length;
        }
    }
    Ok(())
}

fn seal_frames(header: &SegmentHeader, body: &mut [u8]) {
    for (frame, entry) in header.frames.iter().enumerate() {
        let start = entry.body_offset as usize;
        let (head, data) = body[start..start + entry.stored_bytes as usize].split_at_mut(FRAME_HEAD_BYTES);
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
}
