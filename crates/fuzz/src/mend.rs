//! Corrects the fields that shield the code behind them: preambles, counts and checksums.
//!
//! Invariant: fields that are already correct are not changed.

use sawmill_format::crc::crc32c;
use sawmill_format::layout::Field;
use sawmill_format::preamble::{Kind, MAGIC, PREAMBLE_BYTES, VERSION_FIRST, at};
use sawmill_format::{
    boot_set, cache_index, checkpoint, export_state, kept_block, map_part, name_record,
    newest_state, role, segment, transfer, volume_record,
};

const CRC_BYTES: usize = 4;

pub(crate) fn u16_at(bytes: &[u8], field: Field) -> Option<u16> {
    Some(u16::from_le_bytes(*bytes.get(field.offset..)?.first_chunk()?))
}

pub(crate) fn u32_at(bytes: &[u8], field: Field) -> Option<u32> {
    Some(u32::from_le_bytes(*bytes.get(field.offset..)?.first_chunk()?))
}

pub(crate) fn u64_at(bytes: &[u8], field: Field) -> Option<u64> {
    Some(u64::from_le_bytes(*bytes.get(field.offset..)?.first_chunk()?))
}

pub(crate) fn id_at(bytes: &[u8], field: Field) -> Option<[u8; 16]> {
    bytes.get(field.offset..)?.first_chunk().copied()
}

/// Writes a field that lies within `bytes`.
pub(crate) fn put(bytes: &mut [u8], field: Field, value: &[u8]) {
    bytes[field.offset..field.offset + field.size].copy_from_slice(value);
}

fn put_count(bytes: &mut [u8], field: Field, count: usize) {
    put(bytes, field, &(count as u32).to_le_bytes());
}

/// Preamble in front, checksum over all at the end. `bytes` has room for both.
pub(crate) fn seal(bytes: &mut [u8], kind: Kind) {
    let length = bytes.len();
    put(bytes, at::MAGIC, &MAGIC);
    put(bytes, at::KIND, &(kind as u16).to_le_bytes());
    put(bytes, at::VERSION, &VERSION_FIRST.to_le_bytes());
    put(bytes, at::LENGTH, &(length as u64).to_le_bytes());
    let (body, crc) = bytes.split_at_mut(length - CRC_BYTES);
    crc.copy_from_slice(&crc32c(body).to_le_bytes());
}

/// The kind that the preamble names, if it is a preamble.
pub(crate) fn kind_of(bytes: &[u8]) -> Option<Kind> {
    (bytes.len() >= PREAMBLE_BYTES && bytes[..4] == MAGIC)
        .then(|| u16_at(bytes, at::KIND))?
        .and_then(Kind::from_number)
}

/// Two tables share the bytes between the fixed part and the checksum: the first keeps its count if
/// there is room, the second gets the remaining room, and the rest is cut off. Returns their sizes
/// in entries.
fn share(bytes: &mut Vec<u8>, fixed: usize, first: (Field, usize), second: (Field, usize)) {
    let room = bytes.len() - fixed - CRC_BYTES;
    let first_count = (u32_at(bytes, first.0).unwrap_or(0) as usize).min(room / first.1);
    let second_count = (room - first_count * first.1) / second.1;
    put_count(bytes, first.0, first_count);
    put_count(bytes, second.0, second_count);
    // A decoder refuses bytes behind its tables, so what fits no entry is cut off.
    bytes.truncate(fixed + first_count * first.1 + second_count * second.1 + CRC_BYTES);
}

/// The length of the part that all structures of a kind have.
fn fixed_bytes(kind: Kind) -> usize {
    match kind {
        Kind::VolumeRecord => volume_record::at::SIZE,
        Kind::Segment => segment::at::SIZE,
        Kind::Checkpoint => checkpoint::at::SIZE,
        Kind::MapPart => map_part::at::SIZE,
        Kind::CacheIndex => cache_index::at::SIZE,
        Kind::TransferProgress => transfer::at::SIZE,
        Kind::ExportState => export_state::at::SIZE,
        Kind::NewestState => newest_state::at::SIZE,
        Kind::NameRecord => name_record::at::SIZE,
        Kind::Role => role::at::SIZE,
        Kind::BootSet => boot_set::at::SIZE,
        Kind::JournalSuperblock | Kind::Staging => 4096 - CRC_BYTES,
        Kind::Pin => kept_block::pin_at::SIZE - CRC_BYTES,
    }
}

