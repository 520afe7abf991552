//! The messages on a mount holder's socket: one each way ([`passing`](crate::passing)), with a verb
//! and, for some verbs, a parcel with one piece ([`pack`]).
//!
//! A mount holder and its client may have different versions, so the rules for messages and parcels
//! in `docs/format/hand_over.md` apply.
//!
//! Invariants: a decoded packet has exactly the pieces that its verb requires. A packet over the
//! limits for bytes and descriptors is neither sent nor received.
//!
//! Not here: the order of messages (`client`, `holder`).

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use sawmill_device::{Error, ErrorKind, Result};

use crate::{DoorPiece, pack, passing, unpack};

/// The most bytes of one packet: more than the facts of any door take.
const PACKET_BYTES_MAX: usize = 16 << 10;
/// The most descriptors of one packet.
const DESCRIPTORS_MAX: usize = 4;

/// A packet.
#[derive(Debug)]
pub(super) enum Packet {
    /// Asks the mount holder to hold this piece instead of the previous one.
    Hold(DoorPiece),
    /// Asks for the held piece.
    Give,
    /// End.
    End,
    /// Asks the mount holder to keep this connection open until it ends, so that the client notices
    /// the end.
    Watch,
    /// Done.
    Done,
    /// The answer to `Give`: the held piece.
    Here(DoorPiece),
    /// The answer when the mount holder holds nothing any more.
    Nothing,
}

impl Packet {
    fn verb(&self) -> u8 {
        match self {
            Packet::Hold(_) => 1,
            Packet::Give => 2,
            Packet::End => 3,
            Packet::Done => 4,
            Packet::Here(_) => 5,
            Packet::Nothing => 6,
            Packet::Watch => 7,
        }
    }

    fn handed(&self) -> &[DoorPiece] {
        match self {
            Packet::Hold(handed) | Packet::Here(handed) => std::slice::from_ref(handed),
            Packet::Give | Packet::End | Packet::Watch | Packet::Done | Packet::Nothing => &[],
        }
    }
}

/// The bytes of a packet; its descriptors travel beside them.
pub(super) fn encode(packet: &Packet) -> Vec<u8> {
    let mut bytes = vec![packet.verb()];
    bytes.extend(pack(packet.handed()).0);
    bytes
}

/// Parses the bytes of a packet. Returns `Invalid` if they are not a packet.
pub(super) fn decode(bytes: &[u8], descriptors: Vec<OwnedFd>) -> Result<Packet> {
    let invalid =
        |what: &str| Error::new(ErrorKind::Invalid, format!("mount holder: a packet {what}"));
    let (verb, rest) = bytes.split_first().ok_or_else(|| invalid("without a verb"))?;
    let mut pieces = unpack(rest, descriptors)?;
    let piece = pieces.pop();
    Ok(match (verb, piece, pieces.is_empty()) {
        // Exactly one piece: of several, the others' descriptors would be closed unnoticed.
        (1, Some(handed), true) => Packet::Hold(handed),
        (2, None, _) => Packet::Give,
        (3, None, _) => Packet::End,
        (4, None, _) => Packet::Done,
        (5, Some(handed), true) => Packet::Here(handed),
        (6, None, _) => Packet::Nothing,
        (7, None, _) => Packet::Watch,
        _ => return Err(invalid("with an unknown verb, or with the wrong pieces for its verb")),
    })
}

/// Sends one packet. Errors: as [`passing::send`](crate::passing::send); `Invalid` for one that is
/// too long.
pub(super) fn send(stream: &UnixStream, packet: &Packet) -> Result<()> {
    let bytes = encode(packet);
    let descriptors: Vec<_> =
        packet.handed().iter().flat_map(|handed| &handed.descriptors).map(AsFd::as_fd).collect();
    // The sender checks what the receiver would refuse, because an error here names the cause.
    if bytes.len() > PACKET_BYTES_MAX || descriptors.len() > DESCRIPTORS_MAX {
        let text = format!(
            "mount holder: {} bytes and {} files are too many",
            bytes.len(),
            descriptors.len()
        );
        return Err(Error::new(ErrorKind::Invalid, text));
    }
    passing::send(stream, &bytes, &descriptors)
}

/// Receives one packet. Errors: as [`passing::receive`](crate::passing::receive).
pub(super) fn receive(stream: &UnixStream) -> Result<Packet> {
    let (bytes, descriptors) = passing::receive(stream, PACKET_BYTES_MAX, DESCRIPTORS_MAX)?;
    decode(&bytes, descriptors)
}
