//! Garbage collection at work: chooses victims, plans, gathers and sends, one step at a time,
//! beside everything else the engine does.
//!
//! Invariants:
//! 1. A new plan is made only when nothing of the last one is in flight; otherwise the same bytes
//!    would be moved twice.
//! 2. Collection waits for writers that wait for room, and unless somebody asked for it, for busy
//!    ones, as long as garbage is not pressing. Past a lower bound writers wait for collection,
//!    never for long (`garbage_bound`).
//! 3. A segment that cannot be read is skipped after [`DOUBTS_MAX`] attempts.
//!
//! Not here: what is chosen (`gc::policy`), found (`gc::sweep`) and read (`gc::gather`), what stays
//! cached (`caching::moved`), and deleting (`cleanup`).

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use sawmill_format::segment::{SegmentKind, raw_frames};

use super::EngineOptions;
use super::caching::moved::keep_cached;
use super::checkpoint::Checkpoints;
use super::context::Context;
use super::log_tail::LogTail;
use super::messages::{Event, GcRequest};
use super::upload::Upload;
use crate::counters::add;
use crate::gc::gather;
use crate::gc::gathered::{GatherFailure, GatherOutcome, MovedSegment};
use crate::gc::plan_bytes_max;
use crate::gc::policy::Candidate;
use crate::gc::sweep::MovePlan;
use crate::segment::builder;
use crate::status::GcReport;
use crate::store_calls::cannot_encode;
use crate::{Error, ErrorKind, limits};

/// The wait after the store has used up its own retries, or while writers come first.
const REPEAT_AFTER: Duration = Duration::from_millis(500);
/// How often to try an unreadable segment: an answer may be garbled in transit.
const DOUBTS_MAX: u32 = 3;

enum Stage {
    Rest,
    Planning,
    Gathering,
    Ready(Box<MovedSegment>),
}

