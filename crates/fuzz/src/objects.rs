//! The decoders of `crates/format` for data in a store or on a machine.
//!
//! Invariant: accepted input is what the encoder writes, keeps its rules, and takes no more memory
//! than its bytes justify; with another identity it is refused.
//!
//! Not here: the link's structures and packed writes (`link`); write logs (`write_log`).

use sawmill_format::cache_index::{CacheEntry, CacheIndex};
use sawmill_format::checkpoint::{Checkpoint, CheckpointIdentity, PartEntry, SegmentEntry};
use sawmill_format::export_state::ExportState;
use sawmill_format::ids::{PutId, VolumeId};
use sawmill_format::journal::{
    RECORD_HEADER_BYTES, RecordHeader, Superblock, choose_superblock, record_at, superblock_at,
};
use sawmill_format::kept_block::{self, Order, Pin, PinnedStatus};
use sawmill_format::layout::Field;
use sawmill_format::map_part::{
    MapExtent, PartIdentity, decode_part, encode_part, part_first_address,
};
use sawmill_format::newest_state::{self, NewestState};
use sawmill_format::preamble::{Kind, Preamble};
use sawmill_format::role;
use sawmill_format::segment::{
    FRAME_HEAD_BYTES, FrameIdentity, SegmentExtent, SegmentHeader, SegmentIdentity, frame_open,
    frame_seal, header_bytes_of,
};
use sawmill_format::staging::{StagingHeader, StagingIdentity};
use sawmill_format::transfer::TransferProgress;
use sawmill_format::volume_record::VolumeRecord;
use sawmill_format::{
    cache_index, checkpoint as checkpoint_at, export_state as export_state_at, map_part as part_at,
    segment as segment_at, transfer,
};
use sawmill_format::{staging as staging_at, volume_record as record_of_volume_at};

use crate::mend::{id_at, kind_of, mended, put, u16_at, u32_at, u64_at};

/// Another volume.
fn other(volume_id: VolumeId) -> VolumeId {
    VolumeId(volume_id.0.map(|byte| !byte))
}

/// The memory of a list is bounded by the bytes that it was read from.
fn bounded<T>(list: &Vec<T>, from: &[u8]) {
    // The smallest entry (four bytes in a map part) becomes 32 bytes in memory.
    assert!(
        list.capacity() * size_of::<T>() <= 8 * from.len() + 64,
        "a list larger than its bytes justify"
    );
}

fn volume_at(bytes: &[u8], field: Field) -> VolumeId {
    VolumeId(id_at(bytes, field).unwrap_or_default())
}

pub(crate) fn segment(bytes: &[u8]) {
    segment_header(bytes);
    segment_header(&mended(bytes, Kind::Segment));
}

fn segment_header(bytes: &[u8]) {
    use segment_at::at;
    let header_bytes = header_bytes_of(bytes);
    let volume_id = volume_at(bytes, at::VOLUME_ID);
    let identity =
        SegmentIdentity { volume_id, sequence: u64_at(bytes, at::SEQUENCE).unwrap_or(0) };
    let Ok(header) = SegmentHeader::decode(bytes, &identity) else { return };
    assert_eq!(header.check(), Ok(()));
    assert_eq!(header_bytes, Ok(header.header_bytes()));
    let (head, body) = bytes.split_at(header.header_bytes() as usize);
    assert_eq!(header.encode().as_deref(), Ok(head));
    bounded(&header.extents, head);
    bounded(&header.frames, head);
    // A store may return another object's bytes, which must never pass for the ones asked for.
    let other = SegmentIdentity { sequence: identity.sequence ^ 1, ..identity };
    assert!(SegmentHeader::decode(bytes, &other).is_err());
    let disjoint = |pair: &[SegmentExtent]| pair[0].address + pair[0].length <= pair[1].address;
    assert!(header.extents.windows(2).all(disjoint));
    assert!(header.next_sequence > header.sequence && header.position_end >= header.position_start);
    frames(&header, body);
}

