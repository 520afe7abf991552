//! Seal a batch, put it, and enter it into the map once it and all before it are stored.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use sawmill_format::ids::PutId;
use sawmill_format::segment::{SegmentHeader, SegmentRole, segment_key};
use sawmill_store::{Class, Put, PutOutcome, StoreErrorKind};

use super::{Engine, Event, is_padding};
use crate::record::Record;
use crate::recovery::apply::apply_extents;
use crate::recovery::roll_forward::live_bytes_of;
use crate::segment::batch;
use crate::segment::builder::{self, Built};
use crate::segment::resident::ResidentPiece;
use crate::segment::table::SegmentInfo;
use crate::tally::add;
use crate::{Error, ErrorKind, limits};

/// How long to wait after the store has used up its own retries.
const REPEAT_AFTER: Duration = Duration::from_millis(500);

enum Stage {
    UnderWay,
    RepeatAt(Duration),
    Stored,
}

/// Which frames of a moved segment are cached.
#[derive(Default)]
pub(super) struct CachedFrames {
    /// By frame: in the read cache, or on its way there.
    pub(super) frames: Vec<bool>,
    /// Whether frames are on their way there.
    pub(super) is_inserting: bool,
}

impl CachedFrames {
    pub(super) fn has_all(&self, first: u64, last: u64) -> bool {
        self.frames.get(first as usize..=last as usize).is_some_and(|frames| !frames.contains(&false))
    }
}

/// A sealed segment that is not yet part of the map.
pub(super) struct Upload {
    header: SegmentHeader,
    header_bytes: u32,
    object_bytes: u64,
    /// Kept until stored, to be put again; what moved, until it is in the map.
    object: Bytes,
    resident: Vec<ResidentPiece>,
    records: Vec<Arc<Record>>,
    stage: Stage,
    /// When it was first put.
    put_at: Duration,
    pub(super) cached: CachedFrames,
}

impl Upload {
    pub(super) fn moved(header: SegmentHeader, header_bytes: u32, object: Bytes) -> Self {
        let (object_bytes, stage) = (object.len() as u64, Stage::UnderWay);
        let (resident, records, cached) = (Vec::new(), Vec::new(), CachedFrames::default());
        let put_at = Duration::ZERO;
        Upload { header, header_bytes, object_bytes, object, resident, records, stage, put_at, cached }
    }

    pub(super) fn is_moved(&self) -> bool {
        self.header.role == SegmentRole::Moved
    }

    /// The object, of what is moved even after it is stored.
    pub(super) fn contents(&self) -> (&SegmentHeader, &Bytes) {
        (&self.header, &self.object)
    }

    pub(super) fn sequence(&self) -> u64 {
        self.header.sequence
    }

    pub(super) fn put_id(&self) -> PutId {
        self.header.put_id
    }

    pub(super) fn repeat_at(&self) -> Option<Duration> {
        match self.stage {
            Stage::RepeatAt(at) => Some(at),
            _ => None,
        }
    }
}

impl Engine {
    /// Cuts, builds and puts batches while they are due and there is room on the way.
    pub(super) fn seal(&mut self, now: Duration) {
        let held_back = self.is_rolling_back();
        while !held_back && self.uploads.len() < self.options.uploads_max && self.batch_is_due(now) {
            let records = self.cut_batch(now);
            if records.iter().all(|record| is_padding(record)) {
                self.put_back(records);
                return;
            }
            let built = self.build(&records);
            match built {
                Ok(built) => self.send_batch(built, records),
                Err(error) => {
                    // They stay pending: what is not stored must never look as if it were.
                    self.put_back(records);
                    return self.context.write.fail(error);
                }
            }
        }
        self.context.mailbox.set_uploads(self.uploads.len());
    }

    /// Takes the front of what is pending: a batch's worth of payload, and padding with it.
    fn cut_batch(&mut self, now: Duration) -> Vec<Arc<Record>> {
        let mut records = Vec::new();
        let mut bytes = 0;
        while !batch::is_full(bytes, records.len(), self.context.attachment.record.segment_bytes) {
            let Some(record) = self.pending.pop_front() else { break };
            bytes += record.payload_bytes();
            records.push(record);
        }
        self.pending_bytes -= bytes;
        self.pending_since = now;
        records
    }

    /// Padding alone needs no segment: it waits for records to travel with, or is passed over when nothing is
    /// under way.
    fn put_back(&mut self, records: Vec<Arc<Record>>) {
        for record in records.into_iter().rev() {
            self.pending_bytes += record.payload_bytes();
            self.pending.push_front(record);
        }
    }

    fn build(&self, records: &[Arc<Record>]) -> crate::Result<Built> {
        let context = &self.context;
        let Some(journal) = &context.journal else {
            return Err(Error::new(ErrorKind::Internal, "a batch without a journal"));
        };
        let position_end = records.last().map_or(self.sealed_position, |record| record.end());
        let header = self.header(SegmentRole::Data, position_end)?;
        builder::build(records, journal, &self.buffers, header)
    }

