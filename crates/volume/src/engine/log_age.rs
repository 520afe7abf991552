//! Syncs the journal when accepted writes get old without a flush, as the writeback of an operating
//! system does: a power cut costs a writer that never flushes no more than that age.
//!
//! Not here: the sync itself ([`crate::journal`]), and flushes ([`crate::write`]).

use std::time::Duration;

use super::Context;

/// Decides when the journal is synced although no flush asks for it.
pub(super) struct LogAge {
    /// Zero: never.
    age_max: Duration,
    /// Something before this position was not logged at this time.
    unlogged: Option<(u64, Duration)>,
    /// A sync up to that position is requested already: if it hangs, no second one is requested.
    is_requested: bool,
}

impl LogAge {
    pub(super) fn new(age_max: Duration) -> Self {
        LogAge { age_max, unlogged: None, is_requested: false }
    }

    /// Requests a sync if it is time.
    pub(super) fn step(&mut self, context: &Context, now: Duration) {
        let Some(journal) = context.journal.as_ref().filter(|_| !self.age_max.is_zero()) else {
            return;
        };
        let (logged, next) = (journal.logged(), journal.ring.next());
        match self.unlogged {
            _ if logged >= next => (self.unlogged, self.is_requested) = (None, false),
            Some((position, since)) if logged < position => {
                if now < since + self.age_max {
                    return;
                }
                let position = if self.is_requested { position } else { next };
                if !self.is_requested {
                    // The result does not matter here: flushes report a failure.
                    journal.when_logged(position, Box::new(|_| ()));
                    self.is_requested = true;
                }
                self.unlogged = Some((position, now));
            }
            _ => (self.unlogged, self.is_requested) = (Some((next, now)), false),
        }
    }

    /// How long until there may be something to sync.
    pub(super) fn wait(&self, now: Duration) -> Option<Duration> {
        self.unlogged.map(|(_, since)| {
            (since + self.age_max).saturating_sub(now).max(Duration::from_millis(1))
        })
    }
}
