//! Properties of every structure: what was encoded decodes to the same, nothing makes a decoder
//! panic, and what a decoder accepts is what the encoder would write.

use proptest::array::uniform16;
use proptest::collection::vec;
use proptest::prelude::*;
use sawmill_format::boot_set::BootSet;
use sawmill_format::cache_index::{CacheEntry, CacheIndex};
use sawmill_format::checkpoint::{Checkpoint, CheckpointIdentity, PartEntry, SegmentEntry};
use sawmill_format::crc::{Crc32c, crc32c, payload_check};
use sawmill_format::export_state::ExportState;
use sawmill_format::ids::{PutId, VolumeId};
use sawmill_format::journal::*;
use sawmill_format::kept_block::{
    CutEntry, CutKind, DeadEntry, KeptBlock, LineageEntry, Order, Pin,
};
use sawmill_format::map_part::{MapExtent, PartIdentity, decode_part, encode_part};
use sawmill_format::newest_state::NewestState;
use sawmill_format::packed_write::PackedWrite;
use sawmill_format::preamble::Preamble;
use sawmill_format::role::{PromotionPoint, Role, RoleKind};
use sawmill_format::segment::*;
use sawmill_format::staging::{StagingHeader, StagingIdentity};
use sawmill_format::transfer::TransferProgress;
use sawmill_format::volume_record::{FlushMode, VolumeRecord};

use crate::packed::encode_packed;
use crate::samples::{self, *};

/// Bit by bit, as the definition says.
fn crc32c_by_bits(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| {
            crc >> 1 ^ if crc & 1 == 1 { 0x82f6_3b78 } else { 0 }
        })
    })
}

#[test]
fn crc_has_the_published_values() {
    assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    assert_eq!(crc32c(b""), 0);
    assert_eq!(payload_check(b"123456789"), 0xcbf4_3926);
    assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
    assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
    let ascending: Vec<u8> = (0..32).collect();
    assert_eq!(crc32c(&ascending), 0x46dd_794e);
}

prop_compose! {
    fn ids()(
        volume_id in uniform16(any::<u8>()), put_id in uniform16(any::<u8>()),
    ) -> (VolumeId, PutId) {
        (VolumeId(volume_id), PutId(put_id))
    }
}

prop_compose! {
    fn volume_records()(
        (volume_id, put_id) in ids(), blocks: u32,
        block_bytes in prop_oneof![Just(512u32), Just(4096)],
        segment_bytes in 1u32.., frame_bytes in 1u32.., mode in 0usize..3, created_unix_ms: u64,
        name in ".{1,40}",
    ) -> VolumeRecord {
        let size_bytes = u64::from(blocks) * u64::from(block_bytes);
        let flush_mode = FlushMode::ALL[mode];
        VolumeRecord {
            volume_id, put_id, size_bytes, block_bytes, segment_bytes, frame_bytes, flush_mode,
            created_unix_ms, name,
        }
    }
}

