//! Reading ahead: reads that follow each other, forward, backward or at equal steps, get what comes
//! next fetched before they ask.
//!
//! How far ahead depends on the reader and on the store. A stream begins with little. Each time its
//! reader has to wait for the store, the distance doubles, up to what fills the way to the store
//! (`pipe`) and to `ahead_bytes`. A reader that never waits gets enough for long requests, and no
//! more.
//!
//! Invariants: a stream asks for each range once, at most its window beyond its reader and never
//! outside the volume. At most `ahead_bytes` are in flight ahead of all readers. Reads that follow
//! no other fetch nothing.
//!
//! Not here: frames that follow in the same segment, whatever their addresses (`fetch` takes them
//! along), and what arrived before its reader (`landed`).

use std::collections::HashSet;
use std::sync::Arc;

use parking_lot::Mutex;

use super::ReadContext;
use super::fetch::{self, AheadRoom, Purpose, Waiter};
use super::{ReadSource, resolve};
use crate::counters::add;
use crate::limits;
use crate::stored_data::FrameName;

/// Readers told apart.
const STREAMS_MAX: usize = 16;
/// Reads in a row before anything is fetched ahead: so many follow the first.
const ROW_MIN: u32 = 2;
/// The same at steps: two random reads make a step, and a third one rarely has it.
const STEPS_MIN: u32 = 3;
/// After so many reads in a row, one of the next so many may come first.
const NEAR_ROW_MIN: u32 = 8;
const NEAR_READS_MAX: u64 = 8;
/// A stream is over when so many reads of others have come since its last one.
const READS_SINCE_MAX: u32 = 64;
/// Reads further apart than this are no steps.
const STEP_BYTES_MAX: u64 = 16 << 20;
/// Ranges fetched ahead of a reader that goes by steps.
const RANGES_MAX: u64 = 64;
/// What a long stream gets, whatever is known of the store.
const WINDOW_BYTES_MIN: u64 = 1 << 20;
/// Addresses looked at for one hint, and of these at once.
const HINT_BYTES_MAX: u64 = 1 << 30;
const HINT_STEP_BYTES: u64 = 4 << 20;
/// Frames that nobody wants, between two that are wanted, fetched along to save a request.
const GAP_FRAMES_MAX: u32 = limits::GC_GAP_FRAMES_MAX;

/// How one read of a stream leads to the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Course {
    Forward,
    Backward,
    /// This far from the start of one read to the start of the next.
    Steps(i64),
}

/// A read, as a stream sees it.
#[derive(Clone, Copy)]
pub(super) struct ReadSpan {
    pub(super) address: u64,
    pub(super) length: u64,
    /// Whether it has to wait for the store.
    pub(super) waits: bool,
}

impl ReadSpan {
    fn end(self) -> u64 {
        self.address + self.length
    }
}

#[derive(Clone, Copy)]
struct Stream {
    last: ReadSpan,
    /// None after one read.
    course: Option<Course>,
    /// Reads that followed the first, and the bytes of all.
    row: u32,
    row_bytes: u64,
    window_bytes: u64,
    /// Reads of others since its last one.
    reads_since: u32,
    /// How far is asked for. Forward: the end of it; backward: its beginning; by steps: where the
    /// last range begins.
    asked_to: u64,
}

impl Stream {
    fn new(read: ReadSpan) -> Self {
        Stream {
            last: read,
            course: None,
            row: 0,
            row_bytes: read.length,
            window_bytes: 0,
            reads_since: 0,
            asked_to: 0,
        }
    }

    /// Whether something is fetched ahead of it, and its reader still goes on.
    fn is_read(&self) -> bool {
        self.window_bytes > 0 && self.reads_since <= READS_SINCE_MAX
    }

