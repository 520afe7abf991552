//! Frames from the store: each fetched once however many wait for it, several in a row by one request,
//! verified, put into the read cache, handed to those who wait.
//!
//! Invariants: a frame is handed on only if its checksum, bound to volume, segment, epoch and place, is
//! right. A store that cannot be asked makes readers wait, not fail; only a definite "not there" or damage
//! found twice fails.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use sawmill_format::segment::{FrameIdentity, frame_open, raw_frame_range, segment_key};
use sawmill_store::{Class, StoreErrorKind};

use crate::ask::want;
use crate::read::Streams;
use crate::segment::table::SegmentInfo;
use crate::shared::Shared;
use crate::{Error, ErrorKind};

/// How long to wait after the store has used up its own retries.
const REPEAT_AFTER: Duration = Duration::from_millis(500);
/// Frames fetched along with a missing one when misses cluster in its segment (data written together).
const NEIGHBOURS: u32 = 3;

/// Which frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct FrameName {
    pub(crate) sequence: u32,
    pub(crate) epoch: u64,
    pub(crate) frame: u32,
}

/// What a waiter is told.
pub(crate) enum Fetched {
    /// The frame's data.
    Frame(Bytes),
    /// The segment is gone because the attachment moved to a newer cut: resolve again.
    Gone,
    Failed(Error),
}

/// Waits for one frame. Must not block.
pub(crate) type Waiter = Box<dyn FnOnce(Fetched) + Send>;

/// Who waits for what, and what was missed lately.
pub(crate) struct Fetcher {
    waiting: Mutex<HashMap<FrameName, Vec<Waiter>>>,
    last_missed: Mutex<[u32; 8]>,
    /// Held while a read-only attachment moves to a newer cut.
    pub(crate) following: Mutex<()>,
    pub(crate) streams: Streams,
}

impl Fetcher {
    pub(crate) fn new(ahead_bytes: u64) -> Self {
        Fetcher {
            waiting: Mutex::default(),
            last_missed: Mutex::new([0; 8]),
            following: Mutex::default(),
            streams: Streams::new(ahead_bytes),
        }
    }

    /// Whether this segment was missed lately; notes that it is missed now.
    fn misses_cluster(&self, sequence: u32) -> bool {
        let mut last = self.last_missed.lock();
        let seen = last.contains(&sequence);
        last.rotate_right(1);
        last[0] = sequence;
        seen
    }
}

/// Consecutive frames of one segment, fetched by one request.
#[derive(Clone, Copy)]
struct Run {
    first: FrameName,
    count: u32,
    class: Class,
    /// Whether damage has been met once already.
    again: bool,
}

impl Run {
    fn frames(self) -> impl Iterator<Item = FrameName> {
        (0..self.count).map(move |index| FrameName { frame: self.first.frame + index, ..self.first })
    }
}

/// Fetches frames; each waiter is told once. Without a waiter it is a prefetch.
pub(crate) fn fetch(shared: &Arc<Shared>, wanted: Vec<(FrameName, Option<Waiter>)>, class: Class) {
    let mut runs: Vec<Run> = Vec::new();
    {
        let mut waiting = shared.fetcher.waiting.lock();
        for (name, waiter) in wanted {
            if let Some(waiters) = waiting.get_mut(&name) {
                waiters.extend(waiter);
                continue;
            }
            waiting.insert(name, waiter.into_iter().collect());
            match runs.last_mut() {
                Some(run)
                    if run.first.sequence == name.sequence && run.first.frame + run.count == name.frame =>
                {
                    run.count += 1;
                }
                _ => runs.push(Run { first: name, count: 1, class, again: false }),
            }
        }
    }
    for mut run in runs {
        if class == Class::Read && shared.fetcher.misses_cluster(run.first.sequence) {
            take_neighbours(shared, &mut run);
        }
        get(shared, run);
    }
}

/// Lengthens a run by frames that follow it, are not cached and not under way.
fn take_neighbours(shared: &Shared, run: &mut Run) {
    let Some(info) = shared.view().segments.get(run.first.sequence) else { return };
    let frames = info.data_bytes.div_ceil(u64::from(shared.record.frame_bytes));
    let mut waiting = shared.fetcher.waiting.lock();
    for _ in 0..NEIGHBOURS {
        let next = FrameName { frame: run.first.frame + run.count, ..run.first };
        let Some((cache, key)) = shared.cached(next) else { return };
        if u64::from(next.frame) >= frames || waiting.contains_key(&next) || cache.contains(key) {
            return;
        }
        waiting.insert(next, Vec::new());
        run.count += 1;
        shared.tally.prefetched_frames.fetch_add(1, Ordering::Relaxed);
    }
}

fn get(shared: &Arc<Shared>, run: Run) {
    let Some(info) = shared.view().segments.get(run.first.sequence) else {
        return missing(shared, run, "the segment is not in the table of segments");
    };
    let frame_range = |frame| {
        raw_frame_range(u64::from(info.header_bytes), info.data_bytes, shared.record.frame_bytes, frame)
    };
    let start = frame_range(run.first.frame).start;
    let end = frame_range(run.first.frame + run.count - 1).end;
    let key = segment_key(shared.owner_of(run.first.sequence), u64::from(run.first.sequence));
    let asked = shared.clone();
    let get = want(key, Some(start..end), run.class);
    let tell = move |outcome: sawmill_store::Result<Bytes>| match outcome {
        Ok(bytes) => {
            asked.state.store_answered();
            open_frames(&asked, run, &info, &bytes);
        }
        Err(error) => match error.kind() {
            StoreErrorKind::NotFound => missing(&asked, run, &error.to_string()),
            StoreErrorKind::Damaged | StoreErrorKind::Invalid => {
                fail(&asked, run, ErrorKind::Corrupt, &error.to_string());
            }
            StoreErrorKind::Unavailable | StoreErrorKind::Denied | StoreErrorKind::Broken => {
                wait_for_store(&asked, run, &error.to_string());
            }
        },
    };
    shared.store.get(get, Box::new(tell));
}

