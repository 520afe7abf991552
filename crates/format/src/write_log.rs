//! The write log: every write, flush and discard of a block device in order, as the kernel's
//! `dm-log-writes`, QEMU's `blklogwrites` and the crash checker make it.
//!
//! A foreign format: it has no preamble, no checksum and no identity, so damage in it is not
//! detected. Invariant: the kernel's and QEMU's tools can read what is encoded here, and the
//! reverse.
//!
//! Not here: what a crash may remove from a log (`crates/verify`).

use crate::error::check_field;
use crate::layout::layout;
use crate::{FormatError, Result};

layout! {
    /// Bytes of the superblock; it fills the first sector.
    superblock_at, "Write log superblock", 28;
    MAGIC: 0, 8, "magic";
    VERSION: 8, 8, "version";
    ENTRY_COUNT: 16, 8, "entry_count";
    SECTOR_BYTES: 24, 4, "sector_bytes";
}

layout! {
    /// Bytes of one entry; it fills a sector, and its data follow.
    entry_at, "Write log entry", 32;
    SECTOR: 0, 8, "sector";
    SECTOR_COUNT: 8, 8, "sector_count";
    FLAGS: 16, 8, "flags";
    DATA_BYTES: 24, 8, "data_bytes";
}

/// What every log begins with.
pub const MAGIC: u64 = 0x6a_7366_7773_6872;
const VERSION: u64 = 1;
const WHAT: &str = "write log";
/// The smallest and the largest sector.
pub const SECTOR_BYTES_RANGE: std::ops::RangeInclusive<u32> = 512..=(8 << 20);

/// The first sector of a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Superblock {
    /// Entries in the log.
    pub entry_count: u64,
    /// The unit of the log: a power of two.
    pub sector_bytes: u32,
}

/// The flags of an entry's request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flags(pub u64);

impl Flags {
    /// Everything that completed before is durable before the entry's own data are written.
    pub const FLUSH: Flags = Flags(1);
    /// The entry's own data are durable.
    pub const FUA: Flags = Flags(1 << 1);
    /// The range was discarded; no data follow.
    pub const DISCARD: Flags = Flags(1 << 2);
    /// Not a request: a text, in the entry's own sector.
    pub const MARK: Flags = Flags(1 << 3);
    /// The file system called it metadata.
    pub const METADATA: Flags = Flags(1 << 4);

    /// Whether all of `other`'s bits are set.
    #[must_use]
    pub const fn has(self, other: Flags) -> bool {
        self.0 & other.0 == other.0
    }

    /// The union of both.
    #[must_use]
    pub const fn with(self, other: Flags) -> Flags {
        Flags(self.0 | other.0)
    }
}

/// One request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its first sector on the device, in the log's sectors.
    pub sector: u64,
    /// Its length in the log's sectors.
    pub sector_count: u64,
    /// The request's flags.
    pub flags: Flags,
    /// The bytes of a mark's text.
    pub data_bytes: u64,
}

impl Superblock {
    /// The bytes of the fixed part; the rest of the first sector is zero.
    #[must_use]
    pub fn encode(&self) -> [u8; superblock_at::SIZE] {
        let mut bytes = [0; superblock_at::SIZE];
        superblock_at::MAGIC.put(&mut bytes, MAGIC.to_le_bytes());
        superblock_at::VERSION.put(&mut bytes, VERSION.to_le_bytes());
        superblock_at::ENTRY_COUNT.put(&mut bytes, self.entry_count.to_le_bytes());
        superblock_at::SECTOR_BYTES.put(&mut bytes, self.sector_bytes.to_le_bytes());
        bytes
    }

    /// Reads the first bytes of a log.
    pub fn decode(bytes: &[u8]) -> Result<Superblock> {
        let bytes = enough(bytes, superblock_at::SIZE)?;
        let check = |field, why, holds| check_field(WHAT, field, why, holds);
        if superblock_at::MAGIC.u64(bytes) != MAGIC {
            return Err(FormatError::Magic { what: WHAT });
        }
        check("version", "only version 1 is known", superblock_at::VERSION.u64(bytes) == VERSION)?;
        let sector_bytes = superblock_at::SECTOR_BYTES.u32(bytes);
        let fits = sector_bytes.is_power_of_two() && SECTOR_BYTES_RANGE.contains(&sector_bytes);
        check("sector_bytes", "it is not a power of two from 512 to 8 MiB", fits)?;
        Ok(Superblock { entry_count: superblock_at::ENTRY_COUNT.u64(bytes), sector_bytes })
    }
}

impl Entry {
    /// The bytes of the fixed part; a mark's text follows, then zeroes to the end of the sector.
    #[must_use]
    pub fn encode(&self) -> [u8; entry_at::SIZE] {
        let mut bytes = [0; entry_at::SIZE];
        entry_at::SECTOR.put(&mut bytes, self.sector.to_le_bytes());
        entry_at::SECTOR_COUNT.put(&mut bytes, self.sector_count.to_le_bytes());
        entry_at::FLAGS.put(&mut bytes, self.flags.0.to_le_bytes());
        entry_at::DATA_BYTES.put(&mut bytes, self.data_bytes.to_le_bytes());
        bytes
    }

    /// Reads the beginning of an entry's sector.
    pub fn decode(bytes: &[u8]) -> Result<Entry> {
        let bytes = enough(bytes, entry_at::SIZE)?;
        let entry = Entry {
            sector: entry_at::SECTOR.u64(bytes),
            sector_count: entry_at::SECTOR_COUNT.u64(bytes),
            flags: Flags(entry_at::FLAGS.u64(bytes)),
            data_bytes: entry_at::DATA_BYTES.u64(bytes),
        };
        check_field(WHAT, "flags", "a bit is set that nobody defined", entry.flags.0 < 1 << 5)?;
        let end = entry.sector.checked_add(entry.sector_count);
        check_field(WHAT, "sector_count", "the range overflows", end.is_some())?;
        Ok(entry)
    }

    /// How many sectors of data follow the entry's own.
    #[must_use]
    pub fn data_sectors(&self) -> u64 {
        let without = self.flags.has(Flags::DISCARD) || self.flags.has(Flags::MARK);
        if without { 0 } else { self.sector_count }
    }
}

fn enough(bytes: &[u8], least: usize) -> Result<&[u8]> {
    let (need, have) = (least as u64, bytes.len() as u64);
    bytes.get(..least).ok_or(FormatError::Truncated { what: WHAT, need, have })
}
