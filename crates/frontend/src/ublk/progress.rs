//! How many queues of a device are quiet, and how many are gone.
//!
//! Not here: the queues ([`super::queue`]).

use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

#[derive(Clone, Copy, Default)]
struct ProgressSample {
    /// The number of the current round of quiescing.
    round: u64,
    /// Queues that are quiet in that round.
    quiet: usize,
    gone: usize,
}

/// How many queues of a device are quiet, and how many are gone.
#[derive(Default)]
pub(super) struct Progress {
    sample: Mutex<ProgressSample>,
    changed: Condvar,
}

impl Progress {
    /// Starts a round of quiescing. Returns its number. Reports of earlier rounds no longer count.
    pub(super) fn begin_round(&self) -> u64 {
        let mut sample = self.sample.lock();
        sample.round += 1;
        sample.quiet = 0;
        sample.round
    }

    /// A queue is quiet in this round.
    pub(super) fn quiet(&self, round: u64) {
        let mut sample = self.sample.lock();
        if sample.round == round {
            sample.quiet += 1;
            self.changed.notify_all();
        }
    }

    /// A queue is gone: its thread has released it.
    pub(super) fn gone(&self) {
        self.sample.lock().gone += 1;
        self.changed.notify_all();
    }

    /// Waits until this many queues are quiet, or gone. Returns whether they are.
    pub(super) fn wait_quiet(&self, queues: usize, patience: Duration) -> bool {
        let began = Instant::now();
        let mut sample = self.sample.lock();
        while sample.quiet + sample.gone < queues {
            let remaining_time = patience.saturating_sub(began.elapsed());
            if self.changed.wait_for(&mut sample, remaining_time).timed_out() {
                break;
            }
        }
        sample.quiet + sample.gone >= queues
    }

    /// Waits until this many queues are gone.
    pub(super) fn wait_gone(&self, queues: usize) {
        let mut sample = self.sample.lock();
        while sample.gone < queues {
            self.changed.wait(&mut sample);
        }
    }
}
