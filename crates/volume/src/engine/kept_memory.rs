//! Keeps what is not sealed yet in the staging memory, while the store keeps up with the writers:
//! a segment whose records have left memory is read back from the journal's disk, which costs that
//! disk a third transfer of every byte.
//!
//! Invariants: writers wait for memory that is kept for [`WAIT_TIME_MAX`] at most without progress.
//! Nothing is kept for a store that is slower than that, so the journal takes a burst at the speed
//! of its disk ([decision 0044](../../../../docs/decisions/0044-memory-waits-for-the-segment.md)).
//! Not here: how memory is given up (`sawmill_sys::Ring`), and reading back (`journal::read`).

use std::time::Duration;

use super::Context;
use super::log_tail::LogTail;
use crate::write;

/// The longest put of a store that keeps up: with six uploads of 8 MiB each, 480 MiB/s.
const PUT_TIME_MAX: Duration = Duration::from_millis(100);
/// How long writers may wait for kept memory while nothing is sealed: as long as a slow put.
const WAIT_TIME_MAX: Duration = PUT_TIME_MAX;
/// The staging memory holds at least so many segments, or nothing is kept: writers need room beside
/// what is being sealed.
const SEGMENTS_MIN: u64 = 3;

/// Whether memory is kept, and the progress of sealing.
#[derive(Default)]
pub(super) struct KeptMemory {
    sealed: u64,
    /// Since when writers wait and nothing is sealed.
    stuck_since: Option<Duration>,
    is_kept: bool,
}

impl KeptMemory {
    pub(super) fn step(&mut self, context: &Context, log: &LogTail, now: Duration) {
        let Some(journal) = &context.journal else { return };
        let has_progress = log.sealed_position() != self.sealed;
        self.sealed = log.sealed_position();
        if has_progress || context.write.stalled.count() == 0 {
            self.stuck_since = None;
        } else {
            self.stuck_since.get_or_insert(now);
        }
        let is_stuck =
            self.stuck_since.is_some_and(|since| now.saturating_sub(since) >= WAIT_TIME_MAX);
        let keeps_up = log.put_time().is_some_and(|took| took <= PUT_TIME_MAX);
        let segment_bytes = u64::from(context.attachment.record.segment_bytes);
        let has_space = journal.ring.capacity_bytes() >= SEGMENTS_MIN * segment_bytes;
        // What has left memory already is read back: writers do not wait for that.
        let is_in_memory = self.is_kept || self.sealed >= journal.ring.low();
        let was_kept = self.is_kept;
        self.is_kept = keeps_up && has_space && is_in_memory && !is_stuck;
        journal.ring.keep_from(if self.is_kept { self.sealed } else { u64::MAX });
        if was_kept && (has_progress || !self.is_kept) {
            write::resume_soon(&context.write);
        }
    }

    /// When writers will have waited long enough.
    pub(super) fn wait(&self, now: Duration) -> Option<Duration> {
        let ends_at = self.stuck_since.filter(|_| self.is_kept)? + WAIT_TIME_MAX;
        Some(ends_at.saturating_sub(now).max(Duration::from_millis(1)))
    }
}
