//! A write, from request to answer; and discard and write-zeroes, which are writes without a payload.
//!
//! A write is cut into records of at most [`limits::RECORD_PAYLOAD_BYTES_MAX`], appended to the journal in
//! order. When the journal has no room the rest of the write waits in [`Stalled`], in order of arrival, and
//! is taken up again by whoever made room. Nothing is refused for lack of room.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use sawmill_device::{Operation, Request};
use sawmill_format::journal::RecordOperation;
use sawmill_sys::Full;

use crate::shared::{Shared, add};
use crate::status::Stall;
use crate::{Error, flush, limits};

/// A write on its way into the journal.
struct Job {
    request: Request,
    operation: RecordOperation,
    /// Bytes already in the journal.
    done: u64,
    /// End of the last record appended.
    end: u64,
}

/// Writes that wait for room, in order of arrival.
#[derive(Default)]
pub(crate) struct Stalled {
    jobs: Mutex<VecDeque<Job>>,
    count: AtomicUsize,
    /// What the first of them lacked when it was last tried: a number of [`STALLS`].
    lacks: AtomicUsize,
}

/// What a write may wait for.
const STALLS: [Stall; 4] = [Stall::Staging, Stall::JournalBytes, Stall::JournalRecords, Stall::UnstoredAge];
const UNSTORED_AGE: usize = 3;

impl Stalled {
    pub(crate) fn count(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    /// What the first of those that wait is waiting for.
    pub(crate) fn reason(&self) -> Option<Stall> {
        let lacks = STALLS.get(self.lacks.load(Ordering::Relaxed)).copied();
        lacks.filter(|_| self.count() > 0)
    }

    /// There was no room for the first.
    fn note(&self, shared: &Shared, full: Full) {
        let records = shared.journal.as_ref().map_or(0, |journal| journal.unstored_records());
        let lacks = match full {
            Full::Staging => 0,
            _ if records >= limits::RECORDS_UNSTORED_MAX => 2,
            _ => 1,
        };
        self.lacks.store(lacks, Ordering::Relaxed);
    }

    /// Answers all with `error`.
    pub(crate) fn fail(&self, error: &Error) {
        let jobs = std::mem::take(&mut *self.jobs.lock());
        self.count.store(0, Ordering::Release);
        for job in jobs {
            job.request.fail(error.clone());
        }
    }
}

/// Takes a write, discard or write-zeroes.
pub(crate) fn submit(shared: &Shared, request: Request) {
    let operation = match request.operation {
        Operation::Discard => RecordOperation::Discard,
        Operation::WriteZeroes => RecordOperation::Zero,
        _ => RecordOperation::Write,
    };
    let mut job = Job { request, operation, done: 0, end: 0 };
    if shared.stalled.count() == 0 && !is_held_back(shared) {
        match append(shared, &mut job) {
            Ok(()) => return answer(shared, job),
            Err(full) => {
                shared.stalled.note(shared, full);
                make_room(shared, full);
            }
        }
    }
    stall(shared, job);
}

/// Whether what is not stored is too old to accept more; then it is sealed at once.
fn is_held_back(shared: &Shared) -> bool {
    let Some(journal) = shared.journal.as_ref().filter(|_| shared.is_unstored_too_old()) else {
        return false;
    };
    shared.stalled.lacks.store(UNSTORED_AGE, Ordering::Relaxed);
    shared.inbox.seal_through(journal.ring.next());
    true
}

fn stall(shared: &Shared, job: Job) {
    add(&shared.tally.writes_stalled, 1);
    {
        let mut jobs = shared.stalled.jobs.lock();
        jobs.push_back(job);
        shared.stalled.count.store(jobs.len(), Ordering::Release);
    }
    // Room may have been made between the attempt and now; then nobody else would take this job up.
    resume(shared);
    if let Some(error) = shared.journal.as_ref().and_then(|journal| journal.failure()) {
        shared.stalled.fail(error);
        return shared.inbox.wake.ring();
    }
    let hopeless =
        shared.state.is_dead() || shared.journal.as_ref().is_some_and(|journal| journal.ring.is_closed());
    if let Some(error) = shared.state.refusal().filter(|_| hopeless) {
        shared.stalled.fail(&error);
    }
}

/// Takes stalled writes up again, as far as there is room.
pub(crate) fn resume(shared: &Shared) {
    if shared.stalled.count() == 0 {
        return;
    }
    if is_held_back(shared) {
        return;
    }
    let mut finished = Vec::new();
    {
        let mut jobs = shared.stalled.jobs.lock();
        while let Some(job) = jobs.front_mut() {
            if let Err(full) = append(shared, job) {
                shared.stalled.note(shared, full);
                // Whoever makes room comes by here: ringing for more would only chase our own tail. But in a
                // full journal what is there must be sealed, also the part of a batch, or no room is made.
                if let (Full::Journal, Some(journal)) = (full, &shared.journal) {
                    shared.inbox.seal_through(journal.ring.next());
                }
                break;
            }
            finished.extend(jobs.pop_front());
        }
        shared.stalled.count.store(jobs.len(), Ordering::Release);
    }
    for job in finished {
        answer(shared, job);
    }
}

/// Bytes of the next record of a request with `left_bytes` to go.
pub(crate) fn record_length(operation: RecordOperation, left_bytes: u64) -> u64 {
    match operation {
        RecordOperation::Write => left_bytes.min(limits::RECORD_PAYLOAD_BYTES_MAX),
        _ => left_bytes,
    }
}

/// Appends what is left of a write.
fn append(shared: &Shared, job: &mut Job) -> Result<(), Full> {
    let Some(journal) = &shared.journal else { return Ok(()) };
    if shared.unstored.is_limited() {
        shared.unstored.note(journal.ring.next(), shared.world.now());
    }
    while job.done < job.request.length {
        let length = record_length(job.operation, job.request.length - job.done);
        let (address, done) = (job.request.address + job.done, job.done);
        let request = &mut job.request;
        let record = journal.append(
            job.operation,
            address,
            length,
            |payload| request.fill(done, payload),
            |record| shared.journal_map.insert(address, length, record.position, record.clone()),
        )?;
        job.done += length;
        job.end = record.end();
    }
    Ok(())
}

fn answer(shared: &Shared, job: Job) {
    if job.operation == RecordOperation::Write {
        add(&shared.tally.writes, 1);
        add(&shared.tally.written_bytes, job.request.length);
    } else {
        add(&shared.tally.discards, 1);
    }
    if job.request.flags.fua {
        flush::wait_for(shared, job.end, job.request);
    } else {
        job.request.done();
    }
}

fn make_room(shared: &Shared, full: Full) {
    let Some(journal) = &shared.journal else { return };
    match full {
        Full::Staging => journal.wake.ring(),
        // The stall notices.
        Full::Closed => {}
        Full::Journal => {
            // Everything there is must become stored before the ring can move on.
            shared.inbox.seal_through(journal.ring.next());
            journal.press();
        }
    }
}
