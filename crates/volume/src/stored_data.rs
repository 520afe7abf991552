//! Stored data as readers and the engine access it: the view, the read cache, the data still in the
//! journal, and the reads in flight.
//!
//! Invariant: only the engine replaces a view, or a read-only attachment that moves to a newer cut.
//!
//! Not here: what a view holds (`view`), and the way of a read through these parts (`read`).

use std::sync::Arc;

use parking_lot::RwLock;
use sawmill_format::ids::VolumeId;

use crate::cache::{FillRoom, FrameKey, OwnerId, ReadCache};
use crate::cuts::{Cut, Lineage};
use crate::readers::Readers;
use crate::segment::resident::Residents;
use crate::view::View;

/// Which frame of which segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct FrameName {
    pub(crate) sequence: u32,
    pub(crate) epoch: u64,
    pub(crate) frame: u32,
}

/// The read cache as one volume uses it.
pub(crate) struct VolumeCache {
    cache: Arc<ReadCache>,
    /// The volume's name in the cache, and those of its ancestors.
    own: OwnerId,
    ancestors: Vec<OwnerId>,
}

impl VolumeCache {
    /// Registers `volume_id` and its ancestors with `cache`.
    pub(crate) fn enter(cache: Arc<ReadCache>, volume_id: VolumeId, lineage: &Lineage) -> Self {
        let own = cache.owner(volume_id);
        let ancestors =
            lineage.entries().iter().map(|entry| cache.owner(entry.volume_id)).collect();
        VolumeCache { cache, own, ancestors }
    }
}

/// What a reader needs to find and read stored data.
pub(crate) struct StoredData {
    volume_id: VolumeId,
    view: RwLock<Arc<View>>,
    pub(crate) residents: Residents,
    cache: Option<VolumeCache>,
    /// The volumes whose segments the map names.
    pub(crate) lineage: Lineage,
    pub(crate) readers: Arc<Readers>,
    /// A read-only attachment shows this cut and no other.
    pub(crate) fixed_cut: Option<Cut>,
}

impl StoredData {
    pub(crate) fn new(
        volume_id: VolumeId,
        view: View,
        cache: Option<VolumeCache>,
        fixed_cut: Option<Cut>,
    ) -> Self {
        StoredData {
            volume_id,
            lineage: view.lineage.clone(),
            view: RwLock::new(Arc::new(view)),
            residents: Residents::default(),
            cache,
            readers: Arc::default(),
            fixed_cut,
        }
    }

    pub(crate) fn view(&self) -> Arc<View> {
        self.view.read().clone()
    }

    /// Replaces the view after a rollback, or when a read-only attachment moves to a newer cut.
    pub(crate) fn replace_view(&self, view: View) {
        *self.view.write() = Arc::new(view);
    }

    /// The volume that owns a segment: this one, or an ancestor.
    pub(crate) fn owner_of(&self, sequence: u32) -> VolumeId {
        self.lineage.owner(self.volume_id, u64::from(sequence))
    }

    pub(crate) fn has_cache(&self) -> bool {
        self.cache.is_some()
    }

    /// Memory to hold `bytes` that are to enter the read cache, if all volumes leave so much.
    pub(crate) fn fill_room(&self, bytes: u64) -> Option<FillRoom> {
        FillRoom::take(&self.cache.as_ref()?.cache, bytes)
    }

    /// The read cache.
    pub(crate) fn cache(&self) -> Option<Arc<ReadCache>> {
        self.cache.as_ref().map(|entered| entered.cache.clone())
    }

    /// The read cache, and the name of a frame in it. Clones share what their ancestors own.
    pub(crate) fn cached(&self, name: FrameName) -> Option<(&Arc<ReadCache>, FrameKey)> {
        let VolumeCache { cache, own, ancestors } = self.cache.as_ref()?;
        let ancestor = self.lineage.ancestor(u64::from(name.sequence));
        let owner = ancestor.map_or(*own, |(index, _)| ancestors[index]);
        let FrameName { sequence, epoch, frame } = name;
        Some((cache, FrameKey { owner, sequence, epoch, frame }))
    }

    /// A segment was deleted: frees its frames in the cache, if it was this volume's own.
    pub(crate) fn forget_segment(&self, sequence: u32) {
        let is_own = self.lineage.ancestor(u64::from(sequence)).is_none();
        if let Some(VolumeCache { cache, own, .. }) = self.cache.as_ref().filter(|_| is_own) {
            cache.forget_segment(*own, sequence);
        }
    }
}
