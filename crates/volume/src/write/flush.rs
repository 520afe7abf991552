//! A flush, or the wait of a write with FUA, by the volume's flush mode.
//!
//! - logged: everything reserved so far is synced to the journal disk; one sync serves all waiters.
//! - stored: everything reserved so far is in the store, in a contiguous prefix; the segment is
//!   sealed at once.
//! - weak: a barrier only. The journal is one order, so there is nothing to do.
//!
//! A flush that only the local disk backs waits until ownership was checked recently
//! (`crate::watch`).
//!
//! Not here: the sync (`journal::writer`), the notice that something is stored (`engine::mailbox`),
//! and the check that a flush waits for (`engine::fence_check`).

use sawmill_device::Request;
use sawmill_format::volume_record::FlushMode;

use super::WriteContext;
use crate::counters::add;

/// Takes a flush.
pub(crate) fn submit(context: &WriteContext, request: Request) {
    add(&context.attachment.counters.flushes, 1);
    match &context.journal {
        // A write that is completed has its slot, so it ends at or before the next position.
        Some(journal) => wait_for(context, journal.ring.next(), request),
        None => request.done(),
    }
}

/// Answers `request` when everything before `through` is as durable as the volume's mode requires,
/// this attachment has recently checked that it still owns the volume, and nothing unstored is too
/// old.
pub(crate) fn wait_for(context: &WriteContext, through: u64, request: Request) {
    if context.attachment.record.flush_mode == FlushMode::Stored {
        return wait_for_safety(context, through, request);
    }
    let now = context.attachment.world.now();
    if context.watch.may_answer_flush(now) && !context.is_unstored_too_old() {
        return wait_for_safety(context, through, request);
    }
    context.watch.hold(through, request, now);
    context.mailbox.wake.notify();
    // The volume may have ended just before this flush was queued: release it.
    if context.attachment.state.is_dead() || context.mailbox.is_closed() {
        resume(context);
    }
}

/// Resumes the flushes that waited for a check.
pub(crate) fn resume(context: &WriteContext) {
    if !context.attachment.state.is_dead()
        && !context.mailbox.is_closed()
        && context.is_unstored_too_old()
    {
        return;
    }
    for (through, request) in context.watch.take_held() {
        match context.attachment.state.refusal().filter(|_| context.attachment.state.is_dead()) {
            Some(error) => request.fail(error),
            None => wait_for_safety(context, through, request),
        }
    }
}

fn wait_for_safety(context: &WriteContext, through: u64, request: Request) {
    let Some(journal) = &context.journal else { return request.done() };
    let callback: Box<dyn FnOnce(crate::Result<()>) + Send> =
        Box::new(move |outcome| match outcome {
            Ok(()) => request.done(),
            Err(error) => request.fail(error),
        });
    match context.attachment.record.flush_mode {
        FlushMode::Weak => callback(Ok(())),
        FlushMode::Logged => journal.when_logged(through, callback),
        FlushMode::Stored => context.mailbox.when_stored(through, callback),
    }
}