/// The stage of the present collection, its plan, and the moved segments in flight.
pub(super) struct Collector {
    stage: Stage,
    plan: Option<MovePlan>,
    /// Do nothing before this time.
    not_before: Duration,
    /// Segments that could not be read, and the number of attempts.
    doubtful: HashMap<u32, u32>,
    request: Option<GcRequest>,
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
            request: None,
            report: GcReport::default(),
            in_flight: 0,
        }
    }

    /// Whether nothing is planned, gathered or in flight.
    pub(super) fn is_resting(&self) -> bool {
        matches!(self.stage, Stage::Rest) && self.plan.is_none() && self.in_flight == 0
    }

    /// Whether it moves something, or can begin to; not while it waits after a failure, or for the
    /// deletes of a request.
    pub(super) fn is_at_work(&self, context: &Context, now: Duration) -> bool {
        if !matches!(self.stage, Stage::Rest) || self.in_flight > 0 {
            return true;
        }
        let is_settling = self.request.as_ref().is_some_and(|request| request.is_settling);
        let has_garbage = |each: &Candidate| each.live_bytes < each.data_bytes;
        now >= self.not_before
            && !is_settling
            && (self.plan.is_some() || self.candidates(context).iter().any(has_garbage))
    }

    /// A segment is gone; forget its failed attempts.
    pub(super) fn forget(&mut self, sequence: u32) {
        self.doubtful.remove(&sequence);
    }

    fn is_hopeless(&self, sequence: u32) -> bool {
        self.doubtful.get(&sequence).is_some_and(|doubts| *doubts >= DOUBTS_MAX)
    }

    fn doubt(&mut self, sequence: u32, doubts: u32) {
        *self.doubtful.entry(sequence).or_default() += doubts;
    }

    /// One step of collection. Returns when to call it again, if no event does.
    pub(super) fn step(
        &mut self,
        context: &Arc<Context>,
        options: &EngineOptions,
        log: &mut LogTail,
        checkpoints: &mut Checkpoints,
        now: Duration,
    ) -> Option<Duration> {
        if context.mailbox.is_closing() {
            let text =
                "the volume was closed before its garbage was collected; run the command again";
            self.stop(context, &Error::new(ErrorKind::Closed, text));
            return None;
        }
        if self.request.is_none() {
            self.take_request(context, log);
        }
        if let Stage::Ready(_) = self.stage {
            self.send_if_room(context, options, log);
        }
        if !matches!(self.stage, Stage::Rest) {
            return None;
        }
        if self.plan.is_none() && !self.may_plan(context, options, checkpoints) {
            return None;
        }
        let is_busy = self.request.is_none() && log.has_busy_writers(context, now);
        let held_back =
            (is_busy || context.write.stalled.count() > 0) && !is_pressing(context, options);
        if held_back || now < self.not_before {
            let wait = self.not_before.saturating_sub(now);
            return Some(if held_back { wait.max(REPEAT_AFTER) } else { wait });
        }
        match self.plan.take() {
            Some(plan) => self.start_gathering(context, options, log, plan, now),
            None => self.start_plan(context, options),
        }
        None
    }

    /// Stops collecting; what is in flight continues as an upload.
    pub(super) fn stop(&mut self, context: &Context, why: &Error) {
        self.plan = None;
        self.stage = Stage::Rest;
        if let Some(request) = self.request.take() {
            context.mailbox.end_gc_request(request, Err(why.clone()));
        }
    }

    fn take_request(&mut self, context: &Context, log: &LogTail) {
        let Some(mut request) = context.mailbox.take_gc_request() else { return };
        request.through = log.stored_sequence() as u32;
        self.report = GcReport::default();
        // A manual collection tries everything once more.
        self.doubtful.clear();
        self.request = Some(request);
    }

    /// Whether it is time to choose. Ends a request that has nothing left. What there is to choose
    /// is not asked: that ranks all segments, and many steps may pass while writers come first.
    fn may_plan(
        &mut self,
        context: &Context,
        options: &EngineOptions,
        checkpoints: &mut Checkpoints,
    ) -> bool {
        if self.in_flight > 0 {
            return false;
        }
        if let Some(request) = &self.request {
            if !request.is_settling && self.requested_victims(context).is_empty() {
                checkpoints.want_deletes();
                if let Some(request) = &mut self.request {
                    request.is_settling = true;
                }
            }
            return self.request.as_ref().is_some_and(|request| !request.is_settling);
        }
        let totals = context.stored.view().segments.totals();
        options.gc.is_due(totals.own_live_bytes, totals.own_used_bytes)
    }

    /// A request is done when what it made dead has been deleted.
    pub(super) fn finish_request(&mut self, context: &Context) {
        if let Some(request) = self.request.take_if(|request| request.is_settling) {
            context.mailbox.end_gc_request(request, Ok(self.report));
        }
    }

    fn candidates(&self, context: &Context) -> Vec<Candidate> {
        let mut candidates = context.stored.view().segments.candidates();
        candidates.retain(|candidate| !self.is_hopeless(candidate.sequence));
        candidates
    }

    fn requested_victims(&self, context: &Context) -> Vec<u32> {
        let Some(request) = &self.request else { return Vec::new() };
        let candidates = self.candidates(context).into_iter();
        candidates
            .filter(|candidate| request.takes(candidate))
            .map(|candidate| candidate.sequence)
            .collect()
    }

    fn chosen_victims(&self, context: &Context, options: &EngineOptions) -> Vec<u32> {
        let totals = context.stored.view().segments.totals();
        let now_ms = context.attachment.world.unix_ms();
        options.gc.victims(&self.candidates(context), &totals, now_ms, moved_bytes_max(context))
    }

    fn start_plan(&mut self, context: &Arc<Context>, options: &EngineOptions) {
        let requested = self.request.is_some();
        let victims = if requested {
            self.requested_victims(context)
        } else {
            self.chosen_victims(context, options)
        };
        if victims.is_empty() {
            return;
        }
        self.stage = Stage::Planning;
        add(&context.attachment.counters.collections, 1);
        let (planned, bytes_max) = (context.clone(), moved_bytes_max(context));
        let left_alone: HashSet<u32> = self.doubtful.keys().copied().collect();
        context.collector.run(move || {
            let view = planned.stored.view();
            let chosen: HashSet<u32> = victims.iter().copied().collect();
            let may_plug =
                |sequence| !left_alone.contains(&sequence) && view.segments.is_own(sequence);
            let plan = MovePlan::make(
                &view.map,
                &|sequence| chosen.contains(&sequence),
                &may_plug,
                bytes_max,
            );
            planned.mailbox.push_event(Event::Planned { plan, victims });
        });
    }

    pub(super) fn handle_planned(&mut self, plan: MovePlan, victims: Vec<u32>) {
        if !matches!(self.stage, Stage::Planning) {
            return;
        }
        self.stage = Stage::Rest;
        if plan.is_done() {
            // They have died since, or nothing was found live in them.
            for sequence in victims {
                self.doubt(sequence, 1);
            }
            return;
        }
        self.plan = Some(plan);
    }

    fn start_gathering(
        &mut self,
        context: &Arc<Context>,
        options: &EngineOptions,
        log: &LogTail,
        plan: MovePlan,
        now: Duration,
    ) {
        self.stage = Stage::Gathering;
        self.pace(context, options, now);
        context.mailbox.set_gc_left(plan.bytes_left());
        let (gather_context, buffers) = (context.clone(), log.buffers.clone());
        context.collector.run(move || {
            let callback_context = gather_context.clone();
            let callback = Box::new(move |outcome| {
                callback_context.mailbox.push_event(Event::Gathered { outcome })
            });
            gather::gather(&gather_context, &buffers, plan, callback);
        });
    }

    /// The next gathering starts no sooner than the rate allows.
    fn pace(&mut self, context: &Context, options: &EngineOptions, now: Duration) {
        let rate = options.gc.bytes_per_second_max;
        if rate > 0 {
            let seconds = f64::from(context.attachment.record.segment_bytes) / rate as f64;
            self.not_before = now + Duration::from_secs_f64(seconds);
        }
    }

    pub(super) fn handle_gathered(
        &mut self,
        context: &Context,
        outcome: GatherOutcome,
        now: Duration,
    ) {
        if !matches!(self.stage, Stage::Gathering) {
            return;
        }
        self.stage = Stage::Rest;
        match outcome {
            Ok((gathered, plan)) => {
                self.plan = (!plan.is_done()).then_some(plan);
                self.stage = Stage::Ready(Box::new(gathered));
            }
            Err(GatherFailure::NothingLeft) => {}
            Err(GatherFailure::Unavailable { plan, error }) => {
                self.plan = Some(plan);
                self.not_before = now + REPEAT_AFTER;
                context.attachment.state.store_failed(now, error.to_string());
            }
            Err(GatherFailure::Damaged { sequence, error }) => {
                self.doubt(sequence, 1);
                self.not_before = now + REPEAT_AFTER;
                if self.is_hopeless(sequence) {
                    tracing::error!(
                        "segment {sequence} cannot be collected, so it stays: {error}; run \
                        `sawmill check`"
                    );
                }
            }
        }
    }

    /// Writers come first, but one moved segment may always be in flight.
    fn send_if_room(&mut self, context: &Arc<Context>, options: &EngineOptions, log: &mut LogTail) {
        let uploads = log.uploads.len();
        let extra = if self.in_flight == 0 { limits::MOVED_UPLOADS_EXTRA as usize } else { 0 };
        if uploads >= options.uploads_max + extra || log.is_used_up() {
            return;
        }
        let Stage::Ready(gathered) = std::mem::replace(&mut self.stage, Stage::Rest) else {
            return;
        };
        if let Err(error) = self.send_moved(context, log, *gathered) {
            context.write.fail(error);
        }
    }

    fn send_moved(
        &mut self,
        context: &Arc<Context>,
        log: &mut LogTail,
        moved_segment: MovedSegment,
    ) -> crate::Result<()> {
        let mut header = log.header(context, SegmentKind::Moved, log.sealed_position())?;
        let MovedSegment { extents, origins, data_bytes, header_bytes, mut buffer, cached } =
            moved_segment;
        header.extents = extents;
        header.origins = origins;
        header.data_bytes = data_bytes;
        header.frames = raw_frames(data_bytes, header.frame_bytes).map_err(|error| {
            let text = "garbage collection gathered more than fits a segment: this is a bug; \
                        report it with the log";
            Error::caused(ErrorKind::Internal, text, error)
        })?;
        let (head, body) = buffer.bytes_mut().split_at_mut(header_bytes);
        head.copy_from_slice(&header.encode().map_err(cannot_encode)?);
        builder::seal_frames(&header, body);
        let object = Bytes::from_owner(buffer);
        let counters = &context.attachment.counters;
        add(&counters.segments_moved, 1);
        add(&counters.moved_bytes, data_bytes);
        add(&counters.moved_segment_bytes, object.len() as u64);
        self.report.moved_bytes += data_bytes;
        self.report.moved_segments += 1;
        self.in_flight += 1;
        let mut upload = Upload::moved(header, header_bytes as u32, object);
        keep_cached(context, &mut upload, cached);
        log.send(context, upload);
        Ok(())
    }

    /// A moved segment is in the map.
    pub(super) fn moved_applied(&mut self) {
        self.in_flight -= 1;
    }
}

fn is_pressing(context: &Context, options: &EngineOptions) -> bool {
    let totals = context.stored.view().segments.totals();
    options.gc.is_pressing(totals.own_live_bytes, totals.own_used_bytes)
}

fn moved_bytes_max(context: &Context) -> u64 {
    plan_bytes_max(context.attachment.record.segment_bytes, context.stored.view().map.extents())
}