    /// The course on which a read follows the last one.
    fn course_to(&self, read: ReadSpan) -> Option<Course> {
        let is_or = |course: Course| self.is_open() || self.course == Some(course);
        // Requests of several queues arrive somewhat out of order. Random reads of a small volume
        // come near a short row, too.
        let near_bytes = NEAR_READS_MAX * read.length.min(self.last.length);
        let is_near =
            self.row >= NEAR_ROW_MIN && read.address.abs_diff(self.last.end()) <= near_bytes;
        if is_or(Course::Forward) && (read.address == self.last.end() || is_near) {
            return Some(Course::Forward);
        }
        if is_or(Course::Backward) && read.end() == self.last.address {
            return Some(Course::Backward);
        }
        self.course.filter(|course| *course == Course::Steps(self.step_to(read)))
    }

    fn step_to(&self, read: ReadSpan) -> i64 {
        read.address as i64 - self.last.address as i64
    }

    /// Whether too little is known of it to hold on to a course: any two reads make a step.
    fn is_open(&self) -> bool {
        match self.course {
            None => true,
            Some(Course::Steps(_)) => self.row == 1,
            Some(_) => false,
        }
    }

    /// Whether this could be the first two reads of some steps.
    fn may_step_to(&self, read: ReadSpan) -> bool {
        let step = self.step_to(read);
        self.is_open() && step != 0 && step.unsigned_abs() <= STEP_BYTES_MAX
    }

    /// Goes on with a read, and returns what to fetch ahead of it.
    fn go_on(&mut self, read: ReadSpan, course: Course, bounds: Bounds) -> Vec<(u64, u64)> {
        if self.course != Some(course) {
            *self = Stream { course: Some(course), row: 0, asked_to: read.address, ..*self };
        }
        let is_next = course != Course::Forward || read.address == self.last.end();
        // What arrives out of order lies before a later one.
        let is_later = course != Course::Forward || read.end() > self.last.end();
        self.last = if is_later { read } else { self.last };
        (self.row, self.reads_since) = (self.row + 1, 0);
        self.row_bytes += read.length;
        let row_min = if matches!(course, Course::Steps(_)) { STEPS_MIN } else { ROW_MIN };
        if self.row < row_min {
            return Vec::new();
        }
        self.window_bytes = match (self.window_bytes, read.waits && is_next) {
            (0, _) => 2 * self.row_bytes,
            (window_bytes, true) => 2 * window_bytes,
            (window_bytes, false) => window_bytes,
        }
        // A long row gets long requests, even if its reader never waits.
        .max(self.row_bytes.min(WINDOW_BYTES_MIN))
        // Requests that come in one burst double it before anything fetched could help them: the
        // reader may get no more than twice what it has shown to want.
        .min(2 * self.row_bytes)
        .min(bounds.pipe_bytes);
        self.ahead(course, bounds)
    }

    /// What to fetch, so that the window ahead of the last read is asked for. Nothing while most of
    /// it is, so that requests stay long.
    fn ahead(&mut self, course: Course, bounds: Bounds) -> Vec<(u64, u64)> {
        let Bounds { size_bytes, room_bytes, .. } = bounds;
        let Stream { last, window_bytes, .. } = *self;
        let least_bytes = (window_bytes / 2).clamp(1, limits::RUN_BYTES_MAX);
        match course {
            Course::Forward => {
                let from = self.asked_to.max(last.end());
                let to = last.end().saturating_add(window_bytes).min(size_bytes);
                let to = to.min(from.saturating_add(room_bytes));
                if from >= to || to - from < least_bytes.min(size_bytes - from) {
                    return Vec::new();
                }
                self.asked_to = to;
                vec![(from, to - from)]
            }
            Course::Backward => {
                let end = self.asked_to.min(last.address);
                let from = last.address.saturating_sub(window_bytes);
                let from = from.max(end.saturating_sub(room_bytes));
                if from >= end || end - from < least_bytes.min(end) {
                    return Vec::new();
                }
                self.asked_to = from;
                vec![(from, end - from)]
            }
            Course::Steps(step) => self.steps_ahead(step, bounds),
        }
    }

