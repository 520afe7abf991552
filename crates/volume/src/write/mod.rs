//! A write, from request to answer; and discard and write-zeroes, which are writes without a
//! payload.
//!
//! A write is cut into records of at most [`limits::RECORD_PAYLOAD_BYTES_MAX`], appended to the
//! journal in order. When the journal has no room the rest of the write waits in [`StalledWrites`],
//! in order of arrival, and is resumed when there is some. Nothing is refused for lack of room.
//!
//! The order: [`submit`] tries to append. Without room it notes why, asks for room and queues the
//! rest; `stall` then tries once more, because room may have been made meanwhile. `resume` is that
//! second try, and every later one. It runs on a thread of its own ([`resume_soon`]): the thread
//! that made room has more room to make, and a door's thread has its own client to serve.
//!
//! Invariant: a write is answered only when all its records are in the journal map, so every read
//! that begins after the answer sees it.
//!
//! Not here: the place of a record in the ring (`journal`), what makes room there
//! (`journal::writer`, `engine`), and the wait of FUA (`flush`).

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use sawmill_device::{Operation, Request};
use sawmill_format::journal::RecordOperation;
use sawmill_sys::ReserveError;

use crate::attachment::Attachment;
use crate::counters::add;
use crate::engine::mailbox::Mailbox;
use crate::journal::Journal;
use crate::map::JournalMap;
use crate::record::Record;
use crate::threads::pool::Pool;
use crate::unstored::AgeLimit;
use crate::watch::Watch;
use crate::{Error, ErrorKind, limits};
use stalled::{NoRoom, PartialWrite, StalledWrites};

pub(crate) mod flush;
#[cfg(all(test, feature = "shuttle"))]
mod schedules;
mod stalled;

/// What a write and a flush need.
pub(crate) struct WriteContext {
    pub(crate) attachment: Arc<Attachment>,
    /// None when read-only.
    pub(crate) journal: Option<Arc<Journal>>,
    /// Addresses whose newest bytes are not in a stored segment yet.
    pub(crate) journal_map: Arc<JournalMap<Arc<Record>>>,
    pub(crate) mailbox: Arc<Mailbox>,
    pub(crate) stalled: StalledWrites,
    /// One thread that resumes them.
    pub(crate) resumer: Arc<Pool>,
    /// Whether the volume is in use, and still owned by this attachment.
    pub(crate) watch: Watch,
    /// How old unstored writes may become.
    pub(crate) unstored: AgeLimit,
}

/// Declares the engine ended when it is dropped.
struct CloseOnDrop<'a>(&'a Mailbox);

impl Drop for CloseOnDrop<'_> {
    fn drop(&mut self) {
        self.0.set_closed();
    }
}

impl WriteContext {
    pub(crate) fn new(
        attachment: Arc<Attachment>,
        journal: Option<Arc<Journal>>,
        mailbox: Arc<Mailbox>,
        resumer: Arc<Pool>,
        unstored: AgeLimit,
    ) -> Self {
        let (journal_map, stalled, watch) =
            (Arc::default(), StalledWrites::default(), Watch::default());
        WriteContext {
            attachment,
            journal,
            journal_map,
            mailbox,
            stalled,
            resumer,
            watch,
            unstored,
        }
    }

    /// The volume stops for good: every waiter gets the reason.
    pub(crate) fn fail(&self, error: Error) {
        self.attachment.state.set_failed(error);
        self.end_waiters();
    }

    /// A loop or a thread of the volume has panicked: the volume fails with a reason instead of
    /// leaving its users waiting.
    pub(crate) fn fail_by_panic(&self, what: &str) {
        let text = format!("a bug: the {what} panicked; accepted writes are in the journal");
        // Even if the callback of a waiter panics in turn, a close must not wait.
        let _ended = CloseOnDrop(&self.mailbox);
        self.fail(Error::new(ErrorKind::Internal, text));
    }

    /// Another writer has taken the volume over: every waiter gets the error.
    pub(crate) fn fence(&self, reason: String) {
        self.attachment.state.set_fenced(reason);
        self.end_waiters();
    }

    /// Whether an accepted write has been waiting for the store for too long.
    pub(crate) fn is_unstored_too_old(&self) -> bool {
        let Some(journal) = self.journal.as_ref().filter(|_| self.unstored.is_limited()) else {
            return false;
        };
        let now = self.attachment.world.now();
        self.unstored.is_too_old(self.mailbox.stored(), journal.ring.next(), now)
    }

    fn end_waiters(&self) {
        let Some(error) = self.attachment.state.refusal() else { return };
        self.mailbox.fail_waiters(&error);
        self.stalled.fail(&error);
        flush::resume(self);
        if let Some(journal) = &self.journal {
            journal.fail(error);
        }
        self.mailbox.wake.notify();
    }
}

