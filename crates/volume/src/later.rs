//! Jobs for a later time, run by the keeper's thread.

use std::time::Duration;

use parking_lot::Mutex;

type Job = Box<dyn FnOnce() + Send>;

/// See the head of this file.
#[derive(Default)]
pub(crate) struct Later {
    jobs: Mutex<Vec<(Duration, Job)>>,
}

impl Later {
    /// Runs `job` at time `at` or soon after.
    pub(crate) fn at(&self, at: Duration, job: Job) {
        self.jobs.lock().push((at, job));
    }

    /// Runs what is due; says how long until the next.
    pub(crate) fn run_due(&self, now: Duration) -> Option<Duration> {
        let due: Vec<_> = {
            let mut jobs = self.jobs.lock();
            let (due, kept) = jobs.drain(..).partition(|(at, _)| *at <= now);
            *jobs = kept;
            due
        };
        for (_, job) in due {
            job();
        }
        self.jobs.lock().iter().map(|(at, _)| at.saturating_sub(now)).min()
    }
}
