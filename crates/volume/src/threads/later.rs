//! Jobs for a later time, run by the engine's thread. Invariants: each job runs once, when it is
//! due or when the volume ends. None runs under the lock, because a job may add another.

use std::time::Duration;

use parking_lot::Mutex;

use super::pool::Job;

#[derive(Default)]
struct JobQueue {
    /// Bounded by the fetches in flight, each of which is repeated by one job, and one more that
    /// forgets what was fetched ahead.
    waiting: Vec<(Duration, Job)>,
    closed: bool,
}

/// A queue of jobs, each with the time at which it is due.
#[derive(Default)]
pub(crate) struct DeferredJobs {
    jobs: Mutex<JobQueue>,
}

impl DeferredJobs {
    /// Runs `job` at time `at` or soon after.
    pub(crate) fn at(&self, at: Duration, job: Job) {
        {
            let mut jobs = self.jobs.lock();
            if !jobs.closed {
                return jobs.waiting.push((at, job));
            }
        }
        job();
    }

    /// The engine's thread has ended: runs waiting jobs now, and later ones when they are added.
    pub(crate) fn close(&self) {
        let waiting = {
            let mut jobs = self.jobs.lock();
            jobs.closed = true;
            std::mem::take(&mut jobs.waiting)
        };
        for (_, job) in waiting {
            job();
        }
    }

    /// Whether jobs run when they are added, because the volume has ended.
    pub(crate) fn is_closed(&self) -> bool {
        self.jobs.lock().closed
    }

    /// Runs the jobs that are due; returns the time until the next one.
    pub(crate) fn run_due(&self, now: Duration) -> Option<Duration> {
        let due: Vec<_> = {
            let mut jobs = self.jobs.lock();
            let (due, kept) = jobs.waiting.drain(..).partition(|(at, _)| *at <= now);
            jobs.waiting = kept;
            due
        };
        for (_, job) in due {
            job();
        }
        self.jobs.lock().waiting.iter().map(|(at, _)| at.saturating_sub(now)).min()
    }
}
