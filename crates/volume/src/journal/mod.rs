//! The journal: the write-back log on the local disk, one order for all writes of a volume.
//!
//! A write appends by reserving a slot in the staging ring (memory that outlives the process),
//! filling it, entering the journal map and being declared complete. From then on it is *accepted*.
//! The journal's thread ([`writer`]) moves complete records in order to the disk and syncs: then
//! they are *logged*.
//!
//! Modules: [`writer`] (the thread's steps), [`superblock`] (the marks), `read` (a record's
//! payload), [`scan`] (what a journal holds, after a crash).
//!
//! Invariants:
//! 1. Positions are reserved, queued for the writer and, after a crash, recovered in the same
//!    order.
//! 2. Only a contiguous prefix of complete records reaches the disk: it never holds a hole.
//! 3. A flush is answered after a sync that began when everything before it was on the disk.
//! 4. Ring space is used again only after a superblock with the new trim is durable.
//! 5. A failed write or sync of the journal disk is final ([`Journal::fail`]): nothing is retried
//!    as if the bytes were still dirty.
//!
//! Not here: making and binding a journal (`open`), its loop's thread (`threads`), the staging ring
//! (`sawmill_sys`), and the map from addresses to records (`map`).

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{Ordering, fence};

use sawmill_format::journal::{
    RECORD_HEADER_BYTES, RING_START_BYTES, RecordHeader, RecordOperation,
};
use sawmill_sys::sync::{AtomicBool, AtomicU64, AtomicUsize, Mutex};
use sawmill_sys::{ReserveError, Ring};

use crate::disk::Disk;
use crate::record::{Record, checks_of};
use crate::threads::wake::Wake;
use crate::{Error, ErrorKind, Result, limits};

mod read;
#[cfg(all(test, not(feature = "shuttle")))]
pub(crate) mod ring_tests;
pub(crate) mod scan;
#[cfg(all(test, feature = "shuttle"))]
pub(crate) mod schedules;
pub(crate) mod superblock;
pub(crate) mod writer;

pub(crate) use read::{JournalRead, Reach};

/// A waiter for everything before `through` to be logged.
pub(crate) struct FlushWaiter {
    pub(crate) through: u64,
    pub(crate) callback: Box<dyn FnOnce(Result<()>) + Send>,
}

/// What the journal's users share.
pub(crate) struct Journal {
    pub(crate) ring: Arc<Ring>,
    disk: Arc<dyn Disk>,
    tag: u64,
    epoch: u64,
    capacity_bytes: u64,
    first_lap_end: u64,
    /// Reserved records the writer has not taken yet, in order of position.
    /// Bounded by `unstored_records_max` and the room of the ring.
    order: Mutex<VecDeque<Arc<Record>>>,
    /// Durable through here.
    logged: AtomicU64,
    /// Nothing before here can be read any more.
    trim: AtomicU64,
    /// Segments cover everything before here, and end here.
    segments_end: AtomicU64,
    stored_sequence: AtomicU64,
    /// Bounded by the flushes that the doors admit.
    waiters: Mutex<Vec<FlushWaiter>>,
    waiting: AtomicUsize,
    /// A flush of everything before here was asked for.
    flush_asked_through: AtomicU64,
    unstored_records: AtomicUsize,
    unstored_records_max: usize,
    /// A writer waits for room: trim as far as possible.
    is_room_wanted: AtomicBool,
    failed: OnceLock<Error>,
    /// The writer sleeps until there is work: the next append wakes it.
    resting: AtomicBool,
    /// The next record is likely to be flushed by itself: it goes to the disk at once.
    expects_flush: AtomicBool,
    pub(crate) wake: Arc<Wake>,
    pub(crate) syncs: AtomicU64,
    pub(crate) written_bytes: AtomicU64,
    /// What the disk took in long writes lately; 0: there was none yet.
    pub(crate) disk_bytes_per_s: AtomicU64,
}

/// The state in which a journal starts in this process.
pub(crate) struct Start {
    pub(crate) tag: u64,
    pub(crate) epoch: u64,
    pub(crate) capacity_bytes: u64,
    /// What is in the ring between the end of the records and this position is not needed.
    pub(crate) first_lap_end: u64,
    pub(crate) position: u64,
    pub(crate) trim: u64,
    pub(crate) segments_end: u64,
    pub(crate) stored_sequence: u64,
    pub(crate) unstored_records: usize,
    pub(crate) unstored_records_max: usize,
}

