//! One page: its bytes, which of them are known, and which are not below yet.
//!
//! Invariants: dirty bytes and bytes in flight are known; any other known byte is as it is below.
//! At most one write-back of a page is in flight. `dirty` and `sending` hold bytes exactly if their
//! `since` is a number.
//!
//! Not here: which pages exist and which is evicted (`table`), when a page is fetched or written
//! back (`state`).

use std::ops::Range;
use std::sync::Arc;

use sawmill_device::Error;
use sawmill_format::packed_write::entry_at;

use super::buffers::{PageBytes, is_own, new_buffer};
use super::byte_set::ByteSet;
use super::{PAGE_BYTES, SUB_BLOCK_BYTES};

/// The `since` of an empty set.
pub(super) const NEVER: u64 = u64::MAX;

pub(super) struct Page {
    /// Reads and write-backs share them. Empty until something is known.
    pub(super) bytes: PageBytes,
    pub(super) known: ByteSet,
    /// Written and not in flight.
    pub(super) dirty: ByteSet,
    /// In flight to the device below. Bytes that are written again in the meantime are dirty too.
    pub(super) sending: ByteSet,
    /// The number of the oldest write among `dirty`.
    pub(super) dirty_since: u64,
    /// The number of the oldest write among `sending`.
    pub(super) sending_since: u64,
    /// A request waits until all writes up to this number are below.
    pub(super) wanted_through: u64,
    /// The next write-back uses FUA.
    pub(super) fua: bool,
    /// Reads below in flight.
    pub(super) fetches: u32,
    pub(super) fetch_error: Option<Error>,
    /// Clean bytes are forgotten when the fetches end.
    pub(super) is_doubted: bool,
    /// Reads that wait for the fetches.
    pub(super) readers: Vec<u64>,
    /// Pushes that wait for writes up to a number: (number, push).
    pub(super) waiters: Vec<(u64, u64)>,
    /// The page is in the eviction queue.
    pub(super) is_queued: bool,
    /// Used since eviction last skipped it.
    pub(super) used: bool,
}

impl Default for Page {
    fn default() -> Self {
        Page {
            bytes: PageBytes::default(),
            known: ByteSet::default(),
            dirty: ByteSet::default(),
            sending: ByteSet::default(),
            dirty_since: NEVER,
            sending_since: NEVER,
            wanted_through: 0,
            fua: false,
            fetches: 0,
            fetch_error: None,
            is_doubted: false,
            readers: Vec::new(),
            waiters: Vec::new(),
            is_queued: false,
            used: false,
        }
    }
}

impl Page {
    /// Takes the bytes of a range from `new`, which has room for the page. Bytes that others share
    /// stay as they were. `new` becomes the buffer that is not used any more.
    pub(super) fn take(&mut self, inside: Range<usize>, new: &mut PageBytes) {
        let is_short = inside.len() <= self.bytes.len() / 2;
        if is_short
            && !self.known.is_empty()
            && let Some(bytes) = Arc::get_mut(&mut self.bytes)
        {
            bytes[inside.clone()].copy_from_slice(&new[inside.clone()]);
        } else {
            self.keep_known_in(new, 0..inside.start);
            self.keep_known_in(new, inside.end..PAGE_BYTES);
            std::mem::swap(&mut self.bytes, new);
        }
        self.known.insert(inside);
    }

    /// As [`Page::take`], for a few bytes that `fill` copies into their place.
    pub(super) fn fill(&mut self, inside: Range<usize>, fill: impl FnOnce(&mut [u8])) {
        if self.bytes.is_empty() {
            self.bytes = new_buffer();
        }
        fill(&mut Arc::make_mut(&mut self.bytes)[inside.clone()]);
        self.known.insert(inside);
    }

    /// Copies what is known of a range into another buffer for the page, which nobody shares.
    fn keep_known_in(&self, new: &mut PageBytes, range: Range<usize>) {
        for known in self.known.runs() {
            let kept = known.start.max(range.start)..known.end.min(range.end);
            if kept.start < kept.end {
                Arc::make_mut(new)[kept.clone()].copy_from_slice(&self.bytes[kept]);
            }
        }
    }

    /// Resets a quiet page to a new one.
    pub(super) fn reset(&mut self) {
        debug_assert!(self.is_quiet() && self.readers.is_empty() && self.waiters.is_empty());
        self.known.clear();
        (self.wanted_through, self.fua, self.is_queued, self.used) = (0, false, false, false);
    }

    /// The number of the oldest write that is not below.
    pub(super) fn since(&self) -> u64 {
        self.dirty_since.min(self.sending_since)
    }

    /// Whether nothing of it is dirty, in flight, being fetched or about to be.
    pub(super) fn is_quiet(&self) -> bool {
        self.since() == NEVER && self.fetches == 0 && self.readers.is_empty()
    }

    /// Forgets clean bytes. During a fetch, whose readers wait for a page without holes, this
    /// happens at its end.
    pub(super) fn doubt(&mut self) {
        self.is_doubted = self.fetches > 0;
        if !self.is_doubted {
            self.known.clear();
            for run in self.dirty.runs().chain(self.sending.runs()) {
                self.known.insert(run);
            }
        }
    }

    /// Takes fetched bytes from `fetched`, which has room for the page, except where known bytes
    /// exist. `fetched` becomes the buffer that is not used any more.
    pub(super) fn merge(&mut self, inside: Range<usize>, fetched: &mut PageBytes) {
        if !self.known.is_empty() && is_own(&mut self.bytes) {
            let bytes = Arc::make_mut(&mut self.bytes);
            for gap in self.known.gaps(inside.clone()) {
                bytes[gap.clone()].copy_from_slice(&fetched[gap]);
            }
        } else {
            self.keep_known_in(fetched, 0..PAGE_BYTES);
            std::mem::swap(&mut self.bytes, fetched);
        }
        self.known.insert(inside);
    }

    /// The sub-blocks of its first `length` bytes that contain an unknown byte, in order; some may
    /// overlap.
    pub(super) fn holes(&self, length: usize) -> impl Iterator<Item = Range<usize>> + '_ {
        self.known.gaps(0..length).map(move |gap| {
            let start = gap.start / SUB_BLOCK_BYTES * SUB_BLOCK_BYTES;
            start..gap.end.next_multiple_of(SUB_BLOCK_BYTES).min(length)
        })
    }

    /// The content of its write-back: the dirty runs. A gap between two runs is included if it is
    /// known and no longer than an entry, so that the packed form of a known page is never longer
    /// than the page (BASS §3.1).
    pub(super) fn runs_to_send(&self, mut to: impl FnMut(Range<usize>)) {
        const ENTRY_BYTES: usize = entry_at::SIZE;
        let mut open: Option<Range<usize>> = None;
        for run in self.dirty.runs() {
            match &mut open {
                Some(last)
                    if run.start - last.end <= ENTRY_BYTES
                        && self.known.covers(&(last.end..run.start)) =>
                {
                    last.end = run.end;
                }
                _ => open.replace(run).into_iter().for_each(&mut to),
            }
        }
        open.into_iter().for_each(to);
    }
}
