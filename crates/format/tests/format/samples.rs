//! The values behind the golden vectors: one case per file in `vectors/`, with fixed ids and
//! readable numbers: objects of the store here, what is on the local disk in `local`.

mod local;

use sawmill_format::checkpoint::{self, Checkpoint, CheckpointIdentity, PartEntry, SegmentEntry};
use sawmill_format::ids::{PutId, VolumeId};
use sawmill_format::kept_block::{
    self, CutEntry, CutKind, DeadEntry, KeptBlock, LineageEntry, Order, Pin,
};
use sawmill_format::layout::Table;
use sawmill_format::map_part::{
    self, HOLE_SEQUENCE, MapExtent, PartIdentity, decode_part, encode_part, part_crc,
};
use sawmill_format::role::{self, PromotionPoint, Role, RoleKind};
use sawmill_format::segment::{self, *};
use sawmill_format::volume_record::{self, FlushMode, VolumeRecord};
use sawmill_format::{FormatError, Result};

pub(crate) use self::local::{
    STAGING, cache_value, encoded, staging_value, transfer_value, write_record,
};
use self::local::{cache, records, staging_header, transfer};

pub(crate) const VOLUME: VolumeId =
    VolumeId(*b"\x5a\x01\x02\x03\x04\x05\x06\x07\x08\x09\x0a\x0b\x0c\x0d\x0e\x0f");
pub(crate) const PUT: PutId =
    PutId(*b"\xc0\x11\x22\x33\x44\x55\x66\x77\x88\x99\xaa\xbb\xcc\xdd\xee\xff");
pub(crate) const TAG: u64 = 0x7a67_6174_5f6c_6e6a;
/// 2026-11-21, 10:00:00.123 UTC.
pub(crate) const WALL_UNIX_MS: u64 = 1_795_255_200_123;

/// Decodes the vector, and returns whether it is the case's value.
type Decode = Box<dyn Fn(&[u8]) -> Result<bool>>;

/// One golden vector.
pub(crate) struct Case {
    /// `<structure>/v1-<case>`.
    pub(crate) name: &'static str,
    /// What the encoder makes of the value.
    pub(crate) bytes: Vec<u8>,
    /// The value, for readers.
    pub(crate) value: String,
    /// The table of its first bytes.
    pub(crate) table: Table,
    pub(crate) decode: Decode,
}

pub(crate) fn all() -> Vec<Case> {
    let mut cases = vec![
        volume_record(),
        data_segment(),
        zeroes_segment(),
        moved_segment(),
        fence(1, 0),
        fence(2, 10 << 30),
    ];
    cases.extend(crate::superblock::cases());
    cases.push(staging_header());
    cases.extend([checkpoint_with_parts(), first_checkpoint(), part(), cache(1), cache(2)]);
    cases.push(transfer());
    cases.extend([
        checkpoint_with_cuts(),
        pin_case(),
        order_segment(),
        replica_case(),
        promoted_case(),
    ]);
    cases.extend([
        checkpoint_that_counts(),
        checkpoint_that_repeats(),
        checkpoint_with_a_delta(),
        delta(),
        returned_case(),
        crate::packed::packed_case(),
    ]);
    cases.push(crate::newest::newest_case());
    cases.push(crate::boot::boot_case());
    cases.extend(records());
    cases.extend(crate::link::cases());
    cases.extend(crate::names::cases());
    cases
}

pub(crate) fn volume_record_value() -> VolumeRecord {
    VolumeRecord {
        volume_id: VOLUME,
        put_id: PUT,
        size_bytes: 10 << 30,
        block_bytes: 4096,
        segment_bytes: 8 << 20,
        frame_bytes: 64 << 10,
        flush_mode: FlushMode::Stored,
        created_unix_ms: WALL_UNIX_MS,
        name: "disk1".to_owned(),
    }
}

fn volume_record() -> Case {
    let value = volume_record_value();
    Case {
        name: "volume_record/v1-disk1",
        bytes: value.encode().unwrap(),
        value: format!("{value:#?}"),
        table: volume_record::at::TABLE,
        decode: Box::new(move |bytes| Ok(VolumeRecord::decode(bytes, "disk1")? == value)),
    }
}

pub(crate) const SEGMENT: SegmentIdentity = SegmentIdentity { volume_id: VOLUME, sequence: 259 };

