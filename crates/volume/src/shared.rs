//! What the rooms of one open volume share. Each field has one room that changes it; the others look.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::RwLock;
use sawmill_format::volume_record::VolumeRecord;
use sawmill_store::ObjectStore;

use crate::cache::{OwnerId, ReadCache};
use crate::fetch::Fetcher;
use crate::geometry::Geometries;
use crate::journal::Journal;
use crate::keeper::Inbox;
use crate::later::Later;
use crate::map::{JournalMap, ObjectMap};
use crate::pool::Pool;
use crate::readers::Readers;
use crate::record::Record;
use crate::segment::resident::Residents;
use crate::segment::table::SegmentTable;
use crate::state::State;
use crate::status::Counters;
use crate::world::World;
use crate::write::Stalled;

/// The stored part of a volume: which segments there are and where each address is in them.
pub(crate) struct View {
    /// Changed by the keeper.
    pub(crate) map: ObjectMap,
    /// Changed by the keeper.
    pub(crate) segments: SegmentTable,
}

/// See the head of this file.
pub(crate) struct Shared {
    pub(crate) record: VolumeRecord,
    pub(crate) name: String,
    pub(crate) geometry: Geometries,
    pub(crate) epoch: u64,
    pub(crate) read_only: bool,
    pub(crate) world: Arc<dyn World>,
    pub(crate) store: Arc<dyn ObjectStore>,
    /// None when read-only.
    pub(crate) journal: Option<Arc<Journal>>,
    /// Addresses whose newest bytes are not in a stored segment yet.
    pub(crate) journal_map: JournalMap<Arc<Record>>,
    /// Replaced as a whole only when a read-only attachment moves to a newer cut.
    pub(crate) view: RwLock<Arc<View>>,
    pub(crate) residents: Residents,
    pub(crate) cache: Option<(Arc<ReadCache>, OwnerId)>,
    pub(crate) readers: Arc<Readers>,
    pub(crate) pool: Arc<Pool>,
    /// Garbage collection's own thread: users must never wait for it.
    pub(crate) collector: Arc<Pool>,
    pub(crate) fetcher: Fetcher,
    pub(crate) later: Later,
    pub(crate) state: State,
    pub(crate) tally: Tally,
    pub(crate) inbox: Inbox,
    pub(crate) stalled: Stalled,
}

impl Shared {
    pub(crate) fn view(&self) -> Arc<View> {
        self.view.read().clone()
    }

    /// The volume stops for good: every waiter hears why.
    pub(crate) fn fail(&self, error: crate::Error) {
        self.state.set_failed(error);
        self.end_waiters();
    }

    /// Another writer has the volume: every waiter hears it.
    pub(crate) fn fence(&self, reason: String) {
        self.state.set_fenced(reason);
        self.end_waiters();
    }

    fn end_waiters(&self) {
        let Some(error) = self.state.refusal() else { return };
        self.inbox.fail_waiters(&error);
        self.stalled.fail(&error);
        if let Some(journal) = &self.journal {
            journal.fail(error);
        }
        self.inbox.wake.ring();
    }
}

macro_rules! tally {
    ($($name:ident),+ $(,)?) => {
        /// The counters behind [`Counters`], added to from many threads.
        #[derive(Default)]
        pub(crate) struct Tally { $(pub(crate) $name: AtomicU64),+ }

        impl Tally {
            /// A picture of all of them. The journal's own two are filled in by the caller.
            pub(crate) fn counters(&self) -> Counters {
                Counters { $($name: self.$name.load(Ordering::Relaxed),)+ ..Counters::default() }
            }
        }
    };
}

tally!(
    written_bytes,
    writes,
    read_bytes,
    reads,
    flushes,
    discards,
    segments_stored,
    segment_bytes_stored,
    coalesced_bytes,
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
    writes_stalled,
);

/// Adds to a counter.
pub(crate) fn add(counter: &AtomicU64, amount: u64) {
    counter.fetch_add(amount, Ordering::Relaxed);
}
