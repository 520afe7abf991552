//! The two maps from a byte address of the volume to the newest bytes there.
//!
//! A read asks them in this order: [`JournalMap`] knows what is still only in the journal,
//! [`ObjectMap`] knows what is in stored segments, and what neither knows reads as zero. A byte
//! enters the object map before it leaves the journal map, so a reader that asks in this order
//! never sees bytes older than those it may see.
//!
//! Modules: `object` (the object map: groups, areas, counters, export and import), `area` (16 MiB
//! of it, in one of two forms), `runs` (the sparse form: a sorted list), `dense` (the other form: a
//! table of pages), `pieces` (what a lookup visits), `journal` (the journal map), `dirty` and
//! `changes` (what changed in a group since a checkpoint), `part` (a group as an object of the
//! store), `freeze` (which of them a checkpoint writes), `held` and `load` (groups that are loaded
//! when they are first needed).
//!
//! Invariants:
//! 1. Both maps are byte-granular: an extent may begin, end and be cut at any byte.
//! 2. No lock is held between calls. Callbacks run under a lock and must not call the map.
//! 3. Locks cover one area. An operation over several areas is atomic in each of them, not across
//!    them.
//!
//! Not here: records and segments themselves, positions and how they are assigned, when a
//! checkpoint is written, live-byte accounting.

mod area;
mod changes;
mod dense;
mod dirty;
pub(crate) mod freeze;
#[cfg(test)]
mod freeze_tests;
pub(crate) mod held;
mod journal;
#[cfg(test)]
mod journal_tests;
pub(crate) mod load;
#[cfg(test)]
mod load_tests;
mod object;
pub(crate) mod part;
mod pieces;
mod runs;
#[cfg(test)]
mod tests;

pub use journal::{JournalMap, JournalPiece};
pub use object::ObjectMap;

use crate::limits::MAP_AREA_BYTES as AREA_BYTES;
pub use crate::limits::MAP_GROUP_BYTES as GROUP_BYTES;

/// Segments end at 4 GiB of data space, as data offsets have 32 bits.
pub(crate) const DATA_SPACE_BYTES: u64 = sawmill_format::segment::DATA_BYTES_MAX;
/// Bytes of a page in the dense form of an area.
const PAGE_BYTES: u32 = 4096;

/// A place in a stored segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Location {
    /// Sequence of the segment.
    pub sequence: u32,
    /// Byte in the segment's data space (before compression).
    pub data_offset: u32,
}

impl Location {
    /// The place `bytes` further on in the same segment. The sum fits: no extent reaches past 4 GiB
    /// of data space.
    fn advanced(self, bytes: u32) -> Location {
        Location { sequence: self.sequence, data_offset: self.data_offset + bytes }
    }
}

/// A stretch of a lookup in the object map: bytes `address..address + length` lie at `location`, or
/// nowhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapPiece {
    /// First byte in the volume.
    pub address: u64,
    /// Bytes, never 0.
    pub length: u64,
    /// Where the first byte lies, the others follow; `None` when no stored segment holds them.
    pub location: Option<Location>,
}

/// What became of bytes that were to be moved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MoveOutcome {
    /// They lie at the new place.
    pub moved_bytes: u64,
    /// They are of groups that are not loaded yet: the map counts what is replaced there later.
    pub held_bytes: u64,
}

/// An extent of the object map as a checkpoint carries it. `data_offset + length` is at most 4 GiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapExtent {
    /// First byte in the volume.
    pub address: u64,
    /// Bytes, never 0.
    pub length: u64,
    /// Sequence of the segment that holds the bytes.
    pub sequence: u32,
    /// Byte in the segment's data space.
    pub data_offset: u32,
}

/// An extent that cannot be part of a map. Nothing was loaded.
#[derive(Debug, thiserror::Error)]
#[error("map extent {index} (address {address}, length {length}) {why}: take an older checkpoint")]
pub struct MapLoadError {
    /// Which of the given extents, from 0.
    pub index: usize,
    /// Its first byte.
    pub address: u64,
    /// Its bytes.
    pub length: u64,
    /// What is wrong with it.
    pub why: &'static str,
}

/// Cuts `address..end` at multiples of `span_bytes`: (index of the span, start, end), in order.
fn spans(address: u64, end: u64, span_bytes: u64) -> impl Iterator<Item = (u64, u64, u64)> {
    let mut at = address;
    std::iter::from_fn(move || {
        (at < end).then(|| {
            let index = at / span_bytes;
            let start = at;
            at = end.min((index + 1).saturating_mul(span_bytes));
            (index, start, at)
        })
    })
}
