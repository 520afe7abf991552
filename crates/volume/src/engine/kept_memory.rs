//! Keeps what is not sealed yet in the staging memory, while the store keeps up with the writers:
//! a segment whose records have left memory is read back from the journal's disk, which costs that
//! disk a third transfer of every byte.
//!
//! Invariants: writers wait for memory that is kept for [`WAIT_TIME_MAX`] at most without progress,
//! unless sealing waits for collection (`garbage_bound`), and never while a segment could be
//! sealed. Nothing is kept for a store that is far slower than the journal's disk, so the journal
//! takes a burst at the speed of that disk
//! ([decision 0044](../../../../docs/decisions/0044-memory-waits-for-the-segment.md)).
//! Not here: how memory is given up (`sawmill_sys::Ring`), and reading back (`journal::read`).

use std::sync::atomic::Ordering;
use std::time::Duration;

use super::log_tail::{LogTail, Sealing};
use super::{Context, EngineOptions};
use crate::write;

/// What a store takes that keeps up with any disk, in bytes a second with all uploads in flight.
const STORE_RATE_ENOUGH: u64 = 480 << 20;
/// A store keeps up that takes this part of what the journal's disk takes. Both are slower while
/// they share a disk, or while garbage is collected on it.
const DISK_RATE_DIVISOR: u64 = 3;
/// How long writers may wait for kept memory while nothing is sealed.
const WAIT_TIME_MAX: Duration = Duration::from_millis(100);
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
    pub(super) fn step(
        &mut self,
        context: &Context,
        options: &EngineOptions,
        log: &LogTail,
        sealing: Sealing,
        now: Duration,
    ) {
        let Some(journal) = &context.journal else { return };
        let is_held = sealing == Sealing::OnlyAskedFor;
        let has_progress = log.sealed_position() != self.sealed;
        self.sealed = log.sealed_position();
        self.stuck_since = match self.stuck_since {
            // Sealing waits for collection, and writers for that.
            _ if is_held || context.write.stalled.count() == 0 => None,
            Some(since) if !has_progress => Some(since),
            _ => Some(now),
        };
        let is_stuck =
            self.stuck_since.is_some_and(|since| now.saturating_sub(since) >= WAIT_TIME_MAX);
        let segment_bytes = u64::from(context.attachment.record.segment_bytes);
        let has_space = journal.ring.capacity_bytes() >= SEGMENTS_MIN * segment_bytes;
        // What has left memory already is read back: writers do not wait for that.
        let is_in_memory = self.is_kept || self.sealed >= journal.ring.low();
        let was_kept = self.is_kept;
        let store_rate_min = store_rate_min(journal.disk_bytes_per_s.load(Ordering::Relaxed));
        self.is_kept = (is_held || log.keeps_up(store_rate_min, options.uploads_max))
            && has_space
            && is_in_memory
            && !is_stuck;
        journal.ring.keep_from(if self.is_kept { self.sealed } else { u64::MAX });
        let is_all_received = log.received_end() == journal.ring.next();
        if self.is_kept && self.stuck_since.is_some() && is_all_received && log.has_room(options) {
            // The memory is full of less payload than a segment has: small or empty records.
            context.mailbox.intake.seal_for_room(log.received_end());
        }
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

/// What a store must take to keep up with a disk that takes so many bytes a second.
fn store_rate_min(disk_bytes_per_s: u64) -> u64 {
    match disk_bytes_per_s {
        0 => STORE_RATE_ENOUGH,
        rate => STORE_RATE_ENOUGH.min(rate / DISK_RATE_DIVISOR),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_store_on_the_busy_disk_of_the_journal_keeps_up_and_one_far_behind_it_does_not() {
        let mib = |rate: u64| rate << 20;
        assert!(mib(250) >= store_rate_min(mib(700)));
        assert!(mib(100) < store_rate_min(mib(2000)));
        assert!(mib(480) >= store_rate_min(mib(9000)), "as fast as many a disk");
        assert_eq!(store_rate_min(0), STORE_RATE_ENOUGH, "nothing is known of the disk yet");
    }
}
