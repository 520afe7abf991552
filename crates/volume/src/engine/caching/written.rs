//! What was written stays local: the data of each sealed segment enters the read cache, so that it
//! is there when the journal's space is used again.
//!
//! Its frames come from the memory that the segment is put from. Where writers are faster than the
//! cache's disk, a segment waits for its turn; when its memory is gone by then, its data is read
//! back from the journal, and when its journal space is gone too, it is left out and counted.
//! Streams pass by: long runs of addresses that were written together are read together as well,
//! and reading ahead (`read::ahead`) fetches them as fast as the store sends.
//!
//! Invariants: nobody waits for an insertion, neither writers nor the journal's trim; at most
//! [`limits::SEGMENTS_CACHING_MAX`] segments are in memory for it. Frames are named by the epoch
//! that sealed them, so those of a segment that never reached the store are never looked up.
//!
//! Not here: moved segments (`moved`), which frames the cache keeps (`cache`), and reading
//! from the journal what is not in the cache yet (`segment::resident`).

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use sawmill_format::segment::{ExtentKind, SegmentHeader, SegmentKind};

use super::moved::frames_of;
use crate::cache::FillRoom;
use crate::counters::add;
use crate::engine::context::Context;
use crate::engine::log_tail::LogTail;
use crate::engine::messages::Event;
use crate::journal::{Journal, JournalRead, Reach};
use crate::limits;
use crate::segment::buffers::Buffers;
use crate::segment::resident::ResidentPiece;
use crate::stored_data::{FrameName, StoredData};

/// A sealed segment whose data is not in the read cache yet.
struct WaitingSegment {
    sequence: u64,
    /// Which of its frames are to enter, and how many bytes they have.
    wanted: Vec<bool>,
    wanted_bytes: u64,
}

/// Written data on its way into the read cache.
pub(in crate::engine) struct CacheWrites {
    /// By sequence. Bounded by the segments in flight and those whose data is still in the journal.
    waiting: VecDeque<WaitingSegment>,
    /// Segments below this one were seen.
    next_sequence: u64,
    /// How many are being inserted.
    inserting: usize,
}

impl CacheWrites {
    pub(in crate::engine) fn new(next_sequence: u64) -> Self {
        CacheWrites { waiting: VecDeque::new(), next_sequence, inserting: 0 }
    }

    /// Starts the next insertions. To be called after segments were sealed, before their puts can
    /// be answered.
    pub(in crate::engine) fn step(&mut self, context: &Arc<Context>, log: &LogTail) {
        if !context.stored.has_cache() {
            return;
        }
        self.take_sealed(context, log);
        self.drop_given_up(context, log);
        while self.inserting < limits::SEGMENTS_CACHING_MAX
            && let Some(insertion) = self.next(context, log)
        {
            self.inserting += 1;
            context.cache_filler.run(move || insertion.run());
        }
    }

    /// An insertion has ended.
    pub(in crate::engine) fn handle_cached(
        &mut self,
        context: &Context,
        wanted_bytes: u64,
        cached_bytes: u64,
    ) {
        self.inserting -= 1;
        let counters = &context.attachment.counters;
        add(&counters.written_cached_bytes, cached_bytes);
        add(&counters.written_uncached_bytes, wanted_bytes - cached_bytes);
    }

    fn take_sealed(&mut self, context: &Context, log: &LogTail) {
        let frame_bytes = context.attachment.record.frame_bytes;
        let stream_bytes = u64::from(context.attachment.record.segment_bytes / 2);
        let stream_bytes = stream_bytes.min(limits::STREAM_BYTES);
        let first = log.uploads.partition_point(|upload| upload.sequence() < self.next_sequence);
        for upload in log.uploads.range(first..) {
            if upload.header.kind == SegmentKind::Data {
                let wanted = frames_beside_streams(&upload.header, frame_bytes, stream_bytes);
                let wanted_bytes = bytes_of(&wanted, &upload.header, frame_bytes);
                if wanted_bytes > 0 {
                    let sequence = upload.sequence();
                    self.waiting.push_back(WaitingSegment { sequence, wanted, wanted_bytes });
                }
            }
        }
        self.next_sequence = log.next_sequence();
    }

