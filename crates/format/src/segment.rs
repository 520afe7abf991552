//! A segment: writes that follow each other, as one object. A header (what was written where), then
//! a body of frames.
//!
//! Invariants: the header verifies alone; each frame verifies alone, its place included, so that
//! one ranged GET is enough to trust it. The bytes of a (volume, sequence, epoch) never change.
//!
//! Not here: which writes go into a segment, compression, and how the sequences of a volume
//! combine.

use std::ops::Range;

use crate::error::{check_field, check_identity};
use crate::ids::{PutId, VolumeId};
use crate::layout::layout;
use crate::preamble::{self, CRC_BYTES, Kind};
use crate::{FormatError, Result, crc};

mod frame;
mod key;

pub use frame::{FRAME_HEAD_BYTES, FrameIdentity, frame_open, frame_seal, head_at, place_at};
pub use key::{parse_segment_key, segment_key, segment_prefix};

layout! {
    /// Bytes of the fixed part; extents, frames, origins and the CRC follow.
    at, "Segment header", 160;
    PREAMBLE: 0, 16, "preamble";
    VOLUME_ID: 16, 16, "volume_id";
    PUT_ID: 32, 16, "put_id";
    SEQUENCE: 48, 8, "sequence";
    EPOCH: 56, 8, "epoch";
    PREVIOUS_SEQUENCE: 64, 8, "previous_sequence";
    STORED_THROUGH: 72, 8, "stored_through";
    CHECKPOINT_NUMBER: 80, 8, "checkpoint_number";
    POSITION_START: 88, 8, "position_start";
    POSITION_END: 96, 8, "position_end";
    WALL_UNIX_MS: 104, 8, "wall_unix_ms";
    NEXT_SEQUENCE: 112, 8, "next_sequence";
    KIND: 120, 1, "kind";
    RESERVED_1: 121, 3, "reserved";
    FRAME_BYTES: 124, 4, "frame_bytes";
    DATA_BYTES: 128, 8, "data_bytes";
    EXTENT_COUNT: 136, 4, "extent_count";
    FRAME_COUNT: 140, 4, "frame_count";
    BODY_BYTES: 144, 8, "body_bytes";
    SIZE_BYTES: 152, 8, "size_bytes";
}

layout! {
    /// Bytes of one extent.
    extent_at, "Extent", 24;
    ADDRESS: 0, 8, "address";
    LENGTH: 8, 8, "length";
    DATA_OFFSET: 16, 4, "data_offset";
    KIND: 20, 1, "kind";
    RESERVED: 21, 3, "reserved";
}

layout! {
    /// Bytes of one entry of the frame table.
    frame_at, "Frame entry", 8;
    BODY_OFFSET: 0, 4, "body_offset";
    STORED_BYTES: 4, 4, "stored_bytes";
}

layout! {
    /// Bytes of one origin.
    origin_at, "Origin", 16;
    SEQUENCE: 0, 8, "sequence";
    DATA_OFFSET: 8, 4, "data_offset";
    RESERVED: 12, 4, "reserved";
}

const KIND: Kind = Kind::Segment;
const WHAT: &str = KIND.name();
const BYTES_MIN: usize = at::SIZE + CRC_BYTES;

/// The version of a fence that records the size of its disk; all other segments are of version 1.
pub const SIZED_VERSION: u16 = 2;
const _: () = assert!(SIZED_VERSION == KIND.version_max());

/// How many sequences a fence covers: its epoch continues this far behind the fence.
pub const FENCE_WINDOW: u64 = 64;

/// The most data a segment has: offsets into it have 32 bits.
pub const DATA_BYTES_MAX: u64 = 1 << 32;

/// What a segment is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum SegmentKind {
    /// Writes.
    Data = 1,
    /// The first segment of an epoch; shuts older epochs out.
    Fence = 2,
    /// Live data of older segments, rewritten by garbage collection. Covers no journal positions.
    Moved = 3,
    /// A user's order at this place of the log; its data is a [`crate::kept_block::Order`].
    Order = 4,
}

/// What an extent does to its addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum ExtentKind {
    /// They hold bytes of this segment.
    Data = 1,
    /// They hold zeroes.
    Zero = 2,
    /// They hold nothing; they read as zeroes.
    Discard = 3,
}

/// A run of bytes that the segment writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SegmentExtent {
    /// First byte on the disk.
    pub address: u64,
    /// Bytes; not 0.
    pub length: u64,
    /// Where its bytes begin in the segment's uncompressed data; 0 unless `kind` is data.
    pub data_offset: u32,
    /// What it does.
    pub kind: ExtentKind,
}

