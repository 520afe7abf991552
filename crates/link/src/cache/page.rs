//! One page: its bytes, which of them are known, and which are not below yet.
//!
//! Invariants: what is dirty or on its way is known; a known byte that is neither is as it is below. At most
//! one write-back of a page is under way. `dirty` and `sending` hold bytes exactly when their `since` is a
//! number.

use std::ops::Range;
use std::sync::Arc;

use sawmill_device::Error;
use sawmill_format::packed_write::entry_at;

use super::segments::Segments;
use super::{PAGE_BYTES, SUB_BLOCK_BYTES};

/// The `since` of no bytes.
pub(super) const NEVER: u64 = u64::MAX;

pub(super) struct Page {
    /// A write-back may share them: who changes them asks [`Page::bytes_mut`].
    pub(super) bytes: Arc<[u8]>,
    pub(super) known: Segments,
    /// Written and not on their way.
    pub(super) dirty: Segments,
    /// On their way below. Written again meanwhile, they are dirty too.
    pub(super) sending: Segments,
    /// The number of the oldest write among `dirty`.
    pub(super) dirty_since: u64,
    /// The same among `sending`.
    pub(super) sending_since: u64,
    /// Somebody waits until all writes up to this number are below.
    pub(super) wanted_through: u64,
    /// The next write-back is with FUA.
    pub(super) fua: bool,
    /// Reads below that are under way.
    pub(super) fetches: u32,
    pub(super) fetch_error: Option<Error>,
    /// What is clean is forgotten when the fetches end.
    pub(super) doubted: bool,
    /// Reads that wait for the fetches.
    pub(super) readers: Vec<u64>,
    /// Pushes that wait for writes up to a number: (number, push).
    pub(super) waiters: Vec<(u64, u64)>,
    /// It stands in the line of those that may be thrown out.
    pub(super) in_line: bool,
    /// Used since it was last passed over.
    pub(super) used: bool,
}

impl Default for Page {
    fn default() -> Self {
        Page {
            bytes: std::iter::repeat_n(0, PAGE_BYTES).collect(),
            known: Segments::default(),
            dirty: Segments::default(),
            sending: Segments::default(),
            dirty_since: NEVER,
            sending_since: NEVER,
            wanted_through: 0,
            fua: false,
            fetches: 0,
            fetch_error: None,
            doubted: false,
            readers: Vec::new(),
            waiters: Vec::new(),
            in_line: false,
            used: false,
        }
    }
}

impl Page {
    /// Its bytes, to change them: those that are on their way stay as they were.
    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        Arc::make_mut(&mut self.bytes)
    }

    /// Makes a quiet page as good as new.
    pub(super) fn reset(&mut self) {
        debug_assert!(self.is_quiet() && self.readers.is_empty() && self.waiters.is_empty());
        self.known.clear();
        (self.wanted_through, self.fua, self.in_line, self.used) = (0, false, false, false);
    }

    /// The number of the oldest write that is not below.
    pub(super) fn since(&self) -> u64 {
        self.dirty_since.min(self.sending_since)
    }

    /// Nothing of it is dirty, on its way, being fetched or about to be.
    pub(super) fn is_quiet(&self) -> bool {
        self.since() == NEVER && self.fetches == 0 && self.readers.is_empty()
    }

    /// Forgets what is clean; under a fetch, whose readers wait for a page without holes, when that ends.
    pub(super) fn doubt(&mut self) {
        self.doubted = self.fetches > 0;
        if !self.doubted {
            self.known.clear();
            for run in self.dirty.runs().chain(self.sending.runs()) {
                self.known.insert(run);
            }
        }
    }

    /// Takes fetched bytes, except where it knows better.
    pub(super) fn merge(&mut self, inside: Range<usize>, fetched: &[u8]) {
        let bytes = Arc::make_mut(&mut self.bytes);
        for gap in self.known.gaps(inside.clone()) {
            let place = gap.start - inside.start..gap.end - inside.start;
            bytes[gap].copy_from_slice(&fetched[place]);
        }
        self.known.insert(inside);
    }

    /// The sub-blocks of its first `length` bytes that hold a byte not known, in order; some may overlap.
    pub(super) fn holes(&self, length: usize) -> impl Iterator<Item = Range<usize>> + '_ {
        self.known.gaps(0..length).map(move |gap| {
            let start = gap.start / SUB_BLOCK_BYTES * SUB_BLOCK_BYTES;
            start..gap.end.next_multiple_of(SUB_BLOCK_BYTES).min(length)
        })
    }

    /// What its write-back carries: the dirty runs. A gap between two that is known and no longer than an
    /// entry goes with them, so that the packed form of a known page is never longer than the page (BASS
    /// §3.1).
    pub(super) fn runs_to_send(&self, mut to: impl FnMut(Range<usize>)) {
        const ENTRY_BYTES: usize = entry_at::SIZE;
        let mut open: Option<Range<usize>> = None;
        for run in self.dirty.runs() {
            match &mut open {
                Some(last)
                    if run.start - last.end <= ENTRY_BYTES && self.known.covers(&(last.end..run.start)) =>
                {
                    last.end = run.end;
                }
                _ => open.replace(run).into_iter().for_each(&mut to),
            }
        }
        open.into_iter().for_each(to);
    }
}