    fn steps_ahead(&mut self, step: i64, bounds: Bounds) -> Vec<(u64, u64)> {
        let Stream { last, window_bytes, .. } = *self;
        let ranges = |bytes: u64| (bytes / last.length.max(1)).min(RANGES_MAX) as i64;
        let wanted = ranges(window_bytes).max(1);
        // As far as the ranges before this read reached.
        let asked = ((self.asked_to as i64 - last.address as i64) / step).clamp(0, wanted);
        let room = ranges(bounds.room_bytes).min(wanted - asked);
        if room * 2 < wanted {
            return Vec::new();
        }
        let starts = (asked + 1..=asked + room).map(|number| last.address as i64 + number * step);
        let fits = |start: &i64| *start >= 0 && *start as u64 + last.length <= bounds.size_bytes;
        let ranges: Vec<_> = starts.filter(fits).map(|at| (at as u64, last.length)).collect();
        self.asked_to = ranges.last().map_or(self.asked_to, |range| range.0);
        ranges
    }
}

/// What bounds all streams at this moment.
#[derive(Clone, Copy)]
struct Bounds {
    /// So many fill the way to the store.
    pipe_bytes: u64,
    /// So many may be asked for now.
    room_bytes: u64,
    size_bytes: u64,
}

/// The readers seen lately, newest last.
pub(crate) struct Streams {
    streams: Mutex<Vec<Stream>>,
    ahead_bytes: u64,
}

impl Streams {
    pub(crate) fn new(ahead_bytes: u64) -> Self {
        Streams { streams: Mutex::default(), ahead_bytes }
    }

    /// Notes a read and returns the ranges to fetch ahead.
    #[cfg(test)]
    fn note(&self, read: ReadSpan, bounds: Bounds) -> Vec<(u64, u64)> {
        self.note_in(&mut self.streams.lock(), read, bounds)
    }

    fn note_in(
        &self,
        streams: &mut Vec<Stream>,
        read: ReadSpan,
        mut bounds: Bounds,
    ) -> Vec<(u64, u64)> {
        if self.ahead_bytes == 0 || read.length == 0 {
            return Vec::new();
        }
        for stream in streams.iter_mut() {
            stream.reads_since = stream.reads_since.saturating_add(1);
        }
        let found = streams
            .iter()
            .enumerate()
            .rev()
            .find_map(|(index, stream)| Some((index, stream.course_to(read)?)));
        let found = found.or_else(|| {
            let index = streams.iter().rposition(|stream| stream.may_step_to(read))?;
            Some((index, Course::Steps(streams[index].step_to(read))))
        });
        let Some((index, course)) = found else {
            if streams.len() == STREAMS_MAX {
                streams.remove(0);
            }
            streams.push(Stream::new(read));
            return Vec::new();
        };
        let mut stream = streams.remove(index);
        // All windows together fit the memory in which they wait for their readers.
        let others = streams.iter().filter(|other| other.is_read()).count() as u64;
        bounds.pipe_bytes = bounds.pipe_bytes.min(self.ahead_bytes / (1 + others));
        let ranges = stream.go_on(read, course, bounds);
        streams.push(stream);
        ranges
    }
}

/// Notes a read that touched stored data, and fetches ahead of it if it is one of a row.
pub(super) fn note(context: &Arc<ReadContext>, read: ReadSpan) {
    let (fetcher, ahead_bytes) = (&context.fetcher, context.streams.ahead_bytes);
    let size_bytes = context.attachment.geometry.now().size_bytes;
    let pipe_bytes = fetcher.pipe.bytes().max(WINDOW_BYTES_MIN);
    let (ranges, room) = {
        let mut streams = context.streams.streams.lock();
        let room_bytes = fetcher.room_ahead(ahead_bytes, pipe_bytes);
        let bounds = Bounds { pipe_bytes, room_bytes, size_bytes };
        let ranges = context.streams.note_in(&mut streams, read, bounds);
        if ranges.is_empty() {
            return;
        }
        // Under the lock: two readers do not take the same room.
        let bytes = ranges.iter().map(|(_, length)| length).sum();
        let room = fetcher.take_room(bytes, ahead_bytes);
        (ranges, room)
    };
    let frames_max = ahead_bytes / u64::from(context.attachment.record.frame_bytes);
    let wanted = wanted_frames(context, &ranges, frames_max as usize);
    fetch_ahead(context, wanted.frames, room);
}

