//! One packet, sealed and opened in place: header (24 bytes, in clear) | body | tail (16 bytes).
//!
//! Secure: AES-256-GCM with one key per direction and connection. The nonce is four zero bytes and
//! the packet number as in the header; the whole header is associated data. So a packet opens only
//! where it was meant to: for this connection, direction, number and header. Insecure: the tail is
//! the CRC-32C of header and body and twelve zero bytes. It detects damage but no attack, and binds
//! direction and connection only through the header's own fields.
//!
//! Invariants: a caller never seals two packets of one direction under one number, because a reused
//! nonce reveals both bodies and allows forgeries. Retransmitted data gets a new number. Nothing is
//! allocated; `&self` is enough, from any number of threads.
//!
//! Limits. A number has 56 bits below its link's index; [`PACKETS_MAX`] of them are usable, so
//! numbers never wrap into another link's. This prevents nonce reuse; it does not limit the loss of
//! secrecy, which grows with the bytes under one key on all links together. An eavesdropper's
//! advantage over guessing is about (bytes / 16)^2 / 2^129: 2^-57 after 1 TiB, 2^-37 after 1 PiB (a
//! day at 100 Gb/s). The chance of a forgery is below 2^-117 for each attempted packet of 9000
//! bytes. So an initiator makes a new connection after 1 TiB (`crate::initiator`).
//!
//! Not here: counting numbers and bytes, duplicates ([`super::window`]), the meaning of a header.

use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use sawmill_format::crc::Crc32c;

use super::PacketRefusal;

/// Bytes of a packet's header.
pub const HEADER_BYTES: usize = 24;
/// Bytes of a packet's tail.
pub const TAIL_BYTES: usize = 16;
/// The number of packets that a link seals in each direction of a connection: numbers without the
/// link's index are below this.
pub const PACKETS_MAX: u64 = 1 << 48;

/// The offset of the packet number: the link's index in the highest byte, its count of packets
/// below.
const NUMBER_AT: usize = 16;

/// Seals the packets that an end sends, and opens those that it receives.
#[derive(Debug)]
pub enum Seals {
    /// Encrypted and authenticated.
    Sealed(Keys),
    /// In clear, with a checksum.
    Checksum,
}

/// The keys of one end of a connection.
pub struct Keys {
    sending: LessSafeKey,
    receiving: LessSafeKey,
}

impl std::fmt::Debug for Keys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Keys(..)")
    }
}

impl Seals {
    /// Seals with `sending`, opens with `receiving`. The other end has them swapped.
    pub(crate) fn new(sending: &[u8; 32], receiving: &[u8; 32]) -> Result<Self, PacketRefusal> {
        let key = |bytes: &[u8; 32]| {
            UnboundKey::new(&AES_256_GCM, bytes)
                .map(LessSafeKey::new)
                .map_err(|_| PacketRefusal::Broken)
        };
        Ok(Self::Sealed(Keys { sending: key(sending)?, receiving: key(receiving)? }))
    }

    /// Seals `packet` (header | body | 16 bytes of room) in place.
    ///
    /// # Errors
    /// [`PacketRefusal::Spent`] past the last packet number, [`PacketRefusal::Short`]; the
    /// packet is unchanged then.
    pub fn seal(&self, packet: &mut [u8]) -> Result<(), PacketRefusal> {
        let SplitPacket { header, body, tail } = SplitPacket::of(packet)?;
        match self {
            Self::Sealed(keys) => {
                let tag = keys
                    .sending
                    .seal_in_place_separate_tag(nonce_of(header), Aad::from(header), body)
                    .map_err(|_| PacketRefusal::Broken)?;
                tail.copy_from_slice(tag.as_ref());
            }
            Self::Checksum => *tail = checksum(header, body),
        }
        Ok(())
    }

    /// Opens `packet` in place and returns its body. Do not read a refused packet: its bytes may
    /// have been overwritten.
    ///
    /// # Errors
    /// [`PacketRefusal::Forged`] or, insecure, [`PacketRefusal::Damaged`];
    /// [`PacketRefusal::Spent`]; [`PacketRefusal::Short`].
    pub fn open<'a>(&self, packet: &'a mut [u8]) -> Result<&'a mut [u8], PacketRefusal> {
        let SplitPacket { header, body, tail } = SplitPacket::of(packet)?;
        match self {
            Self::Sealed(keys) => keys
                .receiving
                .open_in_place_separate_tag(nonce_of(header), Aad::from(header), tail, body)
                .map_err(|_| PacketRefusal::Forged),
            Self::Checksum if *tail == checksum(header, body) => Ok(body),
            Self::Checksum => Err(PacketRefusal::Damaged),
        }
    }
}

/// A packet with a valid number, split into what is sealed differently.
struct SplitPacket<'a> {
    header: &'a [u8; HEADER_BYTES],
    body: &'a mut [u8],
    tail: &'a mut [u8; TAIL_BYTES],
}

impl<'a> SplitPacket<'a> {
    fn of(packet: &'a mut [u8]) -> Result<Self, PacketRefusal> {
        let short = PacketRefusal::Short { bytes: packet.len(), least: HEADER_BYTES + TAIL_BYTES };
        let (header, rest) = packet.split_first_chunk_mut().ok_or(short)?;
        let (body, tail) = rest.split_last_chunk_mut().ok_or(short)?;
        if number_of(header) & (u64::MAX >> 8) >= PACKETS_MAX {
            return Err(PacketRefusal::Spent);
        }
        Ok(Self { header, body, tail })
    }
}

fn number_bytes(header: &[u8; HEADER_BYTES]) -> [u8; 8] {
    std::array::from_fn(|i| header[NUMBER_AT + i])
}

fn number_of(header: &[u8; HEADER_BYTES]) -> u64 {
    u64::from_le_bytes(number_bytes(header))
}

fn nonce_of(header: &[u8; HEADER_BYTES]) -> Nonce {
    let mut nonce = [0; 12];
    nonce[4..].copy_from_slice(&number_bytes(header));
    Nonce::assume_unique_for_key(nonce)
}

fn checksum(header: &[u8; HEADER_BYTES], body: &[u8]) -> [u8; TAIL_BYTES] {
    let mut crc = Crc32c::new();
    crc.update(header);
    crc.update(body);
    let mut tail = [0; TAIL_BYTES];
    tail[..4].copy_from_slice(&crc.value().to_le_bytes());
    tail
}

#[cfg(test)]
mod tests;
