//! A checkpoint: the map as an object, as far as it fits in one: the segment table, and which parts
//! hold the map.
//!
//! Invariants: it names only stored segments, sorted by sequence, at most one part per group, and
//! at most one delta per checkpoint, sorted.
//!
//! Not here: the map itself ([`crate::map_part`]), and which objects may then be deleted.

use crate::error::{check_field, check_identity};
use crate::ids::{PutId, VolumeId};
use crate::kept_block::{CutEntry, KeptBlock};
use crate::layout::{layout, parse_number};
use crate::map_part::{delta_group, is_delta_group};
use crate::preamble::{self, CRC_BYTES, Kind};
use crate::{FormatError, Result, crc};

layout! {
    /// Bytes of the fixed part; segments, parts and the CRC follow.
    at, "Checkpoint", 160;
    PREAMBLE: 0, 16, "preamble";
    VOLUME_ID: 16, 16, "volume_id";
    PUT_ID: 32, 16, "put_id";
    NUMBER: 48, 8, "number";
    EPOCH: 56, 8, "epoch";
    THROUGH_SEQUENCE: 64, 8, "through_sequence";
    NEXT_SEQUENCE: 72, 8, "next_sequence";
    POSITION: 80, 8, "position";
    WALL_UNIX_MS: 88, 8, "wall_unix_ms";
    SIZE_BYTES: 96, 8, "size_bytes";
    FLAGS: 104, 4, "flags";
    SEGMENT_COUNT: 108, 4, "segment_count";
    PART_COUNT: 112, 4, "part_count";
    KEPT_BYTES: 116, 4, "kept_bytes";
    EXTENT_TOTAL: 120, 8, "extent_total";
    LIVE_BYTES: 128, 8, "live_bytes";
    ATTACHED_MS: 136, 8, "attached_ms";
    REPEATS: 144, 8, "repeats";
    RESERVED: 152, 8, "reserved";
}

layout! {
    /// Bytes of one entry of the segment table.
    segment_at, "Segment entry", 56;
    SEQUENCE: 0, 8, "sequence";
    EPOCH: 8, 8, "epoch";
    DATA_BYTES: 16, 8, "data_bytes";
    LIVE_BYTES: 24, 8, "live_bytes";
    WALL_UNIX_MS: 32, 8, "wall_unix_ms";
    HEADER_BYTES: 40, 4, "header_bytes";
    OBJECT_BYTES: 44, 8, "object_bytes";
    FLAGS: 52, 1, "flags";
    RESERVED: 53, 3, "reserved";
}

layout! {
    /// Bytes of one entry of the part table.
    part_at, "Part entry", 48;
    GROUP: 0, 8, "group";
    NUMBER: 8, 8, "number";
    PUT_ID: 16, 16, "put_id";
    BYTES: 32, 4, "bytes";
    EXTENTS: 36, 4, "extents";
    CRC: 40, 4, "crc";
    RESERVED: 44, 4, "reserved";
}

const KIND: Kind = Kind::Checkpoint;
const WHAT: &str = KIND.name();
const BYTES_MIN: usize = at::SIZE + CRC_BYTES;
/// The version with a kept block and nothing else that came later.
const KEPT_VERSION: u16 = 2;
/// The version that records how long the volume was attached, and nothing else that came later.
const ATTACHED_VERSION: u16 = 3;
/// The version that records which checkpoint this one repeats.
const REPEATS_VERSION: u16 = 4;
/// The version in which some parts are deltas.
const DELTAS_VERSION: u16 = 5;
const _: () = assert!(DELTAS_VERSION == KIND.version_max());
const FLAG_CLEAN: u32 = 1;
const FLAG_DEAD: u8 = 1;

/// Which checkpoint is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CheckpointIdentity {
    /// Its volume.
    pub volume_id: VolumeId,
    /// Its number.
    pub number: u64,
}