/// Where an extent of a moved segment came from. It takes effect only where the map still points
/// there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Origin {
    /// The segment its bytes were copied from.
    pub sequence: u64,
    /// Where they begin in that segment's uncompressed data.
    pub data_offset: u32,
}

/// Where a frame lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FrameEntry {
    /// Bytes of the body before it.
    pub body_offset: u32,
    /// Bytes of head and payload.
    pub stored_bytes: u32,
}

/// Which segment is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SegmentIdentity {
    /// Its volume.
    pub volume_id: VolumeId,
    /// Its sequence.
    pub sequence: u64,
}

/// Everything in a segment but its data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SegmentHeader {
    /// Its volume.
    pub volume_id: VolumeId,
    /// This put.
    pub put_id: PutId,
    /// Its number.
    pub sequence: u64,
    /// The attachment that wrote it.
    pub epoch: u64,
    /// The segment before it.
    pub previous_sequence: u64,
    /// The last sequence known stored, with all before it, when this was made; 0 = none.
    pub stored_through: u64,
    /// The newest durable checkpoint known; 0 = none.
    pub checkpoint_number: u64,
    /// First journal position it covers.
    pub position_start: u64,
    /// The position after the last it covers.
    pub position_end: u64,
    /// Milliseconds since 1970, UTC, by the writer's clock.
    pub wall_unix_ms: u64,
    /// The first sequence the same epoch uses after this: `sequence + 1`, or after a fence
    /// `sequence + FENCE_WINDOW`.
    pub next_sequence: u64,
    /// What it is for.
    pub kind: SegmentKind,
    /// Data per frame; the last frame may hold less.
    pub frame_bytes: u32,
    /// Bytes of uncompressed data.
    pub data_bytes: u64,
    /// What it writes, sorted by address, not overlapping.
    pub extents: Vec<SegmentExtent>,
    /// Its frames, one for each `frame_bytes` of data.
    pub frames: Vec<FrameEntry>,
    /// Where each extent came from: one for each of a moved segment, none of others.
    pub origins: Vec<Origin>,
    /// Bytes of the disk that a fence's attachment shows; 0: not recorded, as in other kinds and in
    /// version 1.
    pub size_bytes: u64,
}

/// Bytes of a header with so many extents, frames and origins; the body begins there.
pub const fn encoded_bytes(extent_count: usize, frame_count: usize, origin_count: usize) -> usize {
    let tables = extent_at::SIZE * extent_count
        + frame_at::SIZE * frame_count
        + origin_at::SIZE * origin_count;
    at::SIZE + tables + CRC_BYTES
}

/// How many bytes the header has, from the first 16 bytes of the object.
pub fn header_bytes_of(first_16_bytes: &[u8]) -> Result<u64> {
    let length = preamble::open(first_16_bytes, KIND)?;
    check_length(length)?;
    Ok(length)
}

fn check_length(length: u64) -> Result<()> {
    let is_possible = (BYTES_MIN as u64..=u64::from(u32::MAX)).contains(&length);
    check_field(WHAT, "length", "no header has that many bytes", is_possible)
}

/// The frame table of a body of raw frames.
pub fn raw_frames(data_bytes: u64, frame_bytes: u32) -> Result<Vec<FrameEntry>> {
    check_field(WHAT, "frame_bytes", "it is zero", frame_bytes > 0)?;
    let frame_count = data_bytes.div_ceil(u64::from(frame_bytes));
    let body_bytes = frame_count
        .checked_mul(FRAME_HEAD_BYTES as u64)
        .and_then(|heads| heads.checked_add(data_bytes));
    let fits = body_bytes.is_some_and(|bytes| bytes <= u64::from(u32::MAX));
    check_field(WHAT, "data_bytes", "the body would not fit in 4 GiB", fits)?;
    let mut frames = Vec::with_capacity(frame_count as usize);
    let (mut body_offset, mut rest) = (0, data_bytes as u32);
    while rest > 0 {
        let data = rest.min(frame_bytes);
        let stored_bytes = FRAME_HEAD_BYTES as u32 + data;
        frames.push(FrameEntry { body_offset, stored_bytes });
        body_offset += stored_bytes;
        rest -= data;
    }
    Ok(frames)
}

