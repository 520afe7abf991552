//! A flush, or the wait of a write with FUA, by the volume's flush mode.
//!
//! - logged: everything reserved so far is synced to the journal disk; one sync serves all who wait.
//! - stored: everything reserved so far is in the store, in a contiguous prefix; the batch is sealed at once.
//! - weak: a barrier only. The journal is one order, so there is nothing to do.

use sawmill_device::Request;
use sawmill_format::volume_record::FlushMode;

use crate::shared::{Shared, add};

/// Takes a flush.
pub(crate) fn submit(shared: &Shared, request: Request) {
    add(&shared.tally.flushes, 1);
    match &shared.journal {
        // A write that is completed has its slot, so it ends at or before the next position.
        Some(journal) => wait_for(shared, journal.ring.next(), request),
        None => request.done(),
    }
}

/// Answers `request` when everything before `target` is as durable as the volume's mode says.
pub(crate) fn wait_for(shared: &Shared, target: u64, request: Request) {
    let Some(journal) = &shared.journal else { return request.done() };
    let tell: Box<dyn FnOnce(crate::Result<()>) + Send> = Box::new(move |outcome| match outcome {
        Ok(()) => request.done(),
        Err(error) => request.fail(error),
    });
    match shared.record.flush_mode {
        FlushMode::Weak => tell(Ok(())),
        FlushMode::Logged => journal.when_logged(target, tell),
        FlushMode::Stored => shared.inbox.when_stored(shared, target, tell),
    }
}
