//! The counters of an open volume, added to from many threads. Not here: what each means
//! ([`crate::status::Counters`]).

use std::sync::atomic::{AtomicU64, Ordering};

use crate::status::Counters;

macro_rules! counters {
    ($($name:ident),+ $(,)?) => {
        /// The counters behind [`Counters`], added to from many threads.
        #[derive(Default)]
        pub(crate) struct AtomicCounters { $(pub(crate) $name: AtomicU64),+ }

        impl AtomicCounters {
            /// The current values of all of them. The journal's own two are filled in by the
            /// caller.
            pub(crate) fn counters(&self) -> Counters {
                Counters { $($name: self.$name.load(Ordering::Relaxed),)+ ..Counters::default() }
            }
        }
    };
}

counters!(
    written_bytes,
    writes,
    read_bytes,
    reads,
    flushes,
    discards,
    segments_stored,
    segment_bytes_stored,
    coalesced_bytes,
    written_cached_bytes,
    written_uncached_bytes,
    checkpoints,
    segments_deleted,
    segments_moved,
    moved_bytes,
    moved_segment_bytes,
    collections,
    reads_journal,
    reads_cache,
    reads_store,
    prefetched_frames,
    prefetches_cut,
    writes_stalled,
);

/// Adds to a counter.
pub(crate) fn add(counter: &AtomicU64, amount: u64) {
    counter.fetch_add(amount, Ordering::Relaxed);
}
