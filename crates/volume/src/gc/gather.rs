//! The bytes of a moved segment: from the journal, the read cache, or the store; verified; laid out
//! in the object's body, ready to be sealed.
//!
//! Runs on the collector's thread, of the lowest priority, and never waits for the store there:
//! answers come back to it as jobs.
//!
//! Invariants: a gathering counts as a read, so that nothing it looked up is deleted under it;
//! every byte is verified by its record's or its frame's checksum; it fails as a whole.
//!
//! Not here: what is live (`sweep`), sealing the frames (`segment::builder`), and the put
//! (`engine::collect`, `engine::log_tail`).

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use parking_lot::Mutex;
use sawmill_format::segment::{
    ExtentKind, FRAME_HEAD_BYTES, FrameIdentity, Origin, SegmentExtent, encoded_bytes, frame_open,
    raw_frame_range, segment_key,
};
use sawmill_store::{Class, StoreError, StoreErrorKind};

use super::gathered::{GatherFailure, GatherOutcome, MovedSegment};
use super::sweep::MovePlan;
use crate::engine::context::Context;
use crate::journal::{JournalRead, Reach};
use crate::map::MapExtent;
use crate::readers::ReadGuard;
use crate::segment::buffers::Buffers;
use crate::segment::table::SegmentInfo;
use crate::store_calls::want;
use crate::stored_data::FrameName;
use crate::{Error, ErrorKind, limits};

type GatherCallback = Box<dyn FnOnce(GatherOutcome) + Send>;

/// Where a run of data goes: `length` bytes from byte `offset` of a frame to `data_offset` of the
/// new one.
struct FramePart {
    offset: u32,
    length: u32,
    data_offset: u64,
}

/// Consecutive frames of one segment, fetched by one request.
struct FrameRun {
    sequence: u32,
    first: u32,
    count: u32,
    info: SegmentInfo,
    /// By frame, in order.
    frame_parts: Vec<(u32, FramePart)>,
}

/// A gathering that waits for the store.
struct PendingGather {
    context: Arc<Context>,
    segment: Mutex<Option<MovedSegment>>,
    pending_runs: AtomicUsize,
    trouble: Mutex<Option<GatherTrouble>>,
    end: Mutex<Option<GatherEnd>>,
    _reading: ReadGuard,
}

/// What the last answer of the store needs to end a gathering.
struct GatherEnd {
    callback: GatherCallback,
    /// The rest of the plan.
    plan: MovePlan,
    /// The part of it that is being gathered.
    pieces: Vec<MapExtent>,
}

/// Why one run could not be gathered. The first of a gathering's troubles becomes its
/// [`GatherFailure`], together with the plan.
enum GatherTrouble {
    Unavailable(StoreError),
    Damaged(u32, Error),
}

/// Gathers the next segment's worth of `plan`, on the collector's thread.
pub(crate) fn gather(
    context: &Arc<Context>,
    buffers: &Buffers,
    mut plan: MovePlan,
    callback: GatherCallback,
) {
    let reading = context.stored.readers.enter();
    let view = context.stored.view();
    let bytes_max = u64::from(context.attachment.record.segment_bytes);
    let pieces = plan.take_live(&view.map, bytes_max, limits::GC_EXTENTS_MAX);
    if pieces.is_empty() {
        return callback(Err(GatherFailure::NothingLeft));
    }
    let mut gathered = lay_out(context, buffers, &pieces);
    let mut absent: Vec<(u32, u32, FramePart)> = Vec::new();
    for (piece, extent) in pieces.iter().zip(gathered.extents.clone()) {
        copy_local(context, &mut gathered, piece, u64::from(extent.data_offset), &mut absent);
    }
    let runs = runs_of(context, absent);
    let runs = match runs {
        Ok(runs) => runs,
        Err(sequence) => {
            let error = damaged("the map names it, and the table of segments does not");
            return callback(Err(GatherFailure::Damaged { sequence, error }));
        }
    };
    if runs.is_empty() {
        return callback(Ok((gathered, plan)));
    }
    let waiting = Arc::new(PendingGather {
        context: context.clone(),
        segment: Mutex::new(Some(gathered)),
        pending_runs: AtomicUsize::new(runs.len()),
        trouble: Mutex::default(),
        end: Mutex::new(Some(GatherEnd { callback, plan, pieces })),
        _reading: reading,
    });
    for run in runs {
        waiting.request_run(run);
    }
}

