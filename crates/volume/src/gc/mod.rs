//! Garbage collection: live data of victim segments is rewritten, so that they can be deleted (LSVD
//! §3.5, BS3 §8.2.4). Modules: [`policy`] (which segments, when), `busy` (whether writers come
//! first), `sweep` (where their live data is), `gather` (its bytes). The engine carries it out
//! (`engine::collect`) and deletes what is dead.
//!
//! Invariants:
//! 1. What is live is decided by the object map alone, never by what is still in the journal: a
//!    write that is not stored kills nothing.
//! 2. A moved extent takes effect only where the map still points at its origin, live and at
//!    replay. So it never hides anything newer, however late it comes.
//! 3. Moving never fails the volume: what cannot be read or stored now stays where it is.

pub(crate) mod busy;
pub(crate) mod gather;
pub(crate) mod gathered;
pub mod policy;
pub(crate) mod sweep;

pub use policy::{Choice, GcPolicy};

use sawmill_store::ObjectStore;

use crate::gc::policy::Candidate;
use crate::names;
use crate::recovery::Reporter;
use crate::segment::table::{SegmentTable, SegmentTotals};
use crate::world::RealWorld;
use crate::{Result, limits};

/// Segments that hold garbage, and what they hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Garbage {
    /// How many segments.
    pub segments: u64,
    /// Their data that is live: what collecting them would move.
    pub live_bytes: u64,
    /// All of their data.
    pub data_bytes: u64,
}

/// What a manual collection of a volume with this threshold would move, judged by its state in
/// `store`.
pub fn garbage(store: &dyn ObjectStore, name: &str, threshold: f64) -> Result<Garbage> {
    let world = RealWorld::default();
    let stored = names::stored(store, name, &mut Reporter::new(&world))?;
    Ok(garbage_of(&stored.view.segments, threshold))
}

pub(crate) fn garbage_of(segments: &SegmentTable, threshold: f64) -> Garbage {
    let mut garbage = Garbage::default();
    for candidate in segments.candidates() {
        if candidate.is_below(threshold) {
            garbage.segments += 1;
            garbage.live_bytes += candidate.live_bytes;
            garbage.data_bytes += candidate.data_bytes;
        }
    }
    garbage
}

/// Live bytes that one plan moves at most: planning takes a pass over a map of `extents` entries.
pub(crate) fn plan_bytes_max(segment_bytes: u32, extents: u64) -> u64 {
    let least = limits::GC_PLAN_SEGMENTS_MIN * u64::from(segment_bytes);
    least.max(extents * limits::GC_PLAN_BYTES_PER_EXTENT)
}

impl GcPolicy {
    /// The segments that a volume of these totals is to collect now; none while there is too little
    /// garbage.
    pub(crate) fn victims(
        &self,
        candidates: &[Candidate],
        totals: &SegmentTotals,
        now_unix_ms: u64,
        plan_bytes_max: u64,
    ) -> Vec<u32> {
        let (live_bytes, data_bytes) = (totals.own_live_bytes, totals.own_used_bytes);
        if !self.is_due(live_bytes, data_bytes) {
            return Vec::new();
        }
        self.choose(candidates, live_bytes, data_bytes, now_unix_ms, plan_bytes_max)
    }
}