impl Journal {
    pub(crate) fn new(ring: Arc<Ring>, disk: Arc<dyn Disk>, start: &Start) -> Self {
        ring.set_position_max(start.trim + start.capacity_bytes - limits::PAD_RESERVE_BYTES);
        Journal {
            ring,
            disk,
            tag: start.tag,
            epoch: start.epoch,
            capacity_bytes: start.capacity_bytes,
            first_lap_end: start.first_lap_end,
            order: Mutex::default(),
            logged: AtomicU64::new(start.position),
            trim: AtomicU64::new(start.trim),
            segments_end: AtomicU64::new(start.segments_end),
            stored_sequence: AtomicU64::new(start.stored_sequence),
            waiters: Mutex::default(),
            waiting: AtomicUsize::new(0),
            flush_asked_through: AtomicU64::new(0),
            unstored_records: AtomicUsize::new(start.unstored_records),
            unstored_records_max: start.unstored_records_max,
            is_room_wanted: AtomicBool::new(false),
            failed: OnceLock::new(),
            resting: AtomicBool::new(false),
            expects_flush: AtomicBool::new(false),
            wake: Arc::default(),
            syncs: AtomicU64::new(0),
            written_bytes: AtomicU64::new(0),
            disk_bytes_per_s: AtomicU64::new(0),
        }
    }

    /// Appends one record. `fill` puts the payload in place; `enter` puts the record into the
    /// journal map. When this returns the record is accepted.
    pub(crate) fn append(
        &self,
        operation: RecordOperation,
        address: u64,
        length: u64,
        fill: impl FnOnce(&mut [u8]),
        enter: impl FnOnce(&Arc<Record>),
    ) -> std::result::Result<Arc<Record>, ReserveError> {
        if self.has_unstored_records_max() {
            return Err(ReserveError::Journal);
        }
        let payload_bytes = if operation == RecordOperation::Write { length } else { 0 };
        let slot_bytes = RECORD_HEADER_BYTES as u64 + payload_bytes;
        let (mut slot, record) = self.ring.reserve(slot_bytes, |position, bytes| {
            self.header(operation, position, slot_bytes, address, length).encode_slot(bytes);
            let record =
                Arc::new(Record::new(position, operation, address, length, slot_bytes as u32));
            self.order.lock().push_back(record.clone());
            record
        })?;
        self.unstored_records.fetch_add(1, Ordering::Relaxed);
        let payload = &mut slot[RECORD_HEADER_BYTES..];
        fill(payload);
        let (checks, payload_crc) = checks_of(address, payload);
        let mut header = self.header(operation, record.position, slot_bytes, address, length);
        header.payload_crc = payload_crc;
        encode_header(&header, &mut slot);
        record.fill(Some(slot.publish()), checks);
        enter(&record);
        record.set_complete();
        self.nudge();
        Ok(record)
    }

    /// Appends padding up to a whole block. False when the ring has no room yet.
    fn pad(&self) -> bool {
        let padded = self.ring.reserve_to_block(RECORD_HEADER_BYTES as u64, |position, bytes| {
            let slot_bytes = bytes.len() as u64;
            let header = self.header(RecordOperation::Pad, position, slot_bytes, 0, 0);
            bytes.fill(0);
            encode_header(&header, bytes);
            let record =
                Arc::new(Record::new(position, RecordOperation::Pad, 0, 0, slot_bytes as u32));
            self.order.lock().push_back(record.clone());
            record
        });
        match padded {
            Ok(Some((slot, record))) => {
                record.fill(Some(slot.publish()), crate::record::Checks::None);
                record.set_complete();
                true
            }
            Ok(None) => true,
            Err(_) => false,
        }
    }

    fn header(
        &self,
        operation: RecordOperation,
        position: u64,
        slot_bytes: u64,
        address: u64,
        length: u64,
    ) -> RecordHeader {
        RecordHeader {
            slot_bytes: slot_bytes as u32,
            position,
            tag: self.tag,
            operation,
            epoch: self.epoch,
            logged: self.logged(),
            address,
            length,
            payload_crc: 0,
        }
    }

    /// Wakes the writer when it rests, when enough waits to be written, or when a flush waits for
    /// this record or is expected.
    fn nudge(&self) {
        // Pairs with the fence of a waiter: either it sees this record complete, or we see it wait.
        // Otherwise a flush could sleep until the writer's next look.
        fence(Ordering::SeqCst);
        let resting =
            self.resting.load(Ordering::SeqCst) && self.resting.swap(false, Ordering::SeqCst);
        // Between the two loads, others may have appended and the writer may have written that.
        let behind = self.ring.next().saturating_sub(self.ring.written());
        let flush =
            self.waiting.load(Ordering::Relaxed) > 0 || self.expects_flush.load(Ordering::Relaxed);
        if resting || flush || behind >= limits::SPAN_BYTES {
            self.wake.notify();
        }
    }