/// What the header of a moved segment records about `pieces`, laid back to back: extents, their
/// origins, bytes of data.
pub(crate) fn contents_of(pieces: &[MapExtent]) -> (Vec<SegmentExtent>, Vec<Origin>, u64) {
    let (mut extents, mut origins) =
        (Vec::with_capacity(pieces.len()), Vec::with_capacity(pieces.len()));
    let mut data_bytes = 0;
    for piece in pieces {
        extents.push(SegmentExtent {
            address: piece.address,
            length: piece.length,
            data_offset: data_bytes as u32,
            kind: ExtentKind::Data,
        });
        origins
            .push(Origin { sequence: u64::from(piece.sequence), data_offset: piece.data_offset });
        data_bytes += piece.length;
    }
    (extents, origins, data_bytes)
}

/// A body with nothing in it yet.
fn lay_out(context: &Context, buffers: &Buffers, pieces: &[MapExtent]) -> MovedSegment {
    let (extents, origins, data_bytes) = contents_of(pieces);
    let frames = data_bytes.div_ceil(u64::from(context.attachment.record.frame_bytes)) as usize;
    let header_bytes = encoded_bytes(extents.len(), frames, origins.len());
    let body_bytes = data_bytes as usize + frames * FRAME_HEAD_BYTES;
    let buffer = buffers.take(header_bytes + body_bytes);
    MovedSegment { extents, origins, data_bytes, header_bytes, buffer, cached: vec![false; frames] }
}

/// Copies what is in the journal or in the read cache, and notes what is not.
fn copy_local(
    context: &Context,
    segment: &mut MovedSegment,
    piece: &MapExtent,
    data_offset: u64,
    absent: &mut Vec<(u32, u32, FramePart)>,
) {
    let frame_bytes = context.attachment.record.frame_bytes;
    let mut done = 0;
    while done < piece.length {
        let from = piece.data_offset + done as u32;
        let resident = context.stored.residents.find(piece.sequence, from);
        let in_frame = u64::from(frame_bytes - from % frame_bytes);
        let available = resident.as_ref().map_or(in_frame, |(_, _, available)| *available);
        let length = available.min(piece.length - done);
        let mut bytes = vec![0; length as usize];
        let is_read = match (&resident, &context.journal) {
            (Some((record, offset, _)), Some(journal)) => {
                matches!(
                    journal.read(record, *offset, &mut bytes, Reach::Device),
                    Ok(JournalRead::Done)
                )
            }
            _ => false,
        };
        if is_read || (resident.is_none() && read_cache(context, piece.sequence, from, &mut bytes))
        {
            segment.place(frame_bytes, data_offset + done, &bytes);
            segment.note_cached(frame_bytes, data_offset + done, length);
        } else {
            want_frames(frame_bytes, piece.sequence, from, length, data_offset + done, absent);
        }
        done += length;
    }
}

fn read_cache(context: &Context, sequence: u32, from: u32, into: &mut [u8]) -> bool {
    let Some(info) = context.stored.view().segments.get(sequence) else { return false };
    let frame_bytes = context.attachment.record.frame_bytes;
    let name = FrameName { sequence, epoch: info.epoch, frame: from / frame_bytes };
    let Some((cache, key)) = context.stored.cached(name) else { return false };
    cache.read(key, from % frame_bytes, into)
}

fn want_frames(
    frame_bytes: u32,
    sequence: u32,
    from: u32,
    length: u64,
    data_offset: u64,
    absent: &mut Vec<(u32, u32, FramePart)>,
) {
    let mut done = 0;
    while done < length {
        let at = from + done as u32;
        let part_bytes = u64::from(frame_bytes - at % frame_bytes).min(length - done);
        let part = FramePart {
            offset: at % frame_bytes,
            length: part_bytes as u32,
            data_offset: data_offset + done,
        };
        absent.push((sequence, at / frame_bytes, part));
        done += part_bytes;
    }
}

/// Groups what is absent into requests; frames close to each other share one. Names a segment that
/// the table does not know.
fn runs_of(
    context: &Context,
    mut absent: Vec<(u32, u32, FramePart)>,
) -> Result<Vec<FrameRun>, u32> {
    absent.sort_by_key(|(sequence, frame, part)| (*sequence, *frame, part.data_offset));
    let view = context.stored.view();
    let mut runs: Vec<FrameRun> = Vec::new();
    for (sequence, frame, part) in absent {
        match runs.last_mut() {
            Some(run)
                if run.sequence == sequence
                    && frame <= run.first + run.count - 1 + limits::GC_GAP_FRAMES_MAX =>
            {
                run.count = frame - run.first + 1;
                run.frame_parts.push((frame, part));
            }
            _ => {
                let info = view.segments.get(sequence).ok_or(sequence)?;
                runs.push(FrameRun {
                    sequence,
                    first: frame,
                    count: 1,
                    info,
                    frame_parts: vec![(frame, part)],
                });
            }
        }
    }
    Ok(runs)
}

