//! The engine: the only owner of what is in the store. It seals segments, puts them, enters stored
//! ones into the map in order, writes checkpoints and deletes what they supersede. It is a loop of
//! [`Engine::step`]s with the time as parameter.
//!
//! Invariants:
//! 1. Segments are cut from the records in order of position; their sequences follow.
//! 2. A segment counts as stored only when all before it are. Only then does the map name it.
//! 3. The bytes of a (sequence, epoch) never change: a failed put is repeated with the same object.
//! 4. A key with another writer's object ends this attachment: it is fenced.
//! 5. The engine never waits for the store: results arrive as [`Event`]s.
//!
//! Each part owns its fields, and its steps name what else they need:
//!
//! | part | owns |
//! |---|---|
//! | [`log_tail`] | records to be sealed, segments in flight ([`upload`]) |
//! | [`checkpoint`] | the checkpoint being written, and when one is due; `past`: what it carries |
//! | [`cleanup`] | what checkpoints have superseded; `pins`: what clones need |
//! | [`collect`] | garbage collection; `caching::moved`: moved data stays in the read cache |
//! | `caching::written` | written data on its way into the read cache |
//! | [`orders`] | snapshots, retention, rollback |
//! | [`resize`] | another size, in a checkpoint |
//! | [`fence_check`] | checks for fences |
//! | [`clock`] | the clock by which moments age |
//! | [`map_loading`] | what of the map is still to be loaded |
//!
//! [`root`] is a durable checkpoint. [`mailbox`] is how others reach the engine, [`messages`] what
//! they send, [`context`] what the engine uses.
//!
//! Not here: the engine's thread (`threads`), the journal's records up to the disk (`journal`),
//! reads (`read`), and the state an engine starts from (`open`, `recovery`).

use std::sync::Arc;
use std::time::Duration;

use sawmill_format::checkpoint::Checkpoint;
use sawmill_format::segment::SegmentKind;

use crate::gc::policy::GcPolicy;
use crate::limits::AttachmentBounds;
use crate::record::Record;
use crate::recovery::end::RollbackRecord;
use crate::write;

mod caching;
mod checkpoint;
mod cleanup;
mod clock;
mod collect;
pub(crate) mod context;
mod fence_check;
mod garbage_bound;
mod intake;
mod kept_memory;
mod log_age;
mod log_tail;
pub(crate) mod mailbox;
mod map_loading;
mod messages;
mod orders;
mod outgoing;
mod own_puts;
mod past;
mod pins;
mod resize;
mod root;
mod stall_watch;
mod superseded;
mod upload;

pub(crate) use context::Context;
#[cfg(all(test, feature = "shuttle"))]
pub(crate) use intake::RecordIntake;
pub(crate) use mailbox::Mailbox;
pub(crate) use messages::{Event, GcRequest, OrderRequest, Resize};

use caching::written::CacheWrites;
use checkpoint::{Checkpoints, Freeze};
use cleanup::Cleanup;
use clock::AttachedClock;
use collect::Collector;
use fence_check::{FenceCheck, FenceCheckResult};
use garbage_bound::GarbageBound;
use kept_memory::KeptMemory;
use log_age::LogAge;
use log_tail::{LogTail, Sealing};
use map_loading::{LoadGoal, MapLoading};
use orders::Orders;
use resize::Resizes;
use stall_watch::StallWatch;

/// After this long without activity, dead data is deleted before the volume becomes quiet.
pub(crate) const QUIET_AFTER: Duration = Duration::from_secs(1);

/// The options of one attachment's engine.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EngineOptions {
    pub(crate) segment_age_max: Duration,
    pub(crate) log_age_max: Duration,
    pub(crate) checkpoint_bytes: u64,
    pub(crate) uploads_max: usize,
    pub(crate) gc: GcPolicy,
    pub(crate) bounds: AttachmentBounds,
}

/// Where the engine starts: the state recovery left.
pub(crate) struct EngineStart {
    pub(crate) next_sequence: u64,
    pub(crate) stored_sequence: u64,
    pub(crate) stored_position: u64,
    /// A time at which no other attachment had taken over yet.
    pub(crate) looked_at: Duration,
    /// The highest checkpoint number in use.
    pub(crate) checkpoint_number: u64,
    /// The checkpoint that was read.
    pub(crate) loaded: Checkpoint,
    /// Size of the disk.
    pub(crate) size_bytes: u64,
    /// The last rollback that recovery met after it.
    pub(crate) rolled_back: Option<RollbackRecord>,
    /// Bytes of log since that checkpoint.
    pub(crate) log_bytes: u64,
    /// The start of the ring: everything before it is among the records or stored.
    pub(crate) received_end: u64,
    /// Records replayed from the journal, in order.
    pub(crate) records: Vec<Arc<Record>>,
}

