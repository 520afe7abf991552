//! Checkpoints: the map as objects, frozen at a stored segment; and the deletes that only a durable one
//! allows.
//!
//! The keeper alone changes the map, so encoding it between two applied segments freezes a cut without
//! stopping anybody. Only groups of addresses that changed are written again; the root names the parts of all
//! groups.
//!
//! Deletes: a dead segment goes when the *second* checkpoint that found it dead is durable, so the newest two
//! checkpoints can both be read in full. Old roots, and parts that neither of the two names, go then too.

use std::collections::HashSet;
use std::time::Duration;

use bytes::Bytes;
use sawmill_format::checkpoint::{
    Checkpoint, CheckpointIdentity, PartEntry, checkpoint_key, checkpoint_prefix, kept_prefix,
    parse_checkpoint_key, parse_kept_key,
};
use sawmill_format::ids::PutId;
use sawmill_format::map_part::{
    MapExtent, PartIdentity, encode_part, map_prefix, parse_part_key, part_crc, part_key,
};
use sawmill_format::segment::segment_key;
use sawmill_store::{Class, Get, List, Put, PutOutcome};

use super::past::{NamedParts, Roots, is_copy};
use super::{Event, Keeper};
use crate::map::GROUP_BYTES;
use crate::shared::add;
use crate::{Error, ErrorKind, Result};

const REPEAT_AFTER: Duration = Duration::from_millis(500);
/// How often a root in the way is looked at before it is believed to be damaged: an answer may be garbled on
/// its way.
const RIVAL_LOOKS_MAX: u32 = 4;

/// An object of a checkpoint on its way.
pub(super) struct Outgoing {
    key: String,
    body: Bytes,
    stored: bool,
    repeat_at: Option<Duration>,
}

impl Outgoing {
    pub(super) fn new(key: String, body: Vec<u8>) -> Self {
        Outgoing { key, body: Bytes::from(body), stored: false, repeat_at: None }
    }
}

/// What a durable checkpoint allows to be deleted.
pub(crate) struct Cleaning {
    /// The checkpoints that stay.
    keep: [u64; 2],
    named: NamedParts,
    roots: Roots,
    doomed: Vec<u32>,
    /// The puts of this attachment until then: what a later checkpoint put is not garbage.
    own_puts: HashSet<PutId>,
}

/// A checkpoint being written: all parts, then the root as the last object.
pub(super) struct Writing {
    root: Checkpoint,
    objects: Vec<Outgoing>,
    parts_left: usize,
    root_sent: bool,
    /// Looks at what is in the root's way that made no sense.
    odd_looks: u32,
    deletable: Vec<u32>,
    /// Older checkpoints that get a copy of their own with this one.
    copies: Vec<u64>,
    /// Reads that may have looked up a deletable segment are of this generation or before.
    generation: u64,
}

impl Writing {
    pub(super) fn repeat_at(&self) -> Option<Duration> {
        self.objects.iter().filter_map(|object| object.repeat_at).min()
    }
}

impl Keeper {
    /// Starts a checkpoint when one is due, and repeats what the store could not take.
    pub(super) fn keep_checkpoints(&mut self, now: Duration) {
        if self.writing.is_some() {
            return self.repeat_objects(now);
        }
        let closing = !self.clean_checkpoint && self.is_drained();
        let due = self.log_bytes >= self.options.checkpoint_bytes;
        if (due || closing)
            && let Err(error) = self.begin_checkpoint(closing)
        {
            self.shared.fail(error);
        }
    }

