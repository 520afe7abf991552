//! Checkpoints: the map as objects, frozen at a stored segment. What one supersedes is deleted by `cleanup`.
//!
//! The engine alone changes the map, so encoding it between two applied segments freezes a cut without
//! stopping anybody. Only groups of addresses that changed are written again; the root names the parts of all
//! groups.

use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::Duration;

use bytes::Bytes;
use sawmill_format::checkpoint::{Checkpoint, CheckpointIdentity, PartEntry, checkpoint_key};
use sawmill_format::ids::PutId;
use sawmill_format::map_part::{MapExtent, PartIdentity, encode_part, part_crc, part_key};
use sawmill_store::{Class, Put, PutOutcome, StoreErrorKind};

use super::cleanup::{Cleanup, Superseded};
use super::outgoing::Outgoing;
use super::past::{Roots, is_copy};
use super::{Engine, Event};
use crate::ask::want;
use crate::map::GROUP_BYTES;
use crate::tally::add;
use crate::{Error, ErrorKind, Result};

const REPEAT_AFTER: Duration = Duration::from_millis(500);
/// How often a root in the way is looked at before it is believed to be damaged: an answer may be garbled on
/// its way.
const RIVAL_LOOKS_MAX: u32 = 4;

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
    /// Who ordered it.
    tell: Vec<SyncSender<()>>,
}

impl Writing {
    pub(super) fn repeat_at(&self) -> Option<Duration> {
        self.objects.iter().filter_map(|object| object.repeat_at).min()
    }
}

impl Engine {
    /// Starts a checkpoint when one is due, and repeats what the store could not take.
    pub(super) fn keep_checkpoints(&mut self, now: Duration) {
        if self.writing.is_some() {
            return self.repeat_objects(now);
        }
        if self.window_in(now).is_some_and(|wait| wait.is_zero()) {
            self.want_deletes();
        }
        let closing = !self.clean_checkpoint && self.is_drained();
        let ordered = self.context.mailbox.take_checkpoint_orders();
        let due = !ordered.is_empty()
            || self.log_bytes >= self.options.checkpoint_bytes
            || self.checkpoints_wanted > 0
            || self.dead_are_due(now);
        if (due || closing)
            && let Err(error) = self.begin_checkpoint(closing)
        {
            self.context.write.fail(error);
        }
        if let Some(writing) = &mut self.writing {
            writing.tell = ordered;
        }
    }

