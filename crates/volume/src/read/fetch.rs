//! Frames from the store: each fetched once however many wait for it, several in a row by one
//! request, verified, put into the read cache, handed to the waiters.
//!
//! Invariants: a frame is handed on only if its checksum, bound to volume, segment, epoch and
//! place, is right. While the volume is open, an unavailable store makes readers wait, not fail;
//! only a definite "not there", damage that the store reports, or a bad frame fetched twice fails a
//! read.
//!
//! A get that no reader waits for goes behind all others. A reader that joins it raises it to the
//! reads. What was fetched ahead waits for its readers in memory (`landed`); what warms the cache
//! does not, and takes no room from it.
//!
//! Not here: which frames are wanted (`read`, `ahead`, `warm`), retries of a request
//! (`sawmill_store`), and the move of a reader to a newer cut (`follow`).

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use sawmill_format::segment::{FrameIdentity, frame_open, raw_frame_range, segment_key};
use sawmill_store::{Class, Get, Raise, StoreError, StoreErrorKind};

use super::ReadContext;
use super::ahead_memory::AheadMemory;
use super::follow::follow;
use super::landed::Landed;
use super::pipe::Pipe;
use crate::segment::table::SegmentInfo;
use crate::store_calls::{store_error, want};
use crate::stored_data::FrameName;
use crate::{Error, ErrorKind, limits};

/// How long to wait after the store has used up its own retries.
const REPEAT_AFTER: Duration = Duration::from_millis(500);
/// Frames fetched along with a missing one when misses cluster around it (data written together).
const NEIGHBORS_MAX: u32 = 3;
/// Misses this many frames apart cluster. By segment alone, reads at random places of a small
/// volume would all cluster.
const CLUSTER_FRAMES: u32 = 2 * (NEIGHBORS_MAX + 1);
/// Frames in memory that no reader came for are forgotten after this long, or up to twice as long.
const LANDED_TIME_MAX: Duration = Duration::from_secs(10);
/// How long readers that waited for much count as such, or up to twice as long.
const AWAITED_PERIOD: Duration = Duration::from_secs(1);

/// What a waiter gets.
pub(crate) enum FetchResult {
    /// The frame's data.
    Frame(Bytes),
    /// The segment is gone because the attachment moved to a newer cut: resolve again.
    Gone,
    /// The store is unavailable. Who warms gives up; a reader that joined asks for itself.
    Away(Error),
    Failed(Error),
}

/// Who wants frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Readers wait for them.
    Read,
    /// A reader may come for them soon.
    Ahead,
    /// They go into the read cache. Who waits for them puts them there.
    Warm,
}

impl Purpose {
    fn class(self) -> Class {
        match self {
            Purpose::Read => Class::Read,
            Purpose::Ahead | Purpose::Warm => Class::Background,
        }
    }
}

/// Waits for one frame. Must not block.
pub(crate) type Waiter = Box<dyn FnOnce(FetchResult) + Send>;

/// A frame on its way.
#[derive(Default)]
struct AwaitedFrame {
    /// Bounded by the reads that the doors admit.
    waiters: Vec<Waiter>,
    /// Of its get, if that was made with nobody waiting.
    raise: Option<Raise>,
}

/// The waiters for each frame, what has arrived before its reader, and what was missed lately.
pub(crate) struct Fetcher {
    /// Bounded by the reads that the doors admit, and read-ahead's own limit.
    waiting: Mutex<HashMap<FrameName, AwaitedFrame>>,
    pub(super) landed: Landed,
    pub(super) pipe: Pipe,
    in_flight: Arc<InFlight>,
    /// Sequences and frames.
    last_missed: Mutex<[(u32, u32); 8]>,
    /// Held while a read-only attachment moves to a newer cut.
    pub(crate) following: Mutex<()>,
}

impl Fetcher {
    /// At most `landed_bytes_max` wait in memory for readers, of what `memory` has for all volumes.
    pub(crate) fn new(landed_bytes_max: u64, memory: Arc<AheadMemory>) -> Self {
        Fetcher {
            waiting: Mutex::default(),
            landed: Landed::new(landed_bytes_max, memory),
            pipe: Pipe::default(),
            in_flight: Arc::default(),
            last_missed: Mutex::default(),
            following: Mutex::default(),
        }
    }