    fn begin_checkpoint(&mut self, clean: bool) -> Result<()> {
        let shared = self.shared.clone();
        let view = shared.view();
        let number = self.checkpoint_number + 1;
        let put_id = PutId(shared.world.random()?);
        let mut objects = Vec::new();
        let mut parts = self.newest_root.parts.clone();
        for group in view.map.dirty_groups() {
            let extents: Vec<_> = view.map.export_group(group).into_iter().map(MapExtent::from).collect();
            view.map.mark_clean(group);
            parts.retain(|part| part.group != group);
            if extents.is_empty() {
                continue;
            }
            let identity = PartIdentity { volume_id: shared.record.volume_id, group, number, put_id };
            let bytes = encode_part(&identity, group * GROUP_BYTES, &extents).map_err(|error| {
                Error::new(ErrorKind::Internal, format!("the map cannot be written: {error}"))
            })?;
            parts.push(PartEntry {
                group,
                number,
                put_id,
                bytes: bytes.len() as u32,
                extents: extents.len() as u32,
                crc: part_crc(&bytes),
            });
            objects.push(Outgoing {
                key: part_key(&identity),
                body: Bytes::from(bytes),
                stored: false,
                repeat_at: None,
            });
        }
        parts.sort_by_key(|part| part.group);
        let copies = self.copy_roots(&view, &mut objects);
        let (kept, segments, deletable) = self.freeze_past(&view, number);
        let root = Checkpoint {
            volume_id: shared.record.volume_id,
            put_id,
            number,
            epoch: shared.epoch,
            through_sequence: self.stored_sequence,
            next_sequence: self.uploads.front().map_or(self.next_sequence, super::Upload::sequence),
            position: self.stored_position,
            wall_unix_ms: shared.world.unix_ms(),
            size_bytes: shared.record.size_bytes,
            clean,
            extent_total: parts.iter().map(|part| u64::from(part.extents)).sum(),
            live_bytes: segments.iter().map(|segment| segment.live_bytes).sum(),
            segments,
            parts,
            kept,
        };
        self.log_bytes = 0;
        let generation = shared.readers.advance();
        let parts_left = objects.len();
        let (root_sent, odd_looks) = (false, 0);
        self.writing =
            Some(Writing { root, objects, parts_left, root_sent, odd_looks, deletable, copies, generation });
        for object in 0..parts_left {
            self.put_object(object);
        }
        self.send_root_if_ready();
        Ok(())
    }

    fn put_object(&self, object: usize) {
        let Some(outgoing) = self.writing.as_ref().and_then(|writing| writing.objects.get(object)) else {
            return;
        };
        let put = Put { key: outgoing.key.clone(), body: outgoing.body.clone(), class: Class::Upload };
        let answered = self.shared.clone();
        let tell = move |outcome| answered.inbox.push_event(Event::CheckpointPut { object, outcome });
        self.shared.store.put(put, Box::new(tell));
    }

    /// The root goes after every part it names is durable.
    fn send_root_if_ready(&mut self) {
        let Some(writing) = &mut self.writing else { return };
        if writing.parts_left > 0 || writing.root_sent {
            return;
        }
        writing.root_sent = true;
        writing.objects.push(Outgoing {
            key: checkpoint_key(writing.root.volume_id, writing.root.number),
            body: Bytes::from(writing.root.encode()),
            stored: false,
            repeat_at: None,
        });
        let root = writing.objects.len() - 1;
        self.put_object(root);
    }

    pub(super) fn hear_checkpoint_put(
        &mut self,
        object: usize,
        outcome: sawmill_store::Result<PutOutcome>,
        now: Duration,
    ) {
        let Some(writing) = &mut self.writing else { return };
        let is_root = writing.root_sent && object + 1 == writing.objects.len();
        let Some(outgoing) = writing.objects.get_mut(object) else { return };
        match outcome {
            // A copy of a checkpoint has the same bytes whoever made it.
            Ok(outcome) if !outgoing.stored && (outcome == PutOutcome::Created || is_copy(&outgoing.key)) => {
                outgoing.stored = true;
                outgoing.body = Bytes::new();
                self.shared.state.store_answered();
                if is_root {
                    self.finish_checkpoint();
                } else {
                    writing.parts_left -= 1;
                    self.send_root_if_ready();
                }
            }
            Ok(_) if outgoing.stored => {}
            Ok(_) if is_root => self.ask_for_rival(),
            Ok(_) => {
                let text = format!("{} exists although its name is random", outgoing.key);
                self.shared.fail(Error::new(ErrorKind::Internal, text));
            }
            Err(error) => {
                outgoing.repeat_at = Some(now + REPEAT_AFTER);
                self.shared.state.store_failed(now, error.to_string());
            }
        }
    }