/// Frames as they are, and resealed over the same bytes.
fn frames(header: &SegmentHeader, body: &[u8]) {
    for (number, frame) in header.frames.iter().enumerate().take(8) {
        let start = frame.body_offset as usize;
        let Some(stored) = body.get(start..start + frame.stored_bytes as usize) else { continue };
        let identity = FrameIdentity {
            volume_id: header.volume_id,
            sequence: header.sequence,
            epoch: header.epoch,
            frame: number as u32,
        };
        let reseal = |data: &[u8]| {
            let mut head = [0; FRAME_HEAD_BYTES];
            frame_seal(&identity, data, &mut head);
            [&head[..], data].concat()
        };
        if let Ok(data) = frame_open(&identity, stored) {
            assert_eq!(reseal(data), stored);
        }
        let mut sealed = reseal(&stored[FRAME_HEAD_BYTES..]);
        assert_eq!(frame_open(&identity, &sealed), Ok(&stored[FRAME_HEAD_BYTES..]));
        assert!(
            frame_open(&FrameIdentity { epoch: identity.epoch ^ 1, ..identity }, &sealed).is_err()
        );
        let flipped = stored.iter().fold(0, |sum, byte| (sum * 31 + usize::from(*byte)) & 0xffff)
            % sealed.len();
        sealed[flipped] ^= 1 << (flipped % 8);
        assert!(frame_open(&identity, &sealed).is_err(), "a flipped bit is noticed");
    }
}

pub(crate) fn checkpoint(bytes: &[u8]) {
    one_checkpoint(bytes);
    one_checkpoint(&mended(bytes, Kind::Checkpoint));
    // Tables out of order are refused, and random numbers are hardly ever in order.
    let mut in_order = mended(bytes, Kind::Checkpoint);
    sort_tables(&mut in_order);
    one_checkpoint(&mended(&in_order, Kind::Checkpoint));
}

/// Numbers both tables of a mended checkpoint upwards.
fn sort_tables(bytes: &mut [u8]) {
    use checkpoint_at::{at, part_at, segment_at};
    let segments = u32_at(bytes, at::SEGMENT_COUNT).unwrap_or(0) as usize * segment_at::SIZE;
    let tables = at::SIZE..bytes.len() - 4;
    let (segments, parts) = bytes[tables].split_at_mut(segments);
    for (number, entry) in segments.chunks_exact_mut(segment_at::SIZE).enumerate() {
        put(entry, segment_at::SEQUENCE, &(1 + number as u64).to_le_bytes());
    }
    for (number, entry) in parts.chunks_exact_mut(part_at::SIZE).enumerate() {
        put(entry, part_at::GROUP, &(number as u64).to_le_bytes());
    }
}

fn one_checkpoint(bytes: &[u8]) {
    use checkpoint_at::at;
    let volume_id = volume_at(bytes, at::VOLUME_ID);
    let identity = CheckpointIdentity { volume_id, number: u64_at(bytes, at::NUMBER).unwrap_or(0) };
    let Ok(value) = Checkpoint::decode(bytes, &identity) else { return };
    assert_eq!(value.check(), Ok(()));
    assert_eq!(value.encode().as_deref(), Ok(bytes));
    bounded(&value.segments, bytes);
    bounded(&value.parts, bytes);
    assert!(value.segments.is_sorted_by_key(|entry: &SegmentEntry| entry.sequence));
    assert!(value.parts.is_sorted_by_key(|entry: &PartEntry| entry.group));
    assert!(
        Checkpoint::decode(bytes, &CheckpointIdentity { volume_id: other(volume_id), ..identity })
            .is_err()
    );
}

pub(crate) fn map_part(bytes: &[u8]) {
    one_part(bytes);
    one_part(&mended(bytes, Kind::MapPart));
}

fn one_part(bytes: &[u8]) {
    use part_at::at;
    let identity = PartIdentity {
        volume_id: volume_at(bytes, at::VOLUME_ID),
        group: u64_at(bytes, at::GROUP).unwrap_or(0),
        number: u64_at(bytes, at::NUMBER).unwrap_or(0),
        put_id: PutId(id_at(bytes, at::PUT_ID).unwrap_or_default()),
    };
    let Ok(extents) = decode_part(bytes, &identity) else { return };
    let first = part_first_address(bytes).expect("it is as long as a part");
    assert_eq!(
        encode_part(&identity, first, &extents).expect("what was read can be written"),
        bytes
    );
    bounded(&extents, bytes);
    let disjoint = |pair: &[MapExtent]| pair[0].address + pair[0].length <= pair[1].address;
    assert!(extents.windows(2).all(disjoint) && extents.iter().all(|extent| extent.length > 0));
    assert!(extents.first().is_none_or(|extent| extent.address >= first));
    assert!(decode_part(bytes, &PartIdentity { group: identity.group ^ 1, ..identity }).is_err());
}