    /// How many bytes may be asked for ahead of readers, of `ahead_bytes_max` at once. None where
    /// readers have lately waited for half as much, or half the usual bound, by themselves: what
    /// they ask for fills the way, and what is asked for ahead in their place comes in longer
    /// bursts, with rests between.
    pub(super) fn room_ahead(&self, ahead_bytes_max: u64, pipe_bytes: u64) -> u64 {
        let carried = *self.in_flight.lock();
        let awaited_most_bytes = carried.awaited_most_bytes.into_iter().max().unwrap_or(0);
        if awaited_most_bytes >= ahead_bytes_max.max(limits::PREFETCH_BYTES_DEFAULT) / 2 {
            return 0;
        }
        let ahead = ahead_bytes_max.saturating_sub(carried.ahead_bytes);
        ahead.min(pipe_bytes.saturating_sub(carried.all_bytes))
    }

    /// Takes room for `bytes` to be asked for ahead of readers, or as much as `ahead_bytes_max`
    /// leaves.
    pub(super) fn take_room(&self, bytes: u64, ahead_bytes_max: u64) -> AheadRoom {
        let mut room = AheadRoom { in_flight: Arc::clone(&self.in_flight), bytes: 0 };
        room.grow_to(bytes, ahead_bytes_max);
        room
    }

    /// Counts a read that waits for the store from `now` on.
    pub(super) fn awaits(&self, bytes: u64, now: Duration) -> AwaitedBytes {
        let mut carried = self.in_flight.lock();
        if now.saturating_sub(carried.period_began) >= AWAITED_PERIOD {
            let was_long_ago = now.saturating_sub(carried.period_began) >= 2 * AWAITED_PERIOD;
            let before = if was_long_ago { 0 } else { carried.awaited_most_bytes[0] };
            carried.awaited_most_bytes = [carried.awaited_bytes, before];
            carried.period_began = now;
        }
        carried.awaited_bytes += bytes;
        carried.awaited_most_bytes[0] = carried.awaited_most_bytes[0].max(carried.awaited_bytes);
        AwaitedBytes { in_flight: Arc::clone(&self.in_flight), bytes }
    }

    /// Whether a frame is in memory or on its way.
    pub(super) fn has(&self, name: FrameName) -> bool {
        // Under the lock, because a frame that arrives goes from one to the other.
        let waiting = self.waiting.lock();
        waiting.contains_key(&name) || self.landed.contains(name)
    }

    /// Whether frames near this one were missed lately; notes that it is missed now.
    fn misses_cluster(&self, name: FrameName) -> bool {
        let mut last = self.last_missed.lock();
        let is_repeat = last.iter().any(|(sequence, frame)| {
            *sequence == name.sequence && frame.abs_diff(name.frame) <= CLUSTER_FRAMES
        });
        last.rotate_right(1);
        last[0] = (name.sequence, name.frame);
        is_repeat
    }
}

/// Bytes on their way from the store.
type InFlight = Mutex<CarriedBytes>;

#[derive(Clone, Copy, Default)]
struct CarriedBytes {
    all_bytes: u64,
    /// Asked for with nobody waiting, and the room taken for more of that.
    ahead_bytes: u64,
    /// Of reads that wait, whoever asked for their frames.
    awaited_bytes: u64,
    /// The most of these in this period, and in the one before.
    awaited_most_bytes: [u64; 2],
    period_began: Duration,
}

/// The bytes of a read that waits for the store, until it is dropped.
pub(super) struct AwaitedBytes {
    in_flight: Arc<InFlight>,
    bytes: u64,
}

impl Drop for AwaitedBytes {
    fn drop(&mut self) {
        self.in_flight.lock().awaited_bytes -= self.bytes;
    }
}

/// Room for gets ahead of readers that are about to be made. Given back when dropped: by then the
/// gets count themselves.
pub(super) struct AheadRoom {
    in_flight: Arc<InFlight>,
    pub(super) bytes: u64,
}

