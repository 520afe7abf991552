//! Writes that wait for room in the journal, in order of arrival.
//!
//! Invariants: a write in the list is tried only when all before it have left. `count` changes only
//! under the lock of the list.
//!
//! Not here: what makes room (`journal::writer`, `engine`), and the append (`write`).

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};

use parking_lot::Mutex;
use sawmill_device::Request;
use sawmill_format::journal::RecordOperation;
use sawmill_sys::ReserveError;

use crate::Error;
use crate::journal::Journal;
use crate::status::Stall;

/// A write on its way into the journal.
pub(super) struct PartialWrite {
    pub(super) request: Request,
    pub(super) operation: RecordOperation,
    /// Bytes already in the journal.
    pub(super) done_bytes: u64,
    /// End of the last record appended.
    pub(super) end_position: u64,
}

/// Writes that wait for room, in order of arrival.
#[derive(Default)]
pub(crate) struct StalledWrites {
    /// Bounded by the writes that the doors admit.
    writes: Mutex<VecDeque<PartialWrite>>,
    count: AtomicUsize,
    /// What the first of them lacked when it was last tried: a [`Stall`] as its number.
    stall: AtomicU8,
}

impl StalledWrites {
    pub(crate) fn count(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    /// Why the oldest stalled request waits.
    pub(crate) fn reason(&self) -> Option<Stall> {
        let number = self.stall.load(Ordering::Relaxed);
        let stall = Stall::ALL.into_iter().find(|stall| *stall as u8 == number);
        stall.filter(|_| self.count() > 0)
    }

    /// Records that there was no room for the first.
    pub(super) fn note(&self, refusal: ReserveError, journal: Option<&Journal>) {
        let stall = match refusal {
            ReserveError::Staging => Stall::Staging,
            _ if journal.is_some_and(Journal::has_unstored_records_max) => Stall::JournalRecords,
            _ => Stall::JournalBytes,
        };
        self.stall.store(stall as u8, Ordering::Relaxed);
    }

    /// Records that the first waits because unstored writes are too old.
    pub(super) fn note_unstored_age(&self) {
        self.stall.store(Stall::UnstoredAge as u8, Ordering::Relaxed);
    }

    pub(super) fn push(&self, partial: PartialWrite) {
        let mut writes = self.writes.lock();
        writes.push_back(partial);
        self.count.store(writes.len(), Ordering::Release);
    }

    /// Tries the writes in order until there is no room; returns those that have finished.
    /// `no_room` is called under the lock, with what the next one lacks.
    pub(super) fn resume(
        &self,
        mut try_append: impl FnMut(&mut PartialWrite) -> Result<(), ReserveError>,
        no_room: impl FnOnce(ReserveError),
    ) -> Vec<PartialWrite> {
        let mut finished = Vec::new();
        let mut writes = self.writes.lock();
        while let Some(partial) = writes.front_mut() {
            if let Err(full) = try_append(partial) {
                no_room(full);
                break;
            }
            finished.extend(writes.pop_front());
        }
        self.count.store(writes.len(), Ordering::Release);
        finished
    }

    /// Answers all with `error`.
    pub(crate) fn fail(&self, error: &Error) {
        let writes = {
            let mut writes = self.writes.lock();
            self.count.store(0, Ordering::Release);
            std::mem::take(&mut *writes)
        };
        for partial in writes {
            partial.request.fail(error.clone());
        }
    }
}