prop_compose! {
    fn segments()(
        (volume_id, put_id) in ids(), numbers in uniform16(any::<u64>()),
        segment_kind in prop_oneof![
            Just(SegmentKind::Data),
            Just(SegmentKind::Fence),
            Just(SegmentKind::Moved),
        ],
        frame_bytes in 1u32..2000, data in vec(any::<u8>(), 0..5000),
        runs in vec((0u64..5000, 1u64..5000, 0u8..3), 0..40),
    ) -> (SegmentHeader, Vec<u8>) {
        let mut free_from = numbers[0] >> 1;
        let mut extents = Vec::new();
        for (gap, length, kind) in runs {
            let kind = [ExtentKind::Data, ExtentKind::Zero, ExtentKind::Discard][usize::from(kind)];
            let kind = if segment_kind == SegmentKind::Moved { ExtentKind::Data } else { kind };
            let fits = kind != ExtentKind::Data || length <= data.len() as u64;
            let offset =
                if kind == ExtentKind::Data && fits { data.len() as u64 - length } else { 0 };
            if fits {
                let data_offset = offset as u32;
                extents.push(SegmentExtent { address: free_from + gap, length, data_offset, kind });
                free_from += gap + length;
            }
        }
        let fence = segment_kind == SegmentKind::Fence;
        let sequence = (numbers[1] >> 1).max(1);
        let moved = segment_kind == SegmentKind::Moved;
        let origin = |number: usize| {
            Origin { sequence: (sequence - 1) >> (number % 7), data_offset: number as u32 }
        };
        let origins = if moved { (0..extents.len()).map(origin).collect() } else { vec![] };
        let position_end = numbers[6].max(numbers[7]);
        let header = SegmentHeader {
            volume_id, put_id,
            sequence,
            epoch: numbers[2],
            previous_sequence: numbers[3],
            stored_through: numbers[4],
            checkpoint_number: numbers[5],
            position_start: if moved { position_end } else { numbers[6].min(numbers[7]) },
            position_end,
            wall_unix_ms: numbers[8],
            next_sequence: sequence + if fence { FENCE_WINDOW } else { 1 },
            kind: segment_kind,
            frame_bytes,
            data_bytes: data.len() as u64,
            extents,
            frames: raw_frames(data.len() as u64, frame_bytes).unwrap(),
            origins,
            size_bytes: if fence { numbers[1] & 0xff_ffff } else { 0 },
        };
        (header, data)
    }
}

prop_compose! {
    fn segment_entries()(
        steps in vec((1u64..1 << 50, uniform16(any::<u32>()), any::<bool>()), 0..20),
    ) -> Vec<SegmentEntry> {
        let mut sequence = 0;
        steps.into_iter().map(|(step, numbers, dead)| {
            sequence += step;
            let wide = |at: usize| u64::from(numbers[at]) << 32 | u64::from(numbers[at + 1]);
            SegmentEntry {
                sequence, epoch: wide(0), data_bytes: wide(2), live_bytes: wide(4),
                wall_unix_ms: wide(6),
                header_bytes: numbers[8], object_bytes: wide(9), dead,
            }
        }).collect()
    }
}

prop_compose! {
    fn part_entries()(
        steps in vec((1u64..1 << 50, ids(), any::<u64>(), any::<[u32; 3]>()), 0..20),
    ) -> Vec<PartEntry> {
        let mut group = 0;
        steps.into_iter().map(|(step, (_, put_id), number, [bytes, extents, crc])| {
            group += step;
            PartEntry { group, number, put_id, bytes, extents, crc }
        }).collect()
    }
}

fn names() -> impl Strategy<Value = String> {
    "[a-zA-Z0-9._-]{1,128}"
}

prop_compose! {
    fn cut_entries()(
        rows in vec((0u8..3, names(), ids(), any::<[u64; 5]>()), 0..6),
    ) -> Vec<CutEntry> {
        let mut cuts: Vec<_> = rows.into_iter().map(|(kind, name, (_, put_id), numbers)| {
            let kind = [CutKind::Retained, CutKind::Snapshot, CutKind::Pin][usize::from(kind)];
            let name = if kind == CutKind::Snapshot { name } else { String::new() };
            let [number, through_sequence, position, wall_unix_ms, pin] = numbers;
            // As in a checkpoint of any age; see `checkpoints`.
            let attached_s = (wall_unix_ms as u32) & 0xffff;
            CutEntry {
                kind, number, through_sequence, name, put_id, position, wall_unix_ms, pin,
                attached_s,
            }
        }).collect();
        cuts.sort();
        cuts.dedup();
        cuts
    }
}

prop_compose! {
    fn kept_blocks()(
        (retention_s, pins_next) in any::<(u64, u64)>(), cuts in cut_entries(), is_empty: bool,
        lineage in vec((1u64..1 << 40, ids(), any::<[u64; 3]>()), 0..4),
        dead in vec((1u64..1 << 40, any::<u64>()), 0..6),
    ) -> KeptBlock {
        let (mut through_sequence, mut sequence) = (0, 0);
        let lineage = lineage.into_iter().map(|(step, (volume_id, _), numbers)| {
            let [pin, cut_number, cut_through] = numbers;
            through_sequence += step;
            LineageEntry { through_sequence, volume_id, pin, cut_number, cut_through }
        }).collect();
        let dead = dead.into_iter().map(|(step, since)| {
            sequence += step;
            DeadEntry { sequence, since }
        }).collect();
        match is_empty {
            true => KeptBlock::default(),
            false => KeptBlock { retention_s, pins_next, cuts, lineage, dead },
        }
    }
}

