//! The tail of the log that is not in the map yet: records to be sealed, and segments in flight.
//!
//! Invariants: segments are cut from the records in order of position, and their sequences follow.
//! A segment enters the map only when all before it have. Not here: garbage collection
//! ([`super::collect`]) and orders ([`super::orders`]), which send segments of their own through
//! here.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use sawmill_format::ids::PutId;
use sawmill_format::journal::RecordOperation;
use sawmill_format::segment::{SegmentHeader, SegmentKind, segment_key};
use sawmill_store::{Bodies, Class, Put, PutOutcome, StoreErrorKind};

use super::caching::moved::is_kept_cached;
use super::context::Context;
use super::messages::Event;
use super::upload::{CachedFrames, Stage, Upload};
use super::{EngineOptions, EngineStart};
use crate::counters::add;
use crate::gc::busy::BusyWriters;
use crate::record::Record;
use crate::recovery::apply::apply_extents;
use crate::recovery::roll_forward::live_bytes_of;
use crate::segment::buffers::Buffers;
use crate::segment::builder::{self, BuiltSegment};
use crate::segment::table::SegmentInfo;
use crate::{Error, ErrorKind, limits};

/// The wait after the store has used up its own retries.
const REPEAT_AFTER: Duration = Duration::from_millis(500);

/// The part of the log that is not in the map yet: records to seal, and segments in flight.
pub(super) struct LogTail {
    /// Records not yet in a segment, in order of position.
    /// Bounded by `limits::RECORDS_UNSTORED_MAX`.
    pending: VecDeque<Arc<Record>>,
    pending_bytes: u64,
    /// The end of the last received record.
    received_end: u64,
    pending_since: Duration,
    /// Segments in flight, in order of sequence.
    /// Bounded by `limits::UPLOADS_MAX` and the two beyond it.
    pub(super) uploads: VecDeque<Upload>,
    next_sequence: u64,
    /// The end of the last sealed segment.
    sealed_position: u64,
    stored_sequence: u64,
    /// The end of the last stored segment.
    stored_position: u64,
    /// The bytes of the last put and how long it took, once there was one.
    last_put: Option<(u64, Duration)>,
    writers: BusyWriters,
    pub(super) buffers: Buffers,
}

/// A segment that has entered the map.
pub(super) struct AppliedSegment {
    pub(super) header: SegmentHeader,
    pub(super) object_bytes: u64,
}

/// Which segments are cut now.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Sealing {
    /// Each that is due.
    AllDue,
    /// Only what somebody asked for: the others wait for collection.
    OnlyAskedFor,
}

impl LogTail {
    /// Starts with what recovery left to be stored. Takes the records of `start`.
    pub(super) fn new(start: &mut EngineStart, now: Duration) -> Self {
        let records = std::mem::take(&mut start.records);
        LogTail {
            pending_bytes: records.iter().map(|record| record.payload_bytes()).sum(),
            pending: records.into(),
            received_end: start.received_end,
            pending_since: now,
            uploads: VecDeque::new(),
            next_sequence: start.next_sequence,
            sealed_position: start.stored_position,
            stored_sequence: start.stored_sequence,
            stored_position: start.stored_position,
            last_put: None,
            writers: BusyWriters::default(),
            buffers: Buffers::default(),
        }
    }

    pub(super) fn next_sequence(&self) -> u64 {
        self.next_sequence
    }

    /// Whether no sequence is left for another segment.
    pub(super) fn is_used_up(&self) -> bool {
        self.next_sequence >= limits::SEQUENCE_MAX
    }

    pub(super) fn sealed_position(&self) -> u64 {
        self.sealed_position
    }

    pub(super) fn stored_sequence(&self) -> u64 {
        self.stored_sequence
    }

    pub(super) fn stored_position(&self) -> u64 {
        self.stored_position
    }

    /// Whether the store takes at least so many bytes a second, by its last put and with as many
    /// at once. A store without a put may.
    pub(super) fn keeps_up(&self, bytes_per_s: u64, uploads_max: usize) -> bool {
        self.last_put.is_none_or(|(bytes, took)| {
            let taken_bytes = u128::from(bytes) * uploads_max as u128;
            taken_bytes * 1_000_000 >= u128::from(bytes_per_s) * took.as_micros()
        })
    }

    /// Whether collection has to wait for writers.
    pub(super) fn has_busy_writers(&self, context: &Context, now: Duration) -> bool {
        self.writers.are_busy(u64::from(context.attachment.record.segment_bytes), now)
    }

