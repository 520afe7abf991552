//! Frames from the store: each fetched once however many wait for it, several in a row by one
//! request, verified, put into the read cache, handed to the waiters.
//!
//! Invariants: a frame is handed on only if its checksum, bound to volume, segment, epoch and
//! place, is right. While the volume is open, an unavailable store makes readers wait, not fail;
//! only a definite "not there", damage that the store reports, or a bad frame fetched twice fails a
//! read.
//!
//! Not here: which frames are wanted (`read`, `ahead`), retries of one request (`sawmill_store`),
//! and the move of a reader to a newer cut (`follow`).

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use sawmill_format::segment::{FrameIdentity, frame_open, raw_frame_range, segment_key};
use sawmill_store::{Class, StoreErrorKind};

use super::ReadContext;
use super::follow::follow;
use crate::segment::table::SegmentInfo;
use crate::store_calls::{store_error, want};
use crate::stored_data::FrameName;
use crate::{Error, ErrorKind};

/// How long to wait after the store has used up its own retries.
const REPEAT_AFTER: Duration = Duration::from_millis(500);
/// Frames fetched along with a missing one when misses cluster in its segment (data written
/// together).
const NEIGHBORS_MAX: u32 = 3;

/// What a waiter gets.
pub(crate) enum FetchResult {
    /// The frame's data.
    Frame(Bytes),
    /// The segment is gone because the attachment moved to a newer cut: resolve again.
    Gone,
    Failed(Error),
}

/// Waits for one frame. Must not block.
pub(crate) type Waiter = Box<dyn FnOnce(FetchResult) + Send>;

/// The waiters for each frame, and what was missed lately.
pub(crate) struct Fetcher {
    /// Bounded by the reads that the doors admit, and read-ahead's own limit.
    waiting: Mutex<HashMap<FrameName, Vec<Waiter>>>,
    last_missed: Mutex<[u32; 8]>,
    /// Held while a read-only attachment moves to a newer cut.
    pub(crate) following: Mutex<()>,
}

impl Fetcher {
    pub(crate) fn new() -> Self {
        Fetcher {
            waiting: Mutex::default(),
            last_missed: Mutex::new([0; 8]),
            following: Mutex::default(),
        }
    }

    /// Whether this segment was missed lately; notes that it is missed now.
    fn misses_cluster(&self, sequence: u32) -> bool {
        let mut last = self.last_missed.lock();
        let is_repeat = last.contains(&sequence);
        last.rotate_right(1);
        last[0] = sequence;
        is_repeat
    }
}

/// Consecutive frames of one segment, fetched by one request.
#[derive(Clone, Copy)]
struct FrameRun {
    first: FrameName,
    count: u32,
    class: Class,
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
    class: Class,
) {
    let mut runs: Vec<FrameRun> = Vec::new();
    {
        let mut waiting = context.fetcher.waiting.lock();
        for (name, waiter) in frames {
            if let Some(waiters) = waiting.get_mut(&name) {
                waiters.extend(waiter);
                continue;
            }
            waiting.insert(name, waiter.into_iter().collect());
            match runs.last_mut() {
                Some(run)
                    if run.first.sequence == name.sequence
                        && run.first.frame + run.count == name.frame =>
                {
                    run.count += 1;
                }
                _ => runs.push(FrameRun { first: name, count: 1, class, again: false }),
            }
        }
    }
    for mut run in runs {
        if class == Class::Read && context.fetcher.misses_cluster(run.first.sequence) {
            take_neighbors(context, &mut run);
        }
        get(context, run);
    }
}