    pub(super) fn begin_checkpoint(&mut self, clean: bool) -> Result<()> {
        let context = self.context.clone();
        let view = context.stored.view();
        let number = self.checkpoint_number + 1;
        let put_id = PutId(context.attachment.world.random()?);
        let mut objects = Vec::new();
        let mut parts = self.newest_root.parts.clone();
        for group in view.map.dirty_groups() {
            let extents: Vec<_> = view.map.export_group(group).into_iter().map(MapExtent::from).collect();
            view.map.mark_clean(group);
            parts.retain(|part| part.group != group);
            if extents.is_empty() {
                continue;
            }
            let identity =
                PartIdentity { volume_id: context.attachment.record.volume_id, group, number, put_id };
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
            volume_id: context.attachment.record.volume_id,
            put_id,
            number,
            epoch: context.attachment.epoch,
            through_sequence: self.stored_sequence,
            next_sequence: self.uploads.front().map_or(self.next_sequence, super::Upload::sequence),
            position: self.stored_position,
            wall_unix_ms: self.frozen_unix_ms(),
            attached_ms: self.attached_ms(),
            repeats: 0,
            size_bytes: self.size_bytes,
            clean,
            extent_total: parts.iter().map(|part| u64::from(part.extents)).sum(),
            live_bytes: segments.iter().map(|segment| segment.live_bytes).sum(),
            segments,
            parts,
            kept,
        };
        self.log_bytes = 0;
        let generation = context.stored.readers.advance();
        let parts_left = objects.len();
        let (root_sent, odd_looks) = (false, 0);
        let tell = Vec::new();
        let writing =
            Writing { root, objects, parts_left, root_sent, odd_looks, deletable, copies, generation, tell };
        self.writing = Some(writing);
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
        let answered = self.context.clone();
        let tell = move |outcome| answered.mailbox.push_event(Event::CheckpointPut { object, outcome });
        self.context.attachment.store.put(put, Box::new(tell));
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
                self.context.attachment.state.store_answered();
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
                self.context.write.fail(Error::new(ErrorKind::Internal, text));
            }
            Err(error) => {
                outgoing.repeat_at = Some(now + REPEAT_AFTER);
                self.context.attachment.state.store_failed(now, error.to_string());
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

    /// The root's number is taken. Whoever attached before us cannot have: its last number was taken before
    /// we began (`open::repeat`). So we are fenced, or something in the way is damaged.
    fn ask_for_rival(&mut self) {
        let Some(writing) = &self.writing else { return };
        let key = checkpoint_key(writing.root.volume_id, writing.root.number);
        let get = want(key, None, Class::Upload);
        let answered = self.context.clone();
        let tell = move |outcome| answered.mailbox.push_event(Event::RivalCheckpoint { outcome });
        self.context.attachment.store.get(get, Box::new(tell));
    }

    pub(super) fn hear_rival(&mut self, outcome: sawmill_store::Result<Bytes>, now: Duration) {
        let Some(writing) = &mut self.writing else { return };
        let identity = CheckpointIdentity { volume_id: writing.root.volume_id, number: writing.root.number };
        let rival = match outcome {
            Ok(bytes) => Ok(Checkpoint::decode(&bytes, &identity).map_err(|error| error.to_string())),
            Err(error) if error.kind() == StoreErrorKind::Damaged => Ok(Err(error.to_string())),
            Err(error) => Err(error),
        };
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
                    self.context.attachment.state.store_failed(now, error.to_string());
                }
                return;
            }
        };
        match rival {
            Ok(_) => self.context.write.fence(format!(
                "volume {}: another writer has taken it over from this one (epoch {}): it wrote {}",
                self.context.attachment.name,
                self.context.attachment.epoch,
                checkpoint_key(identity.volume_id, identity.number)
            )),
            Err(error) => {
                let key = checkpoint_key(identity.volume_id, identity.number);
                let text = format!("{key} exists already and cannot be read: {error}");
                self.context.write.fail(Error::new(ErrorKind::Corrupt, text));
            }
        }
    }

    fn finish_checkpoint(&mut self) {
        let Some(writing) = self.writing.take() else { return };
        let context = self.context.clone();
        let previous = std::mem::replace(&mut self.readable_number, writing.root.number);
        let spared_from = self.crossed().map_or(previous, |rollback| previous.min(rollback.cut_number));
        self.checkpoint_number = writing.root.number;
        self.note_resized(writing.root.number);
        context.mailbox.set_checkpoint_number(writing.root.number);
        add(&context.attachment.tally.checkpoints, 1);
        self.clean_checkpoint = writing.root.clean;
        self.checkpoints_wanted = self.checkpoints_wanted.saturating_sub(1);
        let named = Arc::new(self.named_parts(&writing.root));
        let roots = Arc::new(Roots::of(&writing.root, &self.newest_root, &mut self.copies_left));
        let (deletable, generation) = (writing.deletable, writing.generation);
        let all_named = || named.puts().chain(roots.kept.iter().map(|(_, put_id)| *put_id)).collect();
        self.own_puts.add(writing.root.put_id, writing.root.number, all_named);
        let own_puts = self.own_puts.known();
        self.cleanup = Cleanup::of(Superseded {
            spared_from,
            number: writing.root.number,
            named,
            roots,
            own_puts,
            doomed: deletable,
            generation,
        });
        self.take_over(writing.root, &writing.copies);
        for tell in writing.tell {
            // Whoever ordered it may have given up.
            let _ = tell.try_send(());
        }
    }
}
