//! The bytes of a moved segment: from the journal, the read cache, or the store; verified; laid out in the
//! object's body, ready to be sealed.
//!
//! Runs on the collector's thread, of the lowest priority, and never waits for the store there: answers come
//! back to it as jobs. Invariants: a gathering counts as a read, so that nothing it looked up is deleted
//! under it; every byte is verified by its record's or its frame's checksum; it fails as a whole.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use parking_lot::Mutex;
use sawmill_format::segment::{
    ExtentKind, FRAME_HEAD_BYTES, FrameIdentity, Origin, SegmentExtent, encoded_len, frame_open,
    raw_frame_range, segment_key,
};
use sawmill_store::{Class, StoreErrorKind};

use super::sweep::Plan;
use crate::ask::want;
use crate::fetch::FrameName;
use crate::journal::{JournalRead, Reach};
use crate::limits;
use crate::map::MapExtent;
use crate::readers::Reading;
use crate::segment::buffers::{Buffer, Buffers};
use crate::segment::builder::body_spans;
use crate::segment::table::SegmentInfo;
use crate::shared::Shared;

/// The body of a moved segment, and what its header says of it.
pub(crate) struct Gathered {
    pub(crate) extents: Vec<SegmentExtent>,
    pub(crate) origins: Vec<Origin>,
    pub(crate) data_bytes: u64,
    pub(crate) header_bytes: usize,
    /// Room for the header, then the body: data in place, frames not sealed.
    pub(crate) buffer: Buffer,
    /// Frames with data that was cached before it moved: they are cached again afterwards.
    pub(crate) cached: Vec<bool>,
}

/// Why nothing was gathered.
pub(crate) enum NotGathered {
    /// Nothing of the plan is live any more.
    NothingLeft,
    /// The store cannot be asked now: the same pieces again, later.
    Unavailable { plan: Plan, why: String },
    /// A segment cannot be read: it is left alone.
    Damaged { sequence: u32, what: String },
}

/// How a gathering ended: with what is left of the plan.
pub(crate) type Outcome = Result<(Gathered, Plan), NotGathered>;

type Tell = Box<dyn FnOnce(Outcome) + Send>;

/// Where a run of data goes: `length` bytes from byte `offset` of a frame to `data_offset` of the new one.
struct Wanted {
    offset: u32,
    length: u32,
    data_offset: u64,
}

/// Consecutive frames of one segment, fetched by one request.
struct Run {
    sequence: u32,
    first: u32,
    count: u32,
    info: SegmentInfo,
    /// By frame, in order.
    wanted: Vec<(u32, Wanted)>,
}

/// A gathering that waits for the store.
struct Waiting {
    shared: Arc<Shared>,
    gathered: Mutex<Option<Gathered>>,
    left: AtomicUsize,
    failure: Mutex<Option<Failure>>,
    /// With what is left of the plan, and what is being gathered of it.
    end: Mutex<Option<(Tell, Plan, Vec<MapExtent>)>>,
    _reading: Reading,
}

enum Failure {
    Unavailable(String),
    Damaged(u32, String),
}

/// Gathers the next segment's worth of `plan`, on the collector's thread.
pub(crate) fn gather(shared: &Arc<Shared>, buffers: &Buffers, mut plan: Plan, tell: Tell) {
    let reading = shared.readers.enter();
    let view = shared.view();
    let bytes_max = u64::from(shared.record.segment_bytes);
    let pieces = plan.take_live(&view.map, bytes_max, limits::GC_EXTENTS_MAX);
    if pieces.is_empty() {
        return tell(Err(NotGathered::NothingLeft));
    }
    let mut gathered = lay_out(shared, buffers, &pieces);
    let mut absent: Vec<(u32, u32, Wanted)> = Vec::new();
    for (piece, extent) in pieces.iter().zip(gathered.extents.clone()) {
        copy_local(shared, &mut gathered, piece, u64::from(extent.data_offset), &mut absent);
    }
    let runs = runs_of(shared, absent);
    let runs = match runs {
        Ok(runs) => runs,
        Err(sequence) => {
            let what = "the map names it, and the table of segments does not".to_owned();
            return tell(Err(NotGathered::Damaged { sequence, what }));
        }
    };
    if runs.is_empty() {
        return tell(Ok((gathered, plan)));
    }
    let waiting = Arc::new(Waiting {
        shared: shared.clone(),
        gathered: Mutex::new(Some(gathered)),
        left: AtomicUsize::new(runs.len()),
        failure: Mutex::default(),
        end: Mutex::new(Some((tell, plan, pieces))),
        _reading: reading,
    });
    for run in runs {
        waiting.ask(run);
    }
}

