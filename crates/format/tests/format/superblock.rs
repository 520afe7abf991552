//! The journal's superblock: its golden vectors.

use sawmill_format::journal::{Memory, RingCopy, Superblock, superblock_at};

use crate::samples::{Case, PUT, TAG, VOLUME};

pub(crate) fn cases() -> [Case; 3] {
    [
        case("journal/v1-superblock", superblock_value()),
        case("journal/v2-memory", with_memory()),
        case("journal/v3-copy", with_copy()),
    ]
}

pub(crate) fn superblock_value() -> Superblock {
    Superblock {
        volume_id: VOLUME,
        journal_tag: TAG,
        revision: 5,
        epoch: 3,
        intent_epoch: 4,
        intent_put_id: PUT,
        capacity_bytes: 1 << 30,
        trim: 900_000,
        logged: 1_000_650,
        stored_sequence: 257,
        stored_position: 950_000,
        clean: false,
        bound_epoch: 6,
        bound_position: 8192,
        memory: None,
        ring_copy: None,
    }
}

fn with_memory() -> Superblock {
    let memory = Memory { boot_id: [0xb0; 16], folder: b"/dev/shm/sawmill-1000".to_vec() };
    Superblock { memory: Some(memory), ..superblock_value() }
}

fn with_copy() -> Superblock {
    let ring_copy = RingCopy { from: 1_000_000, at: 1_048_576, bytes: 8192 };
    Superblock { ring_copy: Some(ring_copy), ..superblock_value() }
}

fn case(name: &'static str, value: Superblock) -> Case {
    Case {
        name,
        bytes: value.encode().unwrap().to_vec(),
        value: format!("{value:#?}"),
        table: superblock_at::TABLE,
        decode: Box::new(move |bytes| Ok(Superblock::decode(bytes, VOLUME)? == value)),
    }
}

#[test]
fn a_ring_beyond_every_position_is_refused_although_its_checksum_is_right() {
    let mut bytes = superblock_value().encode().unwrap();
    for (capacity_bytes, is_good) in [(1 << 62, true), ((1 << 62) + 4096, false), (!4095, false)] {
        let at = superblock_at::CAPACITY_BYTES.offset;
        bytes[at..at + 8].copy_from_slice(&u64::to_le_bytes(capacity_bytes));
        let end = bytes.len() - 4;
        let check = sawmill_format::crc::crc32c(&bytes[..end]);
        bytes[end..].copy_from_slice(&check.to_le_bytes());
        let decoded = Superblock::decode(&bytes, VOLUME);
        assert_eq!(decoded.is_ok(), is_good, "{decoded:?}");
        assert!(is_good || format!("{decoded:?}").contains("capacity_bytes"));
    }
}
