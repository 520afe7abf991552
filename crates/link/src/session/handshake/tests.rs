//! Claims about the handshake, as tests: which ends succeed, which fail, and the error that they
//! get.
//!
//! Invariant: `unanswered` panics if a refused greeting reaches `respond`, so each test of a
//! refused greeting also claims that its payload was not returned.
//!
//! Not here: the handshake (`super`), and connections that begin with it (`tests/ends`).

use super::*;
use crate::session::{HEADER_BYTES, PreSharedKey};

const PROLOGUE: &[u8] = b"link 1";

fn key(byte: u8) -> Security {
    Security::Key(PreSharedKey::from_bytes([byte; 32]))
}

fn greet(security: &Security, payload: &[u8]) -> (Greeting, Vec<u8>) {
    let mut out = [0; 300];
    let (greeting, bytes) = Greeting::new(security, PROLOGUE, payload, &mut out).unwrap();
    (greeting, out[..bytes].to_vec())
}

fn reply(
    security: &Security,
    message: &[u8],
    payload: &[u8],
) -> Result<(Seals, Vec<u8>), PacketRefusal> {
    let mut out = [0; 300];
    let (seals, bytes) = answer(security, PROLOGUE, message, |_| payload.to_vec(), &mut out)?;
    Ok((seals, out[..bytes].to_vec()))
}

/// Why a message that must not be answered was refused.
fn unanswered(security: &Security, prologue: &[u8], message: &[u8]) -> PacketRefusal {
    let never = |_: &[u8]| panic!("a payload was given out unproved");
    answer(security, prologue, message, never, &mut [0; 300]).unwrap_err()
}

fn packet(number: u64) -> Vec<u8> {
    let mut packet = vec![0xab; HEADER_BYTES + 20 + 16];
    packet[16..24].copy_from_slice(&number.to_le_bytes());
    packet
}

fn speak(from: &Seals, to: &Seals) -> bool {
    let mut packet = packet(1);
    from.seal(&mut packet).unwrap();
    to.open(&mut packet).is_ok_and(|body| body == [0xab; 20])
}

#[test]
fn two_messages_make_seals_that_fit_and_carry_a_payload_each() {
    for security in [key(1), Security::Insecure] {
        for payload in [&b""[..], b"volume a", &[9; 200]] {
            let (mut greeting, message1) = greet(&security, payload);
            assert_eq!(message1.len(), payload.len() + HANDSHAKE_BYTES);
            let mut out = [0; 300];
            let respond = |received: &[u8]| {
                assert_eq!(received, payload);
                received.iter().rev().copied().collect()
            };
            let (target, bytes) =
                answer(&security, PROLOGUE, &message1, respond, &mut out).unwrap();
            let (initiator, answer) = greeting.finish(&out[..bytes]).unwrap();
            assert_eq!(answer, payload.iter().rev().copied().collect::<Vec<_>>());
            assert!(speak(&initiator, &target) && speak(&target, &initiator));
            let secure = matches!(security, Security::Key(_));
            assert_eq!(matches!(initiator, Seals::Sealed(_)), secure);
            assert_eq!(speak(&initiator, &initiator), !secure, "each direction has its key");
        }
    }
}

#[test]
fn a_secure_payload_is_not_in_clear_and_an_insecure_one_is() {
    let has_name = |message: &[u8]| message.windows(8).any(|bytes| bytes == b"volume a");
    let (_, message1) = greet(&key(1), b"volume a");
    let (_, message2) = reply(&key(1), &message1, b"volume a").unwrap();
    assert!(!has_name(&message1) && !has_name(&message2));
    assert!(has_name(&greet(&Security::Insecure, b"volume a").1));
}

#[test]
fn each_handshake_makes_keys_of_its_own() {
    let once = || {
        let (mut greeting, message1) = greet(&key(1), b"");
        let (target, message2) = reply(&key(1), &message1, b"").unwrap();
        (greeting.finish(&message2).unwrap().0, target)
    };
    let ((a, _), (_, b)) = (once(), once());
    assert!(!speak(&a, &b));
}