/// One segment that exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SegmentEntry {
    /// Its number.
    pub sequence: u64,
    /// The attachment that wrote it.
    pub epoch: u64,
    /// Bytes of uncompressed data.
    pub data_bytes: u64,
    /// How many of these bytes the map points at.
    pub live_bytes: u64,
    /// When it was made, in milliseconds since 1970, UTC.
    pub wall_unix_ms: u64,
    /// Where its body begins.
    pub header_bytes: u32,
    /// Bytes of the object.
    pub object_bytes: u64,
    /// Dead since an earlier checkpoint: it may be deleted once this checkpoint is durable.
    pub dead: bool,
}

/// One part of the map.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PartEntry {
    /// Which group of addresses, or [`crate::map_part::delta_group`].
    pub group: u64,
    /// The checkpoint that wrote it.
    pub number: u64,
    /// The put of the part.
    pub put_id: PutId,
    /// Bytes of the object.
    pub bytes: u32,
    /// Extents in it.
    pub extents: u32,
    /// The CRC at the end of the object; see [`crate::map_part::part_crc`].
    pub crc: u32,
}

/// A frozen cut of a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checkpoint {
    /// Its volume.
    pub volume_id: VolumeId,
    /// This put.
    pub put_id: PutId,
    /// Its number.
    pub number: u64,
    /// The epoch of the log at its last segment.
    pub epoch: u64,
    /// The last segment it includes.
    pub through_sequence: u64,
    /// The sequence where rolling forward continues.
    pub next_sequence: u64,
    /// All writes below this journal position are included.
    pub position: u64,
    /// Milliseconds since 1970, UTC, by the writer's clock.
    pub wall_unix_ms: u64,
    /// How long the volume has been attached in total, in milliseconds, by clocks that never jump.
    /// Older versions do not record it: 0.
    pub attached_ms: u64,
    /// The checkpoint with the same state that this one repeats under a new number: an attach puts
    /// such a checkpoint so that no earlier writer can take that number. 0: the state is its own.
    pub repeats: u64,
    /// Size of the disk.
    pub size_bytes: u64,
    /// The attachment ended with everything stored.
    pub clean: bool,
    /// Extents in all parts.
    pub extent_total: u64,
    /// Bytes the map points at.
    pub live_bytes: u64,
    /// All segments that exist, sorted by sequence.
    pub segments: Vec<SegmentEntry>,
    /// The parts of the map, sorted by group: first whole groups, then deltas, the oldest first.
    pub parts: Vec<PartEntry>,
    /// What is kept of the past.
    pub kept: KeptBlock,
}

impl Checkpoint {
    /// The object's bytes, or which field breaks a rule.
    pub fn encode(&self) -> Result<Vec<u8>> {
        self.check()?;
        let kept = if self.kept.is_empty() { Vec::new() } else { self.kept.encode()? };
        let tables = segment_at::SIZE * self.segments.len() + part_at::SIZE * self.parts.len();
        let length = BYTES_MIN + tables + kept.len();
        let mut bytes = Vec::with_capacity(length);
        bytes.resize(length - CRC_BYTES, 0);
        self.put_fixed(&mut bytes, length, kept.len())?;
        let (_, rest) = bytes.split_at_mut(at::SIZE + tables);
        rest.copy_from_slice(&kept);
        let (segments, parts) =
            bytes[at::SIZE..].split_at_mut(segment_at::SIZE * self.segments.len());
        for (bytes, entry) in segments.chunks_exact_mut(segment_at::SIZE).zip(&self.segments) {
            entry.put(bytes);
        }
        for (bytes, entry) in parts.chunks_exact_mut(part_at::SIZE).zip(&self.parts) {
            entry.put(bytes);
        }
        crc::seal(&mut bytes);
        Ok(bytes)
    }