/// The structures of fixed length, the volume record, the cache index, a transfer's progress, and
/// the head of a journal record.
pub(crate) fn small(bytes: &[u8]) {
    let _ = Preamble::decode(bytes);
    record(bytes);
    order(bytes);
    let mut whole = bytes.to_vec();
    whole.resize(whole.len().max(RECORD_HEADER_BYTES), 0);
    mend_record(&mut whole);
    record(&whole);
    let Some(kind) = kind_of(bytes) else { return };
    for bytes in [bytes, &mended(bytes, kind)] {
        match kind {
            Kind::VolumeRecord => volume_record(bytes),
            Kind::JournalSuperblock => superblock(bytes),
            Kind::Staging => staging(bytes),
            Kind::CacheIndex => index(bytes),
            Kind::TransferProgress => transfer(bytes),
            Kind::ExportState => export_state(bytes),
            Kind::NewestState => newest_state(bytes),
            Kind::Pin => pin(bytes),
            Kind::NameRecord => name_record(bytes),
            Kind::Role => role(bytes),
            Kind::BootSet => boot_set(bytes),
            Kind::Segment | Kind::Checkpoint | Kind::MapPart => {}
        }
    }
}

fn name_record(bytes: &[u8]) {
    use sawmill_format::name_record::{NameRecord, at};
    use sawmill_format::volume_record::at as inner;
    let number = u64_at(bytes, at::NUMBER).unwrap_or(0);
    let volume = at::SIZE + usize::from(u16_at(bytes, at::TARGET_BYTES).unwrap_or(0));
    let rest = bytes.get(volume..).unwrap_or_default();
    let name_bytes = usize::from(u16_at(rest, inner::NAME_BYTES).unwrap_or(0));
    let name =
        rest.get(inner::SIZE..inner::SIZE + name_bytes).and_then(|name| str::from_utf8(name).ok());
    let Some(name) = name else { return };
    let Ok(value) = NameRecord::decode(bytes, name, number) else { return };
    assert_eq!(value.encode().as_deref(), Ok(bytes));
    assert!(NameRecord::decode(bytes, name, number ^ 1).is_err());
}

fn role(bytes: &[u8]) {
    let volume_id = volume_at(bytes, role::at::VOLUME_ID);
    let number = u64_at(bytes, role::at::NUMBER).unwrap_or(0);
    let Ok(value) = role::Role::decode(bytes, volume_id, number) else { return };
    assert_eq!(value.encode().as_deref(), Ok(bytes));
    assert!(role::Role::decode(bytes, volume_id, number ^ 1).is_err());
    assert!(role::Role::decode(bytes, other(volume_id), number).is_err());
}

fn boot_set(bytes: &[u8]) {
    use sawmill_format::boot_set::{BootSet, RANGES_MAX, at};
    let volume_id = volume_at(bytes, at::VOLUME_ID);
    let number = u64_at(bytes, at::NUMBER).unwrap_or(0);
    let Ok(value) = BootSet::decode(bytes, volume_id, number) else { return };
    assert_eq!(value.encode().as_deref(), Ok(bytes));
    assert!(value.ranges.len() <= RANGES_MAX);
    bounded(&value.ranges, bytes);
    assert!(value.ranges.iter().all(|(address, length)| address.checked_add(*length).is_some()));
    assert!(BootSet::decode(bytes, volume_id, number ^ 1).is_err());
    assert!(BootSet::decode(bytes, other(volume_id), number).is_err());
}

/// Corrects the checksums of a record's head.
pub(crate) fn mend_record(head: &mut [u8]) {
    use sawmill_format::crc::crc32c;
    let slot = crc32c(&head[..record_at::SLOT_CRC.offset]);
    put(head, record_at::SLOT_CRC, &slot.to_le_bytes());
    let after_slot = record_at::SLOT_CRC.offset + record_at::SLOT_CRC.size;
    let covered =
        [&head[..record_at::SLOT_CRC.offset], &head[after_slot..record_at::HEADER_CRC.offset]]
            .concat();
    put(head, record_at::HEADER_CRC, &crc32c(&covered).to_le_bytes());
}

fn record(bytes: &[u8]) {
    let tag = u64_at(bytes, record_at::TAG).unwrap_or(0);
    let position = u64_at(bytes, record_at::POSITION).unwrap_or(0);
    let slot = RecordHeader::decode_slot(bytes, tag, position);
    let Ok(header) = RecordHeader::decode(bytes, tag, position) else { return };
    assert_eq!(slot, Ok(header.slot_bytes));
    assert_eq!(header.check(), Ok(()));
    let mut again = [0; RECORD_HEADER_BYTES];
    header.encode(&mut again);
    assert_eq!(again, bytes[..RECORD_HEADER_BYTES]);
    assert!(RecordHeader::decode(bytes, tag ^ 1, position).is_err());
    assert!(RecordHeader::decode(bytes, tag, position ^ 4096).is_err());
}