/// The state machine that is the only writer of what is in the store.
pub(crate) struct Engine {
    context: Arc<Context>,
    options: EngineOptions,
    log: LogTail,
    cache_writes: CacheWrites,
    checkpoints: Checkpoints,
    cleanup: Cleanup,
    collector: Collector,
    orders: Orders,
    resizes: Resizes,
    fence_check: FenceCheck,
    clock: AttachedClock,
    /// When there was last work for users or for collection.
    busy_at: Duration,
    closed: bool,
    stall_watch: StallWatch,
    log_age: LogAge,
    kept_memory: KeptMemory,
    garbage_bound: GarbageBound,
    map_loading: MapLoading,
}

impl Engine {
    pub(crate) fn new(
        context: Arc<Context>,
        options: EngineOptions,
        mut start: EngineStart,
    ) -> Self {
        let now = context.attachment.world.now();
        context.mailbox.set_stored(
            start.stored_position,
            start.stored_sequence,
            start.checkpoint_number,
        );
        context.write.watch.confirm_at(start.looked_at);
        AttachedClock::compare_with_log(&context, &start.loaded);
        Engine {
            options,
            cache_writes: CacheWrites::new(start.next_sequence),
            log: LogTail::new(&mut start, now),
            cleanup: Cleanup::new(start.loaded.repeats.saturating_sub(1)),
            collector: Collector::new(),
            orders: Orders::default(),
            resizes: Resizes::default(),
            fence_check: FenceCheck::default(),
            clock: AttachedClock::behind(&start.loaded, now, context.attachment.world.unix_ms()),
            checkpoints: Checkpoints::new(start),
            busy_at: now,
            closed: false,
            stall_watch: StallWatch::default(),
            log_age: LogAge::new(options.log_age_max),
            kept_memory: KeptMemory::default(),
            garbage_bound: GarbageBound::default(),
            map_loading: MapLoading::default(),
            context,
        }
    }

    /// One step at time `now`. Returns how long the engine may sleep unless it is woken; `None`:
    /// until woken.
    pub(crate) fn step(&mut self, now: Duration) -> Option<Duration> {
        self.clock.step(&self.context, now);
        self.log.take_records(&self.context, now);
        for event in self.context.mailbox.take_events() {
            // A fenced writer must not act on the answers it gets: it would delete data of its
            // successor.
            if !self.context.attachment.state.is_dead() {
                self.handle(event, now);
            }
        }
        if self.context.attachment.state.is_dead() {
            self.end();
            return None;
        }
        self.apply_stored();
        self.log.repeat_failed(&self.context, now);
        self.orders.take(&self.context);
        self.load_map();
        let Engine { context, options, collector, garbage_bound, map_loading, .. } = self;
        let sealing = match map_loading.is_whole {
            true => garbage_bound.step(context, options, collector, now),
            false => Sealing::AllDue,
        };
        if !self.orders.is_rolling_back(&self.checkpoints) {
            self.log.seal(&self.context, &self.options, now, sealing);
        }
        self.kept_memory.step(&self.context, &self.options, &self.log, sealing, now);
        self.cache_writes.step(&self.context, &self.log);
        let Engine { context, options, log, checkpoints, collector, orders, .. } = self;
        let collect_in = match self.map_loading.is_whole {
            true => collector.step(context, options, log, checkpoints, now),
            false => None,
        };
        orders.carry_out(context, options, log, checkpoints, &self.map_loading);
        context.mailbox.set_uploads(log.uploads.len());
        log.advance_over_padding(context);
        if log.is_empty() && context.write.stalled.count() > 0 {
            // They waited for data that is stored now.
            write::resume_soon(&context.write);
        }
        if !log.is_empty() || !collector.is_resting() {
            self.busy_at = now;
        }
        self.resize();
        self.keep_checkpoints(now);
        self.cleanup.step(&self.context, &self.log, now);
        self.fence_check.step(&self.context, &self.log, now);
        if self.checkpoints.is_resting() && self.cleanup.is_quiet() && self.cleanup.is_resting() {
            // Everything that had to be deleted is gone.
            self.collector.finish_request(&self.context);
        }
        // Before the close is over: after that, whoever still waits gets an error.
        self.context.mailbox.notify_stored();
        self.finish_closing();
        self.stall_watch.step(&self.context, now);
        self.log_age.step(&self.context, now);
        if self.log.is_empty() {
            self.log.buffers.clear();
        }
        self.context.mailbox.intake.set_has_pending(self.log.has_pending());
        self.sleep_max(now).into_iter().chain(collect_in).min()
    }