    fn put_fixed(&self, bytes: &mut [u8], length: usize, kept_bytes: usize) -> Result<()> {
        let version = match (self.repeats, self.attached_ms, kept_bytes) {
            _ if self.parts.iter().any(PartEntry::is_delta) => DELTAS_VERSION,
            (0, 0, 0) => preamble::VERSION_FIRST,
            (0, 0, _) => KEPT_VERSION,
            (0, ..) => ATTACHED_VERSION,
            _ => REPEATS_VERSION,
        };
        preamble::put_version(bytes, KIND, version, length);
        at::KEPT_BYTES.put_count(bytes, WHAT, kept_bytes)?;
        at::VOLUME_ID.put(bytes, self.volume_id.0);
        at::PUT_ID.put(bytes, self.put_id.0);
        at::NUMBER.put(bytes, self.number.to_le_bytes());
        at::EPOCH.put(bytes, self.epoch.to_le_bytes());
        at::THROUGH_SEQUENCE.put(bytes, self.through_sequence.to_le_bytes());
        at::NEXT_SEQUENCE.put(bytes, self.next_sequence.to_le_bytes());
        at::POSITION.put(bytes, self.position.to_le_bytes());
        at::WALL_UNIX_MS.put(bytes, self.wall_unix_ms.to_le_bytes());
        at::ATTACHED_MS.put(bytes, self.attached_ms.to_le_bytes());
        at::REPEATS.put(bytes, self.repeats.to_le_bytes());
        at::SIZE_BYTES.put(bytes, self.size_bytes.to_le_bytes());
        at::FLAGS.put(bytes, (if self.clean { FLAG_CLEAN } else { 0 }).to_le_bytes());
        at::SEGMENT_COUNT.put_count(bytes, WHAT, self.segments.len())?;
        at::PART_COUNT.put_count(bytes, WHAT, self.parts.len())?;
        at::EXTENT_TOTAL.put(bytes, self.extent_total.to_le_bytes());
        at::LIVE_BYTES.put(bytes, self.live_bytes.to_le_bytes());
        Ok(())
    }

    /// Reads the whole object.
    pub fn decode(bytes: &[u8], expected: &CheckpointIdentity) -> Result<Checkpoint> {
        preamble::open_whole(bytes, KIND, BYTES_MIN)?;
        let segment_count = at::SEGMENT_COUNT.u32(bytes);
        let tables = u64::from(segment_count) * segment_at::SIZE as u64
            + u64::from(at::PART_COUNT.u32(bytes)) * part_at::SIZE as u64;
        let kept_bytes = at::KEPT_BYTES.u32(bytes);
        let agrees = tables + u64::from(kept_bytes) == (bytes.len() - BYTES_MIN) as u64;
        check_field(WHAT, "length", "it does not agree with segment_count and part_count", agrees)?;
        let tables = &bytes[at::SIZE..bytes.len() - CRC_BYTES];
        let (tables, kept) = tables.split_at(tables.len() - kept_bytes as usize);
        let (segments, parts) = tables.split_at(segment_at::SIZE * segment_count as usize);
        preamble::check_reserved(KIND, bytes, &[at::RESERVED])?;
        let version = preamble::Preamble::decode(bytes)?.version;
        let attached_ms = at::ATTACHED_MS.u64(bytes);
        let repeats = at::REPEATS.u64(bytes);
        let has_kept = kept_bytes > 0;
        let agrees = version >= ATTACHED_VERSION || has_kept == (version == KEPT_VERSION);
        check_field(WHAT, "kept_bytes", "it does not agree with the version", agrees)?;
        if version < ATTACHED_VERSION {
            preamble::check_reserved(KIND, bytes, &[at::ATTACHED_MS])?;
        }
        let agrees = version != ATTACHED_VERSION || attached_ms > 0;
        check_field(WHAT, "attached_ms", "it is 0, and version 3 exists to record it", agrees)?;
        if version < REPEATS_VERSION {
            preamble::check_reserved(KIND, bytes, &[at::REPEATS])?;
        } else if version == REPEATS_VERSION {
            let why = "it is 0, and only a checkpoint that repeats another has version 4";
            check_field(WHAT, "repeats", why, repeats > 0)?;
        }
        let flags = at::FLAGS.u32(bytes);
        if flags & !FLAG_CLEAN != 0 {
            return Err(FormatError::Reserved { what: WHAT });
        }
        check_identity(
            WHAT,
            "volume_id",
            expected.volume_id,
            VolumeId(at::VOLUME_ID.array(bytes)),
        )?;
        check_identity(WHAT, "number", expected.number, at::NUMBER.u64(bytes))?;
        let checkpoint = Checkpoint {
            volume_id: expected.volume_id,
            put_id: PutId(at::PUT_ID.array(bytes)),
            number: expected.number,
            epoch: at::EPOCH.u64(bytes),
            through_sequence: at::THROUGH_SEQUENCE.u64(bytes),
            next_sequence: at::NEXT_SEQUENCE.u64(bytes),
            position: at::POSITION.u64(bytes),
            wall_unix_ms: at::WALL_UNIX_MS.u64(bytes),
            attached_ms,
            repeats,
            size_bytes: at::SIZE_BYTES.u64(bytes),
            clean: flags & FLAG_CLEAN != 0,
            extent_total: at::EXTENT_TOTAL.u64(bytes),
            live_bytes: at::LIVE_BYTES.u64(bytes),
            segments: segments
                .chunks_exact(segment_at::SIZE)
                .map(SegmentEntry::get)
                .collect::<Result<_>>()?,
            parts: parts.chunks_exact(part_at::SIZE).map(PartEntry::get).collect::<Result<_>>()?,
            kept: if has_kept { KeptBlock::decode(kept)? } else { KeptBlock::default() },
        };
        checkpoint.check()?;
        let has_deltas = checkpoint.parts.iter().any(PartEntry::is_delta);
        let agrees = has_deltas == (version == DELTAS_VERSION);
        check_field(WHAT, "group", "only version 5 has deltas, and it has one", agrees)?;
        Ok(checkpoint)
    }

