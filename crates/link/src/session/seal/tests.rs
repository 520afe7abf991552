//! Claims about sealed packets: what opens, what never does, and the bytes themselves.
//!
//! Invariant: the sealed bytes are compared with those of another implementation, because both ends
//! here would share an error.
//!
//! Not here: duplicates, which open; `window` refuses them.

use proptest::prelude::*;

use super::*;

const TO_TARGET: [u8; 32] = [0x11; 32];
const TO_INITIATOR: [u8; 32] = [0x22; 32];

fn both_ends() -> (Seals, Seals) {
    (Seals::new(&TO_TARGET, &TO_INITIATOR).unwrap(), Seals::new(&TO_INITIATOR, &TO_TARGET).unwrap())
}

fn packet(connection: u64, number: u64, body: &[u8]) -> Vec<u8> {
    let bytes = HEADER_BYTES + body.len() + TAIL_BYTES;
    let mut packet = vec![0x5a, 0xa5, 1, 3];
    packet.extend_from_slice(&(bytes as u32).to_le_bytes());
    packet.extend_from_slice(&connection.to_le_bytes());
    packet.extend_from_slice(&number.to_le_bytes());
    packet.extend_from_slice(body);
    packet.resize(bytes, 0xee);
    packet
}

fn sealed(seals: &Seals, connection: u64, number: u64, body: &[u8]) -> Vec<u8> {
    let mut packet = packet(connection, number, body);
    seals.seal(&mut packet).unwrap();
    packet
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn what_one_end_seals_the_other_opens_and_the_header_stays_in_clear() {
    let (initiator, target) = both_ends();
    for (from, to) in
        [(&initiator, &target), (&target, &initiator), (&Seals::Checksum, &Seals::Checksum)]
    {
        for bytes in [0, 1, 15, 16, 17, 64, 8900] {
            let body: Vec<u8> = (0..bytes).map(|i| i as u8).collect();
            let before = packet(7, 0x0300_0000_0000_0009, &body);
            let mut packet = before.clone();
            from.seal(&mut packet).unwrap();
            assert_eq!(packet[..24], before[..24]);
            if bytes > 16 && matches!(from, Seals::Sealed(_)) {
                assert_ne!(packet[24..24 + bytes], body, "the body is not in clear");
            }
            assert_eq!(to.open(&mut packet).unwrap(), body);
        }
    }
}

/// Pins the format. Another implementation of AES-256-GCM computed the same sealed bytes.
#[test]
fn the_bytes_of_a_sealed_packet_are_these() {
    let key: [u8; 32] = std::array::from_fn(|i| i as u8);
    let seals = Seals::new(&key, &[0xff; 32]).unwrap();
    let (connection, number) = (0x0123_4567_89ab_cdef, 0x0200_0000_0000_0105);
    let header = "5aa5010338000000efcdab89674523010501000000000002";
    let packet = sealed(&seals, connection, number, b"sixteen bytes...");
    let (body, tail) = ("170021384685d8440052be4824d68066", "1be0c2fc49f42f29be180fa890e7fbc0");
    assert_eq!(hex(&packet), format!("{header}{body}{tail}"));
    let packet = sealed(&Seals::Checksum, connection, number, b"sixteen bytes...");
    let (body, tail) = ("7369787465656e2062797465732e2e2e", "76e71767000000000000000000000000");
    assert_eq!(hex(&packet), format!("{header}{body}{tail}"));
}

#[test]
fn a_packet_never_opens_in_the_other_direction() {
    let (initiator, target) = both_ends();
    let packet = sealed(&initiator, 7, 1, b"body");
    assert_eq!(
        initiator.open(&mut packet.clone()),
        Err(PacketRefusal::Forged),
        "mirrored to its sender"
    );
    let packet = sealed(&target, 7, 1, b"body");
    assert_eq!(
        target.open(&mut packet.clone()),
        Err(PacketRefusal::Forged),
        "mirrored to its sender"
    );
}

#[test]
fn a_packet_never_opens_under_another_connection_number_or_header() {
    let (initiator, target) = both_ends();
    let packet = sealed(&initiator, 7, 1, b"body");
    assert!(target.open(&mut packet.clone()).is_ok());
    let other = packet_with_header_of(&packet, 8, 1);
    assert_eq!(target.open(&mut other.clone()), Err(PacketRefusal::Forged), "another connection");
    for number in [0, 2, 1 << 32, 1 | 1 << 40, 1 | 1 << 56] {
        let other = packet_with_header_of(&packet, 7, number);
        assert_eq!(target.open(&mut other.clone()), Err(PacketRefusal::Forged), "number {number}");
    }
    // The same number in the nonce does not help: another connection has other keys.
    let other_seals = Seals::new(&[0x33; 32], &[0x44; 32]).unwrap();
    assert_eq!(other_seals.open(&mut packet.clone()), Err(PacketRefusal::Forged));
}

fn packet_with_header_of(sealed: &[u8], connection: u64, number: u64) -> Vec<u8> {
    let mut other = packet(connection, number, &vec![0; sealed.len() - HEADER_BYTES - TAIL_BYTES]);
    other[HEADER_BYTES..].copy_from_slice(&sealed[HEADER_BYTES..]);
    other
}

#[test]
fn the_number_is_in_the_nonce_and_the_link_with_it() {
    let (initiator, _) = both_ends();
    let bodies: Vec<Vec<u8>> = [0, 1, 1 << 8, 1 << 32, 1 << 47, 1 << 56, 255 << 56]
        .map(|number| sealed(&initiator, 7, number, &[0; 64])[24..88].to_vec())
        .to_vec();
    for (i, body) in bodies.iter().enumerate() {
        assert!(!bodies[..i].contains(body), "two numbers share a key stream");
    }
}

#[test]
fn numbers_end_before_they_could_repeat_on_each_link() {
    let (initiator, target) = both_ends();
    for link in [0u64, 1, 255] {
        for seals in [&initiator, &Seals::Checksum] {
            let last = link << 56 | (PACKETS_MAX - 1);
            assert!(seals.seal(&mut packet(7, last, b"body")).is_ok());
            for number in [last + 1, last + 1 + (1 << 50), link << 56 | u64::MAX >> 8] {
                let before = packet(7, number, b"body");
                let mut after = before.clone();
                assert_eq!(seals.seal(&mut after), Err(PacketRefusal::Spent));
                assert_eq!(before, after, "left as it was");
                assert_eq!(seals.open(&mut after), Err(PacketRefusal::Spent));
            }
        }
    }
    assert!(target.open(&mut sealed(&initiator, 7, PACKETS_MAX - 1, b"body")).is_ok());
}

#[test]
fn a_packet_too_short_for_header_and_tail_is_refused_by_both() {
    let (initiator, _) = both_ends();
    for seals in [initiator, Seals::Checksum] {
        for bytes in [0, 1, 15, 16, 23, 24, 39] {
            let short = PacketRefusal::Short { bytes, least: 40 };
            assert_eq!(seals.seal(&mut vec![0; bytes]), Err(short));
            assert_eq!(seals.open(&mut vec![0; bytes]), Err(short));
        }
        let mut least = vec![0; 40];
        seals.seal(&mut least).unwrap();
    }
}

#[test]
fn a_secure_end_never_opens_a_packet_in_clear_nor_the_reverse() {
    let (initiator, target) = both_ends();
    assert_eq!(
        target.open(&mut sealed(&Seals::Checksum, 7, 1, b"body")),
        Err(PacketRefusal::Forged)
    );
    assert_eq!(
        Seals::Checksum.open(&mut sealed(&initiator, 7, 1, b"body")),
        Err(PacketRefusal::Damaged)
    );
}

#[test]
fn threads_share_one_pair_of_keys() {
    let (initiator, target) = both_ends();
    let opened_count: u64 = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4u64)
            .map(|link| {
                let (initiator, target) = (&initiator, &target);
                scope.spawn(move || {
                    (0..500u64)
                        .filter(|n| {
                            let mut packet = sealed(initiator, 7, link << 56 | n, &n.to_le_bytes());
                            target.open(&mut packet).is_ok_and(|body| body == n.to_le_bytes())
                        })
                        .count() as u64
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    assert_eq!(opened_count, 2000);
}

#[test]
fn keys_are_never_printed() {
    assert_eq!(format!("{:?}", both_ends().0), "Sealed(Keys(..))");
}

proptest! {
    /// In header, body and tail alike.
    #[test]
    fn a_packet_with_any_flipped_bits_is_refused(
        body in proptest::collection::vec(any::<u8>(), 0..200),
        number in 0..PACKETS_MAX,
        link in 0u64..256,
        at in any::<prop::sample::Index>(),
        flips in 1u8..=255,
    ) {
        let (initiator, target) = both_ends();
        for (from, to) in [(&initiator, &target), (&Seals::Checksum, &Seals::Checksum)] {
            let mut packet = sealed(from, 7, link << 56 | number, &body);
            let at = at.index(packet.len());
            packet[at] ^= flips;
            let reason = to.open(&mut packet).unwrap_err();
            let expected = [PacketRefusal::Forged, PacketRefusal::Damaged, PacketRefusal::Spent];
            prop_assert!(expected.contains(&reason));
        }
    }

    #[test]
    fn a_packet_cut_short_or_made_longer_is_refused(
        body in proptest::collection::vec(any::<u8>(), 0..100),
        cut in 1usize..40,
        more in proptest::collection::vec(any::<u8>(), 1..40),
    ) {
        let (initiator, target) = both_ends();
        let packet = sealed(&initiator, 7, 1, &body);
        let mut shorter = packet[..packet.len() - cut].to_vec();
        prop_assert!(target.open(&mut shorter).is_err());
        prop_assert!(target.open(&mut [packet, more].concat()).is_err());
    }
}

#[test]
fn every_single_bit_of_a_packet_counts() {
    let (initiator, target) = both_ends();
    for (from, to) in [(&initiator, &target), (&Seals::Checksum, &Seals::Checksum)] {
        let packet = sealed(from, 7, 1, b"all of it");
        for bit in 0..packet.len() * 8 {
            let mut flipped = packet.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(to.open(&mut flipped).is_err(), "bit {bit}");
        }
    }
}