prop_compose! {
    fn orders()(
        kind in 0u8..4, name in names(), numbers in any::<[u64; 3]>(), (_, put_id) in ids(),
    ) -> Order {
        let [retention_s, number, through_sequence] = numbers;
        match kind {
            0 => Order::CreateSnapshot(name),
            1 => Order::DeleteSnapshot(name),
            2 => Order::SetRetention(retention_s),
            _ => Order::RollBack { number, put_id, through_sequence },
        }
    }
}

prop_compose! {
    fn roles()(
        (volume_id, put_id) in ids(), number in 1..u64::MAX, wall_unix_ms: u64, source in ".{0,40}",
        kind in 0..3, [epoch, checkpoint_number, next_sequence]: [u64; 3],
    ) -> Role {
        let kind = match kind {
            0 => RoleKind::Replica,
            1 => RoleKind::Returned(PromotionPoint { epoch, checkpoint_number, next_sequence }),
            _ => RoleKind::Promoted(PromotionPoint { epoch, checkpoint_number, next_sequence }),
        };
        Role { volume_id, put_id, number, wall_unix_ms, kind, source }
    }
}

prop_compose! {
    fn boot_sets()(
        (volume_id, put_id) in ids(), number in 1..u64::MAX, wall_unix_ms: u64,
        ranges in vec((0..1u64 << 40, 1..1u64 << 20), 0..40),
    ) -> BootSet {
        BootSet { volume_id, put_id, number, wall_unix_ms, ranges }
    }
}

prop_compose! {
    fn pins()(
        name in names(), (volume_id, put_id) in ids(), (clone_id, _) in ids(),
        numbers in any::<[u64; 3]>(),
    ) -> Pin {
        let [pin_number, number, through_sequence] = numbers;
        Pin { volume_id, put_id, pin_number, clone_id, number, through_sequence, name }
    }
}

prop_compose! {
    fn checkpoints()(
        (volume_id, put_id) in ids(), numbers in uniform16(any::<u64>()), clean: bool,
        segments in segment_entries(), parts in part_entries(), kept in kept_blocks(),
    ) -> Checkpoint {
        let [number, epoch, through_sequence, next_sequence, position, wall_unix_ms, ..] = numbers;
        let attached_ms = if epoch % 2 == 0 { 0 } else { 65_535_000 + epoch / 4 };
        let repeats = numbers[9] % number.max(1);
        let mut kept = kept;
        if attached_ms == 0 {
            kept.cuts.iter_mut().for_each(|cut| cut.attached_s = 0);
        }
        Checkpoint {
            volume_id, put_id, number, epoch, through_sequence, next_sequence, position,
            wall_unix_ms,
            attached_ms, repeats, size_bytes: numbers[6], clean, extent_total: numbers[7],
            live_bytes: numbers[8], segments, parts,
            kept,
        }
    }
}

prop_compose! {
    fn parts()(
        (volume_id, put_id) in ids(), group: u64, number: u64, first_address in 0u64..1 << 62,
        runs in vec(
            (prop_oneof![Just(0), 0u64..1 << 50], 1u64..1 << 50, any::<u64>(), any::<u32>()),
            0..40,
        ),
    ) -> (PartIdentity, u64, Vec<MapExtent>) {
        let mut free_from = first_address;
        let extents = runs.into_iter().map(|(gap, length, sequence, data_offset)| {
            let address = free_from + gap;
            free_from = address + length;
            MapExtent { address, length, sequence, data_offset }
        });
        (PartIdentity { volume_id, put_id, group, number }, first_address, extents.collect())
    }
}