/// Lengthens a run by frames that follow it, are not cached and not in flight.
fn take_neighbors(context: &ReadContext, run: &mut FrameRun) {
    let Some(info) = context.stored.view().segments.get(run.first.sequence) else { return };
    let frames = info.data_bytes.div_ceil(u64::from(context.attachment.record.frame_bytes));
    let mut waiting = context.fetcher.waiting.lock();
    for _ in 0..NEIGHBORS_MAX {
        let next = FrameName { frame: run.first.frame + run.count, ..run.first };
        let Some((cache, key)) = context.stored.cached(next) else { return };
        if u64::from(next.frame) >= frames || waiting.contains_key(&next) || cache.contains(key) {
            return;
        }
        waiting.insert(next, Vec::new());
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
    let callback_context = context.clone();
    let get = want(key, Some(start..end), run.class);
    let callback = move |outcome: sawmill_store::Result<Bytes>| match outcome {
        Ok(bytes) => {
            callback_context.attachment.state.store_answered();
            open_frames(&callback_context, run, &info, &bytes);
        }
        Err(error) => {
            let (kind, error) = (error.kind(), store_error(&error));
            match kind {
                StoreErrorKind::NotFound => missing(&callback_context, run, error),
                StoreErrorKind::Damaged | StoreErrorKind::Invalid => {
                    fail(&callback_context, run, ErrorKind::Corrupt, &error);
                }
                StoreErrorKind::Unavailable | StoreErrorKind::Denied | StoreErrorKind::Broken => {
                    wait_for_store(&callback_context, run, &error);
                }
            }
        }
    };
    context.attachment.store.get(get, Box::new(callback));
}

/// The store is unavailable: ask again in a while, as long as the volume is open.
fn wait_for_store(context: &Arc<ReadContext>, run: FrameRun, error: &Error) {
    let now = context.attachment.world.now();
    context.attachment.state.store_failed(now, error.to_string());
    // Checked and removed under one lock: a reader that joins a prefetch must not share its
    // failure.
    let nobody_waits = {
        let mut waiting = context.fetcher.waiting.lock();
        let nobody_waits = run.frames().all(|name| waiting.get(&name).is_none_or(Vec::is_empty));
        if nobody_waits {
            for name in run.frames() {
                waiting.remove(&name);
            }
        }
        nobody_waits
    };
    if nobody_waits {
        return;
    }
    if context.attachment.state.refusal().is_some() {
        return fail(context, run, ErrorKind::Unavailable, error);
    }
    let retry_context = context.clone();
    context.jobs.at(now + REPEAT_AFTER, Box::new(move || get(&retry_context, run)));
    context.mailbox.wake.notify();
}

/// Cuts the answer into frames, verifies each, hands them on. Damaged frames are fetched once more
/// before the damage is believed.
fn open_frames(context: &Arc<ReadContext>, run: FrameRun, info: &SegmentInfo, bytes: &Bytes) {
    let mut at = 0usize;
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
        let one = FrameRun { first: name, count: 1, again: true, ..run };
        match opened {
            Some(Ok(data)) => hand_over(context, name, bytes.slice_ref(data)),
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
}

fn hand_over(context: &Arc<ReadContext>, name: FrameName, data: Bytes) {
    if let Some((cache, key)) = context.stored.cached(name) {
        let (cache, cached_data) = (cache.clone(), data.clone());
        context.pool.run_if_calm(move || cache.insert(key, &cached_data));
    }
    for waiter in take_waiters(context, name) {
        waiter(FetchResult::Frame(data.clone()));
    }
}

/// The volume ends: every remaining waiter gets the error.
pub(crate) fn fail_all(context: &ReadContext, error: &Error) {
    let waiting = std::mem::take(&mut *context.fetcher.waiting.lock());
    for waiter in waiting.into_values().flatten() {
        waiter(FetchResult::Failed(error.clone()));
    }
}

fn take_waiters(context: &ReadContext, name: FrameName) -> Vec<Waiter> {
    context.fetcher.waiting.lock().remove(&name).unwrap_or_default()
}

/// The store has definitely no such object. For a reader beside a writer, that means that the
/// writer has moved on.
fn missing(context: &Arc<ReadContext>, run: FrameRun, error: Error) {
    if let Some(cut) = &context.stored.fixed_cut {
        let text = format!("{error}; {cut} is no longer kept: open another one");
        let not_found = Error::new(ErrorKind::NotFound, text).with_source(error);
        return fail(context, run, ErrorKind::NotFound, &not_found);
    }
    if !context.attachment.read_only {
        return fail(context, run, ErrorKind::Corrupt, &error);
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
        Ok(_) => {
            for name in run.frames() {
                for waiter in take_waiters(&follow_context, name) {
                    waiter(FetchResult::Gone);
                }
            }
        }
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
