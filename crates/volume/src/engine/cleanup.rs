//! Deletes what a durable checkpoint has superseded: old roots, parts and dead segments.
//!
//! Invariants:
//! 1. A dead segment that no cut needs is deleted when the *second* checkpoint that found it dead
//!    is durable, so the newest two checkpoints are always fully readable. Old roots, and parts
//!    that neither the two nor a cut names, are deleted then too.
//! 2. Roots are deleted one by one, the oldest first, and segments only after all such roots are
//!    gone: a list that lags must never lead back to a root that misses a segment.
//! 3. Segments are deleted only after every read that may have looked them up has ended, and after
//!    a check for clones that pin them (`pins`).
//! 4. Failed deletes are repeated, even if nothing else happens any more.
//!
//! Not here: what is superseded (`superseded`), the check for fences before a delete
//! (`fence_check`), and how pins are read (`pins`).

use std::collections::HashSet;
use std::fmt::Display;
use std::sync::Arc;
use std::time::Duration;

use sawmill_format::checkpoint::{
    checkpoint_key, checkpoint_prefix, kept_prefix, parse_checkpoint_key, parse_kept_key,
};
use sawmill_format::kept_block::{parse_pin_number, released_prefix};
use sawmill_format::map_part::{map_prefix, parse_part_key};
use sawmill_format::segment::segment_key;
use sawmill_store::{Class, List};

use super::context::Context;
use super::fence_check::check_before_delete;
use super::log_tail::LogTail;
use super::messages::{DeleteOutcome, Event, PinOutcome};
use super::pins::{self, Pins};
use super::superseded::SupersededObjects;
use crate::counters::add;

/// The wait after the store has used up its own retries; nothing waits for a delete.
const REPEAT_AFTER: Duration = Duration::from_secs(5);
/// How often to check whether the reads that block a delete have ended.
const READS_CHECK_EVERY: Duration = Duration::from_millis(100);

/// How often an odd object at the place of a fence is read: an answer may be garbled in transit.
const ODD_CHECKS_MAX: u32 = 4;

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Stage {
    /// Nothing to do.
    #[default]
    Rest,
    /// Old roots and parts must be listed.
    Begin,
    /// They are being listed and deleted.
    UnderWay,
    /// Old roots are gone; dead segments must be deleted.
    Segments,
}

/// The progress of its deletion.
#[derive(Default)]
pub(super) struct Cleanup {
    stage: Stage,
    not_before: Duration,
    /// How many checks for fences found an object that is not ours.
    odd_checks: u32,
    what: SupersededObjects,
    /// Lists and deletes in flight.
    in_flight: u32,
    /// Older checkpoints were deleted by this attachment, or by the one whose state this one
    /// started from.
    roots_gone_below: u64,
}

impl Cleanup {
    /// Nothing to do yet. All roots below `roots_gone_below` are gone.
    pub(super) fn new(roots_gone_below: u64) -> Self {
        Cleanup { roots_gone_below, ..Cleanup::default() }
    }

    /// A checkpoint is durable: what it has superseded is to be deleted, together with what the
    /// last one left.
    pub(super) fn begin(&mut self, what: SupersededObjects) {
        let (in_flight, roots_gone_below) = (self.in_flight, self.roots_gone_below);
        *self = Cleanup {
            stage: Stage::Begin,
            what,
            in_flight,
            roots_gone_below,
            ..Cleanup::default()
        };
    }

    /// Whether no list and no delete is in flight.
    pub(super) fn is_quiet(&self) -> bool {
        self.in_flight == 0
    }

    /// A list or a delete has completed.
    pub(super) fn end_one(&mut self) {
        self.in_flight -= 1;
    }

    /// Whether nothing is left to delete.
    pub(super) fn is_resting(&self) -> bool {
        self.stage == Stage::Rest
    }