    fn handle(&mut self, event: Event, now: Duration) {
        let context = &self.context;
        match event {
            Event::Put { sequence, outcome } => {
                self.log.handle_put(context, sequence, outcome, now)
            }
            Event::Kept { sequence } => self.log.handle_kept(sequence),
            Event::Cached { wanted_bytes, cached_bytes } => {
                self.cache_writes.handle_cached(context, wanted_bytes, cached_bytes);
            }
            Event::CheckpointPut { object, outcome } => {
                if let Some(superseded) = self.checkpoints.handle_put(context, object, outcome, now)
                {
                    self.resizes.note_durable(superseded.number);
                    self.cleanup.begin(superseded);
                }
            }
            Event::RivalCheckpoint { outcome } => {
                self.checkpoints.handle_rival(context, outcome, now)
            }
            Event::FenceChecked { check, outcome } => {
                match self.fence_check.handle(context, &self.log, check, &outcome, now) {
                    Some((number, FenceCheckResult::NoFence)) => self.handle_no_fence(number),
                    Some((number, FenceCheckResult::Odd)) => {
                        self.cleanup.handle_odd_look(number, now)
                    }
                    Some((number, FenceCheckResult::Failed(what))) => {
                        self.cleanup.handle_failed(number, &what, now)
                    }
                    None => {}
                }
            }
            Event::RootsListed { keys, number, gone_below } => {
                self.cleanup.handle_roots_listed(context, keys, number, gone_below);
            }
            Event::RootsDeleted { number, gone_below } => {
                self.cleanup.handle_roots_deleted(number, gone_below)
            }
            Event::PartsListed { keys, number } => {
                self.cleanup.handle_parts_listed(context, keys, number)
            }
            Event::ReleasesListed { pin_numbers } => {
                self.cleanup.handle_releases(context, &pin_numbers)
            }
            Event::PinOutcome(pin_outcome) => self.cleanup.handle_pin(context, pin_outcome, now),
            Event::SegmentsDeleted(deleted) => {
                let sequences = self.cleanup.handle_deleted(context, deleted, now);
                sequences.into_iter().for_each(|sequence| self.collector.forget(sequence));
            }
            Event::CleanedUp => self.cleanup.end_one(),
            Event::CleanUpFailed { number, what } => self.cleanup.handle_failed(number, &what, now),
            Event::Planned { plan, victims } => self.collector.handle_planned(plan, victims),
            Event::Gathered { outcome } => self.collector.handle_gathered(context, outcome, now),
            Event::MapLoaded => self.map_loading.is_under_way = false,
        }
    }

    /// The volume is fenced or has failed: everything that waits gets the reason.
    fn end(&mut self) {
        if let Some(error) = self.context.attachment.state.refusal() {
            self.collector.stop(&self.context, &error);
            self.resizes.refuse(&error);
        }
        self.closed = true;
        self.context.mailbox.set_slowed_for_garbage(false);
        self.orders.refuse(&self.context);
        self.context.mailbox.set_closed();
    }

    /// Enters stored segments into the map, in order.
    fn apply_stored(&mut self) {
        let Engine { context, options, log, checkpoints, collector, orders, garbage_bound, .. } =
            self;
        let mut has_applied = false;
        while let Some(applied) = log.apply_next(context) {
            has_applied = true;
            checkpoints.add_log(applied.object_bytes);
            match applied.header.kind {
                SegmentKind::Moved => {
                    collector.moved_applied();
                    garbage_bound.note_moved();
                }
                SegmentKind::Order => orders.finish(context, options, checkpoints, &applied.header),
                _ => {}
            }
        }
        if has_applied {
            context.mailbox.set_uploads(log.uploads.len());
            // There is room in the journal now.
            write::resume_soon(&context.write);
        }
    }

