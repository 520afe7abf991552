//! The read cache's index: which frame lies in which cell of the cache file. Losing it costs a cold
//! cache.
//!
//! Invariants: an entry names an owner and a cell that exist. An entry has a CRC for each of up to
//! 16 pieces of the frame's data, so that a small read need not verify a whole frame.
//!
//! Not here: the cached bytes, and eviction.

use crate::error::{check_field, check_identity};
use crate::ids::VolumeId;
use crate::layout::layout;
use crate::preamble::{self, CRC_BYTES, Kind};
use crate::{Result, crc};

layout! {
    /// Bytes of the fixed part; owners, entries and the CRC follow.
    at, "Cache index", 40;
    PREAMBLE: 0, 16, "preamble";
    FRAME_BYTES: 16, 4, "frame_bytes";
    CELL_COUNT: 20, 4, "cell_count";
    CACHE_TAG: 24, 8, "cache_tag";
    ENTRY_COUNT: 32, 4, "entry_count";
    OWNER_COUNT: 36, 4, "owner_count";
}

layout! {
    /// Bytes of one entry.
    entry_at, "Cache entry", 100;
    OWNER: 0, 4, "owner";
    SEQUENCE: 4, 8, "sequence";
    EPOCH: 12, 8, "epoch";
    FRAME: 20, 4, "frame";
    CELL: 24, 4, "cell";
    DATA_BYTES: 28, 4, "data_bytes";
    TIER: 32, 1, "tier";
    RESERVED: 33, 3, "reserved";
    CRCS: 36, 64, "crcs";
}

const KIND: Kind = Kind::CacheIndex;
const WHAT: &str = KIND.name();
const BYTES_MIN: usize = at::SIZE + CRC_BYTES;
const OWNER_BYTES: usize = 16;

/// The version that a writer uses. In version 1 the checksums are CRC-32C, which is the same for
/// all versions of a block that ends in its own CRC-32C.
pub const VERSION: u16 = 2;
const _: () = assert!(VERSION == KIND.version_max());
/// How many CRCs an entry has.
pub const CRCS_PER_FRAME: usize = 16;

/// One cached frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CacheEntry {
    /// Which of the owners.
    pub owner: u32,
    /// The segment.
    pub sequence: u64,
    /// The segment's epoch.
    pub epoch: u64,
    /// The frame in the segment.
    pub frame: u32,
    /// The cell of the cache file that holds its data.
    pub cell: u32,
    /// Bytes of data; 1 to `frame_bytes`.
    pub data_bytes: u32,
    /// Which eviction list it is in.
    pub tier: u8,
    /// [`payload_check`](crate::crc::payload_check) of each piece of the data (CRC-32C in an index
    /// of version 1); 0 where there is none.
    pub crcs: [u32; CRCS_PER_FRAME],
}

/// Which frame lies in which cell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheIndex {
    /// 1 or [`VERSION`]: which checksum the pieces have.
    pub version: u16,
    /// Data per cell.
    pub frame_bytes: u32,
    /// Slots of the cache file.
    pub cell_count: u32,
    /// Random, new at each format; the cache file repeats it.
    pub cache_tag: u64,
    /// The volumes whose frames are cached.
    pub owners: Vec<VolumeId>,
    /// The cached frames.
    pub entries: Vec<CacheEntry>,
}

impl CacheIndex {
    /// The file's bytes, or which field breaks a rule.
    pub fn encode(&self) -> Result<Vec<u8>> {
        self.check()?;
        let length =
            BYTES_MIN + OWNER_BYTES * self.owners.len() + entry_at::SIZE * self.entries.len();
        let mut bytes = Vec::with_capacity(length);
        bytes.resize(length - CRC_BYTES, 0);
        preamble::put_version(&mut bytes, KIND, self.version, length);
        at::FRAME_BYTES.put(&mut bytes, self.frame_bytes.to_le_bytes());
        at::CELL_COUNT.put(&mut bytes, self.cell_count.to_le_bytes());
        at::CACHE_TAG.put(&mut bytes, self.cache_tag.to_le_bytes());
        at::ENTRY_COUNT.put_count(&mut bytes, WHAT, self.entries.len())?;
        at::OWNER_COUNT.put_count(&mut bytes, WHAT, self.owners.len())?;
        let (owners, entries) = bytes[at::SIZE..].split_at_mut(OWNER_BYTES * self.owners.len());
        for (bytes, owner) in owners.chunks_exact_mut(OWNER_BYTES).zip(&self.owners) {
            bytes.copy_from_slice(&owner.0);
        }
        for (bytes, entry) in entries.chunks_exact_mut(entry_at::SIZE).zip(&self.entries) {
            entry.put(bytes);
        }
        crc::seal(&mut bytes);
        Ok(bytes)
    }