/// The store cannot be asked: ask again in a while, as long as the volume is open.
fn wait_for_store(shared: &Arc<Shared>, run: Run, error: &str) {
    let now = shared.world.now();
    shared.state.store_failed(now, error.to_owned());
    // Looked at and forgotten under one lock: a reader that joins a prefetch must not share its failure.
    let nobody_waits = {
        let mut waiting = shared.fetcher.waiting.lock();
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
    if shared.state.refusal().is_some() {
        return fail(shared, run, ErrorKind::Unavailable, error);
    }
    let asked = shared.clone();
    shared.later.at(now + REPEAT_AFTER, Box::new(move || get(&asked, run)));
    shared.inbox.wake.ring();
}

/// Cuts the answer into frames, verifies each, hands them on. Damage is asked for once more before it is
/// believed.
fn open_frames(shared: &Arc<Shared>, run: Run, info: &SegmentInfo, bytes: &Bytes) {
    let mut at = 0usize;
    for name in run.frames() {
        let range = raw_frame_range(
            u64::from(info.header_bytes),
            info.data_bytes,
            shared.record.frame_bytes,
            name.frame,
        );
        let length = (range.end - range.start) as usize;
        let identity = FrameIdentity {
            volume_id: shared.owner_of(name.sequence),
            sequence: u64::from(name.sequence),
            epoch: info.epoch,
            frame: name.frame,
        };
        let opened = bytes.get(at..at + length).map(|part| frame_open(&identity, part));
        at += length;
        let one = Run { first: name, count: 1, again: true, ..run };
        match opened {
            Some(Ok(data)) => hand_over(shared, name, bytes.slice_ref(data)),
            Some(Err(error)) if run.again => fail(shared, one, ErrorKind::Corrupt, &error.to_string()),
            None if run.again => fail(shared, one, ErrorKind::Corrupt, "the object is too short"),
            _ => get(shared, one),
        }
    }
}

fn hand_over(shared: &Arc<Shared>, name: FrameName, data: Bytes) {
    if let Some((cache, key)) = shared.cached(name) {
        let (cache, kept) = (cache.clone(), data.clone());
        shared.pool.run_if_calm(move || cache.insert(key, &kept));
    }
    for waiter in take_waiters(shared, name) {
        waiter(Fetched::Frame(data.clone()));
    }
}

/// The volume ends: everybody who still waits is told.
pub(crate) fn fail_all(shared: &Shared, error: &Error) {
    let waiting = std::mem::take(&mut *shared.fetcher.waiting.lock());
    for waiter in waiting.into_values().flatten() {
        waiter(Fetched::Failed(error.clone()));
    }
}

fn take_waiters(shared: &Shared, name: FrameName) -> Vec<Waiter> {
    shared.fetcher.waiting.lock().remove(&name).unwrap_or_default()
}

/// The store said the object is not there. For a reader beside a writer that means: the writer has moved on.
fn missing(shared: &Arc<Shared>, run: Run, what: &str) {
    if let Some(cut) = &shared.fixed_cut {
        let what = format!("{what}; {cut} is no longer kept: open another one");
        return fail(shared, run, ErrorKind::NotFound, &what);
    }
    if !shared.read_only {
        return fail(shared, run, ErrorKind::Corrupt, what);
    }
    let (moved, view, what) = (shared.clone(), shared.view(), what.to_owned());
    let is_needed = move |shared: &Shared| {
        let info = shared.view().segments.get(run.first.sequence);
        info.is_some_and(|info| info.epoch == run.first.epoch && info.live_bytes > 0)
    };
    shared.pool.run(move || match crate::open::follow(&moved, &view) {
        // A cut read after the object was missed needs it too: it was not deleted, it is lost.
        Ok(true) if is_needed(&moved) => fail(&moved, run, ErrorKind::Corrupt, &what),
        Ok(_) => {
            for name in run.frames() {
                for waiter in take_waiters(&moved, name) {
                    waiter(Fetched::Gone);
                }
            }
        }
        Err(error) if matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Denied) => {
            wait_for_store(&moved, run, &error.to_string());
        }
        Err(error) => fail(&moved, run, error.kind(), &error.to_string()),
    });
}

fn fail(shared: &Shared, run: Run, kind: ErrorKind, what: &str) {
    let key = segment_key(shared.owner_of(run.first.sequence), u64::from(run.first.sequence));
    for name in run.frames() {
        let waiters = take_waiters(shared, name);
        let text = format!("{key}, frame {}: {what}", name.frame);
        if kind == ErrorKind::Corrupt && !waiters.is_empty() {
            tracing::error!("{text}; run `sawmill check`");
        }
        for waiter in waiters {
            waiter(Fetched::Failed(Error::new(kind, text.clone())));
        }
    }
}
