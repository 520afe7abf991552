//! What every part of an open volume shares: its record, its epoch, its world, its state and its
//! counters.
//!
//! Invariant: only the size, the state and the counters change. Not here: what a write
//! ([`crate::write`]), a read ([`crate::read`]) and the engine ([`crate::engine`]) need in
//! addition.

use std::sync::Arc;

use sawmill_format::volume_record::VolumeRecord;
use sawmill_store::ObjectStore;

use crate::counters::AtomicCounters;
use crate::geometry::ResizableGeometry;
use crate::state::VolumeState;
use crate::world::World;

/// One opening of a volume, for writing or for reading only.
pub(crate) struct Attachment {
    pub(crate) record: VolumeRecord,
    pub(crate) name: String,
    pub(crate) geometry: ResizableGeometry,
    pub(crate) epoch: u64,
    pub(crate) epoch_before: u64,
    pub(crate) read_only: bool,
    pub(crate) world: Arc<dyn World>,
    pub(crate) store: Arc<dyn ObjectStore>,
    pub(crate) state: VolumeState,
    pub(crate) counters: AtomicCounters,
}
