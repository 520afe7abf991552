//! The options of a cache: policy and limits.
//!
//! Invariants: the longest request is at most a quarter of the cache and not above
//! `dirty_bytes_max`, so it has room when nothing is dirty. Within `packed_bytes_max`, no packed
//! write has more entries than its format allows.
//!
//! Not here: defaults of a command line.

use std::time::Duration;

use sawmill_device::{Error, ErrorKind, Geometry, Result};
use sawmill_format::packed_write;

use super::PAGE_BYTES;

/// When a write is answered, and whether the cache keeps it (BASS §4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// Answered when it is in the cache, written below later.
    WriteBack,
    /// Answered when it is below; kept for reads.
    WriteThrough,
    /// Sent below as it is; the cache forgets its range.
    WriteAround,
}

/// Policy and bounds of a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// When writes are answered.
    pub policy: Policy,
    /// The most bytes of cached pages, at least 64 KiB. Requests in flight may exceed it, by copies
    /// of what they write and pages that were replaced while they read; a thread keeps up to 64 KiB
    /// of spare pages. The metadata of a page is not counted: about 250 bytes, and 1.5 KiB more
    /// if it was written at many addresses.
    pub cache_bytes_max: u64,
    /// Bytes that are not below yet, from 16 KiB to `cache_bytes_max`. Above it, writers wait. At
    /// half of it, the older half is written below.
    pub dirty_bytes_max: u64,
    /// How long a byte may stay dirty without a flush, in seconds, by the clock of
    /// [`super::Cache::tick`].
    pub flush_interval_s: u32,
    /// The most write-backs in flight, at least 1. Each holds up to 256 KiB: a copy, or pages that
    /// are copied when they are written during that time.
    pub write_backs_max: u32,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            policy: Policy::WriteBack,
            cache_bytes_max: 256 << 20,
            dirty_bytes_max: 64 << 20,
            flush_interval_s: 5,
            write_backs_max: 64,
        }
    }
}

impl Options {
    /// The smallest `cache_bytes_max`.
    pub const CACHE_BYTES_MIN: u64 = 64 << 10;
    /// The smallest `dirty_bytes_max`.
    pub const DIRTY_BYTES_MIN: u64 = 16 << 10;
}

/// The packed form of any page fits; the worst case is every second byte dirty.
const PACKED_BYTES_MIN: u32 =
    (packed_write::at::SIZE + (packed_write::entry_at::SIZE + 1) * PAGE_BYTES / 2) as u32 + 1024;

const BELOW_BYTES_MAX: u32 = 256 << 10;
/// No packed write up to this length has more entries than allowed, even if each has one byte.
const PACKED_BYTES_DENSE_MAX: u32 =
    packed_write::ENTRY_COUNT_MAX * (packed_write::entry_at::SIZE as u32 + 1);

/// Limits and properties, ready for use.
pub(super) struct CacheSetup {
    pub(super) policy: Policy,
    /// The geometry of the cache.
    pub(super) geometry: Geometry,
    pub(super) pages_max: usize,
    /// The most pages with bytes that are not below yet.
    pub(super) unsaved_pages_max: usize,
    pub(super) unsaved_bytes_max: u64,
    pub(super) flush_interval: Duration,
    pub(super) write_backs_max: usize,
    /// The longest plain request below: long enough for the wire, short enough for others to get
    /// their turn there.
    pub(super) below_bytes_max: u64,
    pub(super) packed_bytes_max: u64,
    pub(super) packed_span_bytes_max: u64,
}

impl CacheSetup {
    /// `Invalid`: a limit is out of range, or the device does not accept a packed page.
    pub(super) fn new(options: &Options, below: &Geometry, packed: u32, span: u32) -> Result<Self> {
        let invalid = |text: String| Err(Error::new(ErrorKind::Invalid, format!("cache: {text}")));
        if options.cache_bytes_max < Options::CACHE_BYTES_MIN {
            return invalid(format!(
                "cache_bytes_max is {}, below {}",
                options.cache_bytes_max,
                Options::CACHE_BYTES_MIN
            ));
        }
        if !(Options::DIRTY_BYTES_MIN..=options.cache_bytes_max).contains(&options.dirty_bytes_max)
        {
            let (dirty, cache) = (options.dirty_bytes_max, options.cache_bytes_max);
            return invalid(format!(
                "dirty_bytes_max is {dirty}, not from {} to {cache}",
                Options::DIRTY_BYTES_MIN
            ));
        }
        if options.write_backs_max == 0 {
            return invalid("write_backs_max is 0".into());
        }
        if packed < PACKED_BYTES_MIN || (span as usize) < PAGE_BYTES {
            return invalid(format!(
                "the device takes packed writes of {packed} bytes over {span}: too short"
            ));
        }
        let longest = (options.cache_bytes_max / 4).min(options.dirty_bytes_max);
        let request_bytes_max =
            below.request_bytes_max.min(u32::try_from(longest).unwrap_or(u32::MAX));
        let preferred_bytes = below.preferred_bytes.min(request_bytes_max);
        let pages_max = usize::try_from(options.cache_bytes_max).unwrap_or(usize::MAX) / PAGE_BYTES;
        Ok(CacheSetup {
            policy: options.policy,
            geometry: Geometry { request_bytes_max, preferred_bytes, ..*below },
            pages_max,
            unsaved_pages_max: pages_max / 8 * 7,
            unsaved_bytes_max: options.dirty_bytes_max,
            flush_interval: Duration::from_secs(options.flush_interval_s.into()),
            write_backs_max: options.write_backs_max as usize,
            below_bytes_max: below.request_bytes_max.min(BELOW_BYTES_MAX).into(),
            packed_bytes_max: packed.min(PACKED_BYTES_DENSE_MAX).into(),
            packed_span_bytes_max: span.min(packed_write::SPAN_BYTES_MAX).into(),
        })
    }
}