impl AheadRoom {
    /// Takes more, if it has less than `bytes`, as far as `ahead_bytes_max` leaves room.
    pub(super) fn grow_to(&mut self, bytes: u64, ahead_bytes_max: u64) {
        let mut carried = self.in_flight.lock();
        let left = ahead_bytes_max.saturating_sub(carried.ahead_bytes);
        let more = bytes.saturating_sub(self.bytes).min(left);
        carried.ahead_bytes += more;
        self.bytes += more;
    }
}

impl Drop for AheadRoom {
    fn drop(&mut self) {
        self.in_flight.lock().ahead_bytes -= self.bytes;
    }
}

/// The bytes of one get, on their way until it is answered or dropped.
struct Carried {
    in_flight: Arc<InFlight>,
    bytes: u64,
    ahead_bytes: u64,
}

impl Carried {
    fn new(in_flight: &Arc<InFlight>, bytes: u64, purpose: Purpose) -> Self {
        let ahead_bytes = if purpose == Purpose::Ahead { bytes } else { 0 };
        // What goes behind all others takes nothing of the way from what is fetched ahead.
        let bytes = if purpose == Purpose::Warm { 0 } else { bytes };
        let mut carried = in_flight.lock();
        carried.all_bytes += bytes;
        carried.ahead_bytes += ahead_bytes;
        Carried { in_flight: Arc::clone(in_flight), bytes, ahead_bytes }
    }
}

impl Drop for Carried {
    fn drop(&mut self) {
        let mut carried = self.in_flight.lock();
        carried.all_bytes -= self.bytes;
        carried.ahead_bytes -= self.ahead_bytes;
    }
}

/// Consecutive frames of one segment, fetched by one request.
#[derive(Clone, Copy)]
struct FrameRun {
    first: FrameName,
    count: u32,
    /// Frames that readers wait for, at the beginning. The others are fetched ahead of them.
    wanted: u32,
    purpose: Purpose,
    /// Whether damage has been met once already.
    again: bool,
}

impl FrameRun {
    fn frames(self) -> impl Iterator<Item = FrameName> {
        (0..self.count)
            .map(move |index| FrameName { frame: self.first.frame + index, ..self.first })
    }
}

/// Fetches frames; each waiter is answered once. Without a waiter it is a prefetch.
pub(crate) fn fetch(
    context: &Arc<ReadContext>,
    frames: Vec<(FrameName, Option<Waiter>)>,
    purpose: Purpose,
) {
    let run_frames_max = run_frames_max(context);
    let mut runs: Vec<FrameRun> = Vec::new();
    let mut raise = None;
    let mut here: Vec<(Waiter, Bytes)> = Vec::new();
    {
        let mut waiting = context.fetcher.waiting.lock();
        for (name, waiter) in frames {
            if let Some(awaited) = waiting.get_mut(&name) {
                if let (Some(raise), Some(_), Purpose::Read) = (&awaited.raise, &waiter, purpose) {
                    raise.raise();
                }
                awaited.waiters.extend(waiter);
                continue;
            }
            // It may have arrived since its reader looked.
            if let Some(data) = context.fetcher.landed.find(name) {
                here.extend(waiter.map(|waiter| (waiter, data)));
                continue;
            }
            match runs.last_mut() {
                Some(run)
                    if run.first.sequence == name.sequence
                        && run.first.frame + run.count == name.frame
                        && run.count < run_frames_max =>
                {
                    run.count += 1;
                    run.wanted += u32::from(purpose == Purpose::Read);
                }
                _ => {
                    raise = (purpose != Purpose::Read).then(Raise::default);
                    let wanted = u32::from(purpose == Purpose::Read);
                    runs.push(FrameRun { first: name, count: 1, wanted, purpose, again: false });
                }
            }
            let waiters = waiter.into_iter().collect();
            waiting.insert(name, AwaitedFrame { waiters, raise: raise.clone() });
        }
    }
    for mut run in runs {
        if purpose == Purpose::Read && context.fetcher.misses_cluster(run.first) {
            take_neighbors(context, &mut run);
        }
        get(context, run);
    }
    for (waiter, data) in here {
        waiter(FetchResult::Frame(data));
    }
}

