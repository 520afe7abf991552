//! Properties of the messages to a mount holder.

use proptest::prelude::*;

use super::MountHolder;
use super::wire::{Packet, decode, encode, receive, send};
use crate::DoorPiece;

fn handed(facts: &[(String, String)], bytes: &[u8]) -> DoorPiece {
    let facts = facts.iter().cloned().collect();
    DoorPiece { what: "fuse".into(), facts, bytes: bytes.to_vec(), descriptors: Vec::new() }
}

proptest! {
    #[test]
    fn what_is_handed_arrives(
        facts in proptest::collection::vec((".{0,20}", ".{0,40}"), 0..6),
        bytes in proptest::collection::vec(any::<u8>(), 0..100),
    ) {
        let piece = handed(&facts, &bytes);
        let packet = decode(&encode(&Packet::Hold(handed(&facts, &bytes))), Vec::new());
        let Ok(Packet::Hold(decoded)) = packet else { panic!("{packet:?}") };
        prop_assert_eq!(
            (decoded.what, decoded.facts, decoded.bytes),
            (piece.what, piece.facts, piece.bytes)
        );
    }

    #[test]
    fn any_bytes_are_a_packet_or_none(bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
        let _ = decode(&bytes, Vec::new());
        let _ = decode(&[b"\x01SAWMHAND".to_vec(), bytes].concat(), Vec::new());
    }

    #[test]
    fn a_packet_cut_short_is_none(cut in 1usize..40) {
        let whole = encode(&Packet::Here(handed(&[("name".into(), "value".into())], b"bytes")));
        let end = whole.len() - cut.min(whole.len() - 1);
        prop_assert!(decode(&whole[..end], Vec::new()).is_err());
    }
}

#[test]
fn descriptors_travel_with_their_facts() {
    let (near, far) = std::os::unix::net::UnixStream::pair().expect("two sockets");
    let (read, write) = rustix::pipe::pipe().expect("a pipe");
    let piece = DoorPiece { descriptors: vec![write], ..handed(&[], b"") };
    send(&near, &Packet::Here(piece)).expect("sent");
    let Packet::Here(received) = receive(&far).expect("received") else { panic!("another packet") };
    rustix::io::write(&received.descriptors[0], b"through").expect("the same pipe");
    let mut back = [0; 7];
    rustix::io::read(&read, &mut back).expect("there");
    assert_eq!(&back, b"through");
    drop(near);
    receive(&far).expect_err("the other end is closed");
}

#[test]
fn a_mount_holder_that_holds_nothing_is_ended_and_not_waited_for() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let socket = folder.path().join("socket");
    // It does not listen, and does not end.
    let command = ["sh".into(), "-c".into(), "exec 0<&-; exec sleep 600".into()];
    let starting = std::thread::spawn(move || {
        MountHolder::start(&socket, &command, &handed(&[], b"")).is_err()
    });
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while !starting.is_finished() {
        assert!(std::time::Instant::now() < deadline, "the start waits for its end");
        std::thread::yield_now();
    }
    assert!(starting.join().expect("no panic"), "it holds nothing");
}
