//! Threads that may wait for local disks, on behalf of readers that must not wait.
//!
//! Invariants: threads start on demand, up to a limit, and end after some idle time, so an unused
//! volume has none. An accepted job runs. The queue is bounded by what doors admit: a read adds a
//! job for each of its pieces that is not in memory (its bytes, for a map of single bytes), and
//! each job holds the bytes of its piece alone. Optional work is refused when the queue is long.
//!
//! Not here: the jobs (`read`, `engine::collect`), jobs that are due later (`later`), and how many
//! threads a pool may have (`contexts`).

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

/// What a pool runs, and what is due later.
pub(super) type Job = Box<dyn FnOnce() + Send>;

/// What the threads of a pool get when all cores are busy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Priority {
    /// The same as other threads.
    Usual,
    /// Only the time that others leave.
    Lowest,
}

#[derive(Default)]
struct PoolState {
    /// Bounded by the pieces of the reads that doors admit; optional work is refused when it is
    /// long.
    jobs: VecDeque<Job>,
    closed: bool,
    /// Threads that have not ended, and those among them that wait for a job.
    threads: usize,
    idle: usize,
    /// All threads started since the last cleanup; the next start drops those that ended.
    handles: Vec<JoinHandle<()>>,
}

/// What the threads share.
pub(crate) struct Pool {
    name: &'static str,
    threads_max: usize,
    priority: Priority,
    idle_max: Duration,
    state: Mutex<PoolState>,
    wakeup: Condvar,
}

/// Optional jobs are refused when this many wait. Each may hold a frame: 16 MiB. A sequential
/// reader of megabytes brings 16 frames a request; if they were refused, a pass over the disk would
/// not warm the cache.
const OPTIONAL_JOBS_MAX: usize = 256;
/// A thread that was idle for this long ends. Starting another takes less time than a disk read.
const IDLE_TIME_MAX: Duration = Duration::from_secs(10);

impl Pool {
    /// A pool of up to `threads_max` threads. With none, jobs run on the caller's thread (for
    /// simulations).
    pub(crate) fn new(name: &'static str, threads_max: usize, priority: Priority) -> Arc<Self> {
        Self::with_idle_max(name, threads_max, priority, IDLE_TIME_MAX)
    }

    fn with_idle_max(
        name: &'static str,
        threads_max: usize,
        priority: Priority,
        idle_max: Duration,
    ) -> Arc<Self> {
        let (state, wakeup) = (Mutex::default(), Condvar::new());
        Arc::new(Self { name, threads_max, priority, idle_max, state, wakeup })
    }

    /// Runs `job` soon.
    pub(crate) fn run(self: &Arc<Self>, job: impl FnOnce() + Send + 'static) {
        if self.threads_max == 0 {
            return job();
        }
        let mut state = self.state.lock();
        if state.closed {
            return;
        }
        state.jobs.push_back(Box::new(job));
        if state.jobs.len() <= state.idle {
            self.wakeup.notify_one();
        } else if state.threads < self.threads_max {
            self.start_thread(&mut state);
            // The machine has no thread left: the caller waits for the disk itself.
            if state.threads == 0
                && let Some(job) = state.jobs.pop_back()
            {
                drop(state);
                job();
            }
        }
    }

    /// Runs `job` soon unless many jobs wait; returns whether it will run.
    pub(crate) fn run_if_calm(self: &Arc<Self>, job: impl FnOnce() + Send + 'static) -> bool {
        if self.state.lock().jobs.len() >= OPTIONAL_JOBS_MAX {
            return false;
        }
        self.run(job);
        true
    }

    /// Starts one more thread, if the system permits; otherwise jobs wait for the running ones.
    fn start_thread(self: &Arc<Self>, state: &mut PoolState) {
        state.handles.retain(|handle| !handle.is_finished());
        let pool = self.clone();
        let builder = std::thread::Builder::new().name(format!("{}-{}", self.name, state.threads));
        match builder.spawn(move || pool.work()) {
            Ok(handle) => {
                state.threads += 1;
                state.handles.push(handle);
            }
            Err(error) => tracing::warn!(%error, threads = state.threads, "cannot start a thread"),
        }
    }

    fn work(&self) {
        if self.priority == Priority::Lowest {
            sawmill_sys::lower_cpu_priority();
        }
        let mut state = self.state.lock();
        loop {
            if let Some(job) = state.jobs.pop_front() {
                drop(state);
                // A panic is reported by its thread; the pool must not count a thread that is gone.
                let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(job));
                state = self.state.lock();
                continue;
            }
            if state.closed {
                break;
            }
            state.idle += 1;
            let timed_out = self.wakeup.wait_for(&mut state, self.idle_max).timed_out();
            state.idle -= 1;
            if timed_out && state.jobs.is_empty() {
                break;
            }
        }
        state.threads -= 1;
    }

    #[cfg(test)]
    pub(crate) fn is_closed(&self) -> bool {
        self.state.lock().closed
    }

    /// Finishes what is queued and ends the threads.
    pub(crate) fn close(&self) {
        let handles = {
            let mut state = self.state.lock();
            state.closed = true;
            std::mem::take(&mut state.handles)
        };
        self.wakeup.notify_all();
        for handle in handles {
            let _ = sawmill_sys::join_unless_own(handle);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    fn threads(pool: &Pool) -> usize {
        pool.state.lock().threads
    }

    #[test]
    fn an_unused_pool_has_no_thread() {
        let pool = Pool::with_idle_max("test", 4, Priority::Usual, Duration::from_millis(1));
        assert_eq!(threads(&pool), 0);
        let (done, wait) = channel();
        pool.run(move || done.send(()).expect("the test waits"));
        wait.recv().expect("the job runs");
        while threads(&pool) > 0 {
            std::thread::yield_now();
        }
        // Afterwards the pool starts a thread again.
        let (done, wait) = channel();
        pool.run(move || done.send(()).expect("the test waits"));
        wait.recv().expect("the job runs");
        pool.close();
        assert_eq!(threads(&pool), 0);
    }

    #[test]
    fn jobs_that_wait_for_each_other_get_a_thread_each_up_to_the_limit() {
        let pool = Pool::new("test", 3, Priority::Lowest);
        let together = Arc::new(std::sync::Barrier::new(4));
        for _ in 0..3 {
            let together = together.clone();
            pool.run(move || {
                together.wait();
            });
        }
        together.wait();
        let (done, wait) = channel();
        for _ in 0..100 {
            let done = done.clone();
            pool.run(move || done.send(()).expect("the test waits"));
        }
        assert!(threads(&pool) <= 3);
        pool.close();
        assert_eq!(wait.try_iter().count(), 100, "what was accepted has run");
    }

    #[test]
    fn a_job_that_panics_costs_no_other_job() {
        let pool = Pool::new("test", 1, Priority::Usual);
        pool.run(|| panic!("one job fails"));
        let (done, wait) = channel();
        pool.run(move || done.send(()).expect("the test waits"));
        wait.recv().expect("the next job runs");
        pool.close();
    }
}
