//! The engine: the one owner of what is in the store. It seals batches, puts them, enters stored ones into
//! the map in order, writes checkpoints and deletes what they supersede. A loop of [`Engine::step`]s, handed
//! the time.
//!
//! Invariants:
//! 1. Batches are cut from the records in order of position; segment sequences follow.
//! 2. A segment counts as stored only when all before it are. Only then does the map name it.
//! 3. The bytes of a (sequence, epoch) never change: a put that failed is repeated with the same object.
//! 4. A key taken by somebody else's object ends this attachment: fenced.
//! 5. The engine never waits for the store: outcomes come back as [`Event`]s.
//!
//! Modules: [`mailbox`] (how others reach the engine), `upload` (seal, put, apply), `checkpoint` (freeze,
//! write), `cleanup` (delete what checkpoints have superseded), `collect` (garbage collection), `cached`
//! (what moves stays in the read cache), `resize` (another size, in a checkpoint), `orders` (snapshots,
//! retention, rollback), `past` (what of the past a checkpoint carries and a delete spares), `clock` (by
//! which moments age), `fence_check` (looks for fences), `pins` (what clones need, looked up before a
//! delete).

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use sawmill_format::checkpoint::{Checkpoint, PartEntry};
use sawmill_format::journal::RecordOperation;

use crate::gc::policy::GcPolicy;
use crate::record::Record;
use crate::recovery::end::RolledBack;
use crate::segment::batch;
use crate::segment::buffers::Buffers;
use crate::write;
use resize::Resizing;

mod cache_moves;
mod checkpoint;
mod cleanup;
mod clock;
mod collect;
pub(crate) mod context;
mod fence_check;
pub(crate) mod mailbox;
mod messages;
mod orders;
mod outgoing;
mod own_puts;
mod past;
mod pins;
mod resize;
mod upload;

pub(crate) use cleanup::QUIET_AFTER;
pub(crate) use context::Context;
pub(crate) use mailbox::Mailbox;
pub(crate) use messages::{Event, GcOrder, Ordered, Resize};

use checkpoint::Writing;
use cleanup::Cleanup;
use clock::AttachedClock;
use collect::Collector;
use fence_check::FenceCheck;
use upload::Upload;

/// What one attachment chose for its engine.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EngineOptions {
    pub(crate) segment_age_max: Duration,
    pub(crate) checkpoint_bytes: u64,
    pub(crate) uploads_max: usize,
    pub(crate) gc: GcPolicy,
}

/// Where the engine starts: the state recovery left.
pub(crate) struct EngineStart {
    pub(crate) next_sequence: u64,
    pub(crate) stored_sequence: u64,
    pub(crate) stored_position: u64,
    /// When nobody had taken over yet.
    pub(crate) looked_at: Duration,
    /// The highest checkpoint number in use.
    pub(crate) checkpoint_number: u64,
    /// The checkpoint that was read.
    pub(crate) loaded: Checkpoint,
    /// Size of the disk.
    pub(crate) size_bytes: u64,
    /// The last rollback that was met after it.
    pub(crate) rolled_back: Option<RolledBack>,
    /// Bytes of log since that checkpoint.
    pub(crate) log_bytes: u64,
    /// Where the ring starts: everything before is among the records or stored.
    pub(crate) received_end: u64,
    /// Records replayed from the journal, in order.
    pub(crate) records: Vec<Arc<Record>>,
}

/// See the head of this file.
pub(crate) struct Engine {
    context: Arc<Context>,
    options: EngineOptions,
    /// Records not yet in a segment, in order of position.
    pending: VecDeque<Arc<Record>>,
    pending_bytes: u64,
    /// Where the last record received ends.
    received_end: u64,
    pending_since: Duration,
    /// Segments on their way, in order of sequence.
    uploads: VecDeque<Upload>,
    next_sequence: u64,
    /// Where the last sealed segment ends.
    sealed_position: u64,
    stored_sequence: u64,
    /// Where the last stored segment ends.
    stored_position: u64,
    checkpoint_number: u64,
    /// The newest checkpoint known to be readable.
    readable_number: u64,
    /// The checkpoint this attachment began from, and the puts of its own.
    loaded_number: u64,
    /// Older checkpoints were deleted, or were by the attachment whose state this one began from.
    roots_gone_below: u64,
    own_puts: own_puts::OwnPuts,
    /// Size of the disk, as the next checkpoint says it.
    size_bytes: u64,
    /// The resize that the checkpoint being written carries.
    resizing: Option<Resizing>,
    /// The newest durable checkpoint.
    newest_root: Checkpoint,
    /// Checkpoints that cuts begin from and that have no copy of their own yet.
    uncopied: Vec<Checkpoint>,
    /// How many checkpoints to come look for copies of older ones.
    copies_left: u32,
    /// The parts of those that cuts begin from, by number; of older attachments' they are not known.
    cut_parts: BTreeMap<u64, Vec<PartEntry>>,
    /// Orders in turn, and the one whose segment is on its way.
    orders: VecDeque<Ordered>,
    /// The last rollback that is stored.
    rolled_back: Option<RolledBack>,
    ordered: Option<Ordered>,
    log_bytes: u64,
    /// The newest checkpoint says that everything is stored.
    clean_checkpoint: bool,
    writing: Option<Writing>,
    /// Checkpoints that somebody wants although none is due.
    checkpoints_wanted: u32,
    cleanup: Cleanup,
    /// Lists and deletes under way.
    cleaning: u32,
    collector: Collector,
    /// When there was last anything to do for users or for collection.
    busy_at: Duration,
    buffers: Buffers,
    clock: AttachedClock,
    fence_check: FenceCheck,
    closed: bool,
}