    /// Leaves out what is no longer in the journal. The oldest is always given up first.
    fn drop_given_up(&mut self, context: &Context, log: &LogTail) {
        while let Some(segment) = self.waiting.front()
            && segment.sequence <= log.stored_sequence()
            && context.stored.residents.pieces(segment.sequence as u32).is_none()
        {
            if is_needed(&context.stored, segment.sequence) {
                add(&context.attachment.counters.written_uncached_bytes, segment.wanted_bytes);
            }
            self.waiting.pop_front();
        }
    }

    /// The next to insert: the oldest segment whose object is still in memory, or else the oldest
    /// that is only in the journal. None if other volumes have taken all memory for that: what
    /// waits is looked at again when something else happens.
    fn next(&mut self, context: &Arc<Context>, log: &LogTail) -> Option<Insertion> {
        let in_memory = log.uploads.iter().filter(|upload| !upload.object.is_empty());
        for upload in in_memory {
            let by_sequence = |segment: &WaitingSegment| segment.sequence;
            if let Ok(at) = self.waiting.binary_search_by_key(&upload.sequence(), by_sequence) {
                let (header, object) = upload.contents();
                let room = context.stored.fill_room(object.len() as u64)?;
                let segment = self.waiting.remove(at)?;
                let frames = frames_of(header, object, &segment.wanted);
                let data = WrittenData::Frames { epoch: header.epoch, frames };
                return Some(Insertion::new(context, segment, data, room));
            }
        }
        self.next_in_journal(context, log)
    }

    /// None while a segment is in flight: the disk then has writes of users to take, and what is in
    /// memory comes first.
    fn next_in_journal(&mut self, context: &Arc<Context>, log: &LogTail) -> Option<Insertion> {
        if !log.uploads.is_empty() {
            return None;
        }
        while let Some(segment) =
            self.waiting.pop_front_if(|segment| segment.sequence <= log.stored_sequence())
        {
            if !is_needed(&context.stored, segment.sequence) {
                continue;
            }
            let pieces = context.stored.residents.pieces(segment.sequence as u32);
            let Some(pieces) = pieces.filter(|pieces| is_worth_reading(&segment, pieces)) else {
                add(&context.attachment.counters.written_uncached_bytes, segment.wanted_bytes);
                continue;
            };
            let positions = positions_of(&pieces);
            let Some(room) = context.stored.fill_room(positions.end - positions.start) else {
                self.waiting.push_front(segment);
                return None;
            };
            let data = WrittenData::Journal { pieces, buffers: log.buffers.clone() };
            return Some(Insertion::new(context, segment, data, room));
        }
        None
    }
}

/// For each frame of a segment, whether it is to enter the cache: one that lies within a stream is
/// not.
fn frames_beside_streams(header: &SegmentHeader, frame_bytes: u32, stream_bytes: u64) -> Vec<bool> {
    let mut wanted = vec![true; header.frames.len()];
    let mut leave_out = |run: Range<u64>| {
        if run.end - run.start >= stream_bytes {
            let is_last = run.end == header.data_bytes;
            let first = run.start.div_ceil(u64::from(frame_bytes)) as usize;
            let end = (run.end / u64::from(frame_bytes) + u64::from(is_last)) as usize;
            let end = end.min(wanted.len());
            wanted[first.min(end)..end].fill(false);
        }
    };
    let (mut run, mut next_address) = (0..0, 0);
    for extent in header.extents.iter().filter(|extent| extent.kind == ExtentKind::Data) {
        let offset = u64::from(extent.data_offset);
        if extent.address != next_address || offset != run.end {
            leave_out(run);
            run = offset..offset;
        }
        run.end += extent.length;
        next_address = extent.address + extent.length;
    }
    leave_out(run);
    wanted
}

/// Bytes of these frames.
fn bytes_of(wanted: &[bool], header: &SegmentHeader, frame_bytes: u32) -> u64 {
    let starts = (0..header.data_bytes).step_by(frame_bytes as usize);
    let wanted = starts.zip(wanted).filter(|(_, wanted)| **wanted);
    wanted.map(|(start, _)| u64::from(frame_bytes).min(header.data_bytes - start)).sum()
}

/// Whether a stored segment still has live data.
fn is_needed(stored: &StoredData, sequence: u64) -> bool {
    stored.view().segments.get(sequence as u32).is_some_and(|info| info.live_bytes > 0)
}

/// Small records that were flushed one by one take far more of the journal than they hold.
fn is_worth_reading(segment: &WaitingSegment, pieces: &[ResidentPiece]) -> bool {
    let positions = positions_of(pieces);
    positions.end - positions.start <= segment.wanted_bytes * limits::READ_BACK_WASTE_MAX
}