    /// The header of the next segment, with nothing in it yet.
    pub(super) fn header(&self, role: SegmentRole, position_end: u64) -> crate::Result<SegmentHeader> {
        let context = &self.context;
        if self.next_sequence >= limits::SEQUENCE_MAX {
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
            checkpoint_number: self.checkpoint_number,
            position_start: self.sealed_position,
            position_end,
            wall_unix_ms: context.attachment.world.unix_ms(),
            next_sequence: self.next_sequence + 1,
            role,
            frame_bytes: context.attachment.record.frame_bytes,
            data_bytes: 0,
            extents: Vec::new(),
            frames: Vec::new(),
            origins: Vec::new(),
            size_bytes: 0,
        })
    }

    pub(super) fn send_batch(&mut self, built: Built, records: Vec<Arc<Record>>) {
        let Built { header, object, header_bytes, resident, coalesced_bytes } = built;
        add(&self.context.attachment.tally.coalesced_bytes, coalesced_bytes);
        let (object_bytes, stage, cached) = (object.len() as u64, Stage::UnderWay, CachedFrames::default());
        let put_at = Duration::ZERO;
        self.send(Upload {
            header,
            header_bytes,
            object_bytes,
            object,
            resident,
            records,
            stage,
            put_at,
            cached,
        });
    }

    /// Sends the next segment of the log.
    pub(super) fn send(&mut self, mut upload: Upload) {
        upload.put_at = self.context.attachment.world.now();
        self.next_sequence += 1;
        self.sealed_position = upload.header.position_end;
        self.put(&upload);
        self.uploads.push_back(upload);
    }

    fn put(&self, upload: &Upload) {
        let sequence = upload.header.sequence;
        let context = self.context.clone();
        let key = segment_key(context.attachment.record.volume_id, sequence);
        let put = Put { key, body: upload.object.clone(), class: Class::Upload };
        let answered = self.context.clone();
        let tell = move |outcome| answered.mailbox.push_event(Event::Put { sequence, outcome });
        context.attachment.store.put(put, Box::new(tell));
    }

    pub(super) fn hear_put(
        &mut self,
        sequence: u64,
        outcome: sawmill_store::Result<PutOutcome>,
        now: Duration,
    ) {
        let Some(upload) = self.uploads.iter_mut().find(|upload| upload.header.sequence == sequence) else {
            return;
        };
        match outcome {
            Ok(PutOutcome::Created) => {
                upload.stage = Stage::Stored;
                if !upload.is_moved() {
                    upload.object = Bytes::new();
                }
                self.context.attachment.state.store_answered();
            }
            Ok(PutOutcome::Taken) => {
                let key = segment_key(self.context.attachment.record.volume_id, sequence);
                self.context.write.fence(format!(
                    "volume {}: another writer has taken it over (it wrote {key}); writes after position {} \
                     are not in the store, only in the journal: see `sawmill inspect journal`",
                    self.context.attachment.name, self.stored_position
                ));
            }
            Err(error) => {
                let denied = error.kind() == StoreErrorKind::Denied;
                upload.stage = Stage::RepeatAt(now + REPEAT_AFTER * if denied { 4 } else { 1 });
                self.context.attachment.state.store_failed(now, error.to_string());
            }
        }
    }

    /// Puts again, byte for byte, what the store could not take.
    pub(super) fn repeat_failed(&mut self, now: Duration) {
        for index in 0..self.uploads.len() {
            if self.uploads[index].repeat_at().is_some_and(|at| at <= now) {
                self.uploads[index].stage = Stage::UnderWay;
                self.put(&self.uploads[index]);
            }
        }
    }

    /// Enters stored segments into the map, in order.
    pub(super) fn apply_stored(&mut self) {
        let mut applied = false;
        let is_stored = |upload: &Upload| matches!(upload.stage, Stage::Stored);
        while self.uploads.front().is_some_and(is_stored) && self.is_kept_cached() {
            if let Some(upload) = self.uploads.pop_front() {
                self.apply(upload);
                applied = true;
            }
        }
        if applied {
            self.context.mailbox.set_uploads(self.uploads.len());
            self.resume_writers();
        }
    }

    /// The order matters to readers, who look in the journal map first and in the object map second: a byte
    /// is in the object map (and readable from the journal as a resident) before it leaves the journal map.
    fn apply(&mut self, upload: Upload) {
        let context = self.context.clone();
        let Some(journal) = &context.journal else { return };
        let view = context.stored.view();
        let header = &upload.header;
        let sequence = header.sequence as u32;
        let is_moved = upload.is_moved();
        if !is_moved {
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
        context.write.watch.has_news(upload.put_at);
        self.stored_sequence = header.sequence;
        self.stored_position = header.position_end;
        self.log_bytes += upload.object_bytes;
        context.mailbox.set_stored(header.position_end, header.sequence, self.checkpoint_number);
        let counted = upload.records.iter().filter(|record| !is_padding(record)).count();
        journal.set_stored(header.sequence, header.position_end, counted);
        add(&context.attachment.tally.segments_stored, 1);
        add(&context.attachment.tally.segment_bytes_stored, upload.object_bytes);
        if is_moved {
            self.moved_applied();
        }
        if upload.header.role == SegmentRole::Order {
            self.finish_order(&upload.header);
        }
    }
}
