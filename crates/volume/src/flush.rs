//! A flush, or the wait of a write with FUA, by the volume's flush mode.
//!
//! - logged: everything reserved so far is synced to the journal disk; one sync serves all who wait.
//! - stored: everything reserved so far is in the store, in a contiguous prefix; the batch is sealed at once.
//! - weak: a barrier only. The journal is one order, so there is nothing to do.
//!
//! What the local disk alone answers for is not answered on old news of who owns the volume (`crate::watch`).

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

/// Answers `request` when everything before `target` is as durable as the volume's mode says, and this
/// attachment has looked lately whether the volume is still its own,
/// and nothing unstored is too old.
pub(crate) fn wait_for(shared: &Shared, target: u64, request: Request) {
    if shared.record.flush_mode == FlushMode::Stored {
        return wait_for_safety(shared, target, request);
    }
    let now = shared.world.now();
    if shared.watch.lets_flush(now) && !shared.is_unstored_too_old() {
        return wait_for_safety(shared, target, request);
    }
    shared.watch.hold(target, request, now);
    shared.inbox.wake.ring();
    // Who ended the volume may have looked before.
    if shared.state.is_dead() || shared.inbox.is_closed() {
        go_on(shared);
    }
}

/// Takes up the flushes that waited for a look.
pub(crate) fn go_on(shared: &Shared) {
    if !shared.state.is_dead() && !shared.inbox.is_closed() && shared.is_unstored_too_old() {
        return;
    }
    for (target, request) in shared.watch.take_held() {
        match shared.state.refusal().filter(|_| shared.state.is_dead()) {
            Some(error) => request.fail(error),
            None => wait_for_safety(shared, target, request),
        }
    }
}

fn wait_for_safety(shared: &Shared, target: u64, request: Request) {
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
