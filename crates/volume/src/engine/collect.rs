//! Garbage collection, carried out: choose victims, plan, gather, send, one step at a time, beside everything
//! else the engine does.
//!
//! Invariants:
//! 1. A new plan is made only when nothing of the last one is on its way: else the same bytes would be moved
//!    twice.
//! 2. Collection waits for writers that wait for room, unless garbage is pressing; nobody ever waits for
//!    collection. So it cannot take part in a deadlock.
//! 3. A segment that cannot be read is left alone after [`DOUBTS_MAX`] tries.
//!
//! Not here: what is chosen (`gc::policy`), found (`gc::sweep`) and read (`gc::gather`), what stays cached
//! (`cached`), and deleting (`cleanup`).

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use bytes::Bytes;
use sawmill_format::segment::{SegmentRole, raw_frames};

use super::messages::GcOrder;
use super::upload::Upload;
use super::{Engine, Event};
use crate::gc::gather;
use crate::gc::gathered::{Gathered, NotGathered, Outcome};
use crate::gc::plan_bytes_max;
use crate::gc::policy::Candidate;
use crate::gc::sweep::Plan;
use crate::segment::builder;
use crate::status::GcReport;
use crate::tally::add;
use crate::{Error, ErrorKind, limits};

/// How long to wait after the store has used up its own retries, or beside writers that wait for room.
const REPEAT_AFTER: Duration = Duration::from_millis(500);
/// How often a segment is tried that could not be read: an answer may be garbled on its way.
const DOUBTS_MAX: u32 = 3;

enum Stage {
    Rest,
    Planning,
    Gathering,
    Ready(Box<Gathered>),
}

/// See the head of this file.
pub(super) struct Collector {
    stage: Stage,
    plan: Option<Plan>,
    /// Not before this.
    not_before: Duration,
    /// Segments that could not be read, and how often.
    doubtful: HashMap<u32, u32>,
    order: Option<GcOrder>,
    report: GcReport,
    /// Moved segments that are not in the map yet.
    in_flight: usize,
}

impl Collector {
    pub(super) fn new() -> Self {
        Collector {
            stage: Stage::Rest,
            plan: None,
            not_before: Duration::ZERO,
            doubtful: HashMap::new(),
            order: None,
            report: GcReport::default(),
            in_flight: 0,
        }
    }

    /// Whether nothing is planned, gathered or on its way.
    pub(super) fn is_resting(&self) -> bool {
        matches!(self.stage, Stage::Rest) && self.plan.is_none() && self.in_flight == 0
    }

    /// A segment is gone, and its doubts with it.
    pub(super) fn forget(&mut self, sequence: u32) {
        self.doubtful.remove(&sequence);
    }

    fn is_hopeless(&self, sequence: u32) -> bool {
        self.doubtful.get(&sequence).is_some_and(|doubts| *doubts >= DOUBTS_MAX)
    }

    fn doubt(&mut self, sequence: u32, doubts: u32) {
        *self.doubtful.entry(sequence).or_default() += doubts;
    }
}

impl Engine {
    /// One step of collection. Returns when it wants to be asked again, if not by an event.
    pub(super) fn collect(&mut self, now: Duration) -> Option<Duration> {
        if self.context.mailbox.is_closing() {
            let text = "the volume was closed before its garbage was collected; run the command again";
            self.stop_collecting(&Error::new(ErrorKind::Closed, text));
            return None;
        }
        if self.collector.order.is_none() {
            self.take_order();
        }
        if let Stage::Ready(_) = self.collector.stage {
            self.send_if_room();
        }
        if !matches!(self.collector.stage, Stage::Rest) {
            return None;
        }
        if self.collector.plan.is_none() && !self.wants_plan() {
            return None;
        }
        let held_back = self.context.write.stalled.count() > 0 && !self.is_pressing();
        if held_back || now < self.collector.not_before {
            let wait = self.collector.not_before.saturating_sub(now);
            return Some(if held_back { wait.max(REPEAT_AFTER) } else { wait });
        }
        match self.collector.plan.take() {
            Some(plan) => self.start_gathering(plan, now),
            None => self.start_plan(),
        }
        None
    }

