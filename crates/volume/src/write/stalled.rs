//! Writes that wait for room in the journal, in order of arrival.
//!
//! Invariants: one thread at a time resumes them, and a write is tried only when all before it have
//! left. A payload is copied without the lock of the list, so that others can queue meanwhile.
//! `count` includes the write that is being tried, and changes only under that lock. Whoever made
//! room and finds another thread at it has that thread try once more.
//!
//! Not here: what makes room (`journal::writer`, `engine`), and the append (`write`).

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU8, Ordering};

use sawmill_device::Request;
use sawmill_format::journal::RecordOperation;
use sawmill_sys::ReserveError;
use sawmill_sys::sync::{AtomicBool, AtomicUsize, Mutex};

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

/// Why a write cannot be appended now.
pub(super) enum NoRoom {
    Ring(ReserveError),
    /// Unstored writes are too old to accept more.
    UnstoredAge,
}

/// Writes that wait for room, in order of arrival.
#[derive(Default)]
pub(crate) struct StalledWrites {
    /// Bounded by the writes that the doors admit.
    writes: Mutex<VecDeque<PartialWrite>>,
    count: AtomicUsize,
    /// A thread resumes them.
    is_resuming: AtomicBool,
    /// There may be room that no attempt has seen.
    is_room_unseen: AtomicBool,
    /// A job that resumes them waits for its thread.
    is_job_queued: AtomicBool,
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
        self.count.fetch_add(1, Ordering::Release);
    }

    /// Whether a job is needed that resumes them: none waits for its thread already.
    pub(super) fn want_resumer(&self) -> bool {
        !self.is_job_queued.swap(true, Ordering::SeqCst)
    }

    /// The job runs: room that is made from now on needs another one.
    pub(super) fn begin_resume(&self) {
        self.is_job_queued.store(false, Ordering::SeqCst);
    }

    /// Tries the writes in order until there is no room for one, and hands each that has finished
    /// to `finish`. If another thread is at it, that thread tries again. `no_room` gets what the
    /// next one lacks; that one is in the list again.
    pub(super) fn resume(
        &self,
        mut try_append: impl FnMut(&mut PartialWrite) -> Result<(), NoRoom>,
        mut no_room: impl FnMut(NoRoom),
        mut finish: impl FnMut(PartialWrite),
    ) {
        self.is_room_unseen.store(true, Ordering::SeqCst);
        // The other thread looks at `is_room_unseen` after it has cleared `is_resuming`. So either
        // it sees our room, or we see that it has left.
        while self.is_room_unseen.load(Ordering::SeqCst)
            && !self.is_resuming.swap(true, Ordering::SeqCst)
        {
            self.is_room_unseen.swap(false, Ordering::SeqCst);
            self.try_in_order(&mut try_append, &mut no_room, &mut finish);
            self.is_resuming.store(false, Ordering::SeqCst);
        }
    }

    /// A faulty `resume`, which a test must detect: room that comes while another thread is at it
    /// may stay unseen.
    #[cfg(all(test, feature = "shuttle"))]
    pub(super) fn resume_unless_busy(
        &self,
        mut try_append: impl FnMut(&mut PartialWrite) -> Result<(), NoRoom>,
        mut finish: impl FnMut(PartialWrite),
    ) {
        if !self.is_resuming.swap(true, Ordering::SeqCst) {
            self.try_in_order(&mut try_append, &mut |_| (), &mut finish);
            self.is_resuming.store(false, Ordering::SeqCst);
        }
    }

    /// Tries the writes in order until there is no room for one.
    fn try_in_order(
        &self,
        try_append: &mut impl FnMut(&mut PartialWrite) -> Result<(), NoRoom>,
        no_room: &mut impl FnMut(NoRoom),
        finish: &mut impl FnMut(PartialWrite),
    ) {
        loop {
            let Some(mut partial) = self.writes.lock().pop_front() else { return };
            match try_append(&mut partial) {
                Ok(()) => {
                    {
                        let _held = self.writes.lock();
                        self.count.fetch_sub(1, Ordering::Release);
                    }
                    finish(partial);
                }
                Err(full) => {
                    self.writes.lock().push_front(partial);
                    return no_room(full);
                }
            }
        }
    }

    /// Answers all with `error`, except one that is being tried: who tries it looks for the error.
    pub(crate) fn fail(&self, error: &Error) {
        let writes = {
            let mut writes = self.writes.lock();
            self.count.fetch_sub(writes.len(), Ordering::Release);
            std::mem::take(&mut *writes)
        };
        for partial in writes {
            partial.request.fail(error.clone());
        }
    }
}
