//! What is said to the engine: what the store answered, and what users ask for. Each message owns all that it
//! needs, so that it can be sent from any thread.

use std::time::Duration;

use bytes::Bytes;
use sawmill_format::ids::PutId;
use sawmill_format::kept::Order;
use sawmill_store::PutOutcome;

use crate::Result;
use crate::gc::gathered::Outcome;
use crate::gc::policy::Candidate;
use crate::gc::sweep::Plan;
use crate::status::GcReport;
use crate::view::View;

/// Who ordered something, to hear how it ended.
pub(crate) type Tell = Box<dyn FnOnce(Result<()>) + Send>;

/// What the store answered.
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
    /// Old roots that are still there; those below `gone_below` are gone.
    RootsListed {
        keys: Vec<String>,
        number: u64,
        gone_below: u64,
    },
    /// Every root older than the two of checkpoint `number` and the one before is gone.
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
    FenceLooked {
        look: Box<Look>,
        outcome: sawmill_store::Result<Bytes>,
    },
    PinAsked(PinAsked),
    ReleasesListed {
        slots: Vec<u64>,
    },
    Planned {
        plan: Plan,
        victims: Vec<u32>,
    },
    Gathered {
        outcome: Outcome,
    },
    /// The frames of a moved segment that were cached are in the read cache again.
    Kept {
        sequence: u64,
    },
    SegmentsDeleted(Deleted),
}

/// Dead segments that checkpoint `number` allowed to delete.
pub(crate) struct Deleted {
    pub(super) number: u64,
    pub(super) sequences: Vec<u32>,
    pub(super) outcome: sawmill_store::Result<()>,
}

/// The answer to a question for a pin, and what is deleted if there is none.
pub(crate) struct PinAsked {
    pub(super) number: u64,
    pub(super) doomed: Vec<u32>,
    pub(super) slot: u64,
    pub(super) outcome: sawmill_store::Result<Bytes>,
}

/// Collection ordered by hand.
pub(crate) struct GcOrder {
    /// Segments of which less than this share is live are emptied; 1: all, so that everything lies in address
    /// order.
    pub(crate) threshold: f64,
    /// The newest segment it is about: set when it is taken up.
    pub(crate) through: u32,
    /// Everything was moved; what is dead is being deleted.
    pub(crate) is_settling: bool,
    pub(crate) tell: Box<dyn FnOnce(Result<GcReport>) + Send>,
}

impl GcOrder {
    /// Whether the order is about this segment.
    pub(crate) fn takes(&self, candidate: &Candidate) -> bool {
        candidate.sequence <= self.through && candidate.is_below(self.threshold)
    }
}

/// A resize that is asked for, and who waits for it.
pub(crate) struct Resize {
    pub(crate) size_bytes: u64,
    /// The size that whoever asked knew.
    pub(crate) from_bytes: u64,
    pub(crate) tell: Tell,
}

/// An order on its way to the engine.
pub(crate) struct Ordered {
    pub(crate) order: Order,
    /// The map of the cut, for a rollback.
    pub(crate) then: Option<View>,
    /// For a rollback, the name of a snapshot to be made right in front of it.
    pub(crate) undo: Option<String>,
    /// Everything accepted before this position comes first.
    pub(crate) position: u64,
    pub(crate) tell: Tell,
}

/// What a look is for.
#[derive(Clone, Copy)]
pub(super) enum Purpose {
    /// Something is to be deleted by this checkpoint.
    Delete(u64),
    /// The volume is in use; the look began then.
    Watch(Duration),
}

/// What is still to be looked at.
pub(crate) struct Look {
    /// Sequences, and our own put of each that is on its way.
    pub(super) left: Vec<(u64, Option<PutId>)>,
    pub(super) purpose: Purpose,
}