    /// Whether the fields keep the rules of the structure; the decoder refuses those that do not.
    pub fn check(&self) -> Result<()> {
        let segments_sorted = self.segments.is_sorted_by(|one, next| one.sequence < next.sequence);
        check_field(
            WHAT,
            "sequence",
            "the segments are not sorted, or one is there twice",
            segments_sorted,
        )?;
        let parts_sorted = self.parts.is_sorted_by(|one, next| one.group < next.group);
        check_field(
            WHAT,
            "group",
            "the parts are not sorted, or one is there twice",
            parts_sorted,
        )?;
        let is_named_right =
            |part: &PartEntry| !part.is_delta() || part.group == delta_group(part.number);
        check_field(
            WHAT,
            "group",
            "a delta has the number of another checkpoint",
            self.parts.iter().all(is_named_right),
        )?;
        let seconds = self.attached_ms.div_ceil(1000);
        let older = |cut: &CutEntry| u64::from(cut.attached_s) <= seconds;
        let older = self.kept.cuts.iter().all(older);
        check_field(
            WHAT,
            "attached_s",
            "a cut is younger than the checkpoint that names it",
            older,
        )?;
        let is_older = self.repeats == 0 || self.repeats < self.number;
        check_field(WHAT, "repeats", "it is not an older checkpoint", is_older)?;
        self.kept.check()
    }
}

impl SegmentEntry {
    fn put(&self, bytes: &mut [u8]) {
        segment_at::SEQUENCE.put(bytes, self.sequence.to_le_bytes());
        segment_at::EPOCH.put(bytes, self.epoch.to_le_bytes());
        segment_at::DATA_BYTES.put(bytes, self.data_bytes.to_le_bytes());
        segment_at::LIVE_BYTES.put(bytes, self.live_bytes.to_le_bytes());
        segment_at::WALL_UNIX_MS.put(bytes, self.wall_unix_ms.to_le_bytes());
        segment_at::HEADER_BYTES.put(bytes, self.header_bytes.to_le_bytes());
        segment_at::OBJECT_BYTES.put(bytes, self.object_bytes.to_le_bytes());
        segment_at::FLAGS.put(bytes, [if self.dead { FLAG_DEAD } else { 0 }]);
    }

