//! Deleting what a durable checkpoint has superseded: old roots, parts and dead segments.
//!
//! Invariants:
//! 1. A dead segment goes when the *second* checkpoint that found it dead is durable, so the newest two
//!    checkpoints can both be read in full. Old roots, and parts that neither of the two names, go then too.
//! 2. Segments go only after all such roots have gone: a list that lags must never lead back to a root that
//!    misses a segment.
//! 3. Segments go only after every read that may have looked them up has ended, and after a look for clones
//!    that pin them (`pins`).
//! 4. What could not be deleted is tried again, also when nothing else happens any more.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use sawmill_format::checkpoint::{
    checkpoint_key, checkpoint_prefix, kept_prefix, parse_checkpoint_key, parse_kept_key,
};
use sawmill_format::map_part::{map_prefix, parse_part_key};
use sawmill_format::segment::segment_key;
use sawmill_store::{Class, List};

use super::past::{NamedParts, Roots};
use super::{Event, Keeper};
use crate::shared::add;

/// How long to wait after the store has used up its own retries: nobody waits for a delete.
const REPEAT_AFTER: Duration = Duration::from_secs(5);
/// How often to look whether the reads that hold back a delete have ended.
const READS_LOOK_EVERY: Duration = Duration::from_millis(100);
/// Nothing happened for so long: what is dead is cleared away before the volume goes quiet.
const QUIET_AFTER: Duration = Duration::from_secs(1);
/// Deletes of a busy volume wait until so many segments' worth is dead.
const DEAD_SEGMENTS_LEAST: u64 = 4;

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

/// What the newest durable checkpoint lets go.
#[derive(Default)]
pub(super) struct Cleanup {
    stage: Stage,
    not_before: Duration,
    previous: u64,
    number: u64,
    /// The parts that the newest two checkpoints and all cuts name.
    named: Arc<NamedParts>,
    /// The copies of checkpoints that cuts need.
    roots: Arc<Roots>,
    doomed: Vec<u32>,
    /// Reads that may have looked up a doomed segment are of this generation or before.
    generation: u64,
}

