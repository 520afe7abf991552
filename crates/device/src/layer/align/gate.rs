//! Requests for whole blocks pass without a claim while no request needs blocks exclusively, so
//! cores that write whole blocks share nothing that they change.
//!
//! Invariants: no pass begins between [`Gate::close`] and [`Gate::open`]. A caller that closed the
//! gate and then finds it empty ([`Gate::is_empty`]) shares the blocks only with other claims until
//! it opens the gate again. A pass that finds the gate closed, or leaves through a closed gate,
//! reports that, because a request may wait for it. Not here: claims.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Counters of passes, each mostly used by the same threads.
const LANES: usize = 32;

/// Aligned to cache lines of its own.
#[repr(align(128))]
#[derive(Default)]
struct PaddedCounter(AtomicUsize);

/// See the head of this file; `C` is what a pass leaves to wake waiting requests.
pub(super) struct Gate<C> {
    lanes: Box<[Arc<Lane<C>>]>,
    closed: Arc<PaddedCounter>,
}

/// One counter.
pub(super) struct Lane<C> {
    passing: PaddedCounter,
    closed: Arc<PaddedCounter>,
    core: C,
}

impl<C: Clone> Gate<C> {
    pub(super) fn new(core: &C) -> Self {
        let closed = Arc::new(PaddedCounter::default());
        let lane = |_| {
            let (passing, closed) = (PaddedCounter::default(), Arc::clone(&closed));
            Arc::new(Lane { passing, closed, core: core.clone() })
        };
        Gate { lanes: (0..LANES).map(lane).collect(), closed }
    }

    /// Begins a pass. `None`: the gate is closed, and a request may wait.
    pub(super) fn pass(&self) -> Option<Arc<Lane<C>>> {
        let lane = &self.lanes[lane_here()];
        lane.passing.0.fetch_add(1, Ordering::SeqCst);
        if self.closed.0.load(Ordering::SeqCst) == 0 {
            return Some(Arc::clone(lane));
        }
        lane.passing.0.fetch_sub(1, Ordering::SeqCst);
        None
    }

    /// From now on no pass begins.
    pub(super) fn close(&self) {
        self.closed.0.fetch_add(1, Ordering::SeqCst);
    }

    /// Reverts one `close`.
    pub(super) fn open(&self) {
        self.closed.0.fetch_sub(1, Ordering::SeqCst);
    }

    /// Whether no pass is in progress. This stays so while the gate is closed.
    pub(super) fn is_empty(&self) -> bool {
        self.lanes.iter().all(|lane| lane.passing.0.load(Ordering::SeqCst) == 0)
    }
}

impl<C> Lane<C> {
    /// Ends a pass. If the gate is closing, returns the core whose waiter must be woken.
    pub(super) fn leave(&self) -> Option<&C> {
        self.passing.0.fetch_sub(1, Ordering::SeqCst);
        (self.closed.0.load(Ordering::SeqCst) > 0).then_some(&self.core)
    }
}

/// The lane of the calling thread: always the same, so that threads rarely meet.
fn lane_here() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static HERE: usize = NEXT.fetch_add(1, Ordering::Relaxed) % LANES;
    }
    HERE.with(|here| *here)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_closed_gate_admits_no_request_and_leaving_it_reports_a_waiter() {
        let gate = Gate::new(&());
        let inside = gate.pass().expect("it is open");
        gate.close();
        assert!(!gate.is_empty() && gate.pass().is_none());
        assert!(inside.leave().is_some(), "a waiter is there");
        assert!(gate.is_empty());
        gate.open();
        let inside = gate.pass().expect("it is open again");
        assert!(inside.leave().is_none());
    }
}