/// 250 bytes of data in frames of 100, as two data extents, one zero extent and one discard.
pub(crate) fn segment_value() -> SegmentHeader {
    let extent =
        |address, length, data_offset, kind| SegmentExtent { address, length, data_offset, kind };
    SegmentHeader {
        volume_id: VOLUME,
        put_id: PUT,
        sequence: SEGMENT.sequence,
        epoch: 3,
        previous_sequence: 258,
        stored_through: 257,
        checkpoint_number: 12,
        position_start: 1_000_000,
        position_end: 1_000_650,
        wall_unix_ms: WALL_UNIX_MS,
        next_sequence: SEGMENT.sequence + 1,
        kind: SegmentKind::Data,
        frame_bytes: 100,
        data_bytes: 250,
        extents: vec![
            extent(4096, 150, 100, ExtentKind::Data),
            extent(4246, 8192, 0, ExtentKind::Zero),
            extent(1 << 20, 100, 0, ExtentKind::Data),
            extent(1 << 30, 1 << 20, 0, ExtentKind::Discard),
        ],
        frames: raw_frames(250, 100).unwrap(),
        origins: Vec::new(),
        size_bytes: 0,
    }
}

pub(crate) fn segment_data() -> Vec<u8> {
    (0..250).collect()
}

/// The whole object of a header and its uncompressed data.
pub(crate) fn segment_object(header: &SegmentHeader, data: &[u8]) -> Vec<u8> {
    let mut object = header.encode().unwrap();
    for (frame, data) in data.chunks(header.frame_bytes as usize).enumerate() {
        let mut head = [0; FRAME_HEAD_BYTES];
        frame_seal(&frame_identity(header, frame as u32), data, &mut head);
        object.extend_from_slice(&head);
        object.extend_from_slice(data);
    }
    object
}

fn frame_identity(header: &SegmentHeader, frame: u32) -> FrameIdentity {
    FrameIdentity {
        volume_id: header.volume_id,
        sequence: header.sequence,
        epoch: header.epoch,
        frame,
    }
}

/// Header and data of a whole object.
pub(crate) fn open_segment(
    object: &[u8],
    expected: &SegmentIdentity,
) -> Result<(SegmentHeader, Vec<u8>)> {
    let header = SegmentHeader::decode(object, expected)?;
    let mut data = Vec::new();
    let mut rest = &object[header.header_bytes() as usize..];
    for (index, frame) in header.frames.iter().enumerate() {
        let need = u64::from(frame.stored_bytes);
        let have = rest.len() as u64;
        let (bytes, after) = rest
            .split_at_checked(need as usize)
            .ok_or(FormatError::Truncated { what: "body", need, have })?;
        data.extend_from_slice(frame_open(&frame_identity(&header, index as u32), bytes)?);
        rest = after;
    }
    Ok((header, data))
}

fn segment_case(name: &'static str, value: SegmentHeader, data: Vec<u8>) -> Case {
    let identity = SegmentIdentity { volume_id: value.volume_id, sequence: value.sequence };
    Case {
        name,
        bytes: segment_object(&value, &data),
        value: format!("{value:#?}"),
        table: segment::at::TABLE,
        decode: Box::new(move |bytes| {
            let (header, found) = open_segment(bytes, &identity)?;
            Ok(header == value && found == data)
        }),
    }
}

fn data_segment() -> Case {
    segment_case("segment/v1-data", segment_value(), segment_data())
}

/// A segment without data.
fn zeroes_segment() -> Case {
    let value = segment_value();
    let has_data = |extent: &SegmentExtent| extent.kind == ExtentKind::Data;
    let extents = value.extents.iter().filter(|extent| !has_data(extent)).copied().collect();
    let value = SegmentHeader { extents, data_bytes: 0, frames: Vec::new(), ..value };
    segment_case("segment/v1-zeroes", value, Vec::new())
}

/// The two data extents of [`segment_value`], moved.
pub(crate) fn moved_value() -> SegmentHeader {
    let value = segment_value();
    SegmentHeader {
        kind: SegmentKind::Moved,
        position_start: value.position_end,
        extents: value
            .extents
            .iter()
            .copied()
            .filter(|extent| extent.kind == ExtentKind::Data)
            .collect(),
        origins: vec![
            Origin { sequence: 12, data_offset: 8192 },
            Origin { sequence: 258, data_offset: u32::MAX - 99 },
        ],
        ..value
    }
}

fn moved_segment() -> Case {
    segment_case("segment/v1-moved", moved_value(), segment_data())
}

/// A fence. With a size it is of version 2, which records how large the disk is.
pub(crate) fn fence_value(size_bytes: u64) -> SegmentHeader {
    SegmentHeader {
        sequence: 260,
        previous_sequence: 259,
        epoch: 4,
        next_sequence: 260 + FENCE_WINDOW,
        position_start: 1_000_650,
        kind: SegmentKind::Fence,
        frame_bytes: 64 << 10,
        data_bytes: 0,
        extents: Vec::new(),
        frames: Vec::new(),
        size_bytes,
        ..segment_value()
    }
}

fn fence(version: u8, size_bytes: u64) -> Case {
    let name = if version == 1 { "segment/v1-fence" } else { "segment/v2-fence" };
    segment_case(name, fence_value(size_bytes), Vec::new())
}