/// Takes a write, discard or write-zeroes.
pub(crate) fn submit(context: &Arc<WriteContext>, request: Request) {
    let operation = match request.operation {
        Operation::Discard => RecordOperation::Discard,
        Operation::WriteZeroes => RecordOperation::Zero,
        _ => RecordOperation::Write,
    };
    let mut partial = PartialWrite { request, operation, done_bytes: 0, end_position: 0 };
    if context.stalled.count() == 0 && !is_held_back(context) {
        match append(context, &mut partial) {
            Ok(()) => return answer(context, partial),
            Err(full) => {
                context.stalled.note(full, context.journal.as_deref());
                make_room(context, full);
            }
        }
    }
    stall(context, partial);
}

/// Whether unstored writes are too old to accept more; if so, they are sealed at once.
fn is_held_back(context: &WriteContext) -> bool {
    let Some(journal) = context.journal.as_ref().filter(|_| context.is_unstored_too_old()) else {
        return false;
    };
    context.stalled.note_unstored_age();
    context.mailbox.intake.seal_through(journal.ring.next());
    true
}

fn stall(context: &Arc<WriteContext>, partial: PartialWrite) {
    add(&context.attachment.counters.writes_stalled, 1);
    context.stalled.push(partial);
    // Room may have been made between the attempt and now; then nothing else would resume it.
    resume_soon(context);
    fail_hopeless(context);
    // What makes room may be the engine, which must see that somebody waits.
    context.mailbox.wake.notify();
}

/// Fails the stalled writes if there will never be room. Called after a write was queued: whoever
/// ended the volume may have failed the queue before.
fn fail_hopeless(context: &WriteContext) {
    if let Some(error) = context.journal.as_ref().and_then(|journal| journal.failure()) {
        context.stalled.fail(error);
        return context.mailbox.wake.notify();
    }
    let hopeless = context.attachment.state.is_dead()
        || context.journal.as_ref().is_some_and(|journal| journal.ring.is_closed());
    if let Some(error) = context.attachment.state.refusal().filter(|_| hopeless) {
        context.stalled.fail(&error);
    }
}

/// Has the stalled writes resumed, as far as there is room, by another thread: copying their
/// payloads takes long.
pub(crate) fn resume_soon(context: &Arc<WriteContext>) {
    if context.stalled.count() > 0 && context.stalled.want_resumer() {
        let resume_context = context.clone();
        context.resumer.run(move || {
            resume_context.stalled.begin_resume();
            if catch_unwind(AssertUnwindSafe(|| resume(&resume_context))).is_err() {
                resume_context.fail_by_panic("resumer");
            }
        });
    }
}

/// Resumes stalled writes, as far as there is room.
fn resume(context: &WriteContext) {
    context.stalled.resume(
        |partial| match is_held_back(context) {
            true => Err(NoRoom::UnstoredAge),
            false => append(context, partial).map_err(NoRoom::Ring),
        },
        |missing| {
            if let NoRoom::Ring(full) = missing {
                context.stalled.note(full, context.journal.as_deref());
                // The thread that frees space has this repeated, so there is no need to wake it.
                // But a full journal frees space only if even a partial segment is sealed.
                if let (ReserveError::Journal, Some(journal)) = (full, &context.journal) {
                    context.mailbox.intake.seal_for_room(journal.ring.next());
                }
            }
            fail_hopeless(context);
        },
        |partial| answer(context, partial),
    );
    // The end of closing waits for the last of them.
    if context.stalled.count() == 0 && context.mailbox.is_closing() {
        context.mailbox.wake.notify();
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
fn append(context: &WriteContext, partial: &mut PartialWrite) -> Result<(), ReserveError> {
    let Some(journal) = &context.journal else { return Ok(()) };
    if context.unstored.is_limited() {
        context.unstored.note(journal.ring.next(), context.attachment.world.now());
    }
    while partial.done_bytes < partial.request.length {
        let length = record_length(partial.operation, partial.request.length - partial.done_bytes);
        let (address, done) = (partial.request.address + partial.done_bytes, partial.done_bytes);
        let request = &mut partial.request;
        let record = journal.append(
            partial.operation,
            address,
            length,
            |payload| request.fill(done, payload),
            |record| context.journal_map.insert(address, length, record.position, record.clone()),
        )?;
        partial.done_bytes += length;
        partial.end_position = record.end();
    }
    Ok(())
}

fn answer(context: &WriteContext, partial: PartialWrite) {
    if partial.operation == RecordOperation::Write {
        add(&context.attachment.counters.writes, 1);
        add(&context.attachment.counters.written_bytes, partial.request.length);
    } else {
        add(&context.attachment.counters.discards, 1);
    }
    if partial.request.flags.fua {
        flush::wait_for(context, partial.end_position, partial.request);
    } else {
        partial.request.done();
    }
}

fn make_room(context: &WriteContext, refusal: ReserveError) {
    let Some(journal) = &context.journal else { return };
    match refusal {
        ReserveError::Staging => journal.wake.notify(),
        // `stall` looks at the ring, and fails the write.
        ReserveError::Closed => {}
        ReserveError::Journal => {
            // Everything appended so far must be stored before the ring can advance.
            context.mailbox.intake.seal_for_room(journal.ring.next());
            journal.request_room();
        }
    }
}