    /// Has more of the map loaded. The checkpoint that a close ends with needs only the groups that
    /// changes wait for; what else the close still does needs all.
    fn load_map(&mut self) {
        if self.map_loading.is_whole {
            return;
        }
        let is_last = self.is_drained() && self.context.mailbox.next_resize().is_none();
        let goal = if is_last { LoadGoal::Changes } else { LoadGoal::WholeMap };
        self.map_loading.step(&self.context, goal);
    }

    fn resize(&mut self) {
        if self.map_loading.is_whole
            && self.resizes.begin(&self.context, &self.log, &mut self.checkpoints)
        {
            self.begin_checkpoint(false);
        }
    }

    /// Starts a checkpoint if one is due, and repeats what the store could not accept.
    fn keep_checkpoints(&mut self, now: Duration) {
        if self.checkpoints.is_writing() {
            return self.checkpoints.repeat_failed(&self.context, now);
        }
        if self.window_in(now).is_some_and(|wait| wait.is_zero()) {
            self.checkpoints.want_deletes();
        }
        // No checkpoint follows the one that records a clean close: it would record something else.
        if self.closed {
            return;
        }
        let is_drained = self.is_drained();
        let has_map = self.map_loading.is_whole || is_drained && self.map_loading.is_enough;
        if !has_map {
            return;
        }
        let is_closing = is_drained && !self.checkpoints.is_clean();
        let requested = self.context.mailbox.take_checkpoint_requests();
        let is_due = self.checkpoints.is_due(&self.context, &self.options, self.busy_at, now);
        if is_due || is_closing || !requested.is_empty() {
            self.begin_checkpoint(is_drained);
        }
        self.checkpoints.notify_when_durable(requested);
    }

    fn begin_checkpoint(&mut self, is_clean: bool) {
        let (attached_ms, prunes) = (self.attached_ms(), !self.orders.is_under_way());
        let freeze = Freeze { attached_ms, prunes, is_clean };
        // A map that fits no checkpoint ends the volume too: the log has everything, and the next
        // attach rolls it forward.
        if let Err(error) = self.checkpoints.begin(&self.context, &self.log, &self.options, &freeze)
        {
            self.context.write.fail(error);
        }
    }

    /// There was no fence after checkpoint `number`: it counts.
    fn handle_no_fence(&mut self, number: u64) {
        if self.cleanup.handle_no_fence(number) {
            if !self.checkpoints.is_writing() {
                self.resizes.finish(&self.context, &mut self.checkpoints, number);
            }
            self.cleanup.list_old_checkpoints(&self.context, self.checkpoints.loaded_number());
        }
    }

    /// Whether everything that was ever accepted is stored and nothing more can come. Only then may
    /// a checkpoint record that the volume was closed cleanly, because that makes the next attach
    /// ignore the journal.
    fn is_drained(&self) -> bool {
        let context = &self.context;
        let Some(journal) = &context.journal else { return true };
        if !context.mailbox.is_closing() || context.write.stalled.count() > 0 {
            return false;
        }
        journal.ring.close();
        self.log.is_empty()
            && self.orders.is_empty()
            && self.log.received_end() == journal.ring.next()
    }

    fn finish_closing(&mut self) {
        let is_settled =
            self.is_drained() && self.checkpoints.is_closed() && self.cleanup.is_quiet();
        if is_settled && !self.closed {
            self.closed = true;
            self.context.mailbox.set_closed();
        }
    }

    fn sleep_max(&self, now: Duration) -> Option<Duration> {
        let repeat_at =
            [self.log.repeat_at(), self.checkpoints.repeat_at()].into_iter().flatten().min();
        let checkpoint_in = match self.map_loading.is_whole {
            true => {
                let settle_in = self.checkpoints.settle_in(&self.context, self.busy_at, now);
                settle_in.into_iter().chain(self.window_in(now)).min()
            }
            // What is due waits for the map, and that wakes the engine.
            false => None,
        };
        let waits = [
            self.log.seal_in(&self.options, now),
            repeat_at.map(|at| at.saturating_sub(now).max(Duration::from_millis(1))),
            self.cleanup.wait(now),
            checkpoint_in,
            self.fence_check.wait(&self.context, now),
            self.log_age.wait(now),
            self.kept_memory.wait(now),
            self.garbage_bound.wait(now),
        ];
        waits.into_iter().flatten().min()
    }

    fn window_in(&self, now: Duration) -> Option<Duration> {
        self.checkpoints.window_in(&self.context, self.busy_at, self.attached_ms(), now)
    }

    fn attached_ms(&self) -> u64 {
        self.clock.attached_ms(self.context.attachment.world.now())
    }
}