impl Cleanup {
    /// After checkpoint `number`, with `previous` the readable one before it.
    pub(super) fn after(
        previous: u64,
        number: u64,
        named: Arc<NamedParts>,
        roots: Arc<Roots>,
        doomed: Vec<u32>,
        generation: u64,
    ) -> Self {
        Cleanup {
            stage: Stage::Begin,
            not_before: Duration::ZERO,
            previous,
            number,
            named,
            roots,
            doomed,
            generation,
        }
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

impl Keeper {
    /// Whether so much is dead that a checkpoint is worth its price, to let it go.
    pub(super) fn dead_are_due(&self, now: Duration) -> bool {
        let unsettled = self.unsettled_bytes();
        unsettled > 0 && (unsettled >= self.dead_bytes_max() || self.is_quiet(now))
    }

    /// How long until a volume that goes quiet clears away what is dead.
    pub(super) fn settle_in(&self, now: Duration) -> Option<Duration> {
        let waits = self.unsettled_bytes() > 0 && self.writing.is_none();
        waits.then(|| (self.busy_at + QUIET_AFTER).saturating_sub(now).max(Duration::from_millis(1)))
    }

    fn is_quiet(&self, now: Duration) -> bool {
        now >= self.busy_at + QUIET_AFTER && self.unsettled_bytes() >= self.quiet_bytes_min()
    }

    /// Less than this is left lying: a checkpoint may cost more.
    fn quiet_bytes_min(&self) -> u64 {
        self.shared.view().segments.totals().object_bytes / 64
    }

    /// Dead bytes that another checkpoint or two would let go.
    fn unsettled_bytes(&self) -> u64 {
        let totals = self.shared.view().segments.totals();
        totals.dead_object_bytes - totals.settled_object_bytes
    }

    fn dead_bytes_max(&self) -> u64 {
        let view = self.shared.view();
        let least = DEAD_SEGMENTS_LEAST * u64::from(self.shared.record.segment_bytes);
        let checkpoint_bytes: u64 = self.newest_root.parts.iter().map(|part| u64::from(part.bytes)).sum();
        least.max(view.segments.totals().object_bytes / 16).max(2 * checkpoint_bytes)
    }

    /// Takes the next step of cleaning up, if it is time.
    pub(super) fn clean_up(&mut self, now: Duration) {
        if now < self.cleanup.not_before {
            return;
        }
        match self.cleanup.stage {
            Stage::Begin => self.list_old_checkpoints(),
            Stage::Segments => self.delete_doomed(now),
            Stage::Rest | Stage::UnderWay => {}
        }
    }

    fn delete_doomed(&mut self, now: Duration) {
        if self.cleanup.doomed.is_empty() {
            self.cleanup.stage = Stage::Rest;
            return;
        }
        if !self.shared.readers.passed(self.cleanup.generation) {
            // Reads of an older generation may have kept the checkpoint from beginning a new one.
            self.shared.readers.advance();
            self.cleanup.not_before = now + READS_LOOK_EVERY;
            return;
        }
        self.cleanup.stage = Stage::UnderWay;
        self.cleaning += 1;
        self.ask_for_pins(self.cleanup.doomed.clone());
    }

    /// Nobody has pinned them.
    pub(super) fn delete_unpinned(&mut self, sequences: Vec<u32>) {
        if self.cleanup.stage == Stage::UnderWay {
            self.cleanup.doomed.clone_from(&sequences);
        }
        let shared = self.shared.clone();
        let volume_id = shared.record.volume_id;
        // What belongs to an ancestor is only forgotten.
        let own = sequences.iter().filter(|one| shared.lineage.ancestor(u64::from(**one)).is_none());
        let keys = own.map(|sequence| segment_key(volume_id, u64::from(*sequence))).collect::<Vec<_>>();
        let answered = shared.clone();
        let tell = move |outcome| answered.inbox.push_event(Event::SegmentsDeleted { sequences, outcome });
        if keys.is_empty() {
            return tell(Ok(()));
        }
        shared.store.delete(keys, Class::Background, Box::new(tell));
    }

    /// Segments whose delete failed stay in the table as dead.
    pub(super) fn hear_deleted(
        &mut self,
        sequences: &[u32],
        outcome: sawmill_store::Result<()>,
        now: Duration,
    ) {
        if let Err(error) = outcome {
            return self.hear_cleanup_failed(format!("{} dead segments: {error}", sequences.len()), now);
        }
        self.cleaning -= 1;
        let view = self.shared.view();
        for sequence in sequences {
            view.segments.remove(*sequence);
            let own = self.shared.lineage.ancestor(u64::from(*sequence)).is_none();
            if let Some((cache, owner, _)) = self.shared.cache.as_ref().filter(|_| own) {
                cache.forget_segment(*owner, *sequence);
            }
        }
        let deleted: HashSet<u32> = sequences.iter().copied().collect();
        self.cleanup.doomed.retain(|sequence| !deleted.contains(sequence));
        if self.cleanup.stage == Stage::UnderWay && self.cleanup.doomed.is_empty() {
            self.cleanup.stage = Stage::Rest;
        }
        add(&self.shared.tally.segments_deleted, sequences.len() as u64);
    }

    /// What could not be deleted stays garbage for a while.
    pub(super) fn hear_cleanup_failed(&mut self, what: String, now: Duration) {
        self.cleaning -= 1;
        tracing::warn!("not deleted yet: {what}");
        if self.cleanup.stage == Stage::UnderWay {
            self.cleanup.stage = Stage::Begin;
            self.cleanup.not_before = now + REPEAT_AFTER;
        }
    }

    /// Finds roots and parts that the newest two checkpoints do not need.
    fn list_old_checkpoints(&mut self) {
        self.cleanup.stage = Stage::UnderWay;
        let volume_id = self.shared.record.volume_id;
        let (previous, number) = (self.cleanup.previous, self.cleanup.number);
        let named = self.cleanup.named.clone();
        let (loaded, own_puts) = (self.loaded_number, self.own_puts.clone());
        let is_old_root = move |key: &str| {
            parse_checkpoint_key(key).is_some_and(|(id, number)| id == volume_id && number < previous)
        };
        let is_old_part = move |key: &str| {
            parse_part_key(key).is_some_and(|part| {
                // Only what this attachment knows about: it may be a stale one, and the parts those of its
                // successor.
                let known = part.number <= loaded || own_puts.contains(&part.put_id);
                known && part.volume_id == volume_id && !named.holds(part.group, part.number, part.put_id)
            })
        };
        // The list may not show the youngest of the old roots yet.
        let youngest = (previous > 1).then(|| checkpoint_key(volume_id, previous - 1));
        let heard = move |keys: Vec<String>| Event::RootsListed { keys, number };
        self.list(checkpoint_prefix(volume_id), youngest, is_old_root, heard);
        self.list(map_prefix(volume_id), None, is_old_part, |keys| Event::PartsListed { keys });
        if self.cleanup.roots.to_look_for {
            let (loaded, own_puts) = (self.loaded_number, self.own_puts.clone());
            let roots = self.cleanup.roots.clone();
            let is_unneeded = move |key: &str| {
                parse_kept_key(key).is_some_and(|(id, kept_number, put_id)| {
                    let known = kept_number <= loaded || own_puts.contains(&put_id);
                    // The newest one's copy comes with the checkpoint after it, which may be on its way.
                    let is_older = kept_number < number;
                    known && is_older && id == volume_id && !roots.kept.contains(&(kept_number, put_id))
                })
            };
            self.list(kept_prefix(volume_id), None, is_unneeded, |keys| Event::PartsListed { keys });
        }
        self.list_releases();
    }

    /// Lists what is old below `prefix`.
    pub(super) fn list(
        &mut self,
        prefix: String,
        known: Option<String>,
        is_old: impl Fn(&str) -> bool + Send + 'static,
        event: impl FnOnce(Vec<String>) -> Event + Send + 'static,
    ) {
        self.cleaning += 1;
        let answered = self.shared.clone();
        let tell = move |outcome: sawmill_store::Result<Vec<sawmill_store::ObjectInfo>>| {
            answered.inbox.push_event(match outcome {
                Ok(objects) => {
                    let mut keys: Vec<_> = objects.into_iter().map(|object| object.key).collect();
                    keys.retain(|key| is_old(key) && Some(key) != known.as_ref());
                    keys.extend(known);
                    event(keys)
                }
                Err(error) => Event::CleanUpFailed { what: format!("old checkpoints: {error}") },
            });
        };
        self.shared.store.list(List { prefix, class: Class::Background }, Box::new(tell));
    }

    /// Old parts are only garbage.
    pub(super) fn hear_parts_listed(&mut self, keys: Vec<String>) {
        self.delete_old(keys, Event::CleanedUp);
    }

    pub(super) fn hear_roots_listed(&mut self, keys: Vec<String>, number: u64) {
        self.delete_old(keys, Event::RootsDeleted { number });
    }

    pub(super) fn hear_roots_deleted(&mut self, number: u64) {
        self.cleaning -= 1;
        // A later checkpoint has roots of its own to be deleted first.
        if self.cleanup.number == number && self.cleanup.stage == Stage::UnderWay {
            self.cleanup.stage = Stage::Segments;
        }
    }

    fn delete_old(&self, keys: Vec<String>, done: Event) {
        let answered = self.shared.clone();
        let tell = move |outcome: sawmill_store::Result<()>| {
            answered.inbox.push_event(match outcome {
                Ok(()) => done,
                Err(error) => Event::CleanUpFailed { what: format!("old checkpoints: {error}") },
            });
        };
        if keys.is_empty() {
            return tell(Ok(()));
        }
        self.shared.store.delete(keys, Class::Background, Box::new(tell));
    }
}