    /// Time until there is something to try.
    pub(super) fn wait(&self, now: Duration) -> Option<Duration> {
        let waits = matches!(self.stage, Stage::Begin | Stage::Segments);
        waits.then(|| self.not_before.saturating_sub(now).max(Duration::from_millis(1)))
    }

    /// Takes the next step of the cleanup, if it is due.
    pub(super) fn step(&mut self, context: &Arc<Context>, log: &LogTail, now: Duration) {
        if now < self.not_before {
            return;
        }
        match self.stage {
            Stage::Begin => {
                self.stage = Stage::UnderWay;
                self.in_flight += 1;
                check_before_delete(context, log, self.what.number);
            }
            Stage::Segments => self.delete_doomed(context, now),
            Stage::Rest | Stage::UnderWay => {}
        }
    }

    fn delete_doomed(&mut self, context: &Arc<Context>, now: Duration) {
        if self.what.doomed.is_empty() {
            self.stage = Stage::Rest;
            return;
        }
        if !context.stored.readers.passed(self.what.read_period) {
            // Reads of an older period may have prevented the checkpoint from starting a new
            // one.
            context.stored.readers.advance();
            self.not_before = now + READS_CHECK_EVERY;
            return;
        }
        self.stage = Stage::UnderWay;
        self.in_flight += 1;
        pins::request_pin(context, self.what.number, self.what.doomed.clone());
    }

    /// All pins are known now: deletes the segments that none of them needs.
    pub(super) fn delete_unpinned(
        &mut self,
        context: &Arc<Context>,
        number: u64,
        mut sequences: Vec<u32>,
    ) {
        {
            let view = context.stored.view();
            let book = view.cuts.lock();
            sequences.retain(|sequence| {
                let Some(info) = view.segments.get(*sequence) else { return false };
                // A rollback may have revived it.
                let is_needed =
                    view.lineage.needs(&book.cuts, u64::from(*sequence), info.dead_since);
                info.live_bytes == 0 && !is_needed
            });
        }
        if self.is_current(number) {
            self.what.doomed.clone_from(&sequences);
        }
        let volume_id = context.attachment.record.volume_id;
        // What belongs to an ancestor is only dropped from the table.
        let own = sequences
            .iter()
            .filter(|one| context.stored.lineage.ancestor(u64::from(**one)).is_none());
        let keys =
            own.map(|sequence| segment_key(volume_id, u64::from(*sequence))).collect::<Vec<_>>();
        let callback_context = context.clone();
        let callback = move |outcome| {
            callback_context.mailbox.push_event(Event::SegmentsDeleted(DeleteOutcome {
                number,
                sequences,
                outcome,
            }))
        };
        if keys.is_empty() {
            return callback(Ok(()));
        }
        context.attachment.store.delete(keys, Class::Background, Box::new(callback));
    }

    /// Segments whose delete failed stay in the table as dead. Returns those that are gone.
    pub(super) fn handle_deleted(
        &mut self,
        context: &Context,
        delete_outcome: DeleteOutcome,
        now: Duration,
    ) -> Vec<u32> {
        let DeleteOutcome { number, sequences, outcome } = delete_outcome;
        if let Err(error) = outcome {
            let what = format!("{} dead segments: {error}", sequences.len());
            self.handle_failed(number, &what, now);
            return Vec::new();
        }
        self.in_flight -= 1;
        let view = context.stored.view();
        for sequence in &sequences {
            view.segments.remove(*sequence);
            context.stored.forget_segment(*sequence);
        }
        let deleted: HashSet<u32> = sequences.iter().copied().collect();
        self.what.doomed.retain(|sequence| !deleted.contains(sequence));
        if self.is_current(number) && self.what.doomed.is_empty() {
            self.stage = Stage::Rest;
        }
        add(&context.attachment.counters.segments_deleted, sequences.len() as u64);
        sequences
    }