/// Frames of one get.
fn run_frames_max(context: &ReadContext) -> u32 {
    let frames = limits::RUN_BYTES_MAX / u64::from(context.attachment.record.frame_bytes).max(1);
    (frames as u32).max(1)
}

/// Lengthens a run by frames that follow it, are not cached and not in flight.
fn take_neighbors(context: &ReadContext, run: &mut FrameRun) {
    let Some(info) = context.stored.view().segments.get(run.first.sequence) else { return };
    let frames = info.data_bytes.div_ceil(u64::from(context.attachment.record.frame_bytes));
    let mut waiting = context.fetcher.waiting.lock();
    for _ in 0..NEIGHBORS_MAX {
        let next = FrameName { frame: run.first.frame + run.count, ..run.first };
        let Some((cache, key)) = context.stored.cached(next) else { return };
        let is_here = cache.contains(key) || context.fetcher.landed.contains(next);
        if u64::from(next.frame) >= frames || waiting.contains_key(&next) || is_here {
            return;
        }
        waiting.insert(next, AwaitedFrame::default());
        run.count += 1;
        context.attachment.counters.prefetched_frames.fetch_add(1, Ordering::Relaxed);
    }
}

fn get(context: &Arc<ReadContext>, run: FrameRun) {
    let Some(info) = context.stored.view().segments.get(run.first.sequence) else {
        let text = "the segment is not in the table of segments";
        return missing(context, run, damaged(text));
    };
    let frame_range = |frame| {
        raw_frame_range(
            u64::from(info.header_bytes),
            info.data_bytes,
            context.attachment.record.frame_bytes,
            frame,
        )
    };
    let start = frame_range(run.first.frame).start;
    let end = frame_range(run.first.frame + run.count - 1).end;
    let key =
        segment_key(context.stored.owner_of(run.first.sequence), u64::from(run.first.sequence));
    let (callback_context, fetcher) = (context.clone(), &context.fetcher);
    let raise = fetcher.waiting.lock().get(&run.first).and_then(|awaited| awaited.raise.clone());
    let get = Get { raise, ..want(key, Some(start..end), run.purpose.class()) };
    let carried = Carried::new(&fetcher.in_flight, end - start, run.purpose);
    let departure = fetcher.pipe.departs(context.attachment.world.now());
    let callback = move |outcome: sawmill_store::Result<Bytes>| {
        drop(carried);
        match outcome {
            Ok(bytes) => {
                let now = callback_context.attachment.world.now();
                callback_context.fetcher.pipe.arrives(departure, bytes.len() as u64, now);
                callback_context.attachment.state.store_answered();
                open_frames(&callback_context, run, &info, &bytes);
            }
            Err(error) => fetch_failed(&callback_context, run, &error),
        }
    };
    context.attachment.store.get(get, Box::new(callback));
}

fn fetch_failed(context: &Arc<ReadContext>, run: FrameRun, error: &StoreError) {
    let (kind, error) = (error.kind(), store_error(error));
    match kind {
        StoreErrorKind::NotFound => missing(context, run, error),
        StoreErrorKind::Damaged | StoreErrorKind::Invalid => {
            fail(context, run, ErrorKind::Corrupt, &error);
        }
        StoreErrorKind::Unavailable | StoreErrorKind::Denied | StoreErrorKind::Broken => {
            wait_for_store(context, run, &error);
        }
    }
}

/// Gives up a run that nobody waits for. Checked and removed under one lock: a reader that joins a
/// prefetch must not share its failure.
fn drop_unwanted(context: &ReadContext, run: FrameRun) -> bool {
    let mut waiting = context.fetcher.waiting.lock();
    let is_unwanted = |name| waiting.get(&name).is_none_or(|awaited| awaited.waiters.is_empty());
    let nobody_waits = run.frames().all(is_unwanted);
    if nobody_waits {
        for name in run.frames() {
            waiting.remove(&name);
        }
    }
    nobody_waits
}

