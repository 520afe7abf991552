//! Checkpoints: the map as objects, frozen at a stored segment. `cleanup` deletes what a checkpoint
//! supersedes.
//!
//! Only the engine changes the map, so encoding it between two applied segments freezes a cut
//! without stopping any user. Only what changed is written again (`map::freeze`); the root names
//! the parts of all groups.
//!
//! Invariant: at most one checkpoint is in flight, and it has the number after the newest durable
//! one. So an attach that takes the next number leaves none for a fenced writer (`open::repeat`).
//!
//! Not here: what a checkpoint records about the past (`past`), and reading one
//! (`recovery::checkpoint`).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::Duration;

use bytes::Bytes;
use sawmill_format::checkpoint::{Checkpoint, CheckpointIdentity, PartEntry, checkpoint_key};
use sawmill_format::ids::PutId;
use sawmill_store::{Bodies, Class, Put, PutOutcome, StoreErrorKind};

use super::context::Context;
use super::log_tail::LogTail;
use super::messages::Event;
use super::outgoing::OutgoingObject;
use super::own_puts::OwnPuts;
use super::root::PackedRoot;
use super::superseded::{COPY_SEARCHES, Roots, SupersededObjects, is_copy};
use super::{EngineOptions, EngineStart, QUIET_AFTER};
use crate::counters::add;
use crate::map::freeze::freeze_map;
use crate::recovery::end::RollbackRecord;
use crate::store_calls::{cannot_encode, want};
use crate::{Error, ErrorKind, Result, limits};

const REPEAT_AFTER: Duration = Duration::from_millis(500);
/// The shortest interval at which a quiet volume checks for data that has left the retention
/// window.
const WINDOW_CHECK_EVERY_MS: u64 = 10_000;
/// How often a conflicting root is read before it counts as damaged: an answer may be garbled in
/// transit.
const RIVAL_READS_MAX: u32 = 4;

/// A checkpoint being written: all parts, then the root as the last object.
struct CheckpointWrite {
    root: Checkpoint,
    objects: Vec<OutgoingObject>,
    parts_left: usize,
    root_sent: bool,
    /// How often the conflicting root was read and was invalid.
    odd_reads: u32,
    deletable: Vec<u32>,
    /// Older checkpoints that get a copy with this one.
    copies: Vec<u64>,
    /// Reads that may have looked up a deletable segment began in this period or before.
    read_period: u64,
    /// The requesters of this checkpoint.
    /// Bounded by the threads that wait for one: a caller of `Volume::checkpoint` each.
    senders: Vec<SyncSender<()>>,
}

impl CheckpointWrite {
    fn repeat_at(&self) -> Option<Duration> {
        self.objects.iter().filter_map(|object| object.repeat_at).min()
    }
}

/// The newest durable checkpoint, the one in flight, and when the next one is due.
pub(super) struct Checkpoints {
    /// The newest durable one.
    number: u64,
    /// The newest one that is known to be readable.
    readable_number: u64,
    /// The one that this attachment started from, and its own puts.
    loaded_number: u64,
    own_puts: OwnPuts,
    /// The newest durable one.
    pub(super) newest_root: PackedRoot,
    /// Checkpoints that cuts start from and that have no copy yet.
    pub(super) uncopied: Vec<PackedRoot>,
    /// How many of the next checkpoints look for copies of older ones.
    copies_left: u32,
    /// The parts of checkpoints that cuts start from, by number; unknown for those of older
    /// attachments.
    pub(super) cut_parts: BTreeMap<u64, Vec<PartEntry>>,
    /// The last rollback that is stored.
    pub(super) rolled_back: Option<RollbackRecord>,
    /// Bytes of log since the newest checkpoint.
    log_bytes: u64,
    /// Size of the disk for the next checkpoint.
    pub(super) size_bytes: u64,
    /// Whether the newest one records that everything is stored.
    is_clean: bool,
    write: Option<CheckpointWrite>,
    /// How many are wanted although none is due.
    requested_count: u32,
}

/// What the next checkpoint records besides the state that it finds.
pub(super) struct Freeze {
    pub(super) attached_ms: u64,
    /// Whether cuts outside the retention window are dropped.
    pub(super) prunes: bool,
    /// Whether everything is stored and nothing more will come.
    pub(super) is_clean: bool,
}

