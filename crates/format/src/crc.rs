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

/// The check of a payload from the checks of its two parts, without another pass over the bytes.
/// `back_bytes` is the length of the second part.
#[must_use]
pub fn join_payload_checks(front: u32, back: u32, back_bytes: usize) -> u32 {
    if back_bytes == PAGE_BYTES {
        let [a, b, c, d] = front.to_le_bytes().map(usize::from);
        return back ^ OVER_PAGE[0][a] ^ OVER_PAGE[1][b] ^ OVER_PAGE[2][c] ^ OVER_PAGE[3][d];
    }
    let (front, back) = (u64::from(front), u64::from(back));
    crc_fast::checksum_combine(CrcAlgorithm::Crc32IsoHdlc, front, back, back_bytes as u64) as u32
}

/// The length of most parts: payloads are checked page by page.
const PAGE_BYTES: usize = 4096;
/// The reflected polynomial of CRC-32 (ISO-HDLC).
const PAYLOAD_POLYNOMIAL: u32 = 0xedb8_8320;

/// What a page of zeroes makes of a CRC, by the value of each of the CRC's four bytes: the general
/// way costs as much as the pass over the page that it saves.
static OVER_PAGE: [[u32; 256]; 4] = over_page();

const fn over_page() -> [[u32; 256]; 4] {
    // A map of 32 bits onto 32, linear over XOR, as the images of the single bits. First that of
    // one zero bit, then the same again for twice as many, until a page is done.
    let mut images = [0; 32];
    images[0] = PAYLOAD_POLYNOMIAL;
    let mut bit = 1;
    while bit < 32 {
        images[bit] = 1 << (bit - 1);
        bit += 1;
    }
    let mut bits = 1;
    while bits < PAGE_BYTES * 8 {
        let half = images;
        let mut bit = 0;
        while bit < 32 {
            images[bit] = image(&half, half[bit]);
            bit += 1;
        }
        bits *= 2;
    }
    let mut table = [[0; 256]; 4];
    let mut entry = 0;
    while entry < 4 * 256 {
        let (byte, value) = (entry / 256, entry % 256);
        table[byte][value] = image(&images, (value as u32) << (8 * byte));
        entry += 1;
    }
    table
}

/// The image of `value` under a linear map.
const fn image(images: &[u32; 32], mut value: u32) -> u32 {
    let mut sum = 0;
    while value != 0 {
        sum ^= images[value.trailing_zeros() as usize];
        value &= value - 1;
    }
    sum
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_checks_of_two_parts_make_the_check_of_the_whole(
            payload in prop::collection::vec(any::<u8>(), 0..3 * PAGE_BYTES),
            cut in 0..3 * PAGE_BYTES,
        ) {
            let last_page = payload.len().saturating_sub(PAGE_BYTES);
            for cut in [cut.min(payload.len()), last_page] {
                let (front, back) = payload.split_at(cut);
                let joined =
                    join_payload_checks(payload_check(front), payload_check(back), back.len());
                prop_assert_eq!(joined, payload_check(&payload));
            }
        }
    }
}
