//! The counters of a cache. Not here: names and text of metrics.

use std::sync::atomic::AtomicU64;

/// Counters since the cache was made, and three gauges. Lengths are in bytes.
#[derive(Debug, Default)]
pub struct CacheCounters {
    /// Writes that cover a page only in part.
    pub partial_writes: AtomicU64,
    /// Payload of the writes of users.
    pub bytes_written_by_user: AtomicU64,
    /// Payload of write-backs, including failed ones, with the headers of packed ones.
    pub bytes_sent: AtomicU64,
    /// Bytes that successful write-backs saved compared with writing whole pages: the highest value
    /// so far.
    pub bytes_saved: AtomicU64,
    /// Reads below.
    pub fetches: AtomicU64,
    /// Pages of which only the missing sub-blocks were fetched.
    pub hole_fetches: AtomicU64,
    /// Bytes of the reads below.
    pub fetched_bytes: AtomicU64,
    /// Pages written below as a whole.
    pub whole_pages_sent: AtomicU64,
    /// Write-backs of one range, as plain writes.
    pub plain_sent: AtomicU64,
    /// Write-backs of several ranges, as packed writes.
    pub packed_sent: AtomicU64,
    /// Evicted pages.
    pub evictions: AtomicU64,
    /// Write-backs that failed.
    pub write_back_errors: AtomicU64,
    /// Writes that waited for room.
    pub writes_held: AtomicU64,
    /// Gauge: pages.
    pub pages: AtomicU64,
    /// Gauge: the highest number of pages so far.
    pub pages_peak: AtomicU64,
    /// Gauge: bytes that are not below yet. Bytes that are written again while in flight count
    /// twice.
    pub dirty_bytes: AtomicU64,
}
