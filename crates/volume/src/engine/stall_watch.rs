//! Reports when writes wait and nothing becomes stored, and when they continue.
//!
//! Invariant: a load that merely outpaces the store is not reported, because something becomes
//! stored. Not here: what makes writes wait ([`crate::write`]), and how often the engine checks.

use std::time::Duration;

use super::Context;
use crate::status::Stall;

/// Writes may wait this long without progress before it is reported.
const REPORT_AFTER: Duration = Duration::from_secs(5);

/// Tells a stall of the store from a load that outpaces it.
#[derive(Default)]
pub(super) struct StallWatch {
    /// What was stored when progress was last seen, and when that was.
    stored: u64,
    since: Option<Duration>,
    is_reported: bool,
}

impl StallWatch {
    pub(super) fn step(&mut self, context: &Context, now: Duration) {
        let (stall, stored) = (context.write.stalled.reason(), context.mailbox.stored());
        let Some(stall) = stall else {
            if std::mem::take(&mut self.is_reported) {
                tracing::info!("writes continue");
            }
            self.since = None;
            return;
        };
        if stored != self.stored {
            (self.stored, self.since) = (stored, None);
        }
        let since = *self.since.get_or_insert(now);
        if !self.is_reported && now.saturating_sub(since) >= REPORT_AFTER {
            self.is_reported = true;
            let unstored_bytes = context
                .journal
                .as_ref()
                .map_or(0, |journal| journal.ring.next().saturating_sub(stored));
            tracing::warn!(
                "writes wait: {}; {unstored_bytes} bytes are not stored yet",
                in_words(stall)
            );
        }
    }
}

/// What writes wait for, and what ends it.
const fn in_words(stall: Stall) -> &'static str {
    match stall {
        Stall::Staging => {
            "the staging memory is full; they continue when the journal's disk has taken what is \
             in it"
        }
        Stall::JournalBytes => "the journal is full; they continue when the store takes data again",
        Stall::JournalRecords => {
            "the journal holds as many writes as it may; they continue when the store takes data \
            again"
        }
        Stall::UnstoredAge => {
            "the oldest write that is not stored is as old as it may be (--unstored-age-max); they \
             continue when the store takes data again"
        }
    }
}