/// What the header of a moved segment says of `pieces`, laid back to back: extents, their origins, bytes of
/// data.
pub(crate) fn contents_of(pieces: &[MapExtent]) -> (Vec<SegmentExtent>, Vec<Origin>, u64) {
    let (mut extents, mut origins) = (Vec::with_capacity(pieces.len()), Vec::with_capacity(pieces.len()));
    let mut data_bytes = 0;
    for piece in pieces {
        extents.push(SegmentExtent {
            address: piece.address,
            length: piece.length,
            data_offset: data_bytes as u32,
            kind: ExtentKind::Data,
        });
        origins.push(Origin { sequence: u64::from(piece.sequence), data_offset: piece.data_offset });
        data_bytes += piece.length;
    }
    (extents, origins, data_bytes)
}

/// A body with nothing in it yet.
fn lay_out(shared: &Shared, buffers: &Buffers, pieces: &[MapExtent]) -> Gathered {
    let (extents, origins, data_bytes) = contents_of(pieces);
    let frames = data_bytes.div_ceil(u64::from(shared.record.frame_bytes)) as usize;
    let header_bytes = encoded_len(extents.len(), frames, origins.len());
    let body_bytes = data_bytes as usize + frames * FRAME_HEAD_BYTES;
    let buffer = buffers.take(header_bytes + body_bytes);
    Gathered { extents, origins, data_bytes, header_bytes, buffer, cached: vec![false; frames] }
}

impl Gathered {
    /// Puts bytes at `data_offset` of the new segment's data.
    fn place(&mut self, frame_bytes: u32, data_offset: u64, mut bytes: &[u8]) {
        let body = &mut self.buffer.bytes_mut()[self.header_bytes..];
        for span in body_spans(frame_bytes, data_offset, bytes.len() as u64) {
            let (part, rest) = bytes.split_at(span.len());
            body[span].copy_from_slice(part);
            bytes = rest;
        }
    }

    fn note_cached(&mut self, frame_bytes: u32, data_offset: u64, length: u64) {
        let frame_bytes = u64::from(frame_bytes);
        let (first, last) = (data_offset / frame_bytes, (data_offset + length - 1) / frame_bytes);
        for frame in first..=last {
            self.cached[frame as usize] = true;
        }
    }
}

/// Copies what is in the journal or in the read cache, and notes what is not.
fn copy_local(
    shared: &Shared,
    gathered: &mut Gathered,
    piece: &MapExtent,
    data_offset: u64,
    absent: &mut Vec<(u32, u32, Wanted)>,
) {
    let frame_bytes = shared.record.frame_bytes;
    let mut done = 0;
    while done < piece.length {
        let from = piece.data_offset + done as u32;
        let resident = shared.residents.find(piece.sequence, from);
        let in_frame = u64::from(frame_bytes - from % frame_bytes);
        let available = resident.as_ref().map_or(in_frame, |(_, _, available)| *available);
        let length = available.min(piece.length - done);
        let mut bytes = vec![0; length as usize];
        let is_read = match (&resident, &shared.journal) {
            (Some((record, offset, _)), Some(journal)) => {
                matches!(journal.read(record, *offset, &mut bytes, Reach::Device), Ok(JournalRead::Done))
            }
            _ => false,
        };
        if is_read || (resident.is_none() && read_cache(shared, piece.sequence, from, &mut bytes)) {
            gathered.place(frame_bytes, data_offset + done, &bytes);
            gathered.note_cached(frame_bytes, data_offset + done, length);
        } else {
            want_frames(frame_bytes, piece.sequence, from, length, data_offset + done, absent);
        }
        done += length;
    }
}

fn read_cache(shared: &Shared, sequence: u32, from: u32, into: &mut [u8]) -> bool {
    let Some(info) = shared.view().segments.get(sequence) else { return false };
    let frame_bytes = shared.record.frame_bytes;
    let name = FrameName { sequence, epoch: info.epoch, frame: from / frame_bytes };
    let Some((cache, key)) = shared.cached(name) else { return false };
    cache.read(key, from % frame_bytes, into)
}

fn want_frames(
    frame_bytes: u32,
    sequence: u32,
    from: u32,
    length: u64,
    data_offset: u64,
    absent: &mut Vec<(u32, u32, Wanted)>,
) {
    let mut done = 0;
    while done < length {
        let at = from + done as u32;
        let part = u64::from(frame_bytes - at % frame_bytes).min(length - done);
        let wanted =
            Wanted { offset: at % frame_bytes, length: part as u32, data_offset: data_offset + done };
        absent.push((sequence, at / frame_bytes, wanted));
        done += part;
    }
}