impl Engine {
    pub(crate) fn new(context: Arc<Context>, options: EngineOptions, start: EngineStart) -> Self {
        let pending_bytes = start.records.iter().map(|record| record.payload_bytes()).sum();
        let pending_since = context.attachment.world.now();
        context.mailbox.set_stored(start.stored_position, start.stored_sequence, start.checkpoint_number);
        context.write.watch.has_news(start.looked_at);
        let clock = AttachedClock::behind(&start.loaded, pending_since, context.attachment.world.unix_ms());
        let engine = Engine {
            context,
            options,
            pending: start.records.into(),
            pending_bytes,
            received_end: start.received_end,
            pending_since,
            uploads: VecDeque::new(),
            next_sequence: start.next_sequence,
            sealed_position: start.stored_position,
            stored_sequence: start.stored_sequence,
            stored_position: start.stored_position,
            checkpoint_number: start.checkpoint_number,
            readable_number: start.loaded.number,
            loaded_number: start.loaded.number,
            roots_gone_below: start.loaded.repeats.saturating_sub(1),
            own_puts: own_puts::OwnPuts::default(),
            size_bytes: start.size_bytes,
            resizing: None,
            copies_left: if start.loaded.kept.is_empty() { 0 } else { past::COPIES_LOOKS },
            newest_root: start.loaded,
            uncopied: Vec::new(),
            cut_parts: BTreeMap::new(),
            orders: VecDeque::new(),
            rolled_back: start.rolled_back,
            ordered: None,
            // A rollback that is in no checkpoint yet shall soon be in one.
            log_bytes: if start.rolled_back.is_some() { u64::MAX / 2 } else { start.log_bytes },
            clean_checkpoint: false,
            writing: None,
            checkpoints_wanted: 0,
            cleanup: Cleanup::default(),
            cleaning: 0,
            collector: Collector::new(),
            busy_at: pending_since,
            buffers: Buffers::default(),
            clock,
            fence_check: FenceCheck::default(),
            closed: false,
        };
        engine.compare_clocks();
        engine
    }

    /// One step at time `now`. Returns how long the engine may sleep if nobody rings; `None`: until rung.
    pub(crate) fn step(&mut self, now: Duration) -> Option<Duration> {
        self.watch_the_clock(now);
        self.take_records(now);
        for event in self.context.mailbox.take_events() {
            // What a fenced writer hears it must not act on: it would clean up after its successor.
            if !self.context.attachment.state.is_dead() {
                self.hear(event, now);
            }
        }
        if self.context.attachment.state.is_dead() {
            if let Some(error) = self.context.attachment.state.refusal() {
                self.stop_collecting(&error);
                self.refuse_resize(&error);
            }
            self.closed = true;
            self.refuse_orders();
            self.context.mailbox.set_closed();
            return None;
        }
        self.apply_stored();
        self.repeat_failed(now);
        self.take_orders();
        self.seal(now);
        let collect_in = self.collect(now);
        self.carry_out_orders();
        self.advance_over_padding();
        if self.pending.is_empty() && self.uploads.is_empty() && self.context.write.stalled.count() > 0 {
            // They waited for what is all stored now.
            self.resume_writers();
        }
        if !self.pending.is_empty() || !self.uploads.is_empty() || !self.collector.is_resting() {
            self.busy_at = now;
        }
        self.begin_resize();
        self.keep_checkpoints(now);
        self.clean_up(now);
        self.keep_watch(now);
        self.finish_gc_order();
        self.finish_closing();
        self.context.mailbox.tell_stored();
        if self.pending.is_empty() && self.uploads.is_empty() {
            self.buffers.clear();
        }
        self.context.mailbox.set_has_pending(!self.pending.is_empty());
        self.sleep_max(now).into_iter().chain(collect_in).min()
    }