    pub(super) fn received_end(&self) -> u64 {
        self.received_end
    }

    /// Whether everything received is stored.
    pub(super) fn is_empty(&self) -> bool {
        self.pending.is_empty() && self.uploads.is_empty()
    }

    pub(super) fn has_pending(&self) -> bool {
        !self.pending.is_empty()
    }

    pub(super) fn has_room(&self, options: &EngineOptions) -> bool {
        self.uploads.len() < options.uploads_max
    }

    /// Whether everything before `position` was received, and sealed unless it was only padding.
    pub(super) fn is_sealed_through(&self, position: u64) -> bool {
        let before = |record: &&Arc<Record>| record.position < position;
        self.received_end >= position
            && self.pending.iter().take_while(before).all(|record| is_padding(record))
    }

    /// The sequence and the put of each segment in flight.
    pub(super) fn puts(&self) -> impl Iterator<Item = (u64, PutId)> {
        self.uploads.iter().map(|upload| (upload.sequence(), upload.put_id()))
    }

    /// The first sequence that the map does not have.
    pub(super) fn first_unstored(&self) -> u64 {
        self.uploads.front().map_or(self.next_sequence, Upload::sequence)
    }

    pub(super) fn take_records(&mut self, context: &Context, now: Duration) {
        let records = context.mailbox.intake.take_records();
        if self.pending.is_empty() && !records.is_empty() {
            self.pending_since = now;
        }
        for record in records {
            self.pending_bytes += record.payload_bytes();
            self.received_end = record.end();
            self.pending.push_back(record);
        }
    }

    /// Cuts, builds and puts segments while they are due and may be in flight, as far as `sealing`
    /// permits.
    pub(super) fn seal(
        &mut self,
        context: &Arc<Context>,
        options: &EngineOptions,
        now: Duration,
        sealing: Sealing,
    ) {
        while self.has_room(options)
            && self.segment_is_due(context, options, now)
            && (sealing == Sealing::AllDue || self.is_asked_for(context, options, now))
        {
            let records = self.cut_records(context, now);
            if records.iter().all(|record| is_padding(record)) {
                self.put_back(records);
                return;
            }
            let built = self.build(context, &records);
            match built {
                Ok(built) => {
                    let segment_bytes = u64::from(context.attachment.record.segment_bytes);
                    self.writers.note_cut(built.header.data_bytes, segment_bytes, now);
                    self.send_segment(context, built, records);
                }
                Err(error) => {
                    // They stay pending: unstored data must never look as if it were stored.
                    self.put_back(records);
                    return context.write.fail(error);
                }
            }
        }
    }

    /// Whether a segment must be cut from the pending records.
    fn segment_is_due(&self, context: &Context, options: &EngineOptions, now: Duration) -> bool {
        let Some(front) = self.pending.front() else { return false };
        builder::is_full(
            self.pending_bytes,
            self.pending.len(),
            context.attachment.record.segment_bytes,
        ) || front.position < context.mailbox.intake.sealed_for_room_wanted()
            || self.is_asked_for(context, options, now)
    }

    /// Whether the first pending records are to be stored at once: for a flush, an order, a close,
    /// or because of their age.
    fn is_asked_for(&self, context: &Context, options: &EngineOptions, now: Duration) -> bool {
        let Some(front) = self.pending.front() else { return false };
        let age = options.segment_age_max;
        front.position < context.mailbox.intake.sealed_through_wanted()
            || context.mailbox.is_closing()
            || (!age.is_zero() && now >= self.pending_since + age)
    }

    /// Time until a segment is old enough to be sealed.
    pub(super) fn seal_in(&self, options: &EngineOptions, now: Duration) -> Option<Duration> {
        let age = options.segment_age_max;
        let waits = self.has_room(options) && !self.pending.is_empty() && !age.is_zero();
        waits.then(|| (self.pending_since + age).saturating_sub(now).max(Duration::from_millis(1)))
    }

    /// When to repeat the next put.
    pub(super) fn repeat_at(&self) -> Option<Duration> {
        self.uploads.iter().filter_map(Upload::repeat_at).min()
    }

