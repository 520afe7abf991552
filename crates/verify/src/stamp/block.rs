//! The stamp: 512 bytes that name their place and their write.
//!
//! Invariant: a stamped sector is never all zeroes, so zeroes are the content from before, or a
//! write of zeroes.
//!
//! Not here: whether a stamp belongs where it is found (`judge`).

use crc_fast::CrcAlgorithm::Crc32Iscsi;

/// The unit of stamping.
pub const SECTOR_BYTES: usize = 512;

const MAGIC: &[u8; 8] = b"TIMBERst";
const CRC_AT: usize = SECTOR_BYTES - 4;

/// The fields of the stamp in one sector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    /// The run of the test program.
    pub run: u64,
    /// The sector's number on the volume.
    pub sector: u64,
    /// The write, counted from 1 through the whole run.
    pub write: u64,
    /// Which sector of the write this is.
    pub index: u32,
    /// How many sectors the write has.
    pub count: u32,
}

/// The content of a sector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sector {
    /// All zeroes: never written, or zeroed since.
    Empty,
    /// A whole stamp. The judge decides whether it belongs there.
    Stamped(Stamp),
    /// Anything else: torn, flipped or foreign bytes.
    Damaged,
}

impl Stamp {
    /// Writes the stamp into one sector, with a filling that differs from sector to sector.
    ///
    /// # Panics
    /// When `into` is not one sector long.
    pub fn put(&self, into: &mut [u8]) {
        assert_eq!(into.len(), SECTOR_BYTES, "a stamp fills one sector");
        into[..8].copy_from_slice(MAGIC);
        into[8..16].copy_from_slice(&self.run.to_le_bytes());
        into[16..24].copy_from_slice(&self.sector.to_le_bytes());
        into[24..32].copy_from_slice(&self.write.to_le_bytes());
        into[32..36].copy_from_slice(&self.index.to_le_bytes());
        into[36..40].copy_from_slice(&self.count.to_le_bytes());
        // The filling depends on write and sector, so that a piece of one sector inside another
        // never goes unnoticed.
        let mut word = self.write.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ self.sector;
        for chunk in into[40..CRC_AT].chunks_mut(8) {
            word = word.rotate_left(7).wrapping_add(0x2545_f491_4f6c_dd1d);
            chunk.copy_from_slice(&word.to_le_bytes()[..chunk.len()]);
        }
        let crc = crc_fast::checksum(Crc32Iscsi, &into[..CRC_AT]) as u32;
        into[CRC_AT..].copy_from_slice(&crc.to_le_bytes());
    }

    /// The bytes of a whole write of `count` sectors.
    #[must_use]
    pub fn write_bytes(run: u64, write: u64, first_sector: u64, count: u32) -> Vec<u8> {
        let mut bytes = vec![0; count as usize * SECTOR_BYTES];
        for (index, sector) in bytes.chunks_mut(SECTOR_BYTES).enumerate() {
            let stamp = Stamp {
                run,
                sector: first_sector + index as u64,
                write,
                index: index as u32,
                count,
            };
            stamp.put(sector);
        }
        bytes
    }
}

impl Sector {
    /// Reads the stamp of one sector, and checks it against the whole sector.
    #[must_use]
    pub fn read(bytes: &[u8]) -> Self {
        // First, because zeroes have no stamp and are legal content.
        if bytes.iter().all(|&byte| byte == 0) {
            return Sector::Empty;
        }
        let word = |at: usize| -> Option<u64> {
            bytes.get(at..at + 8).and_then(|eight| eight.try_into().ok()).map(u64::from_le_bytes)
        };
        let half = |at: usize| -> Option<u32> {
            bytes.get(at..at + 4).and_then(|four| four.try_into().ok()).map(u32::from_le_bytes)
        };
        let whole = bytes.len() == SECTOR_BYTES
            && bytes.starts_with(MAGIC)
            && half(CRC_AT) == Some(crc_fast::checksum(Crc32Iscsi, &bytes[..CRC_AT]) as u32);
        if !whole {
            return Sector::Damaged;
        }
        match (word(8), word(16), word(24), half(32), half(36)) {
            (Some(run), Some(sector), Some(write), Some(index), Some(count)) => {
                Sector::Stamped(Stamp { run, sector, write, index, count })
            }
            _ => Sector::Damaged,
        }
    }
}