prop_compose! {
    fn superblocks()(
        (volume_id, intent_put_id) in ids(), numbers in any::<[u64; 8]>(), blocks in 1u64..1 << 40,
        clean: bool, boot_id: [u8; 16], folder in vec(1u8.., 0..=1022), has_copy: bool,
    ) -> Superblock {
        let [journal_tag, revision, epoch, intent_epoch, trim, logged, stored_sequence, ..] =
            numbers;
        Superblock {
            volume_id, journal_tag, revision, epoch, intent_epoch, intent_put_id,
            capacity_bytes: blocks * 4096, trim, logged, stored_sequence,
            stored_position: numbers[7], clean,
            bound_epoch: numbers[6], bound_position: numbers[5],
            memory: (!folder.is_empty()).then_some(Memory { boot_id, folder }),
            ring_copy: has_copy.then_some(RingCopy {
                from: trim / 2, at: trim / 2 + blocks * 2048, bytes: 1 + logged % (blocks * 2048),
            }),
        }
    }
}

prop_compose! {
    fn records()(
        [position, tag, epoch, logged] in any::<[u64; 4]>(), address in 0u64..1 << 63,
        length in 0u32..1 << 30, crc: u32, operation in 0usize..5,
    ) -> RecordHeader {
        use RecordOperation::{Discard, Pad, Void, Write, Zero};
        let operation = [Write, Discard, Zero, Pad, Void][operation];
        let pad = operation == Pad;
        RecordHeader {
            slot_bytes: if operation == Write { 80 + length } else { 80 + length % 5000 },
            position, tag, operation, epoch, logged,
            address: if pad { 0 } else { address },
            length: if pad { 0 } else { u64::from(length) },
            payload_crc: if operation == Write { crc } else { 0 },
        }
    }
}

prop_compose! {
    fn cache_indexes()(
        version in 1u16..3, frame_bytes in 1u32.., cache_tag: u64, owners in vec(ids(), 1..5),
        cell_count in 20u32..,
        entries in vec((any::<[u32; 6]>(), any::<u8>(), uniform16(any::<u32>())), 0..20),
    ) -> CacheIndex {
        let owners: Vec<_> = owners.into_iter().map(|(volume_id, _)| volume_id).collect();
        let entries = entries.into_iter().map(|(numbers, tier, crcs)| {
            let [owner, sequence, epoch, frame, cell, data] = numbers;
            let (sequence, epoch) = (u64::from(sequence) << 20, u64::from(epoch) << 20);
            let (owner, cell) = (owner % owners.len() as u32, cell % cell_count);
            let data_bytes = 1 + data % frame_bytes;
            CacheEntry { owner, sequence, epoch, frame, cell, data_bytes, tier, crcs }
        }).collect();
        CacheIndex { version, frame_bytes, cell_count, cache_tag, owners, entries }
    }
}

