//! What a cache counts. Not here: names and text of metrics.

use std::sync::atomic::AtomicU64;

/// Counters since the cache was made, and three gauges. Lengths are bytes.
#[derive(Debug, Default)]
pub struct Stats {
    /// Writes that cover some page in part.
    pub partial_writes: AtomicU64,
    /// Payload of the writes that came in.
    pub bytes_written_by_user: AtomicU64,
    /// Payload of the write-backs, with the headers of packed ones, and of those that failed.
    pub bytes_sent: AtomicU64,
    /// What whole pages would have taken more, of write-backs that succeeded: the most that it ever was.
    pub bytes_saved: AtomicU64,
    /// Reads below.
    pub fetches: AtomicU64,
    /// Pages of which only the missing sub-blocks were fetched.
    pub hole_fetches: AtomicU64,
    /// Bytes of the reads below.
    pub fetched_bytes: AtomicU64,
    /// Pages that went below whole.
    pub whole_pages_sent: AtomicU64,
    /// Write-backs of one range, as plain writes.
    pub plain_sent: AtomicU64,
    /// Write-backs of several ranges, as packed writes.
    pub packed_sent: AtomicU64,
    /// Pages thrown out.
    pub evictions: AtomicU64,
    /// Write-backs that failed.
    pub write_back_errors: AtomicU64,
    /// Writes that waited for room.
    pub writes_held: AtomicU64,
    /// Gauge: pages there are.
    pub pages: AtomicU64,
    /// Gauge: the most pages there ever were.
    pub pages_peak: AtomicU64,
    /// Gauge: bytes that are not below yet. One that is written again while it is on its way counts twice.
    pub dirty_bytes: AtomicU64,
}
