//! Deleting what a durable checkpoint has superseded: old roots, parts and dead segments.
//!
//! Invariants:
//! 1. A dead segment goes when the *second* checkpoint that found it dead is durable, so the newest two
//!    checkpoints can both be read in full. Old roots, and parts that neither of the two names, go then too.
//! 2. Roots go one by one, the oldest first, and segments only after all such roots have gone: a list that
//!    lags must never lead back to a root that misses a segment.
//! 3. Segments go only after every read that may have looked them up has ended, and after a look for clones
//!    that pin them (`pins`).
//! 4. What could not be deleted is tried again, also when nothing else happens any more.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use sawmill_format::checkpoint::{
    checkpoint_key, checkpoint_prefix, kept_prefix, parse_checkpoint_key, parse_kept_key,
};
use sawmill_format::ids::PutId;
use sawmill_format::map_part::{map_prefix, parse_part_key};
use sawmill_format::segment::segment_key;
use sawmill_store::{Class, List};

use super::past::{NamedParts, Roots};
use super::{Engine, Event};
use crate::tally::add;

/// How long to wait after the store has used up its own retries: nobody waits for a delete.
const REPEAT_AFTER: Duration = Duration::from_secs(5);
/// How often to look whether the reads that hold back a delete have ended.
const READS_LOOK_EVERY: Duration = Duration::from_millis(100);
/// Nothing happened for so long: what is dead is cleared away before the volume goes quiet.
pub(crate) const QUIET_AFTER: Duration = Duration::from_secs(1);

/// How often something odd where a fence might stand is looked at: an answer may be garbled on its way.
const ODD_LOOKS_MAX: u32 = 4;
/// A quiet volume looks no more often for what has left the retention window.
const WINDOW_LOOK_EVERY_MS: u64 = 10_000;

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Stage {
    /// Nothing to do.
    #[default]
    Rest,
    /// Old roots and parts are to be listed.
    Begin,
    /// They are being listed and deleted.
    UnderWay,
    /// Old roots are gone; dead segments are to be deleted.
    Segments,
}

/// What a durable checkpoint has superseded, and what it has not.
#[derive(Default)]
pub(super) struct Superseded {
    /// The readable checkpoint before it, which stays too, or an older one that its way leads through.
    pub(super) spared_from: u64,
    pub(super) number: u64,
    /// The parts that the newest two checkpoints and all cuts name.
    pub(super) named: Arc<NamedParts>,
    /// The copies of checkpoints that cuts need.
    pub(super) roots: Arc<Roots>,
    /// The puts of this attachment until then: what a later checkpoint put is not garbage.
    pub(super) own_puts: Arc<HashSet<PutId>>,
    pub(super) doomed: Vec<u32>,
    /// Reads that may have looked up a doomed segment are of this generation or before.
    pub(super) generation: u64,
}

/// How far its deletion has come.
#[derive(Default)]
pub(super) struct Cleanup {
    stage: Stage,
    not_before: Duration,
    /// Looks for fences that found what is not ours.
    odd_looks: u32,
    what: Superseded,
}

impl Cleanup {
    pub(super) fn of(what: Superseded) -> Self {
        Cleanup { stage: Stage::Begin, what, ..Cleanup::default() }
    }

    /// Whether there is nothing left to delete.
    pub(super) fn is_resting(&self) -> bool {
        self.stage == Stage::Rest
    }

    /// How long until there is something to try.
    pub(super) fn wait(&self, now: Duration) -> Option<Duration> {
        let waits = matches!(self.stage, Stage::Begin | Stage::Segments);
        waits.then(|| self.not_before.saturating_sub(now).max(Duration::from_millis(1)))
    }
}

impl Engine {
    /// Whether so much is dead that a checkpoint is worth its price, to let it go.
    pub(super) fn dead_are_due(&self, now: Duration) -> bool {
        let totals = self.context.stored.view().segments.totals();
        let checkpoint_bytes = self.newest_root.parts.iter().map(|part| u64::from(part.bytes)).sum();
        totals.is_worth_a_checkpoint(self.context.attachment.record.segment_bytes, checkpoint_bytes)
            || now >= self.busy_at + QUIET_AFTER && totals.is_worth_a_checkpoint_in_peace()
    }

    /// What is dead and needed by nobody goes with the second checkpoint that begins from here on.
    pub(super) fn want_deletes(&mut self) {
        self.checkpoints_wanted = 2 + u32::from(self.writing.is_some());
    }

    /// How long until something dead leaves the retention window of a quiet volume.
    pub(super) fn window_in(&self, now: Duration) -> Option<Duration> {
        let view = self.context.stored.view();
        if view.segments.totals().dead_object_bytes == 0 || self.writing.is_some() {
            return None;
        }
        let at = view.cuts.lock().prunes_at_attached_ms()?;
        let at = at.max(self.newest_root.attached_ms.saturating_add(WINDOW_LOOK_EVERY_MS));
        let window = Duration::from_millis(at.saturating_sub(self.attached_ms()));
        Some(window.max((self.busy_at + QUIET_AFTER).saturating_sub(now)))
    }