/// The structure of this kind that is nearest to `bytes`.
pub(crate) fn mended(bytes: &[u8], kind: Kind) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    let fixed = fixed_bytes(kind);
    bytes.resize(bytes.len().max(fixed + CRC_BYTES), 0);
    match kind {
        Kind::VolumeRecord => {
            let name_bytes = bytes.len() - fixed - CRC_BYTES;
            put(&mut bytes, volume_record::at::NAME_BYTES, &(name_bytes as u16).to_le_bytes());
        }
        Kind::Segment => mend_segment(&mut bytes),
        Kind::Checkpoint => {
            put_count(&mut bytes, checkpoint::at::KEPT_BYTES, 0);
            let segments = (checkpoint::at::SEGMENT_COUNT, checkpoint::segment_at::SIZE);
            share(
                &mut bytes,
                fixed,
                segments,
                (checkpoint::at::PART_COUNT, checkpoint::part_at::SIZE),
            );
        }
        Kind::MapPart => {
            let entries = bytes.len() - CRC_BYTES;
            // Four numbers per entry, each ending in a byte without the highest bit.
            let ends = bytes[fixed..entries].iter().filter(|byte| **byte < 0x80).count();
            put_count(&mut bytes, map_part::at::EXTENT_COUNT, ends / 4);
        }
        Kind::CacheIndex => {
            let owners = (cache_index::at::OWNER_COUNT, 16);
            share(
                &mut bytes,
                fixed,
                owners,
                (cache_index::at::ENTRY_COUNT, cache_index::entry_at::SIZE),
            );
        }
        Kind::TransferProgress => {
            let texts = (transfer::at::FAR_NAME_BYTES, 1);
            share(&mut bytes, fixed, texts, (transfer::at::FAR_STATE_BYTES, 1));
        }
        Kind::ExportState => {
            let identity_bytes = bytes.len() - fixed - CRC_BYTES;
            put_count(&mut bytes, export_state::at::IDENTITY_BYTES, identity_bytes);
        }
        Kind::NameRecord => mend_name_record(&mut bytes, fixed),
        Kind::Role => {
            let source_bytes = bytes.len() - fixed - CRC_BYTES;
            put(&mut bytes, role::at::SOURCE_BYTES, &(source_bytes as u16).to_le_bytes());
        }
        Kind::BootSet => {
            let ranges = (bytes.len() - fixed - CRC_BYTES) / boot_set::range_at::SIZE;
            put_count(&mut bytes, boot_set::at::RANGE_COUNT, ranges);
            bytes.truncate(fixed + ranges * boot_set::range_at::SIZE + CRC_BYTES);
            put(&mut bytes, boot_set::at::RESERVED, &[0; 4]);
        }
        Kind::JournalSuperblock | Kind::Staging => bytes.truncate(4096),
        Kind::NewestState => bytes.truncate(newest_state::at::SIZE + CRC_BYTES),
        Kind::Pin => bytes.truncate(kept_block::pin_at::SIZE),
    }
    match kind {
        // Sealed already: its checksum is at the end of its header, and not of the object.
        Kind::Segment => {}
        _ => seal(&mut bytes, kind),
    }
    bytes
}

/// A record of a name: its target, then the record of the volume.
fn mend_name_record(bytes: &mut Vec<u8>, fixed: usize) {
    use name_record::at::TARGET_BYTES;
    let target = usize::from(bytes[TARGET_BYTES.offset]);
    let volume = fixed + bytes.len().saturating_sub(fixed + CRC_BYTES).min(target);
    put(bytes, TARGET_BYTES, &((volume - fixed) as u16).to_le_bytes());
    let end = bytes.len() - CRC_BYTES;
    let inner = mended(&bytes[volume..end], Kind::VolumeRecord);
    bytes.truncate(volume);
    bytes.extend_from_slice(&inner);
    bytes.extend_from_slice(&[0; CRC_BYTES]);
}

/// A segment's header ends somewhere in its object. Frames are made to fit what the counts say.
fn mend_segment(bytes: &mut [u8]) {
    use segment::{at, extent_at, frame_at};
    let room = bytes.len() - at::SIZE - CRC_BYTES;
    let is_moved = bytes[at::KIND.offset] == segment::SegmentKind::Moved as u8;
    let extent_bytes = extent_at::SIZE + if is_moved { segment::origin_at::SIZE } else { 0 };
    let extents = (u32_at(bytes, at::EXTENT_COUNT).unwrap_or(0) as usize).min(room / extent_bytes);
    let frame_room = (room - extents * extent_bytes) / frame_at::SIZE;
    let frame_bytes = u32_at(bytes, at::FRAME_BYTES).unwrap_or(0).max(1);
    let frames = (u32_at(bytes, at::FRAME_COUNT).unwrap_or(0) as usize).min(frame_room);
    let data_bytes = u64_at(bytes, at::DATA_BYTES).unwrap_or(0);
    let data_bytes = match frames as u64 * u64::from(frame_bytes) {
        most if data_bytes.div_ceil(u64::from(frame_bytes)) != frames as u64 => most,
        _ => data_bytes,
    };
    put_count(bytes, at::EXTENT_COUNT, extents);
    put_count(bytes, at::FRAME_COUNT, frames);
    put(bytes, at::FRAME_BYTES, &frame_bytes.to_le_bytes());
    put(bytes, at::DATA_BYTES, &data_bytes.to_le_bytes());
    let table = at::SIZE + extents * extent_at::SIZE;
    let mut body = 0u32;
    for entry in bytes[table..table + frames * frame_at::SIZE].chunks_exact_mut(frame_at::SIZE) {
        put(entry, frame_at::BODY_OFFSET, &body.to_le_bytes());
        let stored = u32_at(entry, frame_at::STORED_BYTES).unwrap_or(0).clamp(17, 1 << 20);
        put(entry, frame_at::STORED_BYTES, &stored.to_le_bytes());
        body = body.saturating_add(stored);
    }
    put(bytes, at::BODY_BYTES, &u64::from(body).to_le_bytes());
    let header_bytes = segment::encoded_bytes(extents, frames, if is_moved { extents } else { 0 });
    seal(&mut bytes[..header_bytes], Kind::Segment);
}
