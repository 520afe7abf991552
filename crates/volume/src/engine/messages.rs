//! The messages to the engine: answers of the store and of the collector's thread, and requests of
//! users.
//!
//! Invariant: each message owns everything it needs, so any thread can send it.
//!
//! Not here: how they are sent and bounded (`mailbox`), and what each one leads to
//! (`Engine::handle`).

use std::time::Duration;

use bytes::Bytes;
use sawmill_format::ids::PutId;
use sawmill_format::kept_block::Order;
use sawmill_store::PutOutcome;

use crate::Result;
use crate::gc::gathered::GatherOutcome;
use crate::gc::policy::Candidate;
use crate::gc::sweep::MovePlan;
use crate::status::GcReport;
use crate::view::View;

/// Notifies a requester of the result.
pub(crate) type ResultCallback = Box<dyn FnOnce(Result<()>) + Send>;

/// An answer of the store, or of the collector's thread.
pub(crate) enum Event {
    Put {
        sequence: u64,
        outcome: sawmill_store::Result<PutOutcome>,
    },
    CheckpointPut {
        object: usize,
        outcome: sawmill_store::Result<PutOutcome>,
    },
    RivalCheckpoint {
        outcome: sawmill_store::Result<Bytes>,
    },
    /// Old roots that still exist; those below `gone_below` are gone.
    RootsListed {
        keys: Vec<String>,
        number: u64,
        gone_below: u64,
    },
    /// Every root older than those of checkpoint `number` and its predecessor is gone.
    RootsDeleted {
        number: u64,
        gone_below: u64,
    },
    PartsListed {
        keys: Vec<String>,
        number: u64,
    },
    CleanedUp,
    CleanUpFailed {
        number: u64,
        what: String,
    },
    FenceChecked {
        check: Box<FenceCheckState>,
        outcome: sawmill_store::Result<Bytes>,
    },
    PinOutcome(PinOutcome),
    ReleasesListed {
        pin_numbers: Vec<u64>,
    },
    Planned {
        plan: MovePlan,
        victims: Vec<u32>,
    },
    Gathered {
        outcome: GatherOutcome,
    },
    /// The frames of a moved segment that were cached are in the read cache again.
    Kept {
        sequence: u64,
    },
    /// The read cache has got what was wanted of a written segment, or a part of it.
    Cached {
        wanted_bytes: u64,
        cached_bytes: u64,
    },
    SegmentsDeleted(DeleteOutcome),
    /// A group of the map was loaded.
    MapLoaded,
}

/// Dead segments that checkpoint `number` allowed to be deleted.
pub(crate) struct DeleteOutcome {
    pub(super) number: u64,
    pub(super) sequences: Vec<u32>,
    pub(super) outcome: sawmill_store::Result<()>,
}

/// The answer to a request for a pin, and what is deleted if there is none.
pub(crate) struct PinOutcome {
    pub(super) number: u64,
    pub(super) doomed: Vec<u32>,
    pub(super) pin_number: u64,
    pub(super) outcome: sawmill_store::Result<Bytes>,
}

/// A manual collection.
pub(crate) struct GcRequest {
    /// Segments with a smaller share of live data than this are emptied; 1: all, so that everything
    /// lies in address order.
    pub(crate) threshold: f64,
    /// The newest segment that it includes; set when it is accepted.
    pub(crate) through: u32,
    /// Everything was moved; dead segments are being deleted.
    pub(crate) is_settling: bool,
    pub(crate) callback: Box<dyn FnOnce(Result<GcReport>) + Send>,
}

impl GcRequest {
    /// Whether it includes this segment.
    pub(crate) fn takes(&self, candidate: &Candidate) -> bool {
        candidate.sequence <= self.through && candidate.is_below(self.threshold)
    }
}

/// A requested resize, and its requester.
pub(crate) struct Resize {
    pub(crate) size_bytes: u64,
    /// The size that the requester knew.
    pub(crate) from_bytes: u64,
    pub(crate) callback: ResultCallback,
}

/// An order for the engine.
pub(crate) struct OrderRequest {
    pub(crate) order: Order,
    /// The map of the cut, for a rollback.
    pub(crate) then: Option<View>,
    /// For a rollback, the name of the snapshot to make right before it.
    pub(crate) undo: Option<String>,
    /// Everything accepted before this position precedes the order.
    pub(crate) position: u64,
    pub(crate) callback: ResultCallback,
}

/// The purpose of a check.
#[derive(Clone, Copy)]
pub(super) enum FenceCheckPurpose {
    /// This checkpoint is about to delete something.
    Delete(u64),
    /// The volume is in use; the check started at this time.
    Watch(Duration),
}

/// The places that are left to check.
pub(crate) struct FenceCheckState {
    /// Sequences, and our own put of each that is in flight.
    pub(super) places_left: Vec<(u64, Option<PutId>)>,
    pub(super) purpose: FenceCheckPurpose,
}