    /// Takes the records of a segment from the front of the pending ones, with the padding in
    /// between.
    fn cut_records(&mut self, context: &Context, now: Duration) -> Vec<Arc<Record>> {
        let mut records = Vec::new();
        let mut bytes = 0;
        while !builder::is_full(bytes, records.len(), context.attachment.record.segment_bytes) {
            let Some(record) = self.pending.pop_front() else { break };
            bytes += record.payload_bytes();
            records.push(record);
        }
        self.pending_bytes -= bytes;
        self.pending_since = now;
        records
    }

    /// Padding alone needs no segment: it waits for records to travel with, or is skipped when
    /// nothing is in flight.
    fn put_back(&mut self, records: Vec<Arc<Record>>) {
        for record in records.into_iter().rev() {
            self.pending_bytes += record.payload_bytes();
            self.pending.push_front(record);
        }
    }

    fn build(&self, context: &Context, records: &[Arc<Record>]) -> crate::Result<BuiltSegment> {
        let Some(journal) = &context.journal else {
            return Err(Error::new(ErrorKind::Internal, "a segment of records without a journal"));
        };
        let position_end = records.last().map_or(self.sealed_position, |record| record.end());
        let header = self.header(context, SegmentKind::Data, position_end)?;
        builder::build(records, journal, &self.buffers, header)
    }

    /// The header of the next segment, without content.
    pub(super) fn header(
        &self,
        context: &Context,
        kind: SegmentKind,
        position_end: u64,
    ) -> crate::Result<SegmentHeader> {
        if self.is_used_up() {
            let text = "the volume has used up its segment sequences; copy it to a new one";
            return Err(Error::new(ErrorKind::Full, text));
        }
        Ok(SegmentHeader {
            volume_id: context.attachment.record.volume_id,
            put_id: PutId(context.attachment.world.random()?),
            sequence: self.next_sequence,
            epoch: context.attachment.epoch,
            previous_sequence: self.uploads.back().map_or(self.stored_sequence, Upload::sequence),
            stored_through: self.stored_sequence,
            checkpoint_number: context.mailbox.checkpoint_number(),
            position_start: self.sealed_position,
            position_end,
            wall_unix_ms: context.attachment.world.unix_ms(),
            next_sequence: self.next_sequence + 1,
            kind,
            frame_bytes: context.attachment.record.frame_bytes,
            data_bytes: 0,
            extents: Vec::new(),
            frames: Vec::new(),
            origins: Vec::new(),
            size_bytes: 0,
        })
    }

    pub(super) fn send_segment(
        &mut self,
        context: &Arc<Context>,
        segment: BuiltSegment,
        records: Vec<Arc<Record>>,
    ) {
        let BuiltSegment { header, object, header_bytes, resident, coalesced_bytes } = segment;
        add(&context.attachment.counters.coalesced_bytes, coalesced_bytes);
        let (object_bytes, stage, cached) =
            (object.len() as u64, Stage::UnderWay, CachedFrames::default());
        let put_at = Duration::ZERO;
        let upload = Upload {
            header,
            header_bytes,
            object_bytes,
            object,
            resident,
            records,
            stage,
            put_at,
            cached,
        };
        self.send(context, upload);
    }

    /// Sends the next segment of the log.
    pub(super) fn send(&mut self, context: &Arc<Context>, mut upload: Upload) {
        upload.put_at = context.attachment.world.now();
        self.next_sequence += 1;
        self.sealed_position = upload.header.position_end;
        put(context, &upload);
        self.uploads.push_back(upload);
    }

    pub(super) fn handle_put(
        &mut self,
        context: &Context,
        sequence: u64,
        outcome: sawmill_store::Result<PutOutcome>,
        now: Duration,
    ) {
        let Some(upload) =
            self.uploads.iter_mut().find(|upload| upload.header.sequence == sequence)
        else {
            return;
        };
        match outcome {
            Ok(PutOutcome::Created) => {
                upload.stage = Stage::Stored;
                // A small object says little of what the store takes.
                if upload.object_bytes >= u64::from(context.attachment.record.segment_bytes) / 2 {
                    self.last_put = Some((upload.object_bytes, now.saturating_sub(upload.put_at)));
                }
                if !upload.is_moved() {
                    upload.object = Bytes::new();
                }
                context.attachment.state.store_answered();
            }
            Ok(PutOutcome::Taken) => {
                let key = segment_key(context.attachment.record.volume_id, sequence);
                context.write.fence(format!(
                    "volume {}: another writer has taken it over (it wrote {key}); writes after \
                     position {} are not in the store, only in the journal: see `sawmill inspect \
                     journal`",
                    context.attachment.name, self.stored_position
                ));
            }
            Err(error) => {
                let denied = error.kind() == StoreErrorKind::Denied;
                upload.stage = Stage::RepeatAt(now + REPEAT_AFTER * if denied { 4 } else { 1 });
                context.attachment.state.store_failed(now, error.to_string());
            }
        }
    }