    /// Reads the whole file; the index of another cache file is refused.
    pub fn decode(bytes: &[u8], cache_tag: u64) -> Result<CacheIndex> {
        preamble::open_whole(bytes, KIND, BYTES_MIN)?;
        let owner_count = at::OWNER_COUNT.u32(bytes);
        let tables = u64::from(owner_count) * OWNER_BYTES as u64
            + u64::from(at::ENTRY_COUNT.u32(bytes)) * entry_at::SIZE as u64;
        let agrees = tables == (bytes.len() - BYTES_MIN) as u64;
        check_field(WHAT, "length", "it does not agree with owner_count and entry_count", agrees)?;
        let tables = &bytes[at::SIZE..bytes.len() - CRC_BYTES];
        let (owners, entries) = tables.split_at(OWNER_BYTES * owner_count as usize);
        for entry in entries.chunks_exact(entry_at::SIZE) {
            preamble::check_reserved(KIND, entry, &[entry_at::RESERVED])?;
        }
        check_identity(WHAT, "cache_tag", cache_tag, at::CACHE_TAG.u64(bytes))?;
        let index = CacheIndex {
            version: preamble::at::VERSION.u16(bytes),
            frame_bytes: at::FRAME_BYTES.u32(bytes),
            cell_count: at::CELL_COUNT.u32(bytes),
            cache_tag,
            owners: owners.as_chunks().0.iter().map(|id| VolumeId(*id)).collect(),
            entries: entries.chunks_exact(entry_at::SIZE).map(CacheEntry::get).collect(),
        };
        index.check()?;
        Ok(index)
    }

    /// Whether the fields keep the rules of the structure; the decoder refuses those that do not.
    pub fn check(&self) -> Result<()> {
        let check = |field, why, holds| check_field(WHAT, field, why, holds);
        check("version", "there is no such version", (1..=VERSION).contains(&self.version))?;
        check("frame_bytes", "it is zero", self.frame_bytes > 0)?;
        check(
            "entry_count",
            "it is more than cell_count",
            self.entries.len() <= self.cell_count as usize,
        )?;
        for entry in &self.entries {
            check("owner", "no such owner", (entry.owner as usize) < self.owners.len())?;
            check("cell", "no such cell", entry.cell < self.cell_count)?;
            let holds = (1..=self.frame_bytes).contains(&entry.data_bytes);
            check("data_bytes", "it is not in 1 to frame_bytes", holds)?;
        }
        Ok(())
    }
}

impl CacheEntry {
    fn put(&self, bytes: &mut [u8]) {
        entry_at::OWNER.put(bytes, self.owner.to_le_bytes());
        entry_at::SEQUENCE.put(bytes, self.sequence.to_le_bytes());
        entry_at::EPOCH.put(bytes, self.epoch.to_le_bytes());
        entry_at::FRAME.put(bytes, self.frame.to_le_bytes());
        entry_at::CELL.put(bytes, self.cell.to_le_bytes());
        entry_at::DATA_BYTES.put(bytes, self.data_bytes.to_le_bytes());
        entry_at::TIER.put(bytes, [self.tier]);
        let crcs = bytes[entry_at::CRCS.offset..].as_chunks_mut().0;
        for (bytes, crc) in crcs.iter_mut().zip(self.crcs) {
            *bytes = crc.to_le_bytes();
        }
    }

    fn get(bytes: &[u8]) -> CacheEntry {
        let mut crcs = [0; CRCS_PER_FRAME];
        for (crc, bytes) in crcs.iter_mut().zip(entry_at::CRCS.of(bytes).as_chunks().0) {
            *crc = u32::from_le_bytes(*bytes);
        }
        CacheEntry {
            owner: entry_at::OWNER.u32(bytes),
            sequence: entry_at::SEQUENCE.u64(bytes),
            epoch: entry_at::EPOCH.u64(bytes),
            frame: entry_at::FRAME.u32(bytes),
            cell: entry_at::CELL.u32(bytes),
            data_bytes: entry_at::DATA_BYTES.u32(bytes),
            tier: entry_at::TIER.u8(bytes),
            crcs,
        }
    }
}
