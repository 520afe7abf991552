//! Queues and cores: the queue of a request and, with `tie_queues`, the core of a queue's threads,
//! so that a request, its bytes and its answer stay on one core (as in BUSE).
//!
//! Not here: threads (`host`, `client`).

use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::thread::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};

/// The cores that this process may use, in order.
pub(crate) struct Cores(Vec<usize>);

impl Cores {
    pub(crate) fn new() -> Self {
        // If they are unknown, no thread is pinned.
        let allowed = sched_getaffinity(None).unwrap_or_default();
        Cores((0..CpuSet::MAX_CPU).filter(|core| allowed.is_set(*core)).collect())
    }

    /// The queue of the core that this thread runs on.
    pub(crate) fn queue_here(&self, queues: usize) -> usize {
        let core = sched_getcpu();
        // Uses the core's index among the allowed cores, not its number: numbers can have gaps, and
        // then some queues would get no work.
        self.0.binary_search(&core).unwrap_or(core) % queues
    }

    /// Pins this thread to the core of a queue.
    pub(crate) fn pin_thread(&self, queue: usize) {
        let Some(core) = self.0.get(queue % self.0.len().max(1)) else { return };
        let mut set = CpuSet::new();
        set.set(*core);
        if let Err(error) = sched_setaffinity(None, &set) {
            tracing::debug!(%error, queue, "cannot pin a thread to its core");
        }
    }
}

/// The queue of this thread: always the same.
pub(crate) fn queue_of_thread(queues: usize) -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static HERE: usize = NEXT.fetch_add(1, Ordering::Relaxed);
    }
    HERE.with(|here| here % queues)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_is_tied_stays_on_the_core_of_its_queue() {
        let cores = Cores::new();
        for queue in 0..cores.0.len() + 1 {
            let placement = std::thread::scope(|scope| {
                let tied_thread = scope.spawn(|| {
                    cores.pin_thread(queue);
                    let allowed = sched_getaffinity(None).expect("its own");
                    (cores.queue_here(cores.0.len()), allowed.count())
                });
                tied_thread.join().expect("no panic")
            });
            assert_eq!(placement, (queue % cores.0.len(), 1));
        }
    }
}