pub(crate) const CHECKPOINT: CheckpointIdentity =
    CheckpointIdentity { volume_id: VOLUME, number: 13 };

pub(crate) fn checkpoint_value() -> Checkpoint {
    let segment = |sequence, live_bytes, dead| SegmentEntry {
        sequence,
        epoch: 3,
        data_bytes: 8 << 20,
        live_bytes,
        wall_unix_ms: WALL_UNIX_MS + sequence,
        header_bytes: 4468,
        object_bytes: (8 << 20) + 128 * 16 + 4468,
        dead,
    };
    let part = |group, number| PartEntry {
        group,
        number,
        put_id: PUT,
        bytes: 100,
        extents: 3,
        crc: part_crc(&part_bytes()),
    };
    Checkpoint {
        volume_id: VOLUME,
        put_id: PUT,
        number: CHECKPOINT.number,
        epoch: 3,
        through_sequence: 259,
        next_sequence: 260,
        position: 1_000_650,
        wall_unix_ms: WALL_UNIX_MS,
        attached_ms: 0,
        repeats: 0,
        size_bytes: 10 << 30,
        clean: true,
        extent_total: 6,
        live_bytes: 5 << 20,
        segments: vec![
            segment(257, 0, true),
            segment(258, 1 << 20, false),
            segment(259, 4 << 20, false),
        ],
        parts: vec![part(0, 12), part(7, 13)],
        kept: KeptBlock::default(),
    }
}

/// What a clone with a snapshot and a retention window keeps.
pub(crate) fn kept_value() -> KeptBlock {
    let cut = |kind, number, name: &str, pin| CutEntry {
        kind,
        number,
        through_sequence: 250 + number,
        name: name.to_owned(),
        put_id: PUT,
        position: 900_000 + number,
        wall_unix_ms: WALL_UNIX_MS - number,
        pin,
        attached_s: 0,
    };
    KeptBlock {
        retention_s: 86_400,
        pins_next: 4,
        cuts: vec![
            cut(CutKind::Retained, 7, "", 0),
            cut(CutKind::Snapshot, 8, "before-update", 0),
            cut(CutKind::Pin, 8, "", 3),
        ],
        lineage: vec![LineageEntry {
            through_sequence: 200,
            volume_id: VolumeId([0xba; 16]),
            pin: 2,
            cut_number: 5,
            cut_through: 199,
        }],
        dead: vec![DeadEntry { sequence: 257, since: 9 }],
    }
}

fn checkpoint_with_cuts() -> Case {
    checkpoint_case("checkpoint/v2-cuts", Checkpoint { kept: kept_value(), ..checkpoint_value() })
}

fn checkpoint_that_counts() -> Case {
    let mut kept = kept_value();
    kept.cuts[0].attached_s = 86_401;
    checkpoint_case(
        "checkpoint/v3-attached",
        Checkpoint { attached_ms: 172_800_123, kept, ..checkpoint_value() },
    )
}

fn checkpoint_that_repeats() -> Case {
    let value = Checkpoint { repeats: 12, clean: false, kept: kept_value(), ..checkpoint_value() };
    checkpoint_case("checkpoint/v4-repeats", value)
}

/// The part of group 7 is older than the delta, which corrects it.
fn checkpoint_with_a_delta() -> Case {
    let mut value = checkpoint_value();
    value.parts[1].number = 12;
    let crc = part_crc(&delta_bytes());
    value.parts.push(PartEntry { group: DELTA.group, number: 13, crc, ..value.parts[1] });
    value.extent_total = 9;
    checkpoint_case("checkpoint/v5-delta", value)
}

pub(crate) fn pin_value() -> Pin {
    Pin {
        volume_id: VOLUME,
        put_id: PUT,
        pin_number: 3,
        clone_id: VolumeId([0xc1; 16]),
        number: 8,
        through_sequence: 258,
        name: "copy".to_owned(),
    }
}

fn pin_case() -> Case {
    let value = pin_value();
    Case {
        name: "pin/v1-clone",
        bytes: value.encode().unwrap(),
        value: format!("{value:#?}"),
        table: kept_block::pin_at::TABLE,
        decode: Box::new(move |bytes| Ok(Pin::decode(bytes, VOLUME, 3)? == value)),
    }
}

pub(crate) fn role_value() -> Role {
    Role {
        volume_id: VOLUME,
        put_id: PUT,
        number: 2,
        wall_unix_ms: 1_770_000_000_123,
        kind: RoleKind::Replica,
        source: "s3://bucket/disks/disk1".to_owned(),
    }
}

fn role_case(name: &'static str, value: Role) -> Case {
    Case {
        name,
        bytes: value.encode().unwrap(),
        value: format!("{value:#?}"),
        table: role::at::TABLE,
        decode: Box::new(move |bytes| Ok(Role::decode(bytes, VOLUME, 2)? == value)),
    }
}

