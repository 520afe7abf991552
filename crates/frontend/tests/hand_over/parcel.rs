//! Pieces of doors as bytes: golden, arbitrary and invalid ones.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;

use proptest::collection::{btree_map, vec};
use proptest::prelude::*;
use sawmill_device::ErrorKind;
use sawmill_frontend::{DoorPiece, pack, unpack};

const GOLDEN: &[u8] = include_bytes!("v1-two-pieces.bin");

fn descriptor() -> OwnedFd {
    std::fs::File::open("/dev/null").expect("it is there").into()
}

/// The content of the golden bytes.
fn golden() -> Vec<DoorPiece> {
    let mut listener = DoorPiece::new("listener").with("address", "/run/sawmill/disk1.sock");
    listener.descriptors.push(descriptor());
    let mut connection =
        DoorPiece::new("connection").with("export", "disk1").with("style", "structured");
    connection.bytes = vec![0x25, 0x60, 0x95, 0x13];
    connection.descriptors = vec![descriptor(), descriptor()];
    vec![listener, connection]
}

/// The parts of a piece that can be compared.
type Parts<'a> = (&'a str, &'a BTreeMap<String, String>, &'a [u8], usize);

fn parts(pieces: &[DoorPiece]) -> Vec<Parts<'_>> {
    pieces
        .iter()
        .map(|piece| (&*piece.what, &piece.facts, &*piece.bytes, piece.descriptors.len()))
        .collect()
}

fn refused(bytes: &[u8], descriptors: usize) -> String {
    let descriptors = (0..descriptors).map(|_| descriptor()).collect();
    let error = unpack(bytes, descriptors).expect_err("it must not be taken");
    assert_eq!(error.kind(), ErrorKind::Invalid);
    error.to_string()
}

#[test]
fn the_golden_parcel_is_read_and_written_as_ever() {
    let golden = golden();
    let (bytes, descriptors) = pack(&golden);
    assert_eq!(descriptors.len(), 3);
    assert!(bytes == GOLDEN, "a parcel is written otherwise than it was");
    let read = unpack(GOLDEN, vec![descriptor(), descriptor(), descriptor()]).expect("it is sound");
    assert_eq!(parts(&read), parts(&golden));
}

#[test]
fn the_page_shows_the_golden_parcel() {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/format/hand_over.md");
    let page = std::fs::read_to_string(page).expect("the page of this format");
    for (row, bytes) in GOLDEN.chunks(16).enumerate() {
        let hex: Vec<String> = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        let line = format!("{:04x}  {}", row * 16, hex.join(" "));
        assert!(page.contains(&line), "the page lacks {line}");
    }
}

#[test]
#[ignore = "writes the golden bytes: once for each version"]
fn write_vectors() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/hand_over/v1-two-pieces.bin");
    std::fs::write(path, pack(&golden()).0).expect("a place for it");
}

#[test]
fn a_parcel_cut_anywhere_or_too_long_is_refused() {
    for length in 0..GOLDEN.len() {
        refused(&GOLDEN[..length], 3);
    }
    let text = refused(&[GOLDEN, b"x"].concat(), 3);
    assert!(text.contains("1 bytes follow"), "{text}");
}

#[test]
fn another_version_and_another_kind_of_bytes_are_named() {
    let mut newer = GOLDEN.to_vec();
    newer[8] = 2;
    assert!(refused(&newer, 3).contains("its version is 2; this program knows version 1"));
    assert!(refused(b"GET / HTTP/1.1", 0).contains("SAWMHAND"));
}

#[test]
fn descriptors_must_be_as_many_as_the_pieces_say() {
    assert!(refused(GOLDEN, 2).contains("2 descriptors where 1 are left"));
    assert!(refused(GOLDEN, 4).contains("1 descriptors belong to no piece"));
}

#[test]
fn facts_out_of_order_or_twice_are_refused() {
    let with = |first: &str, second: &str| {
        let piece = DoorPiece::new("x").with(first, 1).with(second, 2);
        pack(&[piece]).0
    };
    let mut bytes = with("aa", "bb");
    let place = bytes.windows(2).position(|two| two == b"bb").expect("a name");
    bytes[place..place + 2].copy_from_slice(b"aa");
    assert!(refused(&bytes, 0).contains("\"aa\" of a x is out of order"));
}

#[test]
fn unknown_facts_are_no_fault_and_missing_ones_are_named() {
    let piece = DoorPiece::new("connection")
        .with("size_bytes", 4096)
        .with("of a later version", "anything");
    assert_eq!(piece.parsed::<u64>("size_bytes").expect("it is there"), 4096);
    let missing = piece.fact("export").expect_err("it is not");
    assert_eq!(missing.to_string(), "hand-over: a connection has no fact \"export\"");
    let text = piece.parsed::<u64>("of a later version").expect_err("no number").to_string();
    assert!(text.contains("cannot be \"anything\""), "{text}");
}

proptest! {
    #[test]
    fn any_pieces_survive_the_journey(
        pieces in vec(
            (".*", btree_map(".*", ".*", 0..5), vec(any::<u8>(), 0..300), 0..3usize),
            0..6,
        ),
    ) {
        let pieces: Vec<DoorPiece> = pieces.into_iter().map(|(what, facts, bytes, count)| {
            let descriptors = (0..count).map(|_| descriptor()).collect();
            DoorPiece { what, facts, bytes, descriptors }
        }).collect();
        let (bytes, descriptors) = pack(&pieces);
        let descriptors =
            descriptors.iter().map(|fd| fd.try_clone_to_owned().expect("room")).collect();
        let read = unpack(&bytes, descriptors).expect("it is sound");
        prop_assert_eq!(parts(&read), parts(&pieces));
    }

    #[test]
    fn no_bytes_make_the_reader_panic(
        bytes in vec(any::<u8>(), 0..200),
        changes in vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
    ) {
        let _ = unpack(&bytes, vec![]);
        let mut near = GOLDEN.to_vec();
        for (place, byte) in changes {
            let place = place.index(near.len());
            near[place] = byte;
        }
        // There is one encoding for each value.
        if let Ok(pieces) = unpack(&near, vec![descriptor(), descriptor(), descriptor()]) {
            prop_assert_eq!(pack(&pieces).0, near);
        }
    }
}