    pub(super) fn handle_pin(
        &mut self,
        context: &Arc<Context>,
        pin_outcome: PinOutcome,
        now: Duration,
    ) {
        match pins::handle(context, pin_outcome) {
            Pins::More => {}
            Pins::AllKnown { number, doomed } => self.delete_unpinned(context, number, doomed),
            Pins::Failed { number, error } => self.handle_failed(number, &error, now),
        }
    }

    pub(super) fn handle_releases(&mut self, context: &Context, pin_numbers: &[u64]) {
        self.in_flight -= 1;
        pins::release(context, pin_numbers);
    }

    /// Whether an event is about the current cleanup, and not about an earlier one.
    fn is_current(&self, number: u64) -> bool {
        self.what.number == number && self.stage == Stage::UnderWay
    }

    /// What could not be deleted stays garbage for a while; the whole list is processed again.
    pub(super) fn handle_failed(&mut self, number: u64, what: impl Display, now: Duration) {
        self.in_flight -= 1;
        tracing::warn!("deletion postponed: {what}");
        if self.what.number == number {
            self.stage = Stage::Begin;
            self.not_before = now + REPEAT_AFTER;
        }
    }

    /// There was no fence after checkpoint `number`: it counts, and what it supersedes may be
    /// deleted. Returns whether it is the newest.
    pub(super) fn handle_no_fence(&mut self, number: u64) -> bool {
        self.in_flight -= 1;
        self.is_current(number)
    }

    /// There is an object at the place of a fence: if it is a fence, this attachment deletes
    /// nothing any more.
    pub(super) fn handle_odd_look(&mut self, number: u64, now: Duration) {
        self.in_flight -= 1;
        if self.is_current(number) {
            self.odd_checks += 1;
            let again = self.odd_checks < ODD_CHECKS_MAX;
            self.stage = if again { Stage::Begin } else { Stage::Rest };
            self.not_before = now + REPEAT_AFTER;
        }
    }

    /// Finds roots and parts that the newest two checkpoints do not need.
    pub(super) fn list_old_checkpoints(&mut self, context: &Arc<Context>, loaded: u64) {
        let volume_id = context.attachment.record.volume_id;
        let (spared_from, number) = (self.what.spared_from, self.what.number);
        let named = self.what.named.clone();
        let own_puts = self.what.own_puts.clone();
        let is_old_root = move |key: &str| {
            parse_checkpoint_key(key)
                .is_some_and(|(id, number)| id == volume_id && number < spared_from)
        };
        let is_old_part = move |key: &str| {
            parse_part_key(key).is_some_and(|part| {
                // Only parts that this attachment knows: if it is stale, other parts may be its
                // successor's.
                let known = part.number <= loaded || own_puts.contains(&part.put_id);
                known
                    && part.volume_id == volume_id
                    && !named.holds(part.group, part.number, part.put_id)
            })
        };
        // The list may not show the youngest of the old roots yet: those since the last cleanup,
        // and those that earlier attaches have left.
        let youngest = self.roots_gone_below.max(1)..spared_from;
        let youngest = youngest.map(|number| checkpoint_key(volume_id, number)).collect();
        let event = move |keys: Vec<String>| Event::RootsListed { keys, number, gone_below: 0 };
        self.list(context, checkpoint_prefix(volume_id), youngest, is_old_root, event);
        self.list(context, map_prefix(volume_id), HashSet::new(), is_old_part, move |keys| {
            Event::PartsListed { keys, number }
        });
        if self.what.roots.may_have_unneeded {
            let own_puts = self.what.own_puts.clone();
            let roots = self.what.roots.clone();
            let is_unneeded = move |key: &str| {
                parse_kept_key(key).is_some_and(|(id, number, put_id)| {
                    let known = number <= loaded || own_puts.contains(&put_id);
                    let unneeded = number < spared_from && !roots.kept.contains(&(number, put_id));
                    known && id == volume_id && unneeded
                })
            };
            self.list(context, kept_prefix(volume_id), HashSet::new(), is_unneeded, move |keys| {
                Event::PartsListed { keys, number }
            });
        }
        if pins::is_pinned(context) {
            // A list that lags only lets pins live longer.
            let numbers =
                |keys: Vec<String>| keys.iter().filter_map(|key| parse_pin_number(key)).collect();
            let event = move |keys| Event::ReleasesListed { pin_numbers: numbers(keys) };
            self.list(context, released_prefix(volume_id), HashSet::new(), |_| true, event);
        }
    }