impl Checkpoints {
    /// Starts with the state of `start`.
    pub(super) fn new(start: EngineStart) -> Self {
        let loaded = start.loaded;
        Checkpoints {
            number: start.checkpoint_number,
            readable_number: loaded.number,
            loaded_number: loaded.number,
            own_puts: OwnPuts::default(),
            copies_left: if loaded.kept.is_empty() { 0 } else { COPY_SEARCHES },
            newest_root: PackedRoot::of(loaded),
            uncopied: Vec::new(),
            cut_parts: BTreeMap::new(),
            rolled_back: start.rolled_back,
            // A rollback that is in no checkpoint yet must be in one soon.
            log_bytes: if start.rolled_back.is_some() { u64::MAX / 2 } else { start.log_bytes },
            size_bytes: start.size_bytes,
            is_clean: false,
            write: None,
            requested_count: 0,
        }
    }

    pub(super) fn loaded_number(&self) -> u64 {
        self.loaded_number
    }

    pub(super) fn is_writing(&self) -> bool {
        self.write.is_some()
    }

    /// Whether the newest one records that everything is stored, and nothing is being written.
    pub(super) fn is_closed(&self) -> bool {
        self.is_clean && self.write.is_none()
    }

    pub(super) fn is_clean(&self) -> bool {
        self.is_clean
    }

    /// Whether none is being written or wanted.
    pub(super) fn is_resting(&self) -> bool {
        self.requested_count == 0 && self.write.is_none()
    }

    /// Wants at least one more.
    pub(super) fn want_one(&mut self) {
        self.requested_count = self.requested_count.max(1);
    }

    /// The second checkpoint that starts after this deletes what is dead and unneeded.
    pub(super) fn want_deletes(&mut self) {
        self.requested_count = 2 + u32::from(self.write.is_some());
    }

    /// The log has grown by a segment.
    pub(super) fn add_log(&mut self, object_bytes: u64) {
        self.log_bytes += object_bytes;
    }

    /// A rollback is stored: recovery must not have to read the cut again for long.
    pub(super) fn note_rollback(&mut self, rollback: RollbackRecord, options: &EngineOptions) {
        self.rolled_back = Some(rollback);
        self.log_bytes = self.log_bytes.max(options.checkpoint_bytes);
    }

    /// Whether there is enough log or dead data to make one worthwhile, or one is wanted.
    pub(super) fn is_due(
        &self,
        context: &Context,
        options: &EngineOptions,
        busy_at: Duration,
        now: Duration,
    ) -> bool {
        let totals = context.stored.view().segments.totals();
        let checkpoint_bytes =
            self.newest_root.parts.iter().map(|part| u64::from(part.bytes)).sum();
        self.log_bytes >= options.checkpoint_bytes
            || self.requested_count > 0
            || totals
                .is_worth_a_checkpoint(context.attachment.record.segment_bytes, checkpoint_bytes)
            || now >= busy_at + QUIET_AFTER && totals.is_worth_a_checkpoint_in_peace()
    }

    /// Notifies the requesters of the checkpoint that has just started when it is durable.
    pub(super) fn notify_when_durable(&mut self, senders: Vec<SyncSender<()>>) {
        if let Some(writing) = &mut self.write {
            writing.senders = senders;
        }
    }

    /// When to repeat the next put.
    pub(super) fn repeat_at(&self) -> Option<Duration> {
        self.write.as_ref().and_then(CheckpointWrite::repeat_at)
    }

    /// Time until dead data of a quiet volume leaves the retention window.
    pub(super) fn window_in(
        &self,
        context: &Context,
        busy_at: Duration,
        attached_ms: u64,
        now: Duration,
    ) -> Option<Duration> {
        let view = context.stored.view();
        if view.segments.totals().dead_object_bytes == 0 || self.write.is_some() {
            return None;
        }
        let at = view.cuts.lock().prunes_at_attached_ms()?;
        let at = at.max(self.newest_root.attached_ms.saturating_add(WINDOW_CHECK_EVERY_MS));
        let window = Duration::from_millis(at.saturating_sub(attached_ms));
        Some(window.max((busy_at + QUIET_AFTER).saturating_sub(now)))
    }

    /// Time until a volume that becomes quiet deletes what is dead.
    pub(super) fn settle_in(
        &self,
        context: &Context,
        busy_at: Duration,
        now: Duration,
    ) -> Option<Duration> {
        let totals = context.stored.view().segments.totals();
        let waits = totals.is_worth_a_checkpoint_in_peace() && self.write.is_none();
        waits.then(|| (busy_at + QUIET_AFTER).saturating_sub(now).max(Duration::from_millis(1)))
    }