/// Where the records of these pieces begin and end.
fn positions_of(pieces: &[ResidentPiece]) -> Range<u64> {
    let records = || pieces.iter().map(|piece| &piece.record);
    let start = records().map(|record| record.position).min().unwrap_or(0);
    start..records().map(|record| record.end()).max().unwrap_or(start)
}

/// Where the data of a segment comes from.
enum WrittenData {
    /// The frames that are wanted, from its object.
    Frames { epoch: u64, frames: Vec<(u32, Bytes)> },
    /// Nothing is in memory any more.
    Journal { pieces: Arc<[ResidentPiece]>, buffers: Buffers },
}

/// One segment on its way into the cache, on the filler's thread. Tells the engine when it is
/// dropped.
struct Insertion {
    context: Arc<Context>,
    segment: WaitingSegment,
    data: Option<WrittenData>,
    cached_bytes: u64,
    room: Option<FillRoom>,
}

impl Drop for Insertion {
    fn drop(&mut self) {
        // First: the engine takes room for the next one as soon as it is told.
        drop((self.data.take(), self.room.take()));
        let (wanted_bytes, cached_bytes) = (self.segment.wanted_bytes, self.cached_bytes);
        self.context.mailbox.push_event(Event::Cached { wanted_bytes, cached_bytes });
    }
}

impl Insertion {
    fn new(
        context: &Arc<Context>,
        segment: WaitingSegment,
        data: WrittenData,
        room: FillRoom,
    ) -> Self {
        let (context, data, room) = (context.clone(), Some(data), Some(room));
        Insertion { context, segment, data, cached_bytes: 0, room }
    }

    fn run(mut self) {
        match self.data.take() {
            Some(WrittenData::Frames { epoch, frames }) => {
                for (frame, data) in &frames {
                    self.insert(epoch, *frame, data);
                }
            }
            Some(WrittenData::Journal { pieces, buffers }) => {
                let context = self.context.clone();
                if let Some(journal) = &context.journal {
                    self.read_back(journal, &buffers, &pieces);
                }
            }
            None => {}
        }
    }

    /// Inserts one frame. Once the volume is closing, nothing: its close waits for this thread.
    fn insert(&mut self, epoch: u64, frame: u32, data: &[u8]) {
        if self.context.attachment.state.refusal().is_some() {
            return;
        }
        let name = FrameName { sequence: self.segment.sequence as u32, epoch, frame };
        let Some((cache, key)) = self.context.stored.cached(name) else { return };
        cache.insert(key, data);
        self.cached_bytes += if cache.contains(key) { data.len() as u64 } else { 0 };
    }

    /// Reads the data back from the journal, frame by frame, until its space is used again or
    /// cannot be read.
    fn read_back(&mut self, journal: &Journal, buffers: &Buffers, pieces: &[ResidentPiece]) {
        let (context, positions) = (self.context.clone(), positions_of(pieces));
        let view = context.stored.view();
        let Some(info) = view.segments.get(self.segment.sequence as u32) else { return };
        if context.attachment.state.refusal().is_some() {
            return;
        }
        let Ok(back) = journal.read_back(positions.start, positions.end, buffers) else { return };
        let reach = back.as_ref().map_or(Reach::Device, Reach::ReadBack);
        let frame_bytes = context.attachment.record.frame_bytes as usize;
        let (mut frame, mut data) = (0, Vec::with_capacity(frame_bytes));
        let mut insert = |frame: u32, data: &[u8]| {
            if self.segment.wanted.get(frame as usize) == Some(&true) {
                self.insert(info.epoch, frame, data);
            }
        };
        for piece in pieces {
            let (mut offset, mut left) = (u64::from(piece.record_offset), piece.length as usize);
            while left > 0 {
                let (filled, part_bytes) = (data.len(), left.min(frame_bytes - data.len()));
                data.resize(filled + part_bytes, 0);
                match journal.read(&piece.record, offset, &mut data[filled..], reach) {
                    Ok(JournalRead::Done) => {
                        (offset, left) = (offset + part_bytes as u64, left - part_bytes)
                    }
                    _ => return,
                }
                if data.len() == frame_bytes {
                    insert(frame, &data);
                    frame += 1;
                    data.clear();
                }
            }
        }
        if !data.is_empty() {
            insert(frame, &data);
        }
    }
}