/// Where raw frame number `frame` lies in the object, head included. Empty when there is no such
/// frame.
pub fn raw_frame_range(
    header_bytes: u64,
    data_bytes: u64,
    frame_bytes: u32,
    frame: u32,
) -> Range<u64> {
    let data_start = u64::from(frame) * u64::from(frame_bytes);
    let data = data_bytes.saturating_sub(data_start).min(u64::from(frame_bytes));
    let start = header_bytes + data_start + u64::from(frame) * FRAME_HEAD_BYTES as u64;
    start..if data == 0 { start } else { start + FRAME_HEAD_BYTES as u64 + data }
}

impl SegmentHeader {
    fn encoded_bytes(&self) -> usize {
        encoded_bytes(self.extents.len(), self.frames.len(), self.origins.len())
    }

    /// Bytes of this header; the body begins there.
    pub fn header_bytes(&self) -> u64 {
        self.encoded_bytes() as u64
    }

    /// Bytes of all frames.
    pub fn body_bytes(&self) -> u64 {
        self.frames.iter().map(|frame| u64::from(frame.stored_bytes)).sum()
    }

    /// Bytes of the whole object.
    pub fn object_bytes(&self) -> u64 {
        self.header_bytes() + self.body_bytes()
    }

    /// The header's bytes, or which field breaks a rule.
    pub fn encode(&self) -> Result<Vec<u8>> {
        self.check()?;
        let length = self.encoded_bytes();
        check_length(length as u64)?;
        let mut bytes = Vec::with_capacity(length);
        bytes.resize(length - CRC_BYTES, 0);
        self.put_fixed(&mut bytes, length)?;
        let (extents, rest) = bytes[at::SIZE..].split_at_mut(extent_at::SIZE * self.extents.len());
        let (frames, origins) = rest.split_at_mut(frame_at::SIZE * self.frames.len());
        for (entry, extent) in extents.chunks_exact_mut(extent_at::SIZE).zip(&self.extents) {
            extent_at::ADDRESS.put(entry, extent.address.to_le_bytes());
            extent_at::LENGTH.put(entry, extent.length.to_le_bytes());
            extent_at::DATA_OFFSET.put(entry, extent.data_offset.to_le_bytes());
            extent_at::KIND.put(entry, [extent.kind as u8]);
        }
        for (entry, frame) in frames.chunks_exact_mut(frame_at::SIZE).zip(&self.frames) {
            frame_at::BODY_OFFSET.put(entry, frame.body_offset.to_le_bytes());
            frame_at::STORED_BYTES.put(entry, frame.stored_bytes.to_le_bytes());
        }
        for (entry, origin) in origins.chunks_exact_mut(origin_at::SIZE).zip(&self.origins) {
            origin_at::SEQUENCE.put(entry, origin.sequence.to_le_bytes());
            origin_at::DATA_OFFSET.put(entry, origin.data_offset.to_le_bytes());
        }
        crc::seal(&mut bytes);
        Ok(bytes)
    }

    fn put_fixed(&self, bytes: &mut [u8], length: usize) -> Result<()> {
        let version = if self.size_bytes > 0 { SIZED_VERSION } else { preamble::VERSION_FIRST };
        preamble::put_version(bytes, KIND, version, length);
        at::VOLUME_ID.put(bytes, self.volume_id.0);
        at::PUT_ID.put(bytes, self.put_id.0);
        at::SEQUENCE.put(bytes, self.sequence.to_le_bytes());
        at::EPOCH.put(bytes, self.epoch.to_le_bytes());
        at::PREVIOUS_SEQUENCE.put(bytes, self.previous_sequence.to_le_bytes());
        at::STORED_THROUGH.put(bytes, self.stored_through.to_le_bytes());
        at::CHECKPOINT_NUMBER.put(bytes, self.checkpoint_number.to_le_bytes());
        at::POSITION_START.put(bytes, self.position_start.to_le_bytes());
        at::POSITION_END.put(bytes, self.position_end.to_le_bytes());
        at::WALL_UNIX_MS.put(bytes, self.wall_unix_ms.to_le_bytes());
        at::NEXT_SEQUENCE.put(bytes, self.next_sequence.to_le_bytes());
        at::KIND.put(bytes, [self.kind as u8]);
        at::FRAME_BYTES.put(bytes, self.frame_bytes.to_le_bytes());
        at::DATA_BYTES.put(bytes, self.data_bytes.to_le_bytes());
        at::EXTENT_COUNT.put_count(bytes, WHAT, self.extents.len())?;
        at::FRAME_COUNT.put_count(bytes, WHAT, self.frames.len())?;
        at::BODY_BYTES.put(bytes, self.body_bytes().to_le_bytes());
        at::SIZE_BYTES.put(bytes, self.size_bytes.to_le_bytes());
        Ok(())
    }