    /// Lists old objects below `prefix`.
    pub(super) fn list(
        &mut self,
        context: &Arc<Context>,
        prefix: String,
        known: HashSet<String>,
        is_old: impl Fn(&str) -> bool + Send + 'static,
        event: impl FnOnce(Vec<String>) -> Event + Send + 'static,
    ) {
        self.in_flight += 1;
        let number = self.what.number;
        let callback_context = context.clone();
        let callback = move |outcome: sawmill_store::Result<Vec<sawmill_store::ObjectInfo>>| {
            callback_context.mailbox.push_event(match outcome {
                Ok(objects) => {
                    let mut keys: Vec<_> = objects.into_iter().map(|object| object.key).collect();
                    keys.retain(|key| is_old(key) && !known.contains(key));
                    keys.extend(known);
                    event(keys)
                }
                Err(error) => {
                    Event::CleanUpFailed { number, what: format!("old checkpoints: {error}") }
                }
            });
        };
        context
            .attachment
            .store
            .list(List { prefix, class: Class::Background }, Box::new(callback));
    }

    /// Old parts are only garbage.
    pub(super) fn handle_parts_listed(
        &self,
        context: &Arc<Context>,
        keys: Vec<String>,
        number: u64,
    ) {
        delete_old(context, keys, number, Event::CleanedUp);
    }

    /// One by one, the oldest first: if a younger root were gone and an older one not, a list with
    /// only the older one would make it the newest, because the next number is free.
    pub(super) fn handle_roots_listed(
        &mut self,
        context: &Arc<Context>,
        mut keys: Vec<String>,
        number: u64,
        gone_below: u64,
    ) {
        self.roots_are_gone(gone_below);
        keys.sort_unstable_by(|one, other| other.cmp(one));
        let oldest: Vec<String> = keys.pop().into_iter().collect();
        let gone_below =
            oldest.iter().filter_map(|key| parse_checkpoint_key(key)).map(|(_, number)| number + 1);
        let gone_below = gone_below.max().unwrap_or_default();
        let done = match keys.is_empty() {
            true => Event::RootsDeleted { number, gone_below },
            false => Event::RootsListed { keys, number, gone_below },
        };
        delete_old(context, oldest, number, done);
    }

    pub(super) fn handle_roots_deleted(&mut self, number: u64, gone_below: u64) {
        self.in_flight -= 1;
        self.roots_are_gone(gone_below);
        // A later checkpoint must delete its own old roots first.
        if self.is_current(number) {
            self.stage = Stage::Segments;
        }
    }

    /// Otherwise the next cleanup would name all of them again, even if a later checkpoint has
    /// replaced this one.
    fn roots_are_gone(&mut self, below: u64) {
        self.roots_gone_below = self.roots_gone_below.max(below);
    }
}

fn delete_old(context: &Arc<Context>, keys: Vec<String>, number: u64, done: Event) {
    let callback_context = context.clone();
    let callback = move |outcome: sawmill_store::Result<()>| {
        callback_context.mailbox.push_event(match outcome {
            Ok(()) => done,
            Err(error) => {
                Event::CleanUpFailed { number, what: format!("old checkpoints: {error}") }
            }
        });
    };
    if keys.is_empty() {
        return callback(Ok(()));
    }
    context.attachment.store.delete(keys, Class::Background, Box::new(callback));
}