    /// Freezes the current map and starts to write it.
    pub(super) fn begin(
        &mut self,
        context: &Arc<Context>,
        log: &LogTail,
        options: &EngineOptions,
        freeze: &Freeze,
    ) -> Result<()> {
        let view = context.stored.view();
        let number = self.number + 1;
        let put_id = PutId(context.attachment.world.random()?);
        let volume_id = context.attachment.record.volume_id;
        let identity = CheckpointIdentity { volume_id, number };
        let frozen =
            freeze_map(&view.map, &self.newest_root.parts, identity, put_id, &options.bounds)?;
        let parts = frozen.parts;
        let objects = frozen.objects.into_iter();
        let mut objects = objects.map(|part| OutgoingObject::new(part.key, part.bytes)).collect();
        let copies = self.copy_roots(&view, freeze, &mut objects)?;
        let (kept, segments, deletable) = self.freeze_past(&view, number);
        let root = Checkpoint {
            volume_id,
            put_id,
            number,
            epoch: context.attachment.epoch,
            through_sequence: log.stored_sequence(),
            next_sequence: log.first_unstored(),
            position: log.stored_position(),
            wall_unix_ms: self.frozen_unix_ms(context, log),
            attached_ms: freeze.attached_ms,
            repeats: 0,
            size_bytes: self.size_bytes,
            clean: freeze.is_clean,
            extent_total: parts.iter().map(|part| u64::from(part.extents)).sum(),
            live_bytes: segments.iter().map(|segment| segment.live_bytes).sum(),
            segments,
            parts,
            kept,
        };
        self.log_bytes = 0;
        let read_period = context.stored.readers.advance();
        let parts_left = objects.len();
        let (root_sent, odd_reads) = (false, 0);
        let senders = Vec::new();
        let writing = CheckpointWrite {
            root,
            objects,
            parts_left,
            root_sent,
            odd_reads,
            deletable,
            copies,
            read_period,
            senders,
        };
        self.write = Some(writing);
        for object in 0..parts_left {
            self.put_object(context, object);
        }
        self.send_root_if_ready(context);
        Ok(())
    }

    fn put_object(&self, context: &Arc<Context>, object: usize) {
        let Some(outgoing) = self.write.as_ref().and_then(|writing| writing.objects.get(object))
        else {
            return;
        };
        let put = Put {
            key: outgoing.key.clone(),
            body: outgoing.body.clone(),
            class: Class::Upload,
            bodies: Bodies::Whole,
        };
        let callback_context = context.clone();
        let callback = move |outcome| {
            callback_context.mailbox.push_event(Event::CheckpointPut { object, outcome })
        };
        context.attachment.store.put(put, Box::new(callback));
    }

    /// The root is put after every part that it names is durable.
    fn send_root_if_ready(&mut self, context: &Arc<Context>) {
        let Some(writing) = &mut self.write else { return };
        if writing.parts_left > 0 || writing.root_sent {
            return;
        }
        let body = match writing.root.encode().map_err(cannot_encode) {
            Ok(body) => body,
            Err(error) => return context.write.fail(error),
        };
        if body.len() as u64 > limits::CHECKPOINT_BYTES_MAX {
            // No reader would accept it. The checkpoint before and the log lead to this state.
            let text = format!(
                "checkpoint {} names {} segments and would be longer than its limit of {} bytes, \
                 so the volume stops; nothing is lost: every write is in the log; export the \
                 volume and import it as a new one",
                writing.root.number,
                writing.root.segments.len(),
                limits::CHECKPOINT_BYTES_MAX
            );
            return context.write.fail(Error::new(ErrorKind::Full, text));
        }
        writing.root_sent = true;
        let key = checkpoint_key(writing.root.volume_id, writing.root.number);
        writing.objects.push(OutgoingObject::new(key, body));
        let root = writing.objects.len() - 1;
        self.put_object(context, root);
    }

    /// Returns what is superseded if this was the last object of the checkpoint.
    pub(super) fn handle_put(
        &mut self,
        context: &Arc<Context>,
        object: usize,
        outcome: sawmill_store::Result<PutOutcome>,
        now: Duration,
    ) -> Option<SupersededObjects> {
        let writing = self.write.as_mut()?;
        let is_root = writing.root_sent && object + 1 == writing.objects.len();
        let outgoing = writing.objects.get_mut(object)?;
        match outcome {
            // A copy of a checkpoint always has the same bytes.
            Ok(outcome)
                if !outgoing.stored
                    && (outcome == PutOutcome::Created || is_copy(&outgoing.key)) =>
            {
                outgoing.stored = true;
                outgoing.body = Bytes::new();
                context.attachment.state.store_answered();
                if is_root {
                    return self.finish(context);
                }
                writing.parts_left -= 1;
                self.send_root_if_ready(context);
            }
            Ok(_) if outgoing.stored => {}
            Ok(_) if is_root => self.request_rival(context),
            Ok(_) => {
                let text = format!("{} exists although its name is random", outgoing.key);
                context.write.fail(Error::new(ErrorKind::Internal, text));
            }
            Err(error) => {
                outgoing.repeat_at = Some(now + REPEAT_AFTER);
                context.attachment.state.store_failed(now, error.to_string());
            }
        }
        None
    }