    /// Nothing more is collected; what is on its way goes on as an upload.
    pub(super) fn stop_collecting(&mut self, why: &Error) {
        self.collector.plan = None;
        self.collector.stage = Stage::Rest;
        if let Some(order) = self.collector.order.take() {
            self.context.mailbox.end_gc_order(order, Err(why.clone()));
        }
    }

    fn take_order(&mut self) {
        let Some(mut order) = self.context.mailbox.take_gc_order() else { return };
        order.through = self.stored_sequence as u32;
        self.collector.report = GcReport::default();
        // By hand, everything is tried once more.
        self.collector.doubtful.clear();
        self.collector.order = Some(order);
    }

    fn is_pressing(&self) -> bool {
        let totals = self.context.stored.view().segments.totals();
        self.options.gc.is_pressing(totals.own_live_bytes, totals.own_used_bytes)
    }

    /// Whether there is something to choose; ends an order that has nothing left.
    fn wants_plan(&mut self) -> bool {
        if self.collector.in_flight > 0 {
            return false;
        }
        if let Some(order) = &self.collector.order {
            if !order.is_settling && self.ordered_victims().is_empty() {
                self.want_deletes();
                if let Some(order) = &mut self.collector.order {
                    order.is_settling = true;
                }
            }
            return self.collector.order.as_ref().is_some_and(|order| !order.is_settling);
        }
        let totals = self.context.stored.view().segments.totals();
        self.options.gc.is_due(totals.own_live_bytes, totals.own_used_bytes)
            && !self.chosen_victims().is_empty()
    }

    /// An order is done when what it made dead has been deleted.
    pub(super) fn finish_gc_order(&mut self) {
        let is_clean = self.cleaning == 0 && self.cleanup.is_resting();
        let settled = self.checkpoints_wanted == 0 && self.writing.is_none() && is_clean;
        if let Some(order) = self.collector.order.take_if(|order| settled && order.is_settling) {
            self.context.mailbox.end_gc_order(order, Ok(self.collector.report));
        }
    }

    fn candidates(&self) -> Vec<Candidate> {
        let mut candidates = self.context.stored.view().segments.candidates();
        candidates.retain(|candidate| !self.collector.is_hopeless(candidate.sequence));
        candidates
    }

    fn ordered_victims(&self) -> Vec<u32> {
        let Some(order) = &self.collector.order else { return Vec::new() };
        let candidates = self.candidates().into_iter();
        candidates.filter(|candidate| order.takes(candidate)).map(|candidate| candidate.sequence).collect()
    }

    fn moved_bytes_max(&self) -> u64 {
        plan_bytes_max(self.context.attachment.record.segment_bytes, self.context.stored.view().map.extents())
    }

    fn chosen_victims(&self) -> Vec<u32> {
        let totals = self.context.stored.view().segments.totals();
        let now_ms = self.context.attachment.world.unix_ms();
        self.options.gc.victims(&self.candidates(), &totals, now_ms, self.moved_bytes_max())
    }

    fn start_plan(&mut self) {
        let ordered = self.collector.order.is_some();
        let victims = if ordered { self.ordered_victims() } else { self.chosen_victims() };
        if victims.is_empty() {
            return;
        }
        self.collector.stage = Stage::Planning;
        add(&self.context.attachment.tally.collections, 1);
        let (context, bytes_max) = (self.context.clone(), self.moved_bytes_max());
        let left_alone: HashSet<u32> = self.collector.doubtful.keys().copied().collect();
        self.context.collector.run(move || {
            let view = context.stored.view();
            let chosen: HashSet<u32> = victims.iter().copied().collect();
            let may_plug = |sequence| !left_alone.contains(&sequence) && view.segments.is_own(sequence);
            let plan = Plan::make(&view.map, &|sequence| chosen.contains(&sequence), &may_plug, bytes_max);
            context.mailbox.push_event(Event::Planned { plan, victims });
        });
    }

    pub(super) fn hear_planned(&mut self, plan: Plan, victims: Vec<u32>) {
        if !matches!(self.collector.stage, Stage::Planning) {
            return;
        }
        self.collector.stage = Stage::Rest;
        if plan.is_done() {
            // They died meanwhile, or nothing that could be found is live in them.
            for sequence in victims {
                self.collector.doubt(sequence, 1);
            }
            return;
        }
        self.collector.plan = Some(plan);
    }

