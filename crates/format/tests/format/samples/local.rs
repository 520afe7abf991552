//! The values of what is on the local disk: records of the journal, the header of its memory, the
//! read cache's index, the progress of a transfer.
//!
//! Not here: objects of the store (`super`).

use sawmill_format::cache_index::{self, CacheEntry, CacheIndex};
use sawmill_format::crc::payload_check;
use sawmill_format::ids::VolumeId;
use sawmill_format::journal::{self, RECORD_HEADER_BYTES, RecordHeader, RecordOperation};
use sawmill_format::staging::{self, StagingHeader, StagingIdentity};
use sawmill_format::transfer::{self, TransferProgress};
use sawmill_format::{FormatError, Result};

use super::{Case, TAG, VOLUME};

const PAYLOAD: &[u8] = b"a write of 26 bytes, whole";

pub(crate) fn write_record() -> RecordHeader {
    RecordHeader {
        slot_bytes: (RECORD_HEADER_BYTES + PAYLOAD.len()) as u32,
        position: 1_000_544,
        tag: TAG,
        operation: RecordOperation::Write,
        epoch: 3,
        logged: 999_000,
        address: 1 << 20,
        length: PAYLOAD.len() as u64,
        payload_crc: payload_check(PAYLOAD),
    }
}

/// Header and payload of a record, the payload verified.
fn open_record(bytes: &[u8], position: u64) -> Result<(RecordHeader, &[u8])> {
    let header = RecordHeader::decode(bytes, TAG, position)?;
    let payload = match header.operation {
        RecordOperation::Write => bytes.get(RECORD_HEADER_BYTES..header.slot_bytes as usize),
        _ => Some(&[][..]),
    };
    match payload {
        None => Err(FormatError::Truncated { what: "payload", need: 0, have: 0 }),
        Some(payload) if payload_check(payload) != header.payload_crc => {
            Err(FormatError::Checksum { what: "payload" })
        }
        Some(payload) => Ok((header, payload)),
    }
}

pub(crate) fn encoded(record: &RecordHeader) -> [u8; RECORD_HEADER_BYTES] {
    let mut bytes = [0; RECORD_HEADER_BYTES];
    record.encode(&mut bytes);
    bytes
}

pub(super) fn records() -> impl Iterator<Item = Case> {
    let write = write_record();
    let empty = RecordHeader { slot_bytes: 80, payload_crc: 0, ..write };
    let discard = RecordHeader { operation: RecordOperation::Discard, length: 1 << 20, ..empty };
    let zero = RecordHeader { operation: RecordOperation::Zero, length: 100, ..empty };
    let pad = RecordHeader {
        operation: RecordOperation::Pad,
        slot_bytes: 4096,
        address: 0,
        length: 0,
        ..empty
    };
    let void =
        RecordHeader { operation: RecordOperation::Void, slot_bytes: 4176, length: 0, ..empty };
    let cases = [
        ("journal/v1-write", write, PAYLOAD),
        ("journal/v1-discard", discard, b""),
        ("journal/v1-zero", zero, b""),
        ("journal/v1-pad", pad, b""),
        ("journal/v1-void", void, b""),
    ];
    cases.into_iter().map(|(name, value, payload)| Case {
        name,
        bytes: [&encoded(&value), payload].concat(),
        value: format!("{value:#?}"),
        table: journal::record_at::TABLE,
        decode: Box::new(move |bytes| Ok(open_record(bytes, value.position)? == (value, payload))),
    })
}

pub(crate) const STAGING: StagingIdentity = StagingIdentity { volume_id: VOLUME, journal_tag: TAG };

pub(crate) fn staging_value() -> StagingHeader {
    StagingHeader {
        volume_id: VOLUME,
        journal_tag: TAG,
        capacity_bytes: 64 << 20,
        boot_id: *b"boot id of linux",
        epoch: 6,
    }
}

pub(super) fn staging_header() -> Case {
    let value = staging_value();
    Case {
        name: "staging/v1-header",
        bytes: value.encode().unwrap().to_vec(),
        value: format!("{value:#?}"),
        table: staging::at::TABLE,
        decode: Box::new(move |bytes| Ok(StagingHeader::decode(bytes, &STAGING)? == value)),
    }
}

pub(crate) fn cache_value(version: u16) -> CacheIndex {
    let entry = |owner, cell, data_bytes| CacheEntry {
        owner,
        sequence: 259,
        epoch: 3,
        frame: 2,
        cell,
        data_bytes,
        tier: 1,
        crcs: std::array::from_fn(|piece| 0x1000 * cell + piece as u32),
    };
    CacheIndex {
        version,
        frame_bytes: 64 << 10,
        cell_count: 16,
        cache_tag: TAG,
        owners: vec![VOLUME, VolumeId([0xee; 16])],
        entries: vec![entry(0, 15, 64 << 10), entry(1, 3, 100)],
    }
}

/// In version 1 the checksums are CRC-32C.
pub(super) fn cache(version: u16) -> Case {
    let value = cache_value(version);
    let names = ["cache_index/v1-two-entries", "cache_index/v2-two-entries"];
    Case {
        name: names[usize::from(version) - 1],
        bytes: value.encode().unwrap(),
        // The first dump is older than the field.
        value: format!("{value:#?}").replacen("    version: 1,\n", "", 1),
        table: cache_index::at::TABLE,
        decode: Box::new(move |bytes| Ok(CacheIndex::decode(bytes, TAG)? == value)),
    }
}

pub(crate) fn transfer_value() -> TransferProgress {
    TransferProgress {
        volume_id: VOLUME,
        size_bytes: 10 << 30,
        done_bytes: 3 << 30,
        epoch: 3,
        position: 0,
        far_name: "/srv/images/debian.qcow2".into(),
        far_state: "2147549184 bytes, changed 1793270400.000000000".into(),
    }
}

pub(super) fn transfer() -> Case {
    let value = transfer_value();
    Case {
        name: "transfer_progress/v1-import",
        bytes: value.encode().unwrap(),
        value: format!("{value:#?}"),
        table: transfer::at::TABLE,
        decode: Box::new(move |bytes| Ok(TransferProgress::decode(bytes, VOLUME)? == value)),
    }
}
