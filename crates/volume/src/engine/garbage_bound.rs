//! Slows writers down while they outrun collection: garbage past the bound of the policy may not
//! grow any more. Full segments of theirs then wait for collection, and writers for the memory
//! that these fill (`kept_memory`).
//!
//! Invariants: only segments that nobody asked for wait; a flush, an order, the age limits and a
//! close get theirs at once. Nothing waits unless collection is at work. A wait that ends by time
//! is the last one until collection has moved a segment, so a store that cannot be read stops no
//! writer for long, and no deadlock can come of it. Whoever limits collection (`--gc-rate`) or
//! turns it off has no bound.
//! Not here: what is collected (`collect`), and where the bound lies (`gc::policy`).

use std::time::Duration;

use super::collect::Collector;
use super::log_tail::Sealing;
use super::{Context, EngineOptions};

/// A moved segment takes a few round trips to a store far away.
const WAIT_TIME_MAX: Duration = Duration::from_secs(2);
/// Garbage of fewer segments has no bound: a small set of data that is written again and again
/// keeps that much by itself, and no more.
const SEGMENTS_MIN: u64 = 64;
/// Garbage may grow by so many segments past the bound, because it comes and goes in steps.
const GROWTH_SEGMENTS_MAX: u64 = 8;

/// How much garbage there was past the bound, and since when segments wait for collection.
#[derive(Default)]
pub(super) struct GarbageBound {
    /// The least garbage since it went past the bound.
    least_bytes: Option<u64>,
    held_since: Option<Duration>,
    /// A wait ended by time, and nothing was moved since.
    is_open: bool,
}

impl GarbageBound {
    pub(super) fn step(
        &mut self,
        context: &Context,
        options: &EngineOptions,
        collector: &Collector,
        now: Duration,
    ) -> Sealing {
        let is_held = self.holds(context, options, collector, now);
        if !is_held {
            self.held_since = None;
        }
        context.mailbox.set_slowed_for_garbage(is_held);
        if is_held { Sealing::OnlyAskedFor } else { Sealing::AllDue }
    }

    fn holds(
        &mut self,
        context: &Context,
        options: &EngineOptions,
        collector: &Collector,
        now: Duration,
    ) -> bool {
        let totals = context.stored.view().segments.totals();
        let garbage_bytes = totals.own_used_bytes.saturating_sub(totals.own_live_bytes);
        let segment_bytes = u64::from(context.attachment.record.segment_bytes);
        if !options.gc.is_exceeded(totals.own_live_bytes, totals.own_used_bytes)
            || garbage_bytes < SEGMENTS_MIN * segment_bytes
        {
            *self = Self::default();
            return false;
        }
        let least_bytes = self.least_bytes.unwrap_or(garbage_bytes).min(garbage_bytes);
        self.least_bytes = Some(least_bytes);
        if self.is_open
            || garbage_bytes <= least_bytes + GROWTH_SEGMENTS_MAX * segment_bytes
            || context.mailbox.is_closing()
            || !collector.is_at_work(context, now)
        {
            return false;
        }
        let since = *self.held_since.get_or_insert_with(|| {
            tracing::debug!("writers wait for collection: garbage is past its bound");
            now
        });
        self.is_open = now >= since + WAIT_TIME_MAX;
        !self.is_open
    }

    /// A moved segment is in the map.
    pub(super) fn note_moved(&mut self) {
        self.is_open = false;
    }

    /// When the segments will have waited long enough.
    pub(super) fn wait(&self, now: Duration) -> Option<Duration> {
        let ends_at = self.held_since? + WAIT_TIME_MAX;
        Some(ends_at.saturating_sub(now).max(Duration::from_millis(1)))
    }
}