impl PendingGather {
    fn request_run(self: &Arc<Self>, run: FrameRun) {
        let context = &self.context;
        let start = self.frame_range(&run, run.first).start;
        let end = self.frame_range(&run, run.first + run.count - 1).end;
        let key = segment_key(context.attachment.record.volume_id, u64::from(run.sequence));
        let waiting = self.clone();
        let callback = move |outcome: sawmill_store::Result<Bytes>| {
            let collector = waiting.context.collector.clone();
            collector.run(move || {
                if let Err(trouble) = waiting.take(&run, outcome) {
                    waiting.trouble.lock().get_or_insert(trouble);
                }
                waiting.end_one();
            });
        };
        context
            .attachment
            .store
            .get(want(key, Some(start..end), Class::Background), Box::new(callback));
    }

    fn frame_range(&self, run: &FrameRun, frame: u32) -> std::ops::Range<u64> {
        let frame_bytes = self.context.attachment.record.frame_bytes;
        raw_frame_range(u64::from(run.info.header_bytes), run.info.data_bytes, frame_bytes, frame)
    }

    /// Verifies the frames of an answer and puts what is wanted of them in place.
    fn take(
        &self,
        run: &FrameRun,
        outcome: sawmill_store::Result<Bytes>,
    ) -> Result<(), GatherTrouble> {
        let of_segment = |error: Error| GatherTrouble::Damaged(run.sequence, error);
        let bytes = outcome.map_err(|error| match error.kind() {
            StoreErrorKind::NotFound | StoreErrorKind::Damaged | StoreErrorKind::Invalid => {
                of_segment(damaged(error.to_string()).with_source(error))
            }
            _ => GatherTrouble::Unavailable(error),
        })?;
        let start = self.frame_range(run, run.first).start;
        let frame_bytes = self.context.attachment.record.frame_bytes;
        let mut opened: Option<(u32, &[u8])> = None;
        for (frame, part) in &run.frame_parts {
            let data = match opened {
                Some((number, data)) if number == *frame => data,
                _ => {
                    let range = self.frame_range(run, *frame);
                    let part =
                        bytes.get((range.start - start) as usize..(range.end - start) as usize);
                    let part = part.ok_or_else(|| of_segment(damaged("it is too short")))?;
                    let identity = FrameIdentity {
                        volume_id: self.context.attachment.record.volume_id,
                        sequence: u64::from(run.sequence),
                        epoch: run.info.epoch,
                        frame: *frame,
                    };
                    frame_open(&identity, part).map_err(|error| {
                        of_segment(damaged(error.to_string()).with_source(error))
                    })?
                }
            };
            opened = Some((*frame, data));
            let bytes = data.get(part.offset as usize..(part.offset + part.length) as usize);
            let bytes = bytes.ok_or_else(|| {
                of_segment(damaged(format!("frame {frame} is shorter than the map says")))
            })?;
            if let Some(gathered) = &mut *self.segment.lock() {
                gathered.place(frame_bytes, part.data_offset, bytes);
            }
        }
        Ok(())
    }

    fn end_one(&self) {
        if self.pending_runs.fetch_sub(1, Ordering::AcqRel) > 1 {
            return;
        }
        let Some(GatherEnd { callback, mut plan, pieces }) = self.end.lock().take() else { return };
        let gathered = self.segment.lock().take();
        callback(match (self.trouble.lock().take(), gathered) {
            (None, Some(gathered)) => Ok((gathered, plan)),
            (Some(GatherTrouble::Damaged(sequence, error)), _) => {
                Err(GatherFailure::Damaged { sequence, error })
            }
            (Some(GatherTrouble::Unavailable(error)), _) => {
                plan.put_back(pieces);
                Err(GatherFailure::Unavailable { plan, error })
            }
            (None, None) => Err(GatherFailure::NothingLeft),
        });
    }
}

/// What is wrong with a segment.
fn damaged(what: impl Into<Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::Corrupt, what)
}