#[test]
fn another_key_or_prologue_proves_nothing() {
    let (mut greeting, message1) = greet(&key(1), b"hello");
    assert_eq!(unanswered(&key(2), PROLOGUE, &message1), PacketRefusal::Unproven);
    assert_eq!(unanswered(&key(1), b"link 1, connection 8", &message1), PacketRefusal::Unproven);
    let text = PacketRefusal::Unproven.to_string();
    assert!(text.contains("compare the key files"), "{text}");
    // A peer with another key cannot produce an answer; one that answers another greeting can.
    let (_, elsewhere) = greet(&key(2), b"hello");
    let (_, message2) = reply(&key(2), &elsewhere, b"").unwrap();
    assert_eq!(greeting.finish(&message2).unwrap_err(), PacketRefusal::Unproven);
    // In clear, the checksum reveals a different prologue.
    let (_, message1) = greet(&Security::Insecure, b"hello");
    assert_eq!(unanswered(&Security::Insecure, b"other", &message1), PacketRefusal::Damaged);
}

#[test]
fn a_message_with_any_flipped_bit_is_refused_and_the_handshake_goes_on() {
    for security in [key(1), Security::Insecure] {
        let (mut greeting, message1) = greet(&security, b"hello");
        for bit in 0..message1.len() * 8 {
            let mut flipped = message1.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            // X25519 ignores the highest bit of a public key. Noise hashes it, so it counts here
            // too.
            unanswered(&security, PROLOGUE, &flipped);
        }
        let (target, message2) = reply(&security, &message1, b"welcome").unwrap();
        for bit in 0..message2.len() * 8 {
            let mut flipped = message2.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert_ne!(
                greeting.finish(&flipped).unwrap_err(),
                PacketRefusal::Finished,
                "bit {bit}"
            );
        }
        let (initiator, payload) = greeting.finish(&message2).unwrap();
        assert_eq!(payload, b"welcome");
        assert!(speak(&initiator, &target) && speak(&target, &initiator));
    }
}

#[test]
fn a_message_cut_short_or_made_longer_is_refused() {
    for security in [key(1), Security::Insecure] {
        let (mut greeting, message1) = greet(&security, b"hello");
        let (_, message2) = reply(&security, &message1, b"hello").unwrap();
        for bytes in 0..message1.len() {
            let reason = unanswered(&security, PROLOGUE, &message1[..bytes]);
            assert_eq!(
                matches!(reason, PacketRefusal::Short { .. }),
                bytes < HANDSHAKE_BYTES,
                "{reason}"
            );
            assert!(greeting.finish(&message2[..bytes]).is_err());
        }
        for extra_bytes in [1, 16, 70_000] {
            let longer = |message: &[u8]| [message, &vec![0; extra_bytes]].concat();
            unanswered(&security, PROLOGUE, &longer(&message1));
            assert!(greeting.finish(&longer(&message2)).is_err());
        }
        assert!(greeting.finish(&message2).is_ok());
    }
}

#[test]
fn a_replayed_answer_finishes_no_other_handshake() {
    for (security, why) in
        [(key(1), PacketRefusal::Unproven), (Security::Insecure, PacketRefusal::NotOurs)]
    {
        let (mut old, message1) = greet(&security, b"hello");
        let (_, message2) = reply(&security, &message1, b"welcome").unwrap();
        let (mut greeting, _) = greet(&security, b"hello");
        assert_eq!(greeting.finish(&message2).unwrap_err(), why);
        assert!(old.finish(&message2).is_ok());
        assert_eq!(
            old.finish(&message2).unwrap_err(),
            PacketRefusal::Finished,
            "nor its own a second time"
        );
    }
}

#[test]
fn a_replayed_greeting_gets_an_answer_but_no_packet_through() {
    let (mut greeting, message1) = greet(&key(1), b"hello");
    let (first, message2) = reply(&key(1), &message1, b"").unwrap();
    let (second, _) = reply(&key(1), &message1, b"").unwrap();
    let (initiator, _) = greeting.finish(&message2).unwrap();
    let mut old_packet = packet(1);
    initiator.seal(&mut old_packet).unwrap();
    assert_eq!(second.open(&mut old_packet.clone()), Err(PacketRefusal::Forged));
    assert!(first.open(&mut old_packet).is_ok());
}

#[test]
fn a_message_mirrored_to_its_sender_is_refused() {
    for security in [key(1), Security::Insecure] {
        let (mut greeting, message1) = greet(&security, b"hello");
        assert_eq!(greeting.finish(&message1).unwrap_err(), PacketRefusal::OutOfTurn);
        let (_, message2) = reply(&security, &message1, b"welcome").unwrap();
        assert_eq!(unanswered(&security, PROLOGUE, &message2), PacketRefusal::OutOfTurn);
        // With the step rewritten, it is still not accepted as an answer.
        let mut mirrored = message1;
        mirrored[1] = 2;
        assert!(greeting.finish(&mirrored).is_err());
        assert!(greeting.finish(&message2).is_ok());
    }
}

