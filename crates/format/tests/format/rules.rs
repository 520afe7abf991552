//! What decoders refuse, and why, rule by rule; keys and names.

use sawmill_format::cache_index::CacheIndex;
use sawmill_format::checkpoint::*;
use sawmill_format::crc::crc32c;
use sawmill_format::export_state::ExportState;
use sawmill_format::ids::{PutId, VolumeId};
use sawmill_format::journal::*;
use sawmill_format::map_part::*;
use sawmill_format::preamble::{Kind, Preamble};
use sawmill_format::segment::*;
use sawmill_format::staging::StagingHeader;
use sawmill_format::transfer::TransferProgress;
use sawmill_format::volume_record::*;
use sawmill_format::{FormatError, IdentityValue};

use crate::samples::*;
use crate::superblock::superblock_value;

const OTHER: VolumeId = VolumeId([0xee; 16]);

/// Changes bytes and recomputes the CRC at the end.
fn resealed(mut bytes: Vec<u8>, length: usize, change: impl FnOnce(&mut [u8])) -> Vec<u8> {
    change(&mut bytes);
    let crc = crc32c(&bytes[..length - 4]);
    bytes[length - 4..length].copy_from_slice(&crc.to_le_bytes());
    bytes
}

/// The volume record with changed bytes and a correct CRC.
fn decode_changed(change: impl FnOnce(&mut [u8])) -> FormatError {
    let bytes = volume_record_value().encode().unwrap();
    let length = bytes.len();
    VolumeRecord::decode(&resealed(bytes, length, change), "disk1").unwrap_err()
}

pub(crate) fn field_of(error: FormatError) -> &'static str {
    match error {
        FormatError::Field { field, .. } => field,
        other => panic!("no field is named by: {other}"),
    }
}

#[test]
fn each_kind_of_refusal_has_its_own_error() {
    let what = "volume record";
    let bytes = volume_record_value().encode().unwrap();
    let damaged = |place: usize| {
        let mut bytes = bytes.clone();
        bytes[place] ^= 0x10;
        VolumeRecord::decode(&bytes, "disk1").unwrap_err()
    };
    let short = |length: usize| VolumeRecord::decode(&bytes[..length], "disk1").unwrap_err();
    assert_eq!(short(15), FormatError::Truncated { what, need: 16, have: 15 });
    assert_eq!(short(96), FormatError::Truncated { what, need: 97, have: 96 });
    assert_eq!(damaged(0), FormatError::Magic { what });
    assert_eq!(damaged(4), FormatError::Kind { what, expected: 1, found: 17 });
    assert_eq!(damaged(6), FormatError::Version { what, found: 17, supported: 1 });
    assert_eq!(damaged(48), FormatError::Checksum { what });
    assert_eq!(decode_changed(|bytes| bytes[70] = 1), FormatError::Reserved { what });
    let (expected, found) = (IdentityValue::from("disk2"), IdentityValue::from("disk1"));
    let foreign = FormatError::Identity { what, field: "name", expected, found };
    assert_eq!(VolumeRecord::decode(&bytes, "disk2"), Err(foreign));
    assert_eq!(field_of(decode_changed(|bytes| bytes[68] = 9)), "flush_mode");
}

