//! CRC-32C (Castagnoli; the check value of `123456789` is `e3069283`), the checksum of everything
//! here but payloads of journal records and blocks of the read cache ([`payload_check`]).
//!
//! A CRC has a trap that the formats avoid: the CRC of *bytes followed by their own CRC* is the
//! same for all bytes.
//!
//! Invariant: no checksum here covers another one together with all that the other covers.

use crc_fast::{CrcAlgorithm, Digest};

/// CRC-32C of `bytes`, in one pass with the fastest instructions of this processor.
#[inline]
pub fn crc32c(bytes: &[u8]) -> u32 {
    crc_fast::crc32_iscsi(bytes)
}

/// The check of a journal record's payload and of a cached block: CRC-32 (ISO-HDLC, the check value
/// of `123456789` is `cbf43926`).
///
/// Not CRC-32C, because of the trap: a block of a file system may end in its own CRC-32C. Then all
/// versions of the block have the same CRC-32C, and a stale version left in the ring would pass for
/// the torn newer one.
#[inline]
pub fn payload_check(payload: &[u8]) -> u32 {
    crc_fast::crc32_iso_hdlc(payload)
}

/// CRC-32C of bytes that come in pieces.
#[derive(Clone, Debug)]
pub struct Crc32c(Digest);

impl Crc32c {
    /// Starts with no bytes.
    pub fn new() -> Self {
        Self(Digest::new(CrcAlgorithm::Crc32Iscsi))
    }

    /// Adds the next piece.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The CRC of all pieces so far.
    pub fn value(&self) -> u32 {
        // A 32-bit CRC in a u64: the upper half is always zero.
        self.0.finalize() as u32
    }
}

impl Default for Crc32c {
    fn default() -> Self {
        Self::new()
    }
}

/// Appends the CRC of all bytes so far.
pub(crate) fn seal(bytes: &mut Vec<u8>) {
    let crc = crc32c(bytes);
    bytes.extend_from_slice(&crc.to_le_bytes());
}

/// Writes the CRC of all bytes before the last four into the last four.
pub(crate) fn seal_in_place(bytes: &mut [u8]) {
    if let Some((body, crc)) = bytes.split_last_chunk_mut::<4>() {
        *crc = crc32c(body).to_le_bytes();
    }
}

/// Whether the last four bytes are the CRC of all before.
pub(crate) fn is_sealed(bytes: &[u8]) -> bool {
    bytes
        .split_last_chunk::<4>()
        .is_some_and(|(body, crc)| crc32c(body) == u32::from_le_bytes(*crc))
}
