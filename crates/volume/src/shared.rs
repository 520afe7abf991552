//! What the rooms of one open volume share. Each field has one room that changes it; the others look.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Mutex, RwLock};
use sawmill_format::ids::VolumeId;
use sawmill_format::volume_record::VolumeRecord;
use sawmill_store::ObjectStore;

use crate::cache::{FrameKey, OwnerId, ReadCache};
use crate::cuts::{Cut, CutBook, Lineage};
use crate::fetch::{Fetcher, FrameName};
use crate::geometry::ResizableGeometry;
use crate::journal::Journal;
use crate::keeper::Inbox;
use crate::later::Later;
use crate::map::{JournalMap, ObjectMap};
use crate::pool::Pool;
use crate::readers::Readers;
use crate::record::Record;
use crate::segment::resident::Residents;
use crate::segment::table::{SegmentInfo, SegmentTable};
use crate::state::State;
use crate::status::Counters;
use crate::unstored::Unstored;
use crate::watch::Watch;
use crate::world::World;
use crate::write::Stalled;

/// The stored part of a volume: which segments there are and where each address is in them.
pub(crate) struct View {
    /// Changed by the keeper.
    pub(crate) map: ObjectMap,
    /// Changed by the keeper.
    pub(crate) segments: SegmentTable,
    /// What of the past is kept. Changed by the keeper.
    pub(crate) cuts: Mutex<CutBook>,
    /// Whose segments the map names.
    pub(crate) lineage: Lineage,
}

impl View {
    /// Another size for the disk: what lay beyond a smaller end is gone.
    pub(crate) fn resize(&self, size_bytes: u64) {
        let size_before = self.map.size_bytes();
        let mut losses: HashMap<u32, u64> = HashMap::new();
        if size_before > size_bytes {
            self.map.remove(size_bytes, size_before - size_bytes, &mut |sequence, bytes| {
                *losses.entry(sequence).or_default() += bytes;
            });
        }
        self.segments.lose(&losses.into_iter().collect::<Vec<_>>());
        self.map.set_size(size_bytes);
    }

    /// This volume with the map it had at a cut: what the map of then names is live again, all else is dead.
    /// The size stays what it is: what lay beyond its end is gone, what came since is empty.
    pub(crate) fn rolled_back_to(&self, then: View) -> View {
        then.resize(self.map.size_bytes());
        // Also what was empty then: the next checkpoint must not go on naming what is there now.
        then.map.mark_dirty(&self.map.groups());
        then.map.mark_all_dirty();
        let segments = self.segments.emptied();
        for (sequence, info) in self.segments.snapshot() {
            let live_bytes = then.segments.get(sequence).map_or(0, |info| info.live_bytes);
            let dead_since = if live_bytes == 0 && info.live_bytes == 0 { info.dead_since } else { 0 };
            let is_settled = info.is_settled && dead_since != 0;
            segments.add(sequence, SegmentInfo { live_bytes, dead_since, is_settled, ..info });
        }
        let cuts = Mutex::new(self.cuts.lock().clone());
        View { map: then.map, segments, cuts, lineage: self.lineage.clone() }
    }
}

/// See the head of this file.
pub(crate) struct Shared {
    pub(crate) record: VolumeRecord,
    pub(crate) name: String,
    pub(crate) geometry: ResizableGeometry,
    pub(crate) epoch: u64,
    pub(crate) epoch_before: u64,
    pub(crate) read_only: bool,
    pub(crate) world: Arc<dyn World>,
    pub(crate) store: Arc<dyn ObjectStore>,
    /// None when read-only.
    pub(crate) journal: Option<Arc<Journal>>,
    /// Addresses whose newest bytes are not in a stored segment yet.
    pub(crate) journal_map: JournalMap<Arc<Record>>,
    /// Replaced as a whole only when a read-only attachment moves to a newer cut, and by a rollback.
    pub(crate) view: RwLock<Arc<View>>,
    pub(crate) residents: Residents,
    /// The read cache, the volume's name in it, and those of its ancestors.
    pub(crate) cache: Option<(Arc<ReadCache>, OwnerId, Vec<OwnerId>)>,
    /// Whose segments the map names.
    pub(crate) lineage: Lineage,
    /// A read-only attachment shows this cut and no other.
    pub(crate) fixed_cut: Option<Cut>,
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
    /// Whether the volume is used, and still its owner's.
    pub(crate) watch: Watch,
    /// How old what is not stored may become.
    pub(crate) unstored: Unstored,
}

impl Shared {
    pub(crate) fn view(&self) -> Arc<View> {
        self.view.read().clone()
    }

    /// The volume whose segment it is: this one, or an ancestor.
    pub(crate) fn owner_of(&self, sequence: u32) -> VolumeId {
        self.lineage.owner(self.record.volume_id, u64::from(sequence))
    }

    /// The read cache, and the name of a frame in it. Clones share what their ancestors own.
    pub(crate) fn cached(&self, name: FrameName) -> Option<(&Arc<ReadCache>, FrameKey)> {
        let (cache, own, ancestors) = self.cache.as_ref()?;
        let ancestor = self.lineage.ancestor(u64::from(name.sequence));
        let owner = ancestor.map_or(*own, |(index, _)| ancestors[index]);
        let FrameName { sequence, epoch, frame } = name;
        Some((cache, FrameKey { owner, sequence, epoch, frame }))
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

    /// Whether an accepted write has been waiting for the store for too long.
    pub(crate) fn is_unstored_too_old(&self) -> bool {
        let Some(journal) = self.journal.as_ref().filter(|_| self.unstored.is_limited()) else {
            return false;
        };
        self.unstored.is_too_old(self.inbox.stored(), journal.ring.next(), self.world.now())
    }

    fn end_waiters(&self) {
        let Some(error) = self.state.refusal() else { return };
        self.inbox.fail_waiters(&error);
        self.stalled.fail(&error);
        crate::flush::go_on(self);
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