    fn get(bytes: &[u8]) -> Result<SegmentEntry> {
        preamble::check_reserved(KIND, bytes, &[segment_at::RESERVED])?;
        let flags = segment_at::FLAGS.u8(bytes);
        if flags & !FLAG_DEAD != 0 {
            return Err(FormatError::Reserved { what: WHAT });
        }
        Ok(SegmentEntry {
            sequence: segment_at::SEQUENCE.u64(bytes),
            epoch: segment_at::EPOCH.u64(bytes),
            data_bytes: segment_at::DATA_BYTES.u64(bytes),
            live_bytes: segment_at::LIVE_BYTES.u64(bytes),
            wall_unix_ms: segment_at::WALL_UNIX_MS.u64(bytes),
            header_bytes: segment_at::HEADER_BYTES.u32(bytes),
            object_bytes: segment_at::OBJECT_BYTES.u64(bytes),
            dead: flags & FLAG_DEAD != 0,
        })
    }
}

impl PartEntry {
    /// Whether it is no whole group, but what changed in many groups.
    pub fn is_delta(&self) -> bool {
        is_delta_group(self.group)
    }

    fn put(&self, bytes: &mut [u8]) {
        part_at::GROUP.put(bytes, self.group.to_le_bytes());
        part_at::NUMBER.put(bytes, self.number.to_le_bytes());
        part_at::PUT_ID.put(bytes, self.put_id.0);
        part_at::BYTES.put(bytes, self.bytes.to_le_bytes());
        part_at::EXTENTS.put(bytes, self.extents.to_le_bytes());
        part_at::CRC.put(bytes, self.crc.to_le_bytes());
    }

    fn get(bytes: &[u8]) -> Result<PartEntry> {
        preamble::check_reserved(KIND, bytes, &[part_at::RESERVED])?;
        Ok(PartEntry {
            group: part_at::GROUP.u64(bytes),
            number: part_at::NUMBER.u64(bytes),
            put_id: PutId(part_at::PUT_ID.array(bytes)),
            bytes: part_at::BYTES.u32(bytes),
            extents: part_at::EXTENTS.u32(bytes),
            crc: part_at::CRC.u32(bytes),
        })
    }
}

/// The key of a checkpoint's copy that is kept for a cut. The original's prefix is for the newest
/// alone, so that a lagging list can never make an old one look new.
pub fn kept_key(volume_id: VolumeId, number: u64, put_id: PutId) -> String {
    format!("{}{number:020}-{put_id}", kept_prefix(volume_id))
}

/// The prefix of all kept copies of checkpoints of a volume, for listing.
pub fn kept_prefix(volume_id: VolumeId) -> String {
    format!("{volume_id}/kept/")
}

/// The volume, number and put in the key of a kept copy; `None` when it is another key.
pub fn parse_kept_key(key: &str) -> Option<(VolumeId, u64, PutId)> {
    let (volume_id, rest) = key.split_once("/kept/")?;
    let (number, put_id) = rest.split_once('-')?;
    Some((volume_id.parse().ok()?, parse_number(number)?, put_id.parse().ok()?))
}

/// The key of a checkpoint.
pub fn checkpoint_key(volume_id: VolumeId, number: u64) -> String {
    format!("{}{number:020}", checkpoint_prefix(volume_id))
}

/// The prefix of all checkpoints of a volume, for listing.
pub fn checkpoint_prefix(volume_id: VolumeId) -> String {
    format!("{volume_id}/checkpoint/")
}

/// The volume and number in a checkpoint's key; `None` when it is another key.
pub fn parse_checkpoint_key(key: &str) -> Option<(VolumeId, u64)> {
    let (volume_id, number) = key.split_once("/checkpoint/")?;
    Some((volume_id.parse().ok()?, parse_number(number)?))
}