#[test]
fn a_secure_end_and_an_insecure_one_refuse_each_other_and_say_so() {
    for (ours, theirs, why) in [
        (key(1), Security::Insecure, PacketRefusal::PeerInsecure),
        (Security::Insecure, key(1), PacketRefusal::PeerSecure),
    ] {
        let (mut peer, message1) = greet(&theirs, b"hello");
        assert_eq!(unanswered(&ours, PROLOGUE, &message1), why);
        assert!(why.to_string().contains("--insecure"), "{why}");
        let (mut greeting, _) = greet(&ours, b"hello");
        let (_, message2) = reply(&theirs, &message1, b"welcome").unwrap();
        assert_eq!(greeting.finish(&message2).unwrap_err(), why);
        // The peer gets the reason from its own point of view, and may still get a valid answer.
        let reason = peer.finish(&refusal(&ours, why).unwrap()).unwrap_err();
        assert!(reason != why && reason.to_string().contains("--insecure"), "{reason}");
        assert!(peer.finish(&message2).is_ok());
    }
}

#[test]
fn a_refusal_names_its_reason_and_answers_greetings_only() {
    for security in [key(1), Security::Insecure] {
        for why in [PacketRefusal::Unproven, PacketRefusal::Unknown] {
            let message = refusal(&key(2), why).unwrap();
            assert_eq!(greet(&security, b"").0.finish(&message).unwrap_err(), why);
            // Two targets cannot refuse each other forever.
            let reason = unanswered(&security, PROLOGUE, &message);
            assert_eq!(refusal(&security, PacketRefusal::Damaged), None);
            assert!(
                matches!(reason, PacketRefusal::Unknown | PacketRefusal::Short { .. }),
                "{reason}"
            );
        }
    }
    assert_eq!(refusal(&key(1), PacketRefusal::Unproven), Some([2, 3, 3, 0]));
}

#[test]
fn the_bytes_of_an_insecure_handshake_are_these() {
    let mut out = [0; 64];
    write_clear(b"prologue", [1, 1, 0, 0], &[0x55; 32], b"hello", &mut out[..57]);
    let mut expected = vec![1, 1, 0, 0];
    expected.extend_from_slice(&[0x55; 32]);
    expected.extend_from_slice(b"hello");
    let crc = sawmill_format::crc::crc32c(&[b"prologue", &expected[..]].concat());
    expected.extend_from_slice(&crc.to_le_bytes());
    expected.extend_from_slice(&[0; 12]);
    assert_eq!(out[..57], expected);
    let heads = |security: &Security| {
        let (_, message1) = greet(security, b"");
        let (_, message2) = reply(security, &message1, b"").unwrap();
        (message1[..4].to_vec(), message2[..4].to_vec())
    };
    assert_eq!(heads(&Security::Insecure), (vec![1, 1, 0, 0], vec![1, 2, 0, 0]));
    assert_eq!(heads(&key(1)), (vec![2, 1, 0, 0], vec![2, 2, 0, 0]));
}

#[test]
fn a_message_that_does_not_fit_is_refused_before_it_is_begun() {
    for security in [key(1), Security::Insecure] {
        let room = |bytes, room| PacketRefusal::Room { bytes, room };
        let reason = Greeting::new(&security, PROLOGUE, b"hello", &mut [0; 56]).unwrap_err();
        assert_eq!(reason, room(57, 56));
        let (_, message1) = greet(&security, b"");
        let reason =
            answer(&security, PROLOGUE, &message1, |_| vec![0; 5], &mut [0; 56]).unwrap_err();
        assert_eq!(reason, room(57, 56));
        let long = vec![0; 65535 - 51];
        let reason = Greeting::new(&security, PROLOGUE, &long, &mut vec![0; 70_000]).unwrap_err();
        assert_eq!(reason, room(65536, 65535));
        let mut out = vec![0; 65535];
        let (mut greeting, bytes) =
            Greeting::new(&security, PROLOGUE, &long[1..], &mut out).unwrap();
        assert_eq!(bytes, 65535);
        let (_, message2) = reply(&security, &out, b"").unwrap();
        assert!(greeting.finish(&message2).is_ok());
    }
}

#[test]
fn a_greeting_prints_no_key() {
    let (greeting, _) = greet(&key(0xab), b"");
    assert_eq!(format!("{greeting:?}"), "Greeting(secure)");
}
