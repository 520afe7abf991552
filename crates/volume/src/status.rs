//! The status of a volume while it is open. Plain values; the binary prints and exports them.
//!
//! Invariant: in [`Positions`], stored <= logged <= accepted.
//!
//! Not here: the counting (`counters`), and a volume that is not open (`inspect::at_rest`).

use std::time::Duration;

use sawmill_format::ids::VolumeId;

/// The health of an open volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Health {
    /// No problem is known.
    Serving,
    /// The store cannot be reached; writes go into the journal, cached data can be read.
    StoreUnavailable {
        /// For how long.
        since: Duration,
        /// The store's last error.
        reason: String,
    },
    /// Another writer has taken the volume over.
    Fenced {
        /// How that was detected.
        reason: String,
    },
    /// The volume stopped rather than guess.
    Failed {
        /// What was violated, where.
        reason: String,
    },
    /// Closed.
    Closed,
}

/// The three safety positions of a volume, in bytes of log. A segment may be stored before it is
/// synced on the local disk; what is stored counts as logged here, so `logged` is never less than
/// `stored`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Positions {
    /// Answered to the writer: survives the death of the process.
    pub accepted: u64,
    /// Synced on the local disk, or stored: survives power loss.
    pub logged: u64,
    /// In the store, in a contiguous prefix: survives loss of the machine.
    pub stored: u64,
}

/// Which safety position to wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Safety {
    /// On the local disk.
    Logged,
    /// In the store.
    Stored,
}

/// What writes wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Stall {
    /// Room in the staging ring: the journal's disk is slower than the writers, or a segment is
    /// about to be built from what is in it.
    Staging,
    /// Room in the journal: it is full of what is not yet stored.
    JournalBytes,
    /// Fewer records that are not yet stored: there are
    /// [`RECORDS_UNSTORED_MAX`](crate::limits::RECORDS_UNSTORED_MAX) of them.
    JournalRecords,
    /// The store: the oldest write that is not stored has reached the age limit
    /// ([`OpenOptions::unstored_age_max`](crate::OpenOptions::unstored_age_max)).
    UnstoredAge,
}

impl Stall {
    pub(crate) const ALL: [Stall; 4] =
        [Stall::Staging, Stall::JournalBytes, Stall::JournalRecords, Stall::UnstoredAge];
}

/// The result of a manual collection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GcReport {
    /// Live bytes rewritten.
    pub moved_bytes: u64,
    /// Segments they were written to.
    pub moved_segments: u64,
}

/// The status of an open volume at one moment.
#[derive(Clone, Debug)]
pub struct Status {
    /// The volume's id.
    pub volume_id: VolumeId,
    /// Its name.
    pub name: String,
    /// Its health.
    pub health: Health,
    /// Size of the disk.
    pub size_bytes: u64,
    /// The attachment's epoch: larger than any before, by a random step.
    pub epoch: u64,
    /// The epoch of the attachment that this one's fence shut out; 0 when opened for reading.
    pub epoch_before: u64,
    /// Whether it was opened for reading only.
    pub read_only: bool,
    /// The safety positions.
    pub positions: Positions,
    /// Newest stored segment.
    pub stored_sequence: u64,
    /// Newest durable checkpoint.
    pub checkpoint_number: u64,
    /// Bytes of the address space that hold data.
    pub live_bytes: u64,
    /// Data bytes in segments of the store, live or not.
    pub segment_data_bytes: u64,
    /// Bytes of segment objects in the store, headers included.
    pub segment_object_bytes: u64,
    /// Segments in the store, dead ones not yet deleted included.
    pub segments: u64,
    /// The part of `segment_object_bytes` in segments without live data, which wait to be deleted.
    pub dead_object_bytes: u64,
    /// Live bytes that garbage collection currently plans to move.
    pub gc_left_bytes: u64,
    /// Whether garbage is past its bound, so that writers get no further than collection lets them.
    pub slowed_for_garbage: bool,
    /// Extents of the object map.
    pub extents: u64,
    /// Memory of the object map, with what is not loaded yet and the changes that wait for that.
    pub map_bytes: u64,
    /// Groups of the object map that are not loaded yet: a volume with a large map serves before.
    pub map_groups_unloaded: u64,
    /// Capacity of the journal.
    pub journal_bytes: u64,
    /// Bytes of the journal that hold writes not yet stored.
    pub journal_unstored_bytes: u64,
    /// Records that hold writes not yet stored.
    pub journal_unstored_records: u64,
    /// Requests waiting because the journal is full.
    pub stalled_requests: u64,
    /// What the first of them waits for.
    pub stall: Option<Stall>,
    /// Segments in flight to the store.
    pub uploads_in_flight: u32,
    /// Counters since open.
    pub counters: Counters,
}

/// Counters since a volume was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Payload bytes of writes accepted.
    pub written_bytes: u64,
    /// Writes accepted.
    pub writes: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Reads.
    pub reads: u64,
    /// Flushes answered.
    pub flushes: u64,
    /// Discards and write-zeroes accepted.
    pub discards: u64,
    /// Syncs of the journal disk.
    pub journal_syncs: u64,
    /// Bytes written to the journal disk.
    pub journal_written_bytes: u64,
    /// Segments stored.
    pub segments_stored: u64,
    /// Bytes of segment objects stored, headers included.
    pub segment_bytes_stored: u64,
    /// Data bytes that overlapping writes inside a segment made unnecessary to store.
    pub coalesced_bytes: u64,
    /// Data bytes of written segments that are in the read cache, or were put into it.
    pub written_cached_bytes: u64,
    /// Data bytes of written segments that the read cache did not get: their journal space was used
    /// again before it was their turn, or the cache's disk failed.
    pub written_uncached_bytes: u64,
    /// Checkpoints written.
    pub checkpoints: u64,
    /// Dead segments deleted.
    pub segments_deleted: u64,
    /// Segments written by garbage collection.
    pub segments_moved: u64,
    /// Live bytes that garbage collection rewrote.
    pub moved_bytes: u64,
    /// Bytes of the segment objects it wrote, headers included; `segment_bytes_stored` counts them
    /// too.
    pub moved_segment_bytes: u64,
    /// Plans of garbage collection: choices of segments to be emptied.
    pub collections: u64,
    /// Reads served from the journal.
    pub reads_journal: u64,
    /// Reads served from the read cache.
    pub reads_cache: u64,
    /// Reads that had to ask the store.
    pub reads_store: u64,
    /// Frames fetched ahead.
    pub prefetched_frames: u64,
    /// Hints to prefetch a range of which a part was left out: the volume has no read cache, more
    /// was on its way than `prefetch_bytes` allows, the range is very long, or its map is not
    /// loaded yet.
    pub prefetches_cut: u64,
    /// Requests that had to wait for staging memory, journal space, the limit of unstored records,
    /// or the age limit of unstored writes.
    pub writes_stalled: u64,
}