/// Groups what is absent into requests; frames close to each other share one. Names a segment that the table
/// does not know.
fn runs_of(shared: &Shared, mut absent: Vec<(u32, u32, Wanted)>) -> Result<Vec<Run>, u32> {
    absent.sort_by_key(|(sequence, frame, wanted)| (*sequence, *frame, wanted.data_offset));
    let view = shared.view();
    let mut runs: Vec<Run> = Vec::new();
    for (sequence, frame, wanted) in absent {
        match runs.last_mut() {
            Some(run)
                if run.sequence == sequence
                    && frame <= run.first + run.count - 1 + limits::GC_GAP_FRAMES_MAX =>
            {
                run.count = frame - run.first + 1;
                run.wanted.push((frame, wanted));
            }
            _ => {
                let info = view.segments.get(sequence).ok_or(sequence)?;
                runs.push(Run { sequence, first: frame, count: 1, info, wanted: vec![(frame, wanted)] });
            }
        }
    }
    Ok(runs)
}

impl Waiting {
    fn ask(self: &Arc<Self>, run: Run) {
        let shared = &self.shared;
        let start = self.frame_range(&run, run.first).start;
        let end = self.frame_range(&run, run.first + run.count - 1).end;
        let key = segment_key(shared.record.volume_id, u64::from(run.sequence));
        let waiting = self.clone();
        let tell = move |outcome: sawmill_store::Result<Bytes>| {
            let collector = waiting.shared.collector.clone();
            collector.run(move || {
                if let Err(failure) = waiting.take(&run, outcome) {
                    waiting.failure.lock().get_or_insert(failure);
                }
                waiting.end_one();
            });
        };
        shared.store.get(want(key, Some(start..end), Class::Background), Box::new(tell));
    }

    fn frame_range(&self, run: &Run, frame: u32) -> std::ops::Range<u64> {
        let frame_bytes = self.shared.record.frame_bytes;
        raw_frame_range(u64::from(run.info.header_bytes), run.info.data_bytes, frame_bytes, frame)
    }

    /// Verifies the frames of an answer and puts what is wanted of them in place.
    fn take(&self, run: &Run, outcome: sawmill_store::Result<Bytes>) -> Result<(), Failure> {
        let damaged = |what: String| Failure::Damaged(run.sequence, what);
        let bytes = outcome.map_err(|error| match error.kind() {
            StoreErrorKind::NotFound | StoreErrorKind::Damaged | StoreErrorKind::Invalid => {
                damaged(error.to_string())
            }
            _ => Failure::Unavailable(error.to_string()),
        })?;
        let start = self.frame_range(run, run.first).start;
        let frame_bytes = self.shared.record.frame_bytes;
        let mut opened: Option<(u32, &[u8])> = None;
        for (frame, wanted) in &run.wanted {
            let data = match opened {
                Some((number, data)) if number == *frame => data,
                _ => {
                    let range = self.frame_range(run, *frame);
                    let part = bytes.get((range.start - start) as usize..(range.end - start) as usize);
                    let part = part.ok_or_else(|| damaged("the object is too short".into()))?;
                    let identity = FrameIdentity {
                        volume_id: self.shared.record.volume_id,
                        sequence: u64::from(run.sequence),
                        epoch: run.info.epoch,
                        frame: *frame,
                    };
                    frame_open(&identity, part).map_err(|error| damaged(error.to_string()))?
                }
            };
            opened = Some((*frame, data));
            let part = data.get(wanted.offset as usize..(wanted.offset + wanted.length) as usize);
            let part = part.ok_or_else(|| damaged(format!("frame {frame} is shorter than the map says")))?;
            if let Some(gathered) = &mut *self.gathered.lock() {
                gathered.place(frame_bytes, wanted.data_offset, part);
            }
        }
        Ok(())
    }

    fn end_one(&self) {
        if self.left.fetch_sub(1, Ordering::AcqRel) > 1 {
            return;
        }
        let Some((tell, mut plan, pieces)) = self.end.lock().take() else { return };
        let gathered = self.gathered.lock().take();
        tell(match (self.failure.lock().take(), gathered) {
            (None, Some(gathered)) => Ok((gathered, plan)),
            (Some(Failure::Damaged(sequence, what)), _) => Err(NotGathered::Damaged { sequence, what }),
            (Some(Failure::Unavailable(why)), _) => {
                plan.put_back(pieces);
                Err(NotGathered::Unavailable { plan, why })
            }
            (None, None) => Err(NotGathered::NothingLeft),
        });
    }
}