    /// Repeats the puts that the store could not accept.
    pub(super) fn repeat_failed(&mut self, context: &Arc<Context>, now: Duration) {
        let Some(writing) = &mut self.write else { return };
        let mut due = Vec::new();
        for (object, outgoing) in writing.objects.iter_mut().enumerate() {
            if outgoing.repeat_at.is_some_and(|at| at <= now) {
                outgoing.repeat_at = None;
                due.push(object);
            }
        }
        for object in due {
            self.put_object(context, object);
        }
    }

    /// The root's number is taken, but not by an earlier attachment: it had taken its last number
    /// before this one started (`open::repeat`). So this attachment is fenced, or the conflicting
    /// object is damaged.
    fn request_rival(&self, context: &Arc<Context>) {
        let Some(writing) = &self.write else { return };
        let key = checkpoint_key(writing.root.volume_id, writing.root.number);
        let get = want(key, None, Class::Upload);
        let callback_context = context.clone();
        let callback =
            move |outcome| callback_context.mailbox.push_event(Event::RivalCheckpoint { outcome });
        context.attachment.store.get(get, Box::new(callback));
    }

    pub(super) fn handle_rival(
        &mut self,
        context: &Context,
        outcome: sawmill_store::Result<Bytes>,
        now: Duration,
    ) {
        let Some(writing) = &mut self.write else { return };
        let identity =
            CheckpointIdentity { volume_id: writing.root.volume_id, number: writing.root.number };
        let key = checkpoint_key(identity.volume_id, identity.number);
        let unreadable = format!("{key} exists already and cannot be read");
        let rival = match outcome {
            Ok(bytes) => Ok(Checkpoint::decode(&bytes, &identity)
                .map_err(|error| Error::caused(ErrorKind::Corrupt, unreadable, error))),
            Err(error) if error.kind() == StoreErrorKind::Damaged => {
                Ok(Err(Error::caused(ErrorKind::Corrupt, unreadable, error)))
            }
            Err(error) => Err(error),
        };
        writing.odd_reads += u32::from(matches!(rival, Ok(Err(_))));
        let rival = match rival {
            Ok(rival) if rival.is_ok() || writing.odd_reads >= RIVAL_READS_MAX => rival,
            odd => {
                // The root is put again later; if there still is a conflict, the object is read
                // again.
                if let Some(root) = writing.objects.last_mut() {
                    root.repeat_at = Some(now + REPEAT_AFTER);
                }
                if let Err(error) = odd {
                    context.attachment.state.store_failed(now, error.to_string());
                }
                return;
            }
        };
        match rival {
            Ok(_) => context.write.fence(format!(
                "volume {}: another writer has taken it over from this one (epoch {}): it wrote \
                 {key}",
                context.attachment.name, context.attachment.epoch
            )),
            Err(error) => context.write.fail(error),
        }
    }

    /// The checkpoint is durable. Returns what it supersedes.
    fn finish(&mut self, context: &Context) -> Option<SupersededObjects> {
        let writing = self.write.take()?;
        let number = writing.root.number;
        let previous = std::mem::replace(&mut self.readable_number, number);
        let spared_from =
            self.crossed().map_or(previous, |rollback| previous.min(rollback.cut_number));
        self.number = number;
        context.mailbox.set_checkpoint_number(number);
        add(&context.attachment.counters.checkpoints, 1);
        self.is_clean = writing.root.clean;
        self.requested_count = self.requested_count.saturating_sub(1);
        let view = context.stored.view();
        let named = Arc::new(self.named_parts(&view, &writing.root));
        let roots = Arc::new(Roots::of(&writing.root, &self.newest_root, &mut self.copies_left));
        let (doomed, read_period) = (writing.deletable, writing.read_period);
        let all_named =
            || named.puts().chain(roots.kept.iter().map(|(_, put_id)| *put_id)).collect();
        self.own_puts.add(writing.root.put_id, number, all_named);
        let own_puts = self.own_puts.known();
        self.take_over(&view, writing.root, &writing.copies);
        for sender in writing.senders {
            // The requester may have given up.
            let _ = sender.try_send(());
        }
        Some(SupersededObjects { spared_from, number, named, roots, own_puts, doomed, read_period })
    }
}