    /// Calls `callback` once everything before `through` is logged, or with the failure.
    pub(crate) fn when_logged(&self, through: u64, callback: Box<dyn FnOnce(Result<()>) + Send>) {
        if let Some(error) = self.failed.get() {
            return callback(Err(error.clone()));
        }
        self.flush_asked_through.fetch_max(through, Ordering::Relaxed);
        if through <= self.logged() {
            return callback(Ok(()));
        }
        {
            let mut waiters = self.waiters.lock();
            waiters.push(FlushWaiter { through, callback });
            self.waiting.store(waiters.len(), Ordering::SeqCst);
        }
        self.wake.notify();
        // The journal may have failed between the first look and the push; then nothing else
        // answers the waiter.
        if let Some(error) = self.failed.get() {
            self.fail(error.clone());
        }
    }

    /// Whether the next record is likely to be flushed by itself.
    pub(crate) fn expects_flush(&self) -> bool {
        self.expects_flush.load(Ordering::Relaxed)
    }

    /// The writer rests, when nothing has come for a while, until the next append or notification.
    /// Returns false if there is something to do.
    pub(crate) fn begin_rest(&self) -> bool {
        self.resting.store(true, Ordering::SeqCst);
        // An append before the flag was set did not notify.
        let may_rest = self.order.lock().is_empty();
        if !may_rest {
            self.end_rest();
        }
        may_rest
    }

    /// The rest is over, if there was one.
    pub(crate) fn end_rest(&self) {
        if self.resting.load(Ordering::Relaxed) {
            self.resting.store(false, Ordering::SeqCst);
        }
    }

    /// Everything before here is durable on the journal disk.
    pub(crate) fn logged(&self) -> u64 {
        self.logged.load(Ordering::Acquire)
    }

    /// Everything before here has been given up.
    pub(crate) fn trim(&self) -> u64 {
        self.trim.load(Ordering::Acquire)
    }

    /// A stored segment covers everything before `end`.
    pub(crate) fn set_stored(&self, sequence: u64, end: u64, records_stored: usize) {
        self.stored_sequence.store(sequence, Ordering::Release);
        self.segments_end.store(end, Ordering::Release);
        self.unstored_records.fetch_sub(records_stored, Ordering::Relaxed);
        self.wake.notify();
    }

    /// Where the last stored segment ends.
    pub(crate) fn segments_end(&self) -> u64 {
        self.segments_end.load(Ordering::Acquire)
    }

    /// A writer waits for room.
    pub(crate) fn request_room(&self) {
        self.is_room_wanted.store(true, Ordering::Release);
        self.wake.notify();
    }

    pub(crate) fn unstored_records(&self) -> usize {
        self.unstored_records.load(Ordering::Relaxed)
    }

    /// Whether there are as many records that are not stored as there may be.
    pub(crate) fn has_unstored_records_max(&self) -> bool {
        self.unstored_records() >= self.unstored_records_max
    }

    pub(crate) fn capacity_bytes(&self) -> u64 {
        self.capacity_bytes
    }

    /// Why the journal can no longer be used, if so.
    pub(crate) fn failure(&self) -> Option<&Error> {
        self.failed.get()
    }

    /// Gives the journal up: every waiter and every later flush gets the error.
    pub(crate) fn fail(&self, error: Error) {
        let error = self.failed.get_or_init(|| error).clone();
        let waiters = {
            let mut waiters = self.waiters.lock();
            self.waiting.store(0, Ordering::SeqCst);
            std::mem::take(&mut *waiters)
        };
        for waiter in waiters {
            (waiter.callback)(Err(error.clone()));
        }
    }

    /// The two parts of the disk that hold positions `[position, position + length)`.
    fn parts(&self, position: u64, length: u64) -> [(u64, u64); 2] {
        disk_parts(self.capacity_bytes, position, length)
    }
}

/// Encodes a header at the front of its slot.
pub(crate) fn encode_header(header: &RecordHeader, slot: &mut [u8]) {
    if let Some(front) = slot.first_chunk_mut::<RECORD_HEADER_BYTES>() {
        header.encode(front);
    }
}

/// Offset and length of the (at most two) parts of a journal disk that hold a range of positions.
pub(crate) fn disk_parts(capacity_bytes: u64, position: u64, length: u64) -> [(u64, u64); 2] {
    let at = position % capacity_bytes;
    let first = length.min(capacity_bytes - at);
    [(RING_START_BYTES + at, first), (RING_START_BYTES, length - first)]
}

/// The failure of a journal disk.
pub(crate) fn disk_failed(what: &str, error: std::io::Error) -> Error {
    Error::new(
        ErrorKind::Unavailable,
        format!(
            "the journal disk failed to {what}: {error}; writes stop; accepted writes are still \
             being stored; replace the disk and serve again"
        ),
    )
    .with_source(error)
}