fn replica_case() -> Case {
    role_case("role/v1-replica", role_value())
}

fn promoted_case() -> Case {
    let promoted =
        PromotionPoint { epoch: 1 << 40, checkpoint_number: 1 << 21, next_sequence: 1_200_000 };
    role_case("role/v1-promoted", Role { kind: RoleKind::Promoted(promoted), ..role_value() })
}

fn returned_case() -> Case {
    let begins =
        PromotionPoint { epoch: 1 << 40, checkpoint_number: 1 << 21, next_sequence: 1_200_000 };
    role_case("role/v1-returned", Role { kind: RoleKind::Returned(begins), ..role_value() })
}

/// An order to roll back: its segment, and the order as the data of that.
pub(crate) fn order_value() -> (SegmentHeader, Vec<u8>) {
    let order = Order::RollBack { number: 8, put_id: PUT, through_sequence: 258 };
    let data = order.encode().unwrap();
    let header = SegmentHeader {
        kind: SegmentKind::Order,
        position_start: 1_000_650,
        frame_bytes: 64 << 10,
        data_bytes: data.len() as u64,
        extents: Vec::new(),
        frames: raw_frames(data.len() as u64, 64 << 10).unwrap(),
        ..segment_value()
    };
    (header, data)
}

fn order_segment() -> Case {
    let (header, data) = order_value();
    segment_case("segment/v1-order", header, data)
}

fn checkpoint_case(name: &'static str, value: Checkpoint) -> Case {
    let identity = CheckpointIdentity { volume_id: value.volume_id, number: value.number };
    Case {
        name,
        bytes: value.encode().unwrap(),
        value: format!("{value:#?}"),
        table: checkpoint::at::TABLE,
        decode: Box::new(move |bytes| Ok(Checkpoint::decode(bytes, &identity)? == value)),
    }
}

fn checkpoint_with_parts() -> Case {
    checkpoint_case("checkpoint/v1-parts", checkpoint_value())
}

fn first_checkpoint() -> Case {
    let empty = Checkpoint {
        number: 1,
        epoch: 1,
        through_sequence: 0,
        next_sequence: 1,
        position: 0,
        clean: false,
        extent_total: 0,
        live_bytes: 0,
        segments: Vec::new(),
        parts: Vec::new(),
        ..checkpoint_value()
    };
    checkpoint_case("checkpoint/v1-empty", empty)
}

pub(crate) const PART: PartIdentity =
    PartIdentity { volume_id: VOLUME, group: 7, number: 13, put_id: PUT };
pub(crate) const PART_FIRST_ADDRESS: u64 = 7 << 30;

pub(crate) fn part_extents() -> Vec<MapExtent> {
    let first = PART_FIRST_ADDRESS;
    vec![
        MapExtent { address: first, length: 4096, sequence: 259, data_offset: 0 },
        MapExtent { address: first + 4096, length: 4096, sequence: 259, data_offset: 4096 },
        MapExtent { address: first + 65536, length: 100, sequence: 258, data_offset: u32::MAX },
        MapExtent { address: first + 70000, length: 1, sequence: u64::MAX, data_offset: 1 },
    ]
}

pub(crate) fn part_bytes() -> Vec<u8> {
    encode_part(&PART, PART_FIRST_ADDRESS, &part_extents()).unwrap()
}

pub(crate) const DELTA: PartIdentity =
    PartIdentity { volume_id: VOLUME, group: 1 << 63 | 13, number: 13, put_id: PUT };

/// In groups far apart, with bytes that became a hole.
pub(crate) fn delta_extents() -> Vec<MapExtent> {
    vec![
        MapExtent { address: 4096, length: 8192, sequence: 259, data_offset: 0 },
        MapExtent { address: 1 << 30, length: 1 << 30, sequence: HOLE_SEQUENCE, data_offset: 0 },
        MapExtent { address: 7 << 30, length: 4096, sequence: 259, data_offset: 8192 },
    ]
}

pub(crate) fn delta_bytes() -> Vec<u8> {
    encode_part(&DELTA, 0, &delta_extents()).unwrap()
}

fn delta() -> Case {
    Case {
        name: "map_part/v2-delta",
        bytes: delta_bytes(),
        value: format!("{:#?}", (DELTA, delta_extents())),
        table: map_part::at::TABLE,
        decode: Box::new(|bytes| Ok(decode_part(bytes, &DELTA)? == delta_extents())),
    }
}

fn part() -> Case {
    Case {
        name: "map_part/v1-four-extents",
        bytes: part_bytes(),
        value: format!("{:#?}", (PART, part_extents())),
        table: map_part::at::TABLE,
        decode: Box::new(|bytes| Ok(decode_part(bytes, &PART)? == part_extents())),
    }
}
