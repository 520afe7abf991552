//! Where a log ends, and what is known of its end. Not here: finding it ([`super::roll_forward`]).

use sawmill_format::checkpoint::Checkpoint;
use sawmill_format::ids::PutId;

use crate::cuts::LogPosition;

/// How far the log in the store goes.
#[derive(Clone, Debug)]
pub(crate) struct LogEnd {
    /// The checkpoint that rolling forward began from.
    pub(crate) checkpoint_number: u64,
    /// The checkpoint whose state was the start: an older one, if an attach repeated it.
    pub(crate) state_number: u64,
    /// Bytes of the disk.
    pub(crate) size_bytes: u64,
    /// The newest epoch.
    pub(crate) epoch: u64,
    /// The epoch that the last fence shut out; 0: none, or it was not read.
    pub(crate) epoch_before: u64,
    /// The put of that epoch's fence, if it was met.
    pub(crate) fence_put_id: Option<PutId>,
    /// The first free sequence.
    pub(crate) next_sequence: u64,
    /// The last segment.
    pub(crate) stored_sequence: u64,
    /// All writes before this position are in the log.
    pub(crate) position: u64,
    /// The last attachment stored everything, and no other has followed.
    pub(crate) clean: bool,
    /// Bytes of segments since the checkpoint.
    pub(crate) log_bytes: u64,
    /// The checkpoint that rolling forward began from, for the orders that it applies.
    pub(crate) place: LogPosition,
    /// The last rollback met.
    pub(crate) rolled_back: Option<RollbackRecord>,
    /// Segments and extents applied.
    pub(crate) segments: u64,
    pub(crate) extents: u64,
}

/// A rollback in the log: its segment, when that was made, and the cut that it leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RollbackRecord {
    pub(crate) sequence: u64,
    pub(crate) wall_unix_ms: u64,
    /// The checkpoint that the cut begins from.
    pub(crate) cut_number: u64,
    pub(crate) cut_through: u64,
}

/// The end of the log as recorded by a checkpoint.
pub(crate) fn start_of(root: &Checkpoint) -> LogEnd {
    LogEnd {
        checkpoint_number: root.number,
        state_number: if root.repeats > 0 { root.repeats } else { root.number },
        size_bytes: root.size_bytes,
        epoch: root.epoch,
        epoch_before: 0,
        fence_put_id: None,
        next_sequence: root.next_sequence,
        stored_sequence: root.through_sequence,
        position: root.position,
        clean: root.clean,
        log_bytes: 0,
        place: LogPosition::behind(root, root.through_sequence, root.position, root.wall_unix_ms),
        rolled_back: None,
        segments: 0,
        extents: 0,
    }
}