    /// Reads a header; `bytes` may include the body.
    pub fn decode(bytes: &[u8], expected: &SegmentIdentity) -> Result<SegmentHeader> {
        let bytes = preamble::open_sealed(bytes, KIND, BYTES_MIN)?;
        let extent_count = at::EXTENT_COUNT.u32(bytes);
        let frame_count = at::FRAME_COUNT.u32(bytes);
        let origin_count = if kind_of(bytes)? == SegmentKind::Moved { extent_count } else { 0 };
        let tables = u64::from(extent_count) * extent_at::SIZE as u64
            + u64::from(frame_count) * frame_at::SIZE as u64
            + u64::from(origin_count) * origin_at::SIZE as u64;
        let agrees = tables == (bytes.len() - BYTES_MIN) as u64;
        check_field(
            WHAT,
            "length",
            "it does not agree with kind, extent_count and frame_count",
            agrees,
        )?;
        let tables = &bytes[at::SIZE..bytes.len() - CRC_BYTES];
        let (extents, tables) = tables.split_at(extent_at::SIZE * extent_count as usize);
        let (frames, origins) = tables.split_at(frame_at::SIZE * frame_count as usize);
        preamble::check_reserved(KIND, bytes, &[at::RESERVED_1])?;
        if preamble::Preamble::decode(bytes)?.version < SIZED_VERSION {
            preamble::check_reserved(KIND, bytes, &[at::SIZE_BYTES])?;
        } else {
            let has_size = at::SIZE_BYTES.u64(bytes) > 0;
            check_field(WHAT, "size_bytes", "this version is that of a size", has_size)?;
        }
        for entry in extents.chunks_exact(extent_at::SIZE) {
            preamble::check_reserved(KIND, entry, &[extent_at::RESERVED])?;
        }
        for entry in origins.chunks_exact(origin_at::SIZE) {
            preamble::check_reserved(KIND, entry, &[origin_at::RESERVED])?;
        }
        check_identity(
            WHAT,
            "volume_id",
            expected.volume_id,
            VolumeId(at::VOLUME_ID.array(bytes)),
        )?;
        check_identity(WHAT, "sequence", expected.sequence, at::SEQUENCE.u64(bytes))?;
        let header = Self::get(bytes, extents, frames, origins)?;
        header.check()?;
        let body_bytes = at::BODY_BYTES.u64(bytes);
        check_field(
            WHAT,
            "body_bytes",
            "it is not the sum of the frames",
            body_bytes == header.body_bytes(),
        )?;
        Ok(header)
    }

    fn get(bytes: &[u8], extents: &[u8], frames: &[u8], origins: &[u8]) -> Result<SegmentHeader> {
        let frames = frames.chunks_exact(frame_at::SIZE).map(|entry| FrameEntry {
            body_offset: frame_at::BODY_OFFSET.u32(entry),
            stored_bytes: frame_at::STORED_BYTES.u32(entry),
        });
        let origins = origins.chunks_exact(origin_at::SIZE).map(|entry| Origin {
            sequence: origin_at::SEQUENCE.u64(entry),
            data_offset: origin_at::DATA_OFFSET.u32(entry),
        });
        Ok(SegmentHeader {
            volume_id: VolumeId(at::VOLUME_ID.array(bytes)),
            put_id: PutId(at::PUT_ID.array(bytes)),
            sequence: at::SEQUENCE.u64(bytes),
            epoch: at::EPOCH.u64(bytes),
            previous_sequence: at::PREVIOUS_SEQUENCE.u64(bytes),
            stored_through: at::STORED_THROUGH.u64(bytes),
            checkpoint_number: at::CHECKPOINT_NUMBER.u64(bytes),
            position_start: at::POSITION_START.u64(bytes),
            position_end: at::POSITION_END.u64(bytes),
            wall_unix_ms: at::WALL_UNIX_MS.u64(bytes),
            next_sequence: at::NEXT_SEQUENCE.u64(bytes),
            kind: kind_of(bytes)?,
            frame_bytes: at::FRAME_BYTES.u32(bytes),
            data_bytes: at::DATA_BYTES.u64(bytes),
            extents: extents
                .chunks_exact(extent_at::SIZE)
                .map(get_extent)
                .collect::<Result<_>>()?,
            frames: frames.collect(),
            origins: origins.collect(),
            size_bytes: at::SIZE_BYTES.u64(bytes),
        })
    }