proptest! {
    #[test]
    fn crc_equals_its_definition_in_one_piece_and_in_many(
        bytes in vec(any::<u8>(), 0..9000), cuts in vec(0usize..9000, 0..5),
    ) {
        prop_assert_eq!(crc32c(&bytes), crc32c_by_bits(&bytes));
        let mut cuts: Vec<_> = cuts.into_iter().map(|cut| cut.min(bytes.len())).collect();
        cuts.extend([0, bytes.len()]);
        cuts.sort_unstable();
        let mut crc = Crc32c::new();
        cuts.windows(2).for_each(|cut| crc.update(&bytes[cut[0]..cut[1]]));
        prop_assert_eq!(crc.value(), crc32c(&bytes));
    }

    #[test]
    fn volume_records_round_trip(value in volume_records()) {
        let decoded = VolumeRecord::decode(&value.encode().unwrap(), &value.name);
        prop_assert_eq!(decoded, Ok(value));
    }

    #[test]
    fn segments_round_trip((header, data) in segments()) {
        let object = segment_object(&header, &data);
        prop_assert_eq!(object.len() as u64, header.object_bytes());
        prop_assert_eq!(header_bytes_of(&object[..16]), Ok(header.header_bytes()));
        let identity = SegmentIdentity { volume_id: header.volume_id, sequence: header.sequence };
        prop_assert_eq!(open_segment(&object, &identity), Ok((header, data)));
    }

    #[test]
    fn orders_round_trip(value in orders()) {
        prop_assert_eq!(Order::decode(&value.encode().unwrap()), Ok(value));
    }

    #[test]
    fn boot_sets_round_trip(value in boot_sets()) {
        let bytes = value.encode().unwrap();
        prop_assert_eq!(BootSet::decode(&bytes, value.volume_id, value.number), Ok(value));
    }

    #[test]
    fn roles_round_trip(value in roles()) {
        let bytes = value.encode().unwrap();
        prop_assert_eq!(Role::decode(&bytes, value.volume_id, value.number), Ok(value));
    }

    #[test]
    fn pins_round_trip(value in pins()) {
        let bytes = value.encode().unwrap();
        prop_assert_eq!(Pin::decode(&bytes, value.volume_id, value.pin_number), Ok(value));
    }

    #[test]
    fn checkpoints_round_trip(value in checkpoints()) {
        let identity = CheckpointIdentity { volume_id: value.volume_id, number: value.number };
        prop_assert_eq!(Checkpoint::decode(&value.encode().unwrap(), &identity), Ok(value));
    }

    #[test]
    fn map_parts_round_trip((identity, first_address, extents) in parts()) {
        let bytes = encode_part(&identity, first_address, &extents).unwrap();
        prop_assert_eq!(decode_part(&bytes, &identity), Ok(extents));
    }

    #[test]
    fn superblocks_round_trip(value in superblocks()) {
        prop_assert_eq!(Superblock::decode(&value.encode().unwrap(), value.volume_id), Ok(value));
    }

    #[test]
    fn journal_records_round_trip(value in records()) {
        let bytes = encoded(&value);
        prop_assert_eq!(RecordHeader::decode(&bytes, value.tag, value.position), Ok(value));
        prop_assert_eq!(
            RecordHeader::decode_slot(&bytes, value.tag, value.position), Ok(value.slot_bytes)
        );
    }

    #[test]
    fn staging_headers_round_trip(
        (volume_id, boot) in ids(), journal_tag: u64, capacity_bytes in 1u64..,
    ) {
        let (boot_id, epoch) = (boot.0, capacity_bytes / 3);
        let value = StagingHeader { volume_id, journal_tag, capacity_bytes, boot_id, epoch };
        let identity = StagingIdentity { volume_id, journal_tag };
        prop_assert_eq!(StagingHeader::decode(&value.encode().unwrap(), &identity), Ok(value));
    }

    #[test]
    fn export_states_round_trip(
        reservation: u64, failed_syncs: u64, epoch: u64, shared: bool, identity: String,
    ) {
        let value = ExportState { reservation, failed_syncs, epoch, shared, identity };
        prop_assert_eq!(ExportState::decode(&value.encode().unwrap(), &value.identity), Ok(value));
    }

    #[test]
    fn transfer_progress_round_trips(
        (volume_id, _) in ids(), size_bytes: u64, part: u64, epoch: u64, position: u64,
        far_name: String, far_state: String,
    ) {
        let done_bytes = part.min(size_bytes);
        let value =
            TransferProgress {
                volume_id, size_bytes, done_bytes, epoch, position, far_name, far_state,
            };
        prop_assert_eq!(TransferProgress::decode(&value.encode().unwrap(), volume_id), Ok(value));
    }

    #[test]
    fn cache_indexes_round_trip(value in cache_indexes()) {
        prop_assert_eq!(CacheIndex::decode(&value.encode().unwrap(), value.cache_tag), Ok(value));
    }
}