    /// How long until a volume that goes quiet clears away what is dead.
    pub(super) fn settle_in(&self, now: Duration) -> Option<Duration> {
        let totals = self.context.stored.view().segments.totals();
        let waits = totals.is_worth_a_checkpoint_in_peace() && self.writing.is_none();
        waits.then(|| (self.busy_at + QUIET_AFTER).saturating_sub(now).max(Duration::from_millis(1)))
    }

    /// Takes the next step of cleaning up, if it is time.
    pub(super) fn clean_up(&mut self, now: Duration) {
        if now < self.cleanup.not_before {
            return;
        }
        match self.cleanup.stage {
            Stage::Begin => {
                self.cleanup.stage = Stage::UnderWay;
                self.look_for_fences(self.cleanup.what.number);
            }
            Stage::Segments => self.delete_doomed(now),
            Stage::Rest | Stage::UnderWay => {}
        }
    }

    fn delete_doomed(&mut self, now: Duration) {
        if self.cleanup.what.doomed.is_empty() {
            self.cleanup.stage = Stage::Rest;
            return;
        }
        if !self.context.stored.readers.passed(self.cleanup.what.generation) {
            // Reads of an older generation may have kept the checkpoint from beginning a new one.
            self.context.stored.readers.advance();
            self.cleanup.not_before = now + READS_LOOK_EVERY;
            return;
        }
        self.cleanup.stage = Stage::UnderWay;
        self.cleaning += 1;
        self.ask_for_pins(self.cleanup.what.number, self.cleanup.what.doomed.clone());
    }

    /// There are no more pins than those that are known now; who is still doomed by them goes.
    pub(super) fn delete_unpinned(&mut self, number: u64, mut sequences: Vec<u32>) {
        {
            let view = self.context.stored.view();
            let book = view.cuts.lock();
            sequences.retain(|sequence| {
                let Some(info) = view.segments.get(*sequence) else { return false };
                // A rollback may have brought it back to life.
                let is_needed = view.lineage.needs(&book.cuts, u64::from(*sequence), info.dead_since);
                info.live_bytes == 0 && !is_needed
            });
        }
        if self.is_current(number) {
            self.cleanup.what.doomed.clone_from(&sequences);
        }
        let context = self.context.clone();
        let volume_id = context.attachment.record.volume_id;
        // What belongs to an ancestor is only forgotten.
        let own = sequences.iter().filter(|one| context.stored.lineage.ancestor(u64::from(**one)).is_none());
        let keys = own.map(|sequence| segment_key(volume_id, u64::from(*sequence))).collect::<Vec<_>>();
        let answered = context.clone();
        let tell =
            move |outcome| answered.mailbox.push_event(Event::SegmentsDeleted { number, sequences, outcome });
        if keys.is_empty() {
            return tell(Ok(()));
        }
        context.attachment.store.delete(keys, Class::Background, Box::new(tell));
    }

    /// Segments whose delete failed stay in the table as dead.
    pub(super) fn hear_deleted(
        &mut self,
        number: u64,
        sequences: &[u32],
        outcome: sawmill_store::Result<()>,
        now: Duration,
    ) {
        if let Err(error) = outcome {
            let what = format!("{} dead segments: {error}", sequences.len());
            return self.hear_cleanup_failed(number, &what, now);
        }
        self.cleaning -= 1;
        let view = self.context.stored.view();
        for sequence in sequences {
            view.segments.remove(*sequence);
            self.collector.forget(*sequence);
            self.context.stored.forget_segment(*sequence);
        }
        let deleted: HashSet<u32> = sequences.iter().copied().collect();
        self.cleanup.what.doomed.retain(|sequence| !deleted.contains(sequence));
        if self.is_current(number) && self.cleanup.what.doomed.is_empty() {
            self.cleanup.stage = Stage::Rest;
        }
        add(&self.context.attachment.tally.segments_deleted, sequences.len() as u64);
    }

    /// Whether what was heard is about the cleanup under way, and not about one before it.
    fn is_current(&self, number: u64) -> bool {
        self.cleanup.what.number == number && self.cleanup.stage == Stage::UnderWay
    }

    /// What could not be deleted stays garbage for a while; all of it is gone through again.
    pub(super) fn hear_cleanup_failed(&mut self, number: u64, what: &str, now: Duration) {
        self.cleaning -= 1;
        tracing::warn!("deletion postponed: {what}");
        if self.cleanup.what.number == number {
            self.cleanup.stage = Stage::Begin;
            self.cleanup.not_before = now + REPEAT_AFTER;
        }
    }

    /// No fence stood behind checkpoint `number`: it counts, and what it supersedes may go.
    pub(super) fn hear_no_fence(&mut self, number: u64) {
        if self.is_current(number) {
            if self.writing.is_none() {
                self.finish_resize(self.cleanup.what.number);
            }
            self.list_old_checkpoints();
        }
    }