    /// Whether the fields keep the rules of the structure; the decoder refuses those that do not.
    pub fn check(&self) -> Result<()> {
        let check = |field, why, holds| check_field(WHAT, field, why, holds);
        check(
            "position_end",
            "it is before position_start",
            self.position_start <= self.position_end,
        )?;
        check("next_sequence", "it is not after sequence", self.sequence < self.next_sequence)?;
        check("frame_bytes", "it is zero", self.frame_bytes > 0)?;
        let may_say = self.kind == SegmentKind::Fence || self.size_bytes == 0;
        check("size_bytes", "only a fence says the size of its disk", may_say)?;
        check(
            "data_bytes",
            "no offset of 32 bits reaches that far",
            self.data_bytes <= DATA_BYTES_MAX,
        )?;
        let mut free_from = 0;
        for extent in &self.extents {
            check("length", "an extent is empty", extent.length > 0)?;
            let end = extent.address.checked_add(extent.length);
            let why = "an extent ends past the last address";
            let end = end.ok_or(FormatError::Field { what: WHAT, field: "length", why })?;
            let why = "the extents are not sorted by address, or overlap";
            check("address", why, extent.address >= free_from)?;
            free_from = end;
            let data_end = u64::from(extent.data_offset).saturating_add(extent.length);
            match extent.kind {
                ExtentKind::Data => {
                    check("data_offset", "it ends past data_bytes", data_end <= self.data_bytes)?
                }
                _ => {
                    check("data_offset", "an extent without data has one", extent.data_offset == 0)?
                }
            }
        }
        self.check_origins()?;
        let frame_count = self.data_bytes.div_ceil(u64::from(self.frame_bytes));
        check(
            "frame_count",
            "it does not agree with data_bytes",
            frame_count == self.frames.len() as u64,
        )?;
        let mut body_offset = 0;
        for frame in &self.frames {
            let contiguous = u64::from(frame.body_offset) == body_offset;
            check("body_offset", "the frames are not back to back", contiguous)?;
            let has_payload = frame.stored_bytes as usize > FRAME_HEAD_BYTES;
            check("stored_bytes", "a frame has no payload", has_payload)?;
            body_offset += u64::from(frame.stored_bytes);
        }
        Ok(())
    }

    /// Checks that each moved extent is data, and that its origin lies in an earlier segment.
    fn check_origins(&self) -> Result<()> {
        let check = |field, why, holds| check_field(WHAT, field, why, holds);
        let expected = if self.kind == SegmentKind::Moved { self.extents.len() } else { 0 };
        check("origins", "there is not one for each moved extent", self.origins.len() == expected)?;
        for (extent, origin) in self.extents.iter().zip(&self.origins) {
            check("kind", "what moved is not data", extent.kind == ExtentKind::Data)?;
            check(
                "origin sequence",
                "it is not before this segment",
                origin.sequence < self.sequence,
            )?;
            let end = u64::from(origin.data_offset).saturating_add(extent.length);
            check(
                "origin data_offset",
                "no offset of 32 bits reaches that far",
                end <= DATA_BYTES_MAX,
            )?;
        }
        let covers = self.position_start != self.position_end;
        check(
            "position_end",
            "what moved covers positions",
            self.kind != SegmentKind::Moved || !covers,
        )
    }
}

fn kind_of(bytes: &[u8]) -> Result<SegmentKind> {
    match at::KIND.u8(bytes) {
        1 => Ok(SegmentKind::Data),
        2 => Ok(SegmentKind::Fence),
        3 => Ok(SegmentKind::Moved),
        4 => Ok(SegmentKind::Order),
        _ => Err(FormatError::Field { what: WHAT, field: "kind", why: "no such kind" }),
    }
}

fn get_extent(entry: &[u8]) -> Result<SegmentExtent> {
    Ok(SegmentExtent {
        address: extent_at::ADDRESS.u64(entry),
        length: extent_at::LENGTH.u64(entry),
        data_offset: extent_at::DATA_OFFSET.u32(entry),
        kind: match extent_at::KIND.u8(entry) {
            1 => ExtentKind::Data,
            2 => ExtentKind::Zero,
            3 => ExtentKind::Discard,
            _ => {
                return Err(FormatError::Field {
                    what: WHAT,
                    field: "kind",
                    why: "no such kind of extent",
                });
            }
        },
    })
}