/// Decodes `bytes` as each structure there is; the accepted ones must be what the encoder writes.
pub(crate) fn decode_all(bytes: &[u8]) {
    crate::link_properties::decode_all(bytes);
    if let Ok(value) = PackedWrite::decode(bytes) {
        let ranges: Vec<_> = value.entries().collect();
        assert_eq!(encode_packed(&ranges).unwrap(), bytes);
    }
    let _ = Preamble::decode(bytes);
    let _ = header_bytes_of(bytes);
    let place = FrameIdentity { volume_id: VOLUME, sequence: 259, epoch: 3, frame: 0 };
    let _ = frame_open(&place, bytes);
    let position = write_record().position;
    let _ = RecordHeader::decode_slot(bytes, TAG, position);
    if let Ok(value) = RecordHeader::decode(bytes, TAG, position) {
        assert_eq!(encoded(&value), bytes[..80]);
    }
    if let Ok(value) = VolumeRecord::decode(bytes, "disk1") {
        assert_eq!(value.encode().unwrap(), bytes);
    }
    if let Ok(value) = SegmentHeader::decode(bytes, &SEGMENT) {
        assert_eq!(value.encode().unwrap(), bytes[..value.header_bytes() as usize]);
    }
    if let Ok(value) = Checkpoint::decode(bytes, &CHECKPOINT) {
        assert_eq!(value.encode().unwrap(), bytes);
    }
    if let Ok(extents) = decode_part(bytes, &PART) {
        let first_address = sawmill_format::map_part::part_first_address(bytes).unwrap();
        assert_eq!(encode_part(&PART, first_address, &extents).unwrap(), bytes);
    }
    if let Ok(value) = Superblock::decode(bytes, VOLUME) {
        assert_eq!(value.encode().unwrap()[..], *bytes);
    }
    if let Ok(value) = StagingHeader::decode(bytes, &STAGING) {
        assert_eq!(value.encode().unwrap()[..], bytes[..4096]);
    }
    if let Ok(value) = ExportState::decode(bytes, "/srv/images/disk.img") {
        assert_eq!(value.encode().unwrap(), bytes);
    }
    if let Ok(value) = BootSet::decode(bytes, VOLUME, 2) {
        assert_eq!(value.encode().unwrap(), bytes);
    }
    if let Ok(value) = NewestState::decode(bytes, VOLUME) {
        assert_eq!(value.encode().unwrap(), bytes);
    }
    if let Ok(value) = TransferProgress::decode(bytes, VOLUME) {
        assert_eq!(value.encode().unwrap(), bytes);
    }
    if let Ok(value) = CacheIndex::decode(bytes, TAG) {
        assert_eq!(value.encode().unwrap(), bytes);
    }
}

/// Recomputes the checksums, so that a changed byte reaches the checks behind them.
fn reseal(name: &str, bytes: &mut [u8]) {
    if name.starts_with("packed_write/") || name.starts_with("link_") {
        return;
    }
    if name.starts_with("journal/") && bytes.len() < 4096 {
        let slot_crc = crc32c(&bytes[..24]).to_le_bytes();
        bytes[24..28].copy_from_slice(&slot_crc);
        let header_crc = crc32c(&[&bytes[..24], &bytes[28..76]].concat()).to_le_bytes();
        bytes[76..80].copy_from_slice(&header_crc);
        return;
    }
    let length = u64::from_le_bytes(bytes[8..16].try_into().unwrap());
    let sealed = usize::try_from(length).ok().and_then(|length| bytes.get_mut(..length));
    if let Some((body, crc)) = sealed.and_then(|sealed| sealed.split_last_chunk_mut::<4>()) {
        *crc = crc32c(body).to_le_bytes();
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn no_bytes_make_a_decoder_panic(mut bytes in vec(any::<u8>(), 0..600), kind in 0u8..9) {
        decode_all(&bytes);
        let length = bytes.len() as u64;
        if let Some(preamble) = bytes.first_chunk_mut::<16>() {
            preamble[..8].copy_from_slice(&[b'S', b'A', b'W', b'M', kind, 0, 1, 0]);
            preamble[8..].copy_from_slice(&length.to_le_bytes());
            reseal("", &mut bytes);
        }
        decode_all(&bytes);
    }

    #[test]
    fn a_changed_vector_is_refused_or_is_another_value(
        case: prop::sample::Index,
        changes in vec((any::<prop::sample::Index>(), any::<u8>(), any::<bool>()), 1..4),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let cases = samples::all();
        let case = case.get(&cases);
        let mut bytes = case.bytes.clone();
        for (place, value, near_the_start) in changes {
            let reach = if near_the_start { bytes.len().min(160) } else { bytes.len() };
            bytes[place.index(reach)] = value;
        }
        decode_all(&bytes);
        reseal(case.name, &mut bytes);
        decode_all(&bytes);
        if let Some(cut) = cut {
            decode_all(&bytes[..cut.index(bytes.len())]);
        }
    }
}