/// The store is unavailable: ask again in a while, as long as the volume is open.
fn wait_for_store(context: &Arc<ReadContext>, run: FrameRun, error: &Error) {
    let now = context.attachment.world.now();
    context.attachment.state.store_failed(now, error.to_string());
    if drop_unwanted(context, run) {
        return;
    }
    if context.attachment.state.refusal().is_some() {
        return fail(context, run, ErrorKind::Unavailable, error);
    }
    if run.purpose != Purpose::Read {
        // A reader that waits for it asks for itself.
        return answer_all(context, run, || FetchResult::Away(error.clone()));
    }
    let retry_context = context.clone();
    context.jobs.at(now + REPEAT_AFTER, Box::new(move || get(&retry_context, run)));
    context.mailbox.wake.notify();
}

/// Cuts the answer into frames, verifies each, hands them on. Damaged frames are fetched once more
/// before the damage is believed.
fn open_frames(context: &Arc<ReadContext>, run: FrameRun, info: &SegmentInfo, bytes: &Bytes) {
    let mut at = 0usize;
    let mut arrived = Vec::with_capacity(run.count as usize);
    for name in run.frames() {
        let range = raw_frame_range(
            u64::from(info.header_bytes),
            info.data_bytes,
            context.attachment.record.frame_bytes,
            name.frame,
        );
        let length = (range.end - range.start) as usize;
        let identity = FrameIdentity {
            volume_id: context.stored.owner_of(name.sequence),
            sequence: u64::from(name.sequence),
            epoch: info.epoch,
            frame: name.frame,
        };
        let opened = bytes.get(at..at + length).map(|part| frame_open(&identity, part));
        at += length;
        let is_wanted = name.frame - run.first.frame < run.wanted;
        let wanted = u32::from(is_wanted);
        let one = FrameRun { first: name, count: 1, wanted, again: true, ..run };
        match opened {
            Some(Ok(data)) => arrived.push((name, bytes.slice_ref(data), is_wanted)),
            Some(Err(error)) if run.again => {
                let error = damaged(error.to_string()).with_source(error);
                fail(context, one, ErrorKind::Corrupt, &error)
            }
            None if run.again => {
                fail(context, one, ErrorKind::Corrupt, &damaged("the object is too short"))
            }
            _ => get(context, one),
        }
    }
    // Frames that stay in memory hold all of the answer, which counts only if it is theirs alone.
    if run.wanted > 0 || arrived.len() < run.count as usize {
        for (_, data, _) in arrived.iter_mut().filter(|(_, _, is_wanted)| !is_wanted) {
            *data = Bytes::copy_from_slice(data);
        }
    }
    hand_over(context, arrived, run.purpose);
}

/// Hands frames on. Each is with whether a reader waited for it when it was asked for.
fn hand_over(context: &Arc<ReadContext>, arrived: Vec<(FrameName, Bytes, bool)>, purpose: Purpose) {
    let is_warm = purpose == Purpose::Warm;
    for (name, data, _) in arrived.iter().filter(|_| !is_warm) {
        if let Some((cache, key)) = context.stored.cached(*name) {
            // A copy: what waits for the cache's disk must not hold whole answers.
            let (cache, cached_data) = (cache.clone(), Bytes::copy_from_slice(data));
            context.pool.run_if_calm(move || cache.insert(key, &cached_data));
        }
    }
    let now = context.attachment.world.now();
    // Under one lock, so that a reader finds the frame on its way or in memory, never in neither.
    let (waiters, is_first) = {
        let (mut waiters, mut ahead) = (Vec::new(), Vec::new());
        let mut waiting = context.fetcher.waiting.lock();
        for (name, data, is_wanted) in arrived {
            let awaited = waiting.remove(&name).unwrap_or_default();
            waiters.extend(awaited.waiters.into_iter().map(|waiter| (waiter, data.clone())));
            // Also if a reader came before it: that one may want a part of it.
            if !is_wanted && !is_warm {
                ahead.push((name, data));
            }
        }
        (waiters, context.fetcher.landed.put(ahead, now))
    };
    for (waiter, data) in waiters {
        waiter(FetchResult::Frame(data));
    }
    if is_first {
        forget_later(context, now + LANDED_TIME_MAX);
        context.mailbox.wake.notify();
    }
}

