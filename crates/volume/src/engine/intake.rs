//! Records that the journal has written and the engine has not taken yet, and the position to seal
//! without waiting for a full segment.
//!
//! Invariant: a record or a position that the engine must handle wakes it.
//! [`limits::RECORDS_UNSTORED_MAX`] bounds the number of records. Not here: orders and events
//! ([`super::mailbox`]).

use std::sync::Arc;
use std::sync::atomic::Ordering;

use sawmill_sys::sync::{AtomicBool, AtomicU64, Mutex};

use crate::limits;
use crate::record::Record;
use crate::threads::wake::Wake;

/// The queue of written records between the journal and the engine.
pub(crate) struct RecordIntake {
    /// Bounded by `limits::RECORDS_UNSTORED_MAX`.
    records: Mutex<Vec<Arc<Record>>>,
    record_bytes: AtomicU64,
    /// The engine has records already and will check again in time: a few more need not wake it.
    has_pending: AtomicBool,
    seal_through: AtomicU64,
    /// The same, only because the journal or the memory is full.
    seal_for_room: AtomicU64,
    wake: Arc<Wake>,
}

impl RecordIntake {
    /// An empty intake; `wake` belongs to the engine.
    pub(crate) fn new(wake: Arc<Wake>) -> Self {
        RecordIntake {
            records: Default::default(),
            record_bytes: Default::default(),
            has_pending: Default::default(),
            seal_through: Default::default(),
            seal_for_room: Default::default(),
            wake,
        }
    }

    /// Adds complete records, in order. Wakes the engine if they are a good part of a segment, or
    /// if it has no other records.
    pub(crate) fn push_records(&self, records: Vec<Arc<Record>>, segment_bytes: u64) {
        let bytes: u64 = records.iter().map(|record| record.payload_bytes()).sum();
        let wanted = self.sealed_through_wanted();
        let urgent = records.first().is_some_and(|record| record.position < wanted);
        let count = {
            let mut kept = self.records.lock();
            kept.extend(records);
            kept.len()
        };
        let before = self.record_bytes.fetch_add(bytes, Ordering::AcqRel);
        let much = before + bytes >= segment_bytes / 4 || count >= limits::SEGMENT_RECORDS_MAX / 4;
        if much || urgent || !self.has_pending.load(Ordering::SeqCst) {
            self.wake.notify();
        }
    }

    /// Before it sleeps, the engine reports whether it has records.
    pub(crate) fn set_has_pending(&self, has_pending: bool) {
        self.has_pending.store(has_pending, Ordering::SeqCst);
        // Records that arrived while it still had some woke nothing.
        if !has_pending && !self.records.lock().is_empty() {
            self.wake.notify();
        }
    }

    pub(crate) fn take_records(&self) -> Vec<Arc<Record>> {
        self.record_bytes.store(0, Ordering::Release);
        std::mem::take(&mut *self.records.lock())
    }

    /// Everything before `position` must be sealed without waiting for a full segment.
    pub(crate) fn seal_through(&self, position: u64) {
        if self.seal_through.fetch_max(position, Ordering::AcqRel) < position {
            self.wake.notify();
        }
    }

    pub(crate) fn sealed_through_wanted(&self) -> u64 {
        self.seal_through.load(Ordering::Acquire)
    }

    /// Everything before `position` must be sealed without waiting for a full segment, because
    /// writers have no room.
    pub(crate) fn seal_for_room(&self, position: u64) {
        if self.seal_for_room.fetch_max(position, Ordering::AcqRel) < position {
            self.wake.notify();
        }
    }

    pub(crate) fn sealed_for_room_wanted(&self) -> u64 {
        self.seal_for_room.load(Ordering::Acquire)
    }
}