    /// Repeats, byte for byte, the puts that the store could not accept.
    pub(super) fn repeat_failed(&mut self, context: &Arc<Context>, now: Duration) {
        for upload in &mut self.uploads {
            if upload.repeat_at().is_some_and(|at| at <= now) {
                upload.stage = Stage::UnderWay;
                put(context, upload);
            }
        }
    }

    /// The frames of a moved segment are in the read cache.
    pub(super) fn handle_kept(&mut self, sequence: u64) {
        if let Some(upload) = self.uploads.iter_mut().find(|upload| upload.sequence() == sequence) {
            upload.cached.is_inserting = false;
        }
    }

    /// Enters the next segment into the map, if it is stored.
    pub(super) fn apply_next(&mut self, context: &Arc<Context>) -> Option<AppliedSegment> {
        let is_stored = |upload: &Upload| matches!(upload.stage, Stage::Stored);
        let front = self.uploads.front_mut().filter(|upload| is_stored(upload))?;
        if !is_kept_cached(context, front) {
            return None;
        }
        let upload = self.uploads.pop_front()?;
        Some(self.apply(context, upload))
    }

    /// The order matters to readers, which look in the journal map first and in the object map
    /// second: a byte is in the object map (and readable from the journal as a resident) before it
    /// leaves the journal map.
    fn apply(&mut self, context: &Context, upload: Upload) -> AppliedSegment {
        let view = context.stored.view();
        let header = &upload.header;
        let sequence = header.sequence as u32;
        if !upload.is_moved() {
            context.stored.residents.add(sequence, header.position_end, upload.resident);
        }
        let info = SegmentInfo {
            epoch: header.epoch,
            header_bytes: upload.header_bytes,
            data_bytes: header.data_bytes,
            live_bytes: live_bytes_of(header),
            object_bytes: upload.object_bytes,
            wall_unix_ms: header.wall_unix_ms,
            dead_since: 0,
            is_settled: false,
        };
        view.segments.add(sequence, info);
        apply_extents(&view, header);
        for record in &upload.records {
            if record.length > 0 {
                context.journal_map.remove(record.address, record.length, record.position);
            }
        }
        context.write.watch.confirm_at(upload.put_at);
        self.stored_sequence = header.sequence;
        self.stored_position = header.position_end;
        context.mailbox.advance_stored_segment(header.position_end, header.sequence);
        if let Some(journal) = &context.journal {
            let counted = upload.records.iter().filter(|record| !is_padding(record)).count();
            journal.set_stored(header.sequence, header.position_end, counted);
        }
        add(&context.attachment.counters.segments_stored, 1);
        add(&context.attachment.counters.segment_bytes_stored, upload.object_bytes);
        AppliedSegment { object_bytes: upload.object_bytes, header: upload.header }
    }

    /// Padding needs no storing: positions of padding are stored as soon as everything before them
    /// is.
    pub(super) fn advance_over_padding(&mut self, context: &Context) {
        if !self.uploads.is_empty() {
            return;
        }
        while self.pending.front().is_some_and(|record| is_padding(record)) {
            if let Some(record) = self.pending.pop_front() {
                context.mailbox.advance_stored(record.end());
            }
        }
        if self.pending.is_empty() {
            // Includes the padding between the end of the log and the start of this attachment's
            // ring.
            context.mailbox.advance_stored(self.received_end);
        }
    }
}

fn put(context: &Arc<Context>, upload: &Upload) {
    let sequence = upload.header.sequence;
    let key = segment_key(context.attachment.record.volume_id, sequence);
    let put = Put { key, body: upload.object.clone(), class: Class::Upload, bodies: Bodies::Whole };
    let callback_context = context.clone();
    let callback =
        move |outcome| callback_context.mailbox.push_event(Event::Put { sequence, outcome });
    context.attachment.store.put(put, Box::new(callback));
}

/// Whether a record only fills space.
fn is_padding(record: &Record) -> bool {
    matches!(record.operation, RecordOperation::Pad | RecordOperation::Void)
}