    fn take_records(&mut self, now: Duration) {
        let records = self.context.mailbox.take_records();
        if self.pending.is_empty() && !records.is_empty() {
            self.pending_since = now;
        }
        for record in records {
            self.pending_bytes += record.payload_bytes();
            self.received_end = record.end();
            self.pending.push_back(record);
        }
    }

    fn hear(&mut self, event: Event, now: Duration) {
        match event {
            Event::Put { sequence, outcome } => self.hear_put(sequence, outcome, now),
            Event::CheckpointPut { object, outcome } => self.hear_checkpoint_put(object, outcome, now),
            Event::RivalCheckpoint { outcome } => self.hear_rival(outcome, now),
            Event::RootsListed { keys, number, gone_below } => {
                self.hear_roots_listed(keys, number, gone_below);
            }
            Event::RootsDeleted { number, gone_below } => self.hear_roots_deleted(number, gone_below),
            Event::PartsListed { keys, number } => self.hear_parts_listed(keys, number),
            Event::CleanedUp => self.cleaning -= 1,
            Event::FenceLooked { look, outcome } => self.hear_fence_look(look, &outcome, now),
            Event::CleanUpFailed { number, what } => self.hear_cleanup_failed(number, &what, now),
            Event::SegmentsDeleted { number, sequences, outcome } => {
                self.hear_deleted(number, &sequences, outcome, now);
            }
            Event::Planned { plan, victims } => self.hear_planned(plan, victims),
            Event::Gathered { outcome } => self.hear_gathered(outcome, now),
            Event::Kept { sequence } => self.hear_kept(sequence),
            Event::PinAsked { number, doomed, slot, outcome } => {
                self.hear_pin(number, doomed, slot, outcome, now);
            }
            Event::ReleasesListed { slots } => self.hear_releases(&slots),
        }
    }

    /// Padding needs no storing: positions that only pad are stored as soon as all before them is.
    fn advance_over_padding(&mut self) {
        if !self.uploads.is_empty() {
            return;
        }
        while self.pending.front().is_some_and(|record| is_padding(record)) {
            if let Some(record) = self.pending.pop_front() {
                self.context.mailbox.advance_stored(record.end());
            }
        }
        if self.pending.is_empty() {
            // Also the padding between the end of the log and the start of this attachment's ring.
            self.context.mailbox.advance_stored(self.received_end);
        }
    }

    /// Whether everything that was ever accepted is stored and nothing more can come. Only then may a
    /// checkpoint say that the volume was closed cleanly: it makes the next attach pass over the journal.
    fn is_drained(&self) -> bool {
        let context = &self.context;
        let Some(journal) = &context.journal else { return true };
        if !context.mailbox.is_closing() || context.write.stalled.count() > 0 {
            return false;
        }
        journal.ring.close();
        self.pending.is_empty()
            && self.uploads.is_empty()
            && self.orders.is_empty()
            && self.received_end == journal.ring.next()
    }

    fn finish_closing(&mut self) {
        let settled = self.is_drained() && self.writing.is_none() && self.cleaning == 0;
        if settled && self.clean_checkpoint && !self.closed {
            self.closed = true;
            self.context.mailbox.set_closed();
        }
    }

    fn sleep_max(&self, now: Duration) -> Option<Duration> {
        let age = self.options.segment_age_max;
        let has_room = self.uploads.len() < self.options.uploads_max;
        let seal_in = (has_room && !self.pending.is_empty() && !age.is_zero())
            .then(|| (self.pending_since + age).saturating_sub(now).max(Duration::from_millis(1)));
        let repeat_at = self.uploads.iter().filter_map(Upload::repeat_at).min();
        let repeat_at = repeat_at.into_iter().chain(self.writing.as_ref().and_then(Writing::repeat_at)).min();
        let repeat_in = repeat_at.map(|at| at.saturating_sub(now).max(Duration::from_millis(1)));
        let rest =
            [repeat_in, self.cleanup.wait(now), self.settle_in(now), self.window_in(now), self.watch_in(now)];
        seal_in.into_iter().chain(rest.into_iter().flatten()).min()
    }

    /// Whether a batch is to be cut from what is pending.
    fn batch_is_due(&self, now: Duration) -> bool {
        let Some(front) = self.pending.front() else { return false };
        let age = self.options.segment_age_max;
        batch::is_full(self.pending_bytes, self.pending.len(), self.context.attachment.record.segment_bytes)
            || front.position < self.context.mailbox.sealed_through_wanted()
            || self.context.mailbox.is_closing()
            || (!age.is_zero() && now >= self.pending_since + age)
    }

    /// Room was made in the journal or in memory.
    fn resume_writers(&self) {
        write::resume(&self.context.write);
    }
}

/// Whether a record only fills space.
fn is_padding(record: &Record) -> bool {
    matches!(record.operation, RecordOperation::Pad | RecordOperation::Void)
}