/// Forgets frames that no reader came for, at `at` and as long as there are some.
fn forget_later(context: &Arc<ReadContext>, at: Duration) {
    let job_context = context.clone();
    let forget = move || {
        let context = &job_context;
        // When the volume ends, all of them go.
        let (now, is_end) = (context.attachment.world.now(), context.jobs.is_closed());
        let before = if is_end { Duration::MAX } else { now.saturating_sub(LANDED_TIME_MAX) };
        if context.fetcher.landed.forget_before(before) && !is_end {
            forget_later(context, now + LANDED_TIME_MAX);
        }
    };
    context.jobs.at(at, Box::new(forget));
}

/// The volume ends: every remaining waiter gets the error.
pub(crate) fn fail_all(context: &ReadContext, error: &Error) {
    let waiting = std::mem::take(&mut *context.fetcher.waiting.lock());
    for waiter in waiting.into_values().flat_map(|awaited| awaited.waiters) {
        waiter(FetchResult::Failed(error.clone()));
    }
}

fn take_waiters(context: &ReadContext, name: FrameName) -> Vec<Waiter> {
    let awaited = context.fetcher.waiting.lock().remove(&name);
    awaited.map(|awaited| awaited.waiters).unwrap_or_default()
}

fn answer_all(context: &ReadContext, run: FrameRun, result: impl Fn() -> FetchResult) {
    for waiter in run.frames().flat_map(|name| take_waiters(context, name)) {
        waiter(result());
    }
}

/// The store has definitely no such object. For a reader beside a writer, that means that the
/// writer has moved on.
fn missing(context: &Arc<ReadContext>, run: FrameRun, error: Error) {
    if run.purpose != Purpose::Read {
        // Nothing kept it from being deleted: only readers are counted, and ask for themselves.
        return answer_all(context, run, || FetchResult::Gone);
    }
    if let Some(cut) = &context.stored.fixed_cut {
        let text = format!("{error}; {cut} is no longer kept: open another one");
        let not_found = Error::new(ErrorKind::NotFound, text).with_source(error);
        return fail(context, run, ErrorKind::NotFound, &not_found);
    }
    if !context.attachment.read_only {
        return fail(context, run, ErrorKind::Corrupt, &error);
    }
    // A prefetch is no reason to move on: that takes a recovery.
    if drop_unwanted(context, run) {
        return;
    }
    let (follow_context, view) = (context.clone(), context.stored.view());
    let is_needed = move |context: &ReadContext| {
        let info = context.stored.view().segments.get(run.first.sequence);
        info.is_some_and(|info| info.epoch == run.first.epoch && info.live_bytes > 0)
    };
    context.pool.run(move || match follow(&follow_context, &view) {
        // A cut read after the miss still needs the object: it was not deleted but lost.
        Ok(true) if is_needed(&follow_context) => {
            fail(&follow_context, run, ErrorKind::Corrupt, &error)
        }
        Ok(_) => answer_all(&follow_context, run, || FetchResult::Gone),
        Err(error) if matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Denied) => {
            wait_for_store(&follow_context, run, &error);
        }
        Err(error) => fail(&follow_context, run, error.kind(), &error),
    });
}

fn damaged(what: impl Into<Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::Corrupt, what)
}

/// Ends a run for those who wait for its frames, with an error of `kind` that `error` caused.
fn fail(context: &ReadContext, run: FrameRun, kind: ErrorKind, error: &Error) {
    let key =
        segment_key(context.stored.owner_of(run.first.sequence), u64::from(run.first.sequence));
    for name in run.frames() {
        let waiters = take_waiters(context, name);
        let failed = Error::caused(kind, format!("{key}, frame {}", name.frame), error.clone());
        if kind == ErrorKind::Corrupt && !waiters.is_empty() {
            tracing::error!("{failed}; run `sawmill check`");
        }
        for waiter in waiters {
            waiter(FetchResult::Failed(failed.clone()));
        }
    }
}
