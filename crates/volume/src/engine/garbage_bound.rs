//! Slows writers down while they outrun collection: past the bound of the policy, a segment of
//! theirs is cut for each one that collection has moved, so what they make dead is less than what
//! it frees. The journal takes what they write meanwhile, until it is full.
//!
//! Invariants: a segment waits only while collection is at work, and [`WAIT_TIME_MAX`] at most, so
//! a store that cannot be read stops no writer, and no deadlock can come of it. Nothing waits while
//! the volume closes. Whoever limits collection (`--gc-rate`) or turns it off has no bound.
//! Not here: what is collected (`collect`), and where the bound lies (`gc::policy`).

use std::time::Duration;

use super::collect::Collector;
use super::{Context, EngineOptions};

/// A moved segment takes a few round trips to a store far away.
const WAIT_TIME_MAX: Duration = Duration::from_secs(2);

/// Whether garbage is past its bound, and since when a segment waits for collection.
#[derive(Default)]
pub(super) struct GarbageBound {
    is_exceeded: bool,
    /// A segment was cut past the bound, and none was moved since.
    owed_since: Option<Duration>,
}

impl GarbageBound {
    /// How many segments the writers may have cut now.
    pub(super) fn segments_max(
        &mut self,
        context: &Context,
        options: &EngineOptions,
        collector: &Collector,
        now: Duration,
    ) -> usize {
        let totals = context.stored.view().segments.totals();
        self.is_exceeded = options.gc.is_exceeded(totals.own_live_bytes, totals.own_used_bytes)
            && !context.mailbox.is_closing()
            && collector.is_at_work(context, now);
        context.mailbox.set_slowed_for_garbage(self.is_exceeded);
        if !self.is_exceeded {
            self.owed_since = None;
            return usize::MAX;
        }
        usize::from(self.owed_since.is_none_or(|since| now >= since + WAIT_TIME_MAX))
    }

    pub(super) fn note_cut(&mut self, segments: usize, now: Duration) {
        if segments > 0 {
            self.owed_since = self.is_exceeded.then_some(now);
        }
    }

    /// A moved segment is in the map.
    pub(super) fn note_moved(&mut self) {
        self.owed_since = None;
    }

    /// When the writers will have waited long enough.
    pub(super) fn wait(&self, now: Duration) -> Option<Duration> {
        let ends_at = self.owed_since.filter(|_| self.is_exceeded)? + WAIT_TIME_MAX;
        Some(ends_at.saturating_sub(now).max(Duration::from_millis(1)))
    }
}