    /// Something stands where a fence might: if it is one, this attachment deletes nothing any more.
    pub(super) fn hear_odd_look(&mut self, number: u64, now: Duration) {
        self.cleaning -= 1;
        if self.is_current(number) {
            self.cleanup.odd_looks += 1;
            let again = self.cleanup.odd_looks < ODD_LOOKS_MAX;
            self.cleanup.stage = if again { Stage::Begin } else { Stage::Rest };
            self.cleanup.not_before = now + REPEAT_AFTER;
        }
    }

    /// Finds roots and parts that the newest two checkpoints do not need.
    fn list_old_checkpoints(&mut self) {
        let volume_id = self.context.attachment.record.volume_id;
        let (spared_from, number) = (self.cleanup.what.spared_from, self.cleanup.what.number);
        let named = self.cleanup.what.named.clone();
        let (loaded, own_puts) = (self.loaded_number, self.cleanup.what.own_puts.clone());
        let is_old_root = move |key: &str| {
            parse_checkpoint_key(key).is_some_and(|(id, number)| id == volume_id && number < spared_from)
        };
        let is_old_part = move |key: &str| {
            parse_part_key(key).is_some_and(|part| {
                // Only what this attachment knows about: it may be a stale one, and the parts those of its
                // successor.
                let known = part.number <= loaded || own_puts.contains(&part.put_id);
                known && part.volume_id == volume_id && !named.holds(part.group, part.number, part.put_id)
            })
        };
        // The list may not show the youngest of the old roots yet: those since the last cleanup, and those
        // that attaches before this one have left.
        let youngest = self.roots_gone_below.max(1)..spared_from;
        let youngest = youngest.map(|number| checkpoint_key(volume_id, number)).collect();
        let heard = move |keys: Vec<String>| Event::RootsListed { keys, number, gone_below: 0 };
        self.list(checkpoint_prefix(volume_id), youngest, is_old_root, heard);
        self.list(map_prefix(volume_id), HashSet::new(), is_old_part, move |keys| Event::PartsListed {
            keys,
            number,
        });
        if self.cleanup.what.roots.to_look_for {
            let own_puts = self.cleanup.what.own_puts.clone();
            let roots = self.cleanup.what.roots.clone();
            let is_unneeded = move |key: &str| {
                parse_kept_key(key).is_some_and(|(id, number, put_id)| {
                    let known = number <= loaded || own_puts.contains(&put_id);
                    let unneeded = number < spared_from && !roots.kept.contains(&(number, put_id));
                    known && id == volume_id && unneeded
                })
            };
            self.list(kept_prefix(volume_id), HashSet::new(), is_unneeded, move |keys| Event::PartsListed {
                keys,
                number,
            });
        }
        self.list_releases();
    }

    /// Lists what is old below `prefix`.
    pub(super) fn list(
        &mut self,
        prefix: String,
        known: HashSet<String>,
        is_old: impl Fn(&str) -> bool + Send + 'static,
        event: impl FnOnce(Vec<String>) -> Event + Send + 'static,
    ) {
        self.cleaning += 1;
        let number = self.cleanup.what.number;
        let answered = self.context.clone();
        let tell = move |outcome: sawmill_store::Result<Vec<sawmill_store::ObjectInfo>>| {
            answered.mailbox.push_event(match outcome {
                Ok(objects) => {
                    let mut keys: Vec<_> = objects.into_iter().map(|object| object.key).collect();
                    keys.retain(|key| is_old(key) && !known.contains(key));
                    keys.extend(known);
                    event(keys)
                }
                Err(error) => Event::CleanUpFailed { number, what: format!("old checkpoints: {error}") },
            });
        };
        self.context.attachment.store.list(List { prefix, class: Class::Background }, Box::new(tell));
    }

    /// Old parts are only garbage.
    pub(super) fn hear_parts_listed(&mut self, keys: Vec<String>, number: u64) {
        self.delete_old(keys, number, Event::CleanedUp);
    }

    /// One by one, the oldest first: where a younger one were gone and an older one not, a list that shows
    /// the older one alone would make it the newest, as the next number is free.
    pub(super) fn hear_roots_listed(&mut self, mut keys: Vec<String>, number: u64, gone_below: u64) {
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
        self.delete_old(oldest, number, done);
    }

    pub(super) fn hear_roots_deleted(&mut self, number: u64, gone_below: u64) {
        self.cleaning -= 1;
        self.roots_are_gone(gone_below);
        // A later checkpoint has roots of its own to be deleted first.
        if self.is_current(number) {
            self.cleanup.stage = Stage::Segments;
        }
    }

    /// The next cleanup would name all of them again, also where a later checkpoint has taken the place of
    /// this one's.
    fn roots_are_gone(&mut self, below: u64) {
        self.roots_gone_below = self.roots_gone_below.max(below);
    }

    fn delete_old(&self, keys: Vec<String>, number: u64, done: Event) {
        let answered = self.context.clone();
        let tell = move |outcome: sawmill_store::Result<()>| {
            answered.mailbox.push_event(match outcome {
                Ok(()) => done,
                Err(error) => Event::CleanUpFailed { number, what: format!("old checkpoints: {error}") },
            });
        };
        if keys.is_empty() {
            return tell(Ok(()));
        }
        self.context.attachment.store.delete(keys, Class::Background, Box::new(tell));
    }
}