#[test]
fn errors_name_what_was_refused_and_what_to_do() {
    let text = VolumeRecord::decode(&volume_record_value().encode().unwrap(), "disk2")
        .unwrap_err()
        .to_string();
    assert_eq!(text, r#"volume record: belongs elsewhere, its name is "disk1" and not "disk2""#);
    let newer = decode_changed(|bytes| bytes[6] = 2).to_string();
    assert_eq!(
        newer,
        "volume record: format version 2, this build reads up to 1; use a newer Sawmill"
    );
}

#[test]
fn bytes_after_the_end_of_a_whole_object_are_refused() {
    let longer = |mut bytes: Vec<u8>| {
        bytes.push(0);
        bytes
    };
    let length = |error| assert_eq!(field_of(error), "length");
    length(
        VolumeRecord::decode(&longer(volume_record_value().encode().unwrap()), "disk1")
            .unwrap_err(),
    );
    length(
        Checkpoint::decode(&longer(checkpoint_value().encode().unwrap()), &CHECKPOINT).unwrap_err(),
    );
    length(decode_part(&longer(part_bytes()), &PART).unwrap_err());
    length(
        Superblock::decode(&longer(superblock_value().encode().unwrap().to_vec()), VOLUME)
            .unwrap_err(),
    );
    length(CacheIndex::decode(&longer(cache_value(2).encode().unwrap()), TAG).unwrap_err());
}

#[test]
fn a_segment_header_and_a_staging_header_may_be_followed_by_more() {
    let (header, data) = (segment_value(), segment_data());
    assert_eq!(SegmentHeader::decode(&segment_object(&header, &data), &SEGMENT), Ok(header));
    let mut file = staging_value().encode().unwrap().to_vec();
    file.resize(3 * 4096, 0xaa);
    assert_eq!(StagingHeader::decode(&file, &STAGING), Ok(staging_value()));
}

#[test]
fn an_intact_structure_of_another_place_is_refused() {
    fn foreign<T: std::fmt::Debug>(result: Result<T, FormatError>, name: &str) {
        match result.unwrap_err() {
            FormatError::Identity { field, .. } => assert_eq!(field, name),
            other => panic!("{other}"),
        }
    }
    let segment = segment_value().encode().unwrap();
    foreign(
        SegmentHeader::decode(&segment, &SegmentIdentity { volume_id: OTHER, ..SEGMENT }),
        "volume_id",
    );
    foreign(
        SegmentHeader::decode(&segment, &SegmentIdentity { sequence: 260, ..SEGMENT }),
        "sequence",
    );
    let checkpoint = checkpoint_value().encode().unwrap();
    foreign(
        Checkpoint::decode(&checkpoint, &CheckpointIdentity { volume_id: OTHER, ..CHECKPOINT }),
        "volume_id",
    );
    foreign(
        Checkpoint::decode(&checkpoint, &CheckpointIdentity { number: 14, ..CHECKPOINT }),
        "number",
    );
    let part = part_bytes();
    foreign(decode_part(&part, &PartIdentity { volume_id: OTHER, ..PART }), "volume_id");
    foreign(decode_part(&part, &PartIdentity { group: 8, ..PART }), "group");
    foreign(decode_part(&part, &PartIdentity { number: 12, ..PART }), "number");
    foreign(decode_part(&part, &PartIdentity { put_id: PutId([1; 16]), ..PART }), "put_id");
    foreign(Superblock::decode(&superblock_value().encode().unwrap(), OTHER), "volume_id");
    let staging = staging_value().encode().unwrap();
    let tag = sawmill_format::staging::StagingIdentity { journal_tag: 1, ..STAGING };
    foreign(StagingHeader::decode(&staging, &tag), "journal_tag");
    foreign(CacheIndex::decode(&cache_value(2).encode().unwrap(), 1), "cache_tag");
    let state = crate::link::export_state_value().encode().unwrap();
    foreign(ExportState::decode(&state, "/srv/images/other.img"), "identity");
    let record = encoded(&write_record());
    foreign(RecordHeader::decode(&record, 1, write_record().position), "tag");
    foreign(RecordHeader::decode(&record, TAG, 80), "position");
}

#[test]
fn a_segment_header_that_breaks_a_rule_is_refused() {
    let breaks = |change: &dyn Fn(&mut SegmentHeader)| {
        let mut header = segment_value();
        change(&mut header);
        field_of(header.check().unwrap_err())
    };
    assert_eq!(breaks(&|header| header.position_end = 999_999), "position_end");
    assert_eq!(breaks(&|header| header.next_sequence = header.sequence), "next_sequence");
    assert_eq!(breaks(&|header| header.frame_bytes = 0), "frame_bytes");
    assert_eq!(breaks(&|header| header.extents[1].length = 0), "length");
    assert_eq!(breaks(&|header| header.extents[3].length = u64::MAX - 5), "length");
    assert_eq!(breaks(&|header| header.extents.swap(0, 1)), "address");
    assert_eq!(breaks(&|header| header.extents[1].address -= 1), "address");
    assert_eq!(breaks(&|header| header.extents[0].data_offset = 101), "data_offset");
    assert_eq!(breaks(&|header| header.extents[1].data_offset = 1), "data_offset");
    assert_eq!(breaks(&|header| header.data_bytes = 301), "frame_count");
    assert_eq!(breaks(&|header| header.frames[1].body_offset += 1), "body_offset");
    assert_eq!(breaks(&|header| header.frames[2].stored_bytes = 16), "stored_bytes");
}

#[test]
fn a_moved_segment_that_breaks_a_rule_is_refused() {
    let breaks = |change: &dyn Fn(&mut SegmentHeader)| {
        let mut header = moved_value();
        change(&mut header);
        field_of(header.check().unwrap_err())
    };
    assert_eq!(breaks(&|header| header.origins.truncate(1)), "origins");
    assert_eq!(breaks(&|header| header.kind = SegmentKind::Data), "origins");
    assert_eq!(breaks(&|header| header.origins[0].sequence = header.sequence), "origin sequence");
    assert_eq!(
        breaks(&|header| header.origins[1].data_offset = u32::MAX - 98),
        "origin data_offset"
    );
    assert_eq!(breaks(&|header| header.position_start -= 1), "position_end");
    let zero = SegmentExtent { data_offset: 0, kind: ExtentKind::Zero, ..moved_value().extents[1] };
    assert_eq!(breaks(&|header| header.extents[1] = zero), "kind");
}

#[test]
fn segment_fields_that_no_value_has_are_refused() {
    let length = segment_value().header_bytes() as usize;
    let decode = |offset: usize, byte: u8| {
        let bytes =
            resealed(segment_value().encode().unwrap(), length, |bytes| bytes[offset] = byte);
        SegmentHeader::decode(&bytes, &SEGMENT).unwrap_err()
    };
    assert_eq!(field_of(decode(120, 5)), "kind");
    assert_eq!(field_of(decode(120, 3)), "length", "a moved segment has origins");
    assert_eq!(field_of(decode(160 + 20, 4)), "kind");
    assert_eq!(field_of(decode(144, 0)), "body_bytes");
    assert_eq!(field_of(decode(136, 3)), "length");
    assert_eq!(decode(160 + 23, 1), FormatError::Reserved { what: "segment" });
}

#[test]
fn the_first_16_bytes_tell_how_much_of_a_segment_to_fetch() {
    let header = segment_value();
    let object = segment_object(&header, &segment_data());
    assert_eq!(header_bytes_of(&object[..16]), Ok(header.header_bytes()));
    assert_eq!(header.header_bytes(), encoded_bytes(4, 3, 0) as u64);
    assert_eq!(header.object_bytes(), object.len() as u64);
    let mut absurd = object[..16].to_vec();
    absurd[15] = 1;
    assert_eq!(field_of(header_bytes_of(&absurd).unwrap_err()), "length");
}

#[test]
fn raw_frame_ranges_are_those_of_the_frame_table() {
    let header = segment_value();
    for (index, frame) in header.frames.iter().enumerate() {
        let start = header.header_bytes() + u64::from(frame.body_offset);
        let range = raw_frame_range(
            header.header_bytes(),
            header.data_bytes,
            header.frame_bytes,
            index as u32,
        );
        assert_eq!(range, start..start + u64::from(frame.stored_bytes));
    }
    assert!(
        raw_frame_range(header.header_bytes(), header.data_bytes, header.frame_bytes, 3).is_empty()
    );
}

#[test]
fn a_body_of_more_than_4_gib_is_refused() {
    assert_eq!(field_of(raw_frames(u64::from(u32::MAX), 4096).unwrap_err()), "data_bytes");
    assert_eq!(field_of(raw_frames(u64::MAX, 1).unwrap_err()), "data_bytes");
}

#[test]
fn a_frame_of_another_place_does_not_open() {
    let place = FrameIdentity { volume_id: VOLUME, sequence: 259, epoch: 3, frame: 2 };
    let mut head = [0; FRAME_HEAD_BYTES];
    frame_seal(&place, b"data", &mut head);
    let stored = [&head[..], b"data"].concat();
    assert_eq!(frame_open(&place, &stored), Ok(&b"data"[..]));
    let others = [
        FrameIdentity { volume_id: OTHER, ..place },
        FrameIdentity { sequence: 260, ..place },
        FrameIdentity { epoch: 4, ..place },
        FrameIdentity { frame: 1, ..place },
    ];
    for other in others {
        assert_eq!(frame_open(&other, &stored), Err(FormatError::Checksum { what: "frame" }));
    }
    assert_eq!(
        field_of(frame_open(&place, &[&stored[..], b"x"].concat()).unwrap_err()),
        "payload_bytes"
    );
}

/// The CRC of bytes followed by their own CRC is the same for all bytes. So a header CRC over 0..76
/// would not depend on the slot: after a power cut between two sectors, a new slot would verify
/// with the rest of the header that an earlier lap left at the same place.
#[test]
fn a_new_slot_torn_from_an_old_header_is_refused() {
    let old = write_record();
    let new = RecordHeader { position: old.position + (1 << 30), ..old };
    let mut torn = encoded(&old);
    torn[..28].copy_from_slice(&encoded(&new)[..28]);
    assert_eq!(RecordHeader::decode_slot(&torn, TAG, new.position), Ok(new.slot_bytes));
    let result = RecordHeader::decode(&torn, TAG, new.position);
    assert_eq!(result, Err(FormatError::Checksum { what: "journal record" }));
}

#[test]
fn an_unfilled_slot_can_be_stepped_over_but_not_read() {
    let record = write_record();
    let mut space = [0xaa; 106];
    record.encode_slot(&mut space);
    assert_eq!(space[28..80], [0; 52], "nothing of what was there before is left");
    assert_eq!(space[80..], [0xaa; 26], "the payload's place is not touched");
    assert_eq!(RecordHeader::decode_slot(&space, TAG, record.position), Ok(106));
    let result = RecordHeader::decode(&space, TAG, record.position);
    assert_eq!(result, Err(FormatError::Checksum { what: "journal record" }));
}

#[test]
fn a_record_that_breaks_a_rule_is_refused() {
    let write = write_record();
    let empty = RecordHeader { slot_bytes: 80, payload_crc: 0, ..write };
    let pad = RecordHeader { operation: RecordOperation::Pad, address: 0, length: 0, ..empty };
    let field = |record: RecordHeader| field_of(record.check().unwrap_err());
    assert_eq!(field(RecordHeader { length: 25, ..write }), "slot_bytes");
    assert_eq!(field(RecordHeader { slot_bytes: 79, length: 0, ..write }), "slot_bytes");
    assert_eq!(field(RecordHeader { address: u64::MAX, ..write }), "length");
    for operation in [
        RecordOperation::Discard,
        RecordOperation::Zero,
        RecordOperation::Void,
        RecordOperation::Pad,
    ] {
        assert_eq!(field(RecordHeader { operation, payload_crc: 1, ..empty }), "payload_crc");
    }
    assert_eq!(field(RecordHeader { address: 1, ..pad }), "address");
    assert_eq!(field(RecordHeader { length: 1, ..pad }), "length");
}

fn copy_of(revision: u64) -> Vec<u8> {
    Superblock { revision, ..superblock_value() }.encode().unwrap().to_vec()
}

fn chosen(copy_0: &[u8], copy_1: &[u8]) -> Result<u64, FormatError> {
    choose_superblock(copy_0, copy_1, VOLUME).map(|superblock| superblock.revision)
}

#[test]
fn the_newest_valid_superblock_copy_counts() {
    let torn = |revision| {
        let mut bytes = copy_of(revision);
        bytes[2000] = 1;
        bytes
    };
    assert_eq!(chosen(&copy_of(4), &copy_of(5)), Ok(5));
    assert_eq!(chosen(&copy_of(6), &copy_of(5)), Ok(6));
    assert_eq!(chosen(&torn(6), &copy_of(5)), Ok(5));
    assert_eq!(chosen(&copy_of(4), &torn(5)), Ok(4));
    assert_eq!(chosen(&copy_of(4), &copy_of(8)), Ok(4), "an even revision is not in copy 1");
    assert_eq!(
        chosen(&torn(4), &torn(5)),
        Err(FormatError::Checksum { what: "journal superblock" })
    );
    assert_eq!(
        chosen(&[0; 4096], &[0; 4096]),
        Err(FormatError::Magic { what: "journal superblock" })
    );
}

#[test]
fn an_intact_superblock_of_a_newer_version_is_not_passed_over() {
    let newer = resealed(copy_of(6), 4096, |bytes| bytes[6] = 4);
    let error = FormatError::Version { what: "journal superblock", found: 4, supported: 3 };
    assert_eq!(chosen(&newer, &copy_of(5)), Err(error));
    let mut damaged = copy_of(6);
    damaged[6] = 4;
    assert_eq!(chosen(&damaged, &copy_of(5)), Ok(5), "a flipped bit is no newer version");
}

#[test]
fn the_superblock_of_another_volume_is_named() {
    let foreign =
        Superblock { volume_id: OTHER, revision: 5, ..superblock_value() }.encode().unwrap();
    let error = chosen(&[0; 4096], &foreign).unwrap_err();
    assert!(
        matches!(error, FormatError::Identity { found: IdentityValue::Volume(OTHER), .. }),
        "{error}"
    );
    assert_eq!(Superblock::owner(&foreign), Ok(OTHER));
}

#[test]
fn unknown_flags_are_refused_as_reserved() {
    let superblock = resealed(copy_of(5), 4096, |bytes| bytes[120] = 2);
    let what = "journal superblock";
    assert_eq!(Superblock::decode(&superblock, VOLUME), Err(FormatError::Reserved { what }));
    let bytes = checkpoint_value().encode().unwrap();
    for (offset, byte) in
        [(104, 3), (136, 1), (144, 1), (152, 1), (160 + 52, 2), (160 + 3 * 56 + 44, 1)]
    {
        let changed = resealed(bytes.clone(), bytes.len(), |bytes| bytes[offset] = byte);
        let what = "checkpoint";
        assert_eq!(
            Checkpoint::decode(&changed, &CHECKPOINT),
            Err(FormatError::Reserved { what }),
            "byte {offset}"
        );
    }
}

#[test]
fn tables_of_a_checkpoint_must_be_sorted() {
    let mut checkpoint = checkpoint_value();
    checkpoint.segments[1].sequence = 257;
    assert_eq!(field_of(checkpoint.check().unwrap_err()), "sequence");
    let mut checkpoint = checkpoint_value();
    checkpoint.parts.swap(0, 1);
    assert_eq!(field_of(checkpoint.check().unwrap_err()), "group");
    checkpoint.parts[1].group = checkpoint.parts[0].group;
    assert_eq!(field_of(checkpoint.check().unwrap_err()), "group");
}

#[test]
fn only_a_delta_has_the_place_of_one() {
    let mut checkpoint = checkpoint_value();
    checkpoint.parts[1].group = delta_group(12);
    assert_eq!(field_of(checkpoint.check().unwrap_err()), "group");
    checkpoint.parts[1].group = delta_group(13);
    assert_eq!(checkpoint.encode().unwrap()[6..8], [5, 0]);
    let of_version = |bytes: Vec<u8>, version| {
        let length = bytes.len();
        resealed(bytes, length, |bytes| bytes[6] = version)
    };
    for (value, version) in [(checkpoint, 1), (checkpoint_value(), 5)] {
        let bytes = of_version(value.encode().unwrap(), version);
        assert_eq!(field_of(Checkpoint::decode(&bytes, &CHECKPOINT).unwrap_err()), "group");
    }
    let part = of_version(part_bytes(), 2);
    assert_eq!(field_of(decode_part(&part, &PART).unwrap_err()), "group");
}

#[test]
fn a_hole_in_a_delta_has_no_place_in_a_segment() {
    let mut extents = delta_extents();
    extents[1].data_offset = 1;
    assert_eq!(field_of(encode_part(&DELTA, 0, &extents).unwrap_err()), "data_offset");
    assert!(encode_part(&PartIdentity { group: 0, ..PART }, 0, &extents).is_ok());
}

#[test]
fn a_map_part_refuses_extents_in_disorder() {
    let encode = |extents: &[MapExtent]| {
        field_of(encode_part(&PART, PART_FIRST_ADDRESS, extents).unwrap_err())
    };
    let mut extents = part_extents();
    extents.swap(0, 1);
    assert_eq!(encode(&extents), "address");
    let first = part_extents()[0];
    assert_eq!(encode(&[MapExtent { address: PART_FIRST_ADDRESS - 1, ..first }]), "address");
    assert_eq!(encode(&[MapExtent { length: 0, ..first }]), "length");
    assert_eq!(encode(&[MapExtent { length: u64::MAX, ..first }]), "length");
}

#[test]
fn a_number_in_a_map_part_has_one_encoding() {
    let decode = |entry: &[u8]| {
        let mut bytes = encode_part(&PART, 0, &[]).unwrap();
        bytes.truncate(80);
        bytes.extend_from_slice(entry);
        bytes.extend_from_slice(&[0; 4]);
        let length = bytes.len();
        let bytes = resealed(bytes, length, |bytes| {
            bytes[8..16].copy_from_slice(&(length as u64).to_le_bytes());
            bytes[64] = 1;
        });
        decode_part(&bytes, &PART)
    };
    let extent = MapExtent { address: 1, length: 2, sequence: 3, data_offset: 4 };
    assert_eq!(decode(&[1, 2, 6, 8]), Ok(vec![extent]));
    let longer_than_needed = [0x81, 0x00, 2, 6, 8];
    let too_big = [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x02, 2, 6, 8];
    let endless = [0x80; 14];
    for entry in [&longer_than_needed[..], &too_big, &endless] {
        assert_eq!(field_of(decode(entry).unwrap_err()), "entries");
    }
    assert_eq!(
        field_of(decode(&[1, 2, 6, 7]).unwrap_err()),
        "data_offset",
        "-4 does not fit 32 bits"
    );
    assert_eq!(field_of(decode(&[1, 2, 6]).unwrap_err()), "extent_count");
    assert_eq!(field_of(decode(&[1, 2, 6, 8, 0]).unwrap_err()), "extent_count");
}

#[test]
fn the_part_entry_of_a_checkpoint_can_hold_the_crc_of_a_part() {
    let part = part_bytes();
    let (body, crc) = part.split_at(part.len() - 4);
    assert_eq!(part_crc(&part).to_le_bytes(), *crc);
    assert_eq!(part_crc(&part), crc32c(body));
    assert_eq!(part_first_address(&part), Ok(PART_FIRST_ADDRESS));
}

#[test]
fn cache_entries_name_owners_and_cells_that_exist() {
    let breaks = |change: &dyn Fn(&mut CacheIndex)| {
        let mut index = cache_value(2);
        change(&mut index);
        field_of(index.check().unwrap_err())
    };
    assert_eq!(breaks(&|index| index.frame_bytes = 0), "frame_bytes");
    assert_eq!(breaks(&|index| index.cell_count = 1), "entry_count");
    assert_eq!(breaks(&|index| index.entries[0].owner = 2), "owner");
    assert_eq!(breaks(&|index| index.entries[0].cell = 16), "cell");
    assert_eq!(breaks(&|index| index.entries[0].data_bytes = 0), "data_bytes");
    assert_eq!(breaks(&|index| index.entries[0].data_bytes = 65537), "data_bytes");
}

#[test]
fn a_volume_record_that_breaks_a_rule_is_not_written() {
    let breaks = |change: &dyn Fn(&mut VolumeRecord)| {
        let mut record = volume_record_value();
        change(&mut record);
        field_of(record.encode().unwrap_err())
    };
    assert_eq!(breaks(&|record| record.block_bytes = 1024), "block_bytes");
    assert_eq!(breaks(&|record| record.size_bytes += 512), "size_bytes");
    assert_eq!(breaks(&|record| record.segment_bytes = 0), "segment_bytes");
    assert_eq!(breaks(&|record| record.frame_bytes = 0), "frame_bytes");
    assert_eq!(breaks(&|record| record.name = String::new()), "name_bytes");
    assert_eq!(breaks(&|record| record.name = "x".repeat(65536)), "name_bytes");
}

#[test]
fn every_key_parses_back_and_no_other_text_does() {
    assert_eq!(parse_volume_key("volumes/disk1"), Some("disk1"));
    assert_eq!(parse_volume_key("volumes/"), None);
    let key = segment_key(VOLUME, u64::MAX);
    assert_eq!(key, "5a0102030405060708090a0b0c0d0e0f/seg/ff/18446744073709551615");
    assert_eq!(parse_segment_key(&key), Some((VOLUME, u64::MAX)));
    assert!(key.starts_with(&segment_prefix(VOLUME)));
    let key = checkpoint_key(VOLUME, 13);
    assert_eq!(parse_checkpoint_key(&key), Some((VOLUME, 13)));
    assert!(key.starts_with(&checkpoint_prefix(VOLUME)));
    for group in [7, u64::MAX] {
        let identity = PartIdentity { group, ..PART };
        assert_eq!(parse_part_key(&part_key(&identity)), Some(identity));
        assert!(part_key(&identity).starts_with(&map_prefix(VOLUME)));
    }
    for key in [
        "5a0102030405060708090a0b0c0d0e0f/seg/04/00000000000000000003",
        "5a0102030405060708090a0b0c0d0e0f/seg/03/3",
        "5a0102030405060708090a0b0c0d0e0f/seg/03/00000000000000000003/x",
        "5A0102030405060708090A0B0C0D0E0F/seg/03/00000000000000000003",
        "5a0102030405060708090a0b0c0d0e0f/seg/03/+0000000000000000003",
        "5a0102030405060708090a0b0c0d0e0f/seg/ff/99999999999999999999",
        "seg/03/00000000000000000003",
    ] {
        assert_eq!(parse_segment_key(key), None, "{key}");
    }
    assert_eq!(parse_checkpoint_key("5a0102030405060708090a0b0c0d0e0f/checkpoint/13"), None);
    assert_eq!(parse_part_key(&part_key(&PART).replace("00000007", "7")), None);
    assert_eq!(parse_part_key(&part_key(&PART).replace("00000007", "+0000007")), None);
}

#[test]
fn ids_and_flush_modes_have_one_text() {
    assert_eq!(VOLUME.to_string(), "5a0102030405060708090a0b0c0d0e0f");
    assert_eq!(VOLUME.to_string().parse(), Ok(VOLUME));
    assert_eq!(PutId([0; 16]).to_string().len(), 32);
    let overlong = "5a0102030405060708090a0b0c0d0e0f0";
    for text in
        ["", "5A0102030405060708090A0B0C0D0E0F", overlong, "+a0102030405060708090a0b0c0d0e0f"]
    {
        assert!(text.parse::<VolumeId>().is_err(), "{text}");
    }
    for mode in FlushMode::ALL {
        assert_eq!(mode.to_string().parse(), Ok(mode));
    }
    assert_eq!(field_of("Logged".parse::<FlushMode>().unwrap_err()), "text");
}

#[test]
fn any_structure_is_recognized_by_its_preamble() {
    let preamble = Preamble::decode(&checkpoint_value().encode().unwrap()).unwrap();
    assert_eq!(Kind::from_number(preamble.kind), Some(Kind::Checkpoint));
    assert_eq!((preamble.version, preamble.length), (1, 428));
    assert_eq!(Kind::from_number(8), None);
    assert_eq!(Preamble::decode(b"some other bytes"), Err(FormatError::Magic { what: "preamble" }));
}

#[test]
fn positions_wrap_around_the_ring_behind_the_superblocks() {
    assert_eq!(ring_offset_bytes(0, 65536), 8192);
    assert_eq!(ring_offset_bytes(65536 + 100, 65536), 8292);
    assert_eq!((superblock_value().copy(), superblock_value().offset_bytes()), (1, 4096));
}

#[test]
fn each_rule_of_an_export_state_is_refused() {
    let value = crate::link::export_state_value();
    let bytes = value.encode().unwrap();
    let length = bytes.len();
    let decode = |at: usize, byte: u8| {
        let change = |bytes: &mut [u8]| bytes[at] = byte;
        ExportState::decode(&resealed(bytes.clone(), length, change), &value.identity).unwrap_err()
    };
    assert_eq!(field_of(decode(40, 2)), "shared");
    assert_eq!(field_of(decode(44, 9)), "identity_bytes");
    assert_eq!(field_of(decode(48, 0xff)), "identity");
    assert!(matches!(decode(41, 1), sawmill_format::FormatError::Reserved { .. }));
}

#[test]
fn transfer_progress_beyond_the_end_is_refused() {
    let bytes = transfer_value().encode().unwrap();
    let length = bytes.len();
    let decode = |at: usize, byte: u8| {
        let change = |bytes: &mut [u8]| bytes[at] = byte;
        TransferProgress::decode(&resealed(bytes.clone(), length, change), VOLUME).unwrap_err()
    };
    assert_eq!(field_of(decode(40 + 5, 9)), "done_bytes");
    assert_eq!(field_of(decode(64, 9)), "length");
    assert_eq!(field_of(decode(72, 0xff)), "far_name");
}