    fn repeat_objects(&mut self, now: Duration) {
        let Some(writing) = &mut self.writing else { return };
        let mut due = Vec::new();
        for (object, outgoing) in writing.objects.iter_mut().enumerate() {
            if outgoing.repeat_at.is_some_and(|at| at <= now) {
                outgoing.repeat_at = None;
                due.push(object);
            }
        }
        for object in due {
            self.put_object(object);
        }
    }

    /// The root's number is taken: by a stale writer of an older epoch (then ours takes the next number), or
    /// by a newer one (then we are fenced). Its content says which.
    fn ask_for_rival(&mut self) {
        let Some(writing) = &self.writing else { return };
        let key = checkpoint_key(writing.root.volume_id, writing.root.number);
        let get = Get { key, range: None, class: Class::Upload };
        let answered = self.shared.clone();
        let tell = move |outcome| answered.inbox.push_event(Event::RivalCheckpoint { outcome });
        self.shared.store.get(get, Box::new(tell));
    }

    pub(super) fn hear_rival(&mut self, outcome: sawmill_store::Result<Bytes>, now: Duration) {
        let Some(writing) = &mut self.writing else { return };
        let identity = CheckpointIdentity { volume_id: writing.root.volume_id, number: writing.root.number };
        let rival = outcome.map(|bytes| Checkpoint::decode(&bytes, &identity));
        writing.odd_looks += u32::from(matches!(rival, Ok(Err(_))));
        let rival = match rival {
            Ok(rival) if rival.is_ok() || writing.odd_looks >= RIVAL_LOOKS_MAX => rival,
            odd => {
                // The root is put again in a while: if something is still in the way, its content is asked
                // for again.
                if let Some(root) = writing.objects.last_mut() {
                    root.repeat_at = Some(now + REPEAT_AFTER);
                }
                if let Err(error) = odd {
                    self.shared.state.store_failed(now, error.to_string());
                }
                return;
            }
        };
        match rival {
            Ok(rival) if rival.epoch < writing.root.epoch => {
                writing.root.number += 1;
                writing.root_sent = false;
                writing.objects.pop();
                self.send_root_if_ready();
            }
            Ok(rival) => self.shared.fence(format!(
                "volume {}: another writer (epoch {}) has taken it over from this one (epoch {})",
                self.shared.name, rival.epoch, self.shared.epoch
            )),
            Err(error) => {
                let key = checkpoint_key(identity.volume_id, identity.number);
                let text = format!("{key} is in the way and cannot be read: {error}");
                self.shared.fail(Error::new(ErrorKind::Corrupt, text));
            }
        }
    }

    fn finish_checkpoint(&mut self) {
        let Some(writing) = self.writing.take() else { return };
        let shared = self.shared.clone();
        let previous = std::mem::replace(&mut self.readable_number, writing.root.number);
        self.checkpoint_number = writing.root.number;
        self.own_puts.insert(writing.root.put_id);
        shared.inbox.set_checkpoint_number(writing.root.number);
        add(&shared.tally.checkpoints, 1);
        self.clean_checkpoint = writing.root.clean;
        let doomed = if shared.readers.passed(writing.generation) { writing.deletable } else { Vec::new() };
        let keep = [previous, writing.root.number];
        let named = self.named_parts(&writing.root);
        let roots = Roots::of(&writing.root, &self.newest_root, &mut self.copies_left);
        self.take_over(writing.root, &writing.copies);
        let own_puts = self.own_puts.clone();
        self.look_for_fences(Cleaning { keep, named, roots, doomed, own_puts });
    }

    pub(super) fn delete_segments(&self, sequences: Vec<u32>) {
        let volume_id = self.shared.record.volume_id;
        // What belongs to an ancestor is only forgotten.
        let own = sequences.iter().filter(|one| self.shared.lineage.ancestor(u64::from(**one)).is_none());
        let keys = own.map(|sequence| segment_key(volume_id, u64::from(*sequence))).collect::<Vec<_>>();
        let answered = self.shared.clone();
        let tell = move |outcome| answered.inbox.push_event(Event::SegmentsDeleted { sequences, outcome });
        if keys.is_empty() {
            return tell(Ok(()));
        }
        self.shared.store.delete(keys, Class::Background, Box::new(tell));
    }