/// Fetches the stored frames of a range that are not cached, in the background, if there is a cache
/// for them: as many as there is room for. What is left out is counted.
pub(super) fn fetch_hinted(context: &Arc<ReadContext>, address: u64, length: u64) {
    let ahead_bytes = context.streams.ahead_bytes;
    let hinted_bytes = length.min(HINT_BYTES_MAX);
    let mut is_cut = hinted_bytes < length || !context.stored.has_cache();
    if context.stored.has_cache() {
        let room = context.fetcher.take_room(ahead_bytes, ahead_bytes);
        let frames_max = room.bytes / u64::from(context.attachment.record.frame_bytes);
        let (mut wanted, end) = (HashSet::new(), address + hinted_bytes);
        // In steps: a map may have an extent for each byte.
        for at in (address..end).step_by(HINT_STEP_BYTES as usize) {
            let step = (at, HINT_STEP_BYTES.min(end - at));
            // One too many shows that some are left out.
            let found = wanted_frames(context, &[step], frames_max as usize + 1);
            // A hint is answered at once: it does not wait until a map is loaded.
            is_cut |= found.lacks_map;
            wanted.extend(found.frames);
            if wanted.len() > frames_max as usize {
                is_cut = true;
                break;
            }
        }
        fetch_ahead(context, wanted, room);
    }
    add(&context.attachment.counters.prefetches_cut, u64::from(is_cut));
}

/// What is to be fetched of some ranges.
#[derive(Default)]
struct WantedFrames {
    frames: HashSet<FrameName>,
    /// The map of a part of them is not loaded.
    lacks_map: bool,
}

/// The stored frames of ranges that are not here, `frames_max` of them at most.
fn wanted_frames(
    context: &Arc<ReadContext>,
    ranges: &[(u64, u64)],
    frames_max: usize,
) -> WantedFrames {
    let mut wanted = WantedFrames::default();
    for (address, length) in ranges {
        for piece in resolve(context, *address, *length) {
            wanted.lacks_map |= matches!(piece.source, ReadSource::Unloaded);
            let ReadSource::Frame { name, .. } = piece.source else { continue };
            if wanted.frames.len() < frames_max && !is_here(context, name) {
                wanted.frames.insert(name);
            }
        }
    }
    wanted
}

/// Fetches frames in the background, as many as there is room for.
fn fetch_ahead(context: &Arc<ReadContext>, wanted: HashSet<FrameName>, mut room: AheadRoom) {
    let ahead_bytes = context.streams.ahead_bytes;
    let frame_bytes = u64::from(context.attachment.record.frame_bytes);
    let frames_max = (ahead_bytes / frame_bytes) as usize;
    let mut wanted: Vec<FrameName> = wanted.into_iter().collect();
    wanted.sort_unstable_by_key(|name| (name.sequence, name.frame));
    let mut frames: Vec<(FrameName, Option<Waiter>)> = Vec::with_capacity(wanted.len());
    for name in wanted {
        if let Some((before, _)) = frames.last()
            && before.sequence == name.sequence
            && name.frame - before.frame <= GAP_FRAMES_MAX + 1
        {
            let between = before.frame + 1..name.frame;
            let between = between.map(|frame| FrameName { frame, ..name });
            let gap: Vec<FrameName> = between
                .filter(|name| frames.len() < frames_max && !is_here(context, *name))
                .collect();
            frames.extend(gap.into_iter().map(|name| (name, None)));
        }
        frames.push((name, None));
    }
    // More than the ranges have bytes: frames that are wanted in part, and gaps.
    room.grow_to(frames.len() as u64 * frame_bytes, ahead_bytes);
    frames.truncate((room.bytes / frame_bytes) as usize);
    add(&context.attachment.counters.prefetched_frames, frames.len() as u64);
    fetch::fetch(context, frames, Purpose::Ahead);
}

/// Whether a frame need not be fetched, or is being fetched already.
fn is_here(context: &ReadContext, name: FrameName) -> bool {
    context.stored.cached(name).is_some_and(|(cache, key)| cache.contains(key))
        || context.fetcher.has(name)
}

#[cfg(test)]
mod tests;