fn pin(bytes: &[u8]) {
    let volume_id = volume_at(bytes, kept_block::pin_at::VOLUME_ID);
    let pin_number = u64_at(bytes, kept_block::pin_at::PIN_NUMBER).unwrap_or(0);
    let Ok(value) = Pin::decode(bytes, volume_id, pin_number) else { return };
    assert!(PinnedStatus::of(&value).is_none_or(|status| status as u64 == value.number));
    assert_eq!(value.encode().as_deref(), Ok(bytes));
    assert!(Pin::decode(bytes, volume_id, pin_number ^ 1).is_err());
    assert!(Pin::decode(bytes, other(volume_id), pin_number).is_err());
}

/// Orders have no head and no checksum of their own; their frame has them.
fn order(bytes: &[u8]) {
    if let Ok(value) = Order::decode(bytes) {
        assert_eq!(value.encode().as_deref(), Ok(bytes));
    }
}

fn volume_record(bytes: &[u8]) {
    use record_of_volume_at::at;
    let name_bytes = usize::from(u16_at(bytes, at::NAME_BYTES).unwrap_or(0));
    let name =
        bytes.get(at::SIZE..at::SIZE + name_bytes).and_then(|name| str::from_utf8(name).ok());
    let Ok(value) = VolumeRecord::decode(bytes, name.unwrap_or("")) else { return };
    assert_eq!(value.check(), Ok(()));
    assert_eq!(value.encode().expect("what was read can be written"), bytes);
    assert!(VolumeRecord::decode(bytes, "another").is_err() || value.name == "another");
}

fn superblock(bytes: &[u8]) {
    let owner = Superblock::owner(bytes);
    let volume_id = volume_at(bytes, superblock_at::VOLUME_ID);
    let read = Superblock::decode(bytes, volume_id);
    let chosen = choose_superblock(bytes, bytes, volume_id);
    let Ok(value) = read else { return };
    assert_eq!(owner, Ok(volume_id));
    assert_eq!(value.encode().as_ref().map(|block| &block[..]), Ok(bytes));
    assert_eq!(chosen.as_ref(), Ok(&value), "the copy that belongs where it lies is chosen");
    assert!(value.capacity_bytes > 0 && value.capacity_bytes.is_multiple_of(4096));
    assert!(Superblock::decode(bytes, other(volume_id)).is_err());
}

fn staging(bytes: &[u8]) {
    use staging_at::at;
    let volume_id = volume_at(bytes, at::VOLUME_ID);
    let journal_tag = u64_at(bytes, at::JOURNAL_TAG).unwrap_or(0);
    let Ok(value) = StagingHeader::decode(bytes, &StagingIdentity { volume_id, journal_tag })
    else {
        return;
    };
    assert_eq!(value.encode().as_ref().map(|page| &page[..]), Ok(&bytes[..4096]));
    let other = StagingIdentity { volume_id, journal_tag: journal_tag ^ 1 };
    assert!(StagingHeader::decode(bytes, &other).is_err());
}

fn index(bytes: &[u8]) {
    let tag = u64_at(bytes, cache_index::at::CACHE_TAG).unwrap_or(0);
    let Ok(value) = CacheIndex::decode(bytes, tag) else { return };
    assert_eq!(value.check(), Ok(()));
    assert_eq!(value.encode().as_deref(), Ok(bytes));
    bounded(&value.owners, bytes);
    bounded(&value.entries, bytes);
    let exists = |entry: &CacheEntry| {
        (entry.owner as usize) < value.owners.len() && entry.cell < value.cell_count
    };
    assert!(value.entries.iter().all(exists));
    assert!(CacheIndex::decode(bytes, tag ^ 1).is_err());
}

fn export_state(bytes: &[u8]) {
    let identity = bytes.get(export_state_at::at::SIZE..bytes.len().saturating_sub(4));
    let identity = identity.and_then(|text| str::from_utf8(text).ok()).unwrap_or("");
    let Ok(value) = ExportState::decode(bytes, identity) else { return };
    assert_eq!(value.encode().as_deref(), Ok(bytes));
    assert!(value.identity.capacity() <= bytes.len());
}

fn newest_state(bytes: &[u8]) {
    let volume_id = volume_at(bytes, newest_state::at::VOLUME_ID);
    let Ok(value) = NewestState::decode(bytes, volume_id) else { return };
    assert_eq!(value.encode().as_deref(), Ok(bytes));
    assert!(NewestState::decode(bytes, other(volume_id)).is_err());
}

fn transfer(bytes: &[u8]) {
    let volume_id = volume_at(bytes, transfer::at::VOLUME_ID);
    let Ok(value) = TransferProgress::decode(bytes, volume_id) else { return };
    assert_eq!(value.encode().as_deref(), Ok(bytes));
    assert!(value.done_bytes <= value.size_bytes);
    assert!(TransferProgress::decode(bytes, other(volume_id)).is_err());
}