    fn start_gathering(&mut self, plan: Plan, now: Duration) {
        self.collector.stage = Stage::Gathering;
        self.pace(now);
        self.context.mailbox.set_gc_left(plan.bytes_left());
        let (context, buffers) = (self.context.clone(), self.buffers.clone());
        self.context.collector.run(move || {
            let told = context.clone();
            let tell = Box::new(move |outcome| told.mailbox.push_event(Event::Gathered { outcome }));
            gather::gather(&context, &buffers, plan, tell);
        });
    }

    /// The next gathering begins no sooner than the rate allows.
    fn pace(&mut self, now: Duration) {
        let rate = self.options.gc.bytes_per_second_max;
        if rate > 0 {
            let seconds = f64::from(self.context.attachment.record.segment_bytes) / rate as f64;
            self.collector.not_before = now + Duration::from_secs_f64(seconds);
        }
    }

    pub(super) fn hear_gathered(&mut self, outcome: Outcome, now: Duration) {
        if !matches!(self.collector.stage, Stage::Gathering) {
            return;
        }
        self.collector.stage = Stage::Rest;
        match outcome {
            Ok((gathered, plan)) => {
                self.collector.plan = (!plan.is_done()).then_some(plan);
                self.collector.stage = Stage::Ready(Box::new(gathered));
            }
            Err(NotGathered::NothingLeft) => {}
            Err(NotGathered::Unavailable { plan, why }) => {
                self.collector.plan = Some(plan);
                self.collector.not_before = now + REPEAT_AFTER;
                self.context.attachment.state.store_failed(now, why);
            }
            Err(NotGathered::Damaged { sequence, what }) => {
                self.collector.doubt(sequence, 1);
                self.collector.not_before = now + REPEAT_AFTER;
                if self.collector.is_hopeless(sequence) {
                    tracing::error!(
                        "segment {sequence} cannot be collected, so it stays: {what}; run `sawmill check`"
                    );
                }
            }
        }
    }

    /// Writers come first; but one moved segment may always be on its way.
    fn send_if_room(&mut self) {
        let uploads = self.uploads.len();
        let extra = if self.collector.in_flight == 0 { limits::MOVED_UPLOADS_EXTRA as usize } else { 0 };
        if uploads >= self.options.uploads_max + extra || self.next_sequence >= limits::SEQUENCE_MAX {
            return;
        }
        let Stage::Ready(gathered) = std::mem::replace(&mut self.collector.stage, Stage::Rest) else {
            return;
        };
        if let Err(error) = self.send_moved(*gathered) {
            self.context.write.fail(error);
        }
    }

    fn send_moved(&mut self, gathered: Gathered) -> crate::Result<()> {
        let mut header = self.header(SegmentRole::Moved, self.sealed_position)?;
        let Gathered { extents, origins, data_bytes, header_bytes, mut buffer, cached } = gathered;
        header.extents = extents;
        header.origins = origins;
        header.data_bytes = data_bytes;
        header.frames = raw_frames(data_bytes, header.frame_bytes).map_err(|error| {
            Error::new(ErrorKind::Internal, format!("what moves does not fit a segment: {error}"))
        })?;
        let (head, body) = buffer.bytes_mut().split_at_mut(header_bytes);
        head.copy_from_slice(&header.encode());
        builder::seal_frames(&header, body);
        let object = Bytes::from_owner(buffer);
        let tally = &self.context.attachment.tally;
        add(&tally.segments_moved, 1);
        add(&tally.moved_bytes, data_bytes);
        add(&tally.moved_segment_bytes, object.len() as u64);
        self.collector.report.moved_bytes += data_bytes;
        self.collector.report.moved_segments += 1;
        self.collector.in_flight += 1;
        let mut upload = Upload::moved(header, header_bytes as u32, object);
        self.keep_cached(&mut upload, cached);
        self.send(upload);
        Ok(())
    }

    /// A moved segment is in the map.
    pub(super) fn moved_applied(&mut self) {
        self.collector.in_flight -= 1;
    }
}
