//! Passes: requests for whole blocks need no range lock while no request needs blocks exclusively,
//! so cores that write whole blocks share nothing that they change.
//!
//! Invariants: no pass begins between [`Passes::close`] and [`Passes::open`]. Who closed them and
//! then finds none ([`Passes::is_empty`]) shares the blocks only with other range locks until it
//! opens them again. A pass that is refused, or ends while passes are closed, reports that, because
//! a request may wait for it. Not here: range locks (`range_locks`).

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Counters of passes, each mostly used by the same threads.
const STRIPES: usize = 32;

/// Aligned to cache lines of its own.
#[repr(align(128))]
#[derive(Default)]
struct PaddedCounter(AtomicUsize);

/// Counts the requests for whole blocks that need no range lock; `C` is what a pass leaves to wake
/// waiting requests.
pub(super) struct Passes<C> {
    stripes: Box<[Arc<Stripe<C>>]>,
    closed: Arc<PaddedCounter>,
}

/// One counter.
pub(super) struct Stripe<C> {
    passing: PaddedCounter,
    closed: Arc<PaddedCounter>,
    core: C,
}

impl<C: Clone> Passes<C> {
    pub(super) fn new(core: &C) -> Self {
        let closed = Arc::new(PaddedCounter::default());
        let stripe = |_| {
            let (passing, closed) = (PaddedCounter::default(), Arc::clone(&closed));
            Arc::new(Stripe { passing, closed, core: core.clone() })
        };
        Passes { stripes: (0..STRIPES).map(stripe).collect(), closed }
    }

    /// Begins a pass. `None`: passes are closed, and a request may wait.
    pub(super) fn pass(&self) -> Option<Arc<Stripe<C>>> {
        let stripe = &self.stripes[stripe_here()];
        stripe.passing.0.fetch_add(1, Ordering::SeqCst);
        if self.closed.0.load(Ordering::SeqCst) == 0 {
            return Some(Arc::clone(stripe));
        }
        stripe.passing.0.fetch_sub(1, Ordering::SeqCst);
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

    /// Whether no pass is in progress. This stays so while passes are closed.
    pub(super) fn is_empty(&self) -> bool {
        self.stripes.iter().all(|stripe| stripe.passing.0.load(Ordering::SeqCst) == 0)
    }
}

impl<C> Stripe<C> {
    /// Ends a pass. If passes are closed, returns the core whose waiter must be woken.
    pub(super) fn leave(&self) -> Option<&C> {
        self.passing.0.fetch_sub(1, Ordering::SeqCst);
        (self.closed.0.load(Ordering::SeqCst) > 0).then_some(&self.core)
    }
}

/// The stripe of the calling thread: always the same, so that threads rarely meet.
fn stripe_here() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static HERE: usize = NEXT.fetch_add(1, Ordering::Relaxed) % STRIPES;
    }
    HERE.with(|here| *here)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_pass_begins_while_they_are_closed_and_the_end_of_one_reports_a_waiter() {
        let passes = Passes::new(&());
        let pass = passes.pass().expect("they are open");
        passes.close();
        assert!(!passes.is_empty() && passes.pass().is_none());
        assert!(pass.leave().is_some(), "a waiter is there");
        assert!(passes.is_empty());
        passes.open();
        let pass = passes.pass().expect("they are open again");
        assert!(pass.leave().is_none());
    }
}
