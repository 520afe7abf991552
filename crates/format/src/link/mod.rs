//! The protocol between the two ends of a link: packets, the statements in them, and the messages
//! of the handshake.
//!
//! Modules: this file is the packet's header; [`statement`] the content of a sealed packet;
//! [`greeting`] the payloads of the handshake and of discovery; [`control`] requests to a target
//! other than reads and writes.
//!
//! Invariants: as everywhere in this crate, no decoder panics, allocates, or reads beyond what its
//! input justifies. A packet contains its own length, so that a stream can be cut into packets, and
//! the padding of a short Ethernet frame cut off.
//!
//! Not here: keys, seals, which end may send what when (`crates/link`). Page:
//! `docs/format/link.md`.

pub mod control;
pub mod greeting;
pub mod statement;

use crate::error::check_field;
use crate::layout::{Field, layout};
use crate::{FormatError, Result};

layout! {
    /// The head of every packet, in clear; the seal covers all of it.
    packet_at, "Packet", 24;
    MAGIC: 0, 2, "magic";
    VERSION: 2, 1, "version";
    KIND: 3, 1, "kind";
    LENGTH: 4, 4, "length";
    CONNECTION: 8, 8, "connection";
    NUMBER: 16, 8, "number";
}

const WHAT: &str = "link packet";
/// `LW` on the wire: a link's wire.
pub const MAGIC: u16 = u16::from_le_bytes(*b"LW");
/// The version of the protocol that this build speaks, and the only one so far.
pub const VERSION: u8 = 1;
/// Bytes before a packet's body.
pub const HEADER_BYTES: usize = packet_at::SIZE;
/// Bytes after a packet's body: its seal, or its checksum and zeroes.
pub const TAIL_BYTES: usize = 16;
/// The longest packet: what a stream carries at once.
pub const PACKET_BYTES_MAX: usize = 64 << 10;
/// The shortest packet that a path must carry for a link to work.
pub const PACKET_BYTES_MIN: usize = 1200;
/// Links that a connection may have.
pub const LINKS_MAX: usize = 8;
/// Pieces of a request begin at multiples of this, so that a few bits say which have come.
pub const GRAIN_BYTES: usize = 128;

/// Bytes of a cookie, and of a proof outside of any connection.
pub const PROOF_BYTES: usize = 16;
/// The shortest sealed packet.
pub const SEALED_BYTES_MIN: usize = HEADER_BYTES + TAIL_BYTES;

/// What a packet is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PacketKind {
    /// The first message of the handshake, from the initiator.
    Hello,
    /// The second, from the target.
    Welcome,
    /// A target's refusal of a hello. Not sealed: a hint, never a proof.
    Refused,
    /// Statements, sealed with the connection's keys.
    Sealed,
    /// A target's answer to a packet of a connection that it does not know. Its proof shows that
    /// the sender has the key; without a proof the answer is a hint.
    Unknown,
    /// A search for targets, sent to every host on a LAN.
    Seek,
    /// A target's answer to a seek.
    Found,
    /// A target under load answers a hello with a cookie: an initiator that repeats the hello with
    /// it proves that it receives at its address.
    Cookie,
    /// A hello, repeated with the cookie.
    Retry,
}

impl PacketKind {
    const ALL: [(u8, PacketKind); 9] = [
        (1, PacketKind::Hello),
        (2, PacketKind::Welcome),
        (3, PacketKind::Refused),
        (4, PacketKind::Sealed),
        (5, PacketKind::Unknown),
        (6, PacketKind::Seek),
        (7, PacketKind::Found),
        (8, PacketKind::Cookie),
        (9, PacketKind::Retry),
    ];

    /// Its number on the wire.
    #[must_use]
    pub fn code(self) -> u8 {
        Self::ALL.iter().find(|(_, kind)| *kind == self).map_or(0, |(code, _)| *code)
    }

    fn from_code(code: u8) -> Option<PacketKind> {
        Self::ALL.iter().find(|(number, _)| *number == code).map(|(_, kind)| *kind)
    }
}

/// A packet's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet {
    /// What it is.
    pub kind: PacketKind,
    /// Bytes of the whole packet, header and tail included.
    pub length: u32,
    /// The receiver's number for the connection; zero in a hello.
    pub connection: u64,
    /// The link it was sent on, from 0.
    pub link: u8,
    /// Its number on that link, from 0, below 2^56, and never reused. In a hello it is a hint which
    /// key to use; in *unknown*, number and link are those of the packet that it answers.
    pub number: u64,
}

/// Packet numbers are below this.
pub const NUMBER_END: u64 = 1 << 56;

impl Packet {
    /// Writes the header.
    pub fn encode(&self, into: &mut [u8]) {
        packet_at::MAGIC.put(into, MAGIC.to_le_bytes());
        packet_at::VERSION.put(into, [VERSION]);
        packet_at::KIND.put(into, [self.kind.code()]);
        packet_at::LENGTH.put(into, self.length.to_le_bytes());
        packet_at::CONNECTION.put(into, self.connection.to_le_bytes());
        let number = u64::from(self.link) << 56 | self.number & (NUMBER_END - 1);
        packet_at::NUMBER.put(into, number.to_le_bytes());
    }

    /// Reads the header of a packet that fills the front of `bytes`; what lies behind it is
    /// padding.
    pub fn decode(bytes: &[u8]) -> Result<Packet> {
        if bytes.len() < HEADER_BYTES {
            let (need, have) = (HEADER_BYTES as u64, bytes.len() as u64);
            return Err(FormatError::Truncated { what: WHAT, need, have });
        }
        if packet_at::MAGIC.u16(bytes) != MAGIC {
            return Err(FormatError::Magic { what: WHAT });
        }
        let version = packet_at::VERSION.u8(bytes);
        if version != VERSION {
            let (found, supported) = (u16::from(version), u16::from(VERSION));
            return Err(FormatError::Version { what: WHAT, found, supported });
        }
        let kind = PacketKind::from_code(packet_at::KIND.u8(bytes));
        let kind =
            kind.ok_or(FormatError::Field { what: WHAT, field: "kind", why: "no such kind" })?;
        let length = packet_at::LENGTH.u32(bytes);
        let fits = (HEADER_BYTES..=bytes.len().min(PACKET_BYTES_MAX)).contains(&(length as usize));
        check_field(WHAT, "length", "shorter than a header or longer than what came", fits)?;
        let number = packet_at::NUMBER.u64(bytes);
        let link = (number >> 56) as u8;
        check_field(WHAT, "number", "no such link", usize::from(link) < LINKS_MAX)?;
        let number = number & (NUMBER_END - 1);
        Ok(Packet { kind, length, connection: packet_at::CONNECTION.u64(bytes), link, number })
    }
}

/// Fails unless `bytes` has `need` bytes.
fn check_length(what: &'static str, bytes: &[u8], need: usize) -> Result<()> {
    if bytes.len() >= need {
        return Ok(());
    }
    Err(FormatError::Truncated { what, need: need as u64, have: bytes.len() as u64 })
}

/// Fails unless a reserved field is zero.
fn check_reserved(what: &'static str, field: Field, bytes: &[u8]) -> Result<()> {
    if field.is_zero(bytes) { Ok(()) } else { Err(FormatError::Reserved { what }) }
}

/// Text of `length` bytes from the front of `bytes`.
fn text<'a>(what: &'static str, bytes: &'a [u8], length: usize) -> Result<&'a str> {
    check_length(what, bytes, length)?;
    let why = "it is not UTF-8";
    str::from_utf8(&bytes[..length]).map_err(|_| FormatError::Field { what, field: "text", why })
}
