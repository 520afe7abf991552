//! The journal on the local SSD: two superblock copies, then a ring of records.
//!
//! Invariants: a record is bound to its position and to the journal's tag, so that bytes left in
//! the ring by an earlier lap or another journal are never taken for it. Superblock copies are
//! written in turn; the newest valid one counts.
//!
//! Not here: when to write what, and what recovery concludes from a record that does not decode.

mod record;
mod superblock;

pub use record::{RECORD_HEADER_BYTES, RECORD_VERSION, RecordHeader, RecordOperation, record_at};
pub use superblock::{
    CAPACITY_BYTES_MAX, MEMORY_FOLDER_BYTES_MAX, Memory, RingCopy, SUPERBLOCK_BYTES, Superblock,
    choose_superblock, superblock_at,
};

/// Where the ring begins in the journal file; the superblock copies are before it.
pub const RING_START_BYTES: u64 = 2 * SUPERBLOCK_BYTES as u64;

/// Where a position lies in the journal file. `capacity_bytes` is not 0.
#[inline]
pub const fn ring_offset_bytes(position: u64, capacity_bytes: u64) -> u64 {
    RING_START_BYTES + position % capacity_bytes
}