    /// Segments whose delete failed stay in the table as dead; the next checkpoint tries again.
    pub(super) fn hear_deleted(&mut self, sequences: &[u32], outcome: sawmill_store::Result<()>) {
        self.cleaning -= 1;
        if let Err(error) = outcome {
            tracing::warn!("{} dead segments could not be deleted yet: {error}", sequences.len());
            return;
        }
        let view = self.shared.view();
        for sequence in sequences {
            view.segments.remove(*sequence);
            let own = self.shared.lineage.ancestor(u64::from(*sequence)).is_none();
            if let Some((cache, owner, _)) = self.shared.cache.as_ref().filter(|_| own) {
                cache.forget_segment(*owner, *sequence);
            }
        }
        add(&self.shared.tally.segments_deleted, sequences.len() as u64);
    }

    /// Finds roots and parts that the newest two checkpoints do not need. Segments go only after all such
    /// roots have gone: a list that lags must never lead back to a root that misses a segment.
    pub(super) fn list_old_checkpoints(&mut self, cleaning: Cleaning) {
        let Cleaning { keep, named, roots, doomed, own_puts } = cleaning;
        let volume_id = self.shared.record.volume_id;
        let [previous, _] = keep;
        let (loaded, known_puts) = (self.loaded_number, own_puts.clone());
        let is_old_root = move |key: &str| {
            parse_checkpoint_key(key).is_some_and(|(id, number)| id == volume_id && number < previous)
        };
        let is_old_part = move |key: &str| {
            parse_part_key(key).is_some_and(|part| {
                // Only what this attachment knows about: it may be a stale one, and the parts those of its
                // successor.
                let known = part.number <= loaded || known_puts.contains(&part.put_id);
                known && part.volume_id == volume_id && !named.holds(part.group, part.number, part.put_id)
            })
        };
        // The list may not show the youngest of the old roots yet.
        let youngest = (previous > 1).then(|| checkpoint_key(volume_id, previous - 1));
        let heard = |keys: Vec<String>| Event::RootsListed { keys, doomed };
        self.list(checkpoint_prefix(volume_id), youngest, is_old_root, heard);
        self.list(map_prefix(volume_id), None, is_old_part, |keys| Event::PartsListed { keys });
        if roots.to_look_for {
            let is_unneeded = move |key: &str| {
                parse_kept_key(key).is_some_and(|(id, number, put_id)| {
                    let known = number <= loaded || own_puts.contains(&put_id);
                    let unneeded = number < previous && !roots.kept.contains(&(number, put_id));
                    known && id == volume_id && unneeded
                })
            };
            let heard = |keys| Event::PartsListed { keys };
            self.list(kept_prefix(volume_id), None, is_unneeded, heard);
        }
        self.list_releases();
    }

    /// Lists what is old below `prefix`. A failed listing only leaves it for the next checkpoint to find.
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
                Err(_) => Event::CleanedUp,
            });
        };
        self.shared.store.list(List { prefix, class: Class::Background }, Box::new(tell));
    }

    /// Old parts are only garbage.
    pub(super) fn hear_parts_listed(&mut self, keys: Vec<String>) {
        self.delete_old(keys, |_| Event::CleanedUp);
    }

    pub(super) fn hear_roots_listed(&mut self, keys: Vec<String>, doomed: Vec<u32>) {
        self.delete_old(keys, |done| if done { Event::RootsDeleted { doomed } } else { Event::CleanedUp });
    }

    pub(super) fn hear_roots_deleted(&mut self, doomed: Vec<u32>) {
        if doomed.is_empty() {
            self.cleaning -= 1;
        } else {
            self.ask_for_pins(doomed);
        }
    }

    fn delete_old(&self, keys: Vec<String>, event: impl FnOnce(bool) -> Event + Send + 'static) {
        let answered = self.shared.clone();
        let tell = move |outcome: sawmill_store::Result<()>| {
            if let Err(error) = &outcome {
                tracing::warn!("old checkpoints could not be deleted yet: {error}");
            }
            answered.inbox.push_event(event(outcome.is_ok()));
        };
        if keys.is_empty() {
            return tell(Ok(()));
        }
        self.shared.store.delete(keys, Class::Background, Box::new(tell));
    }
}
