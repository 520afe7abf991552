//! A few threads that may wait for local disks, on behalf of readers that must not. The queue is bounded by
//! the requests that doors admit; optional work is refused when it is long.

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::JoinHandle;

use parking_lot::{Condvar, Mutex};

type Job = Box<dyn FnOnce() + Send>;

/// What the threads of a pool get when all cores are busy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Priority {
    /// As everybody.
    Usual,
    /// What others leave.
    Lowest,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    closed: bool,
}

/// What the threads share.
#[derive(Default)]
pub(crate) struct Pool {
    queue: Mutex<Queue>,
    bell: Condvar,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// Optional jobs are refused when this many wait. Each may hold a frame: 16 MiB. A sequential reader of
/// megabytes brings 16 frames a request; if they were refused, a pass over the disk would not warm the cache.
const OPTIONAL_JOBS_MAX: usize = 256;

impl Pool {
    /// Starts `threads` threads of this name. With none, jobs run on the caller's thread (for simulations).
    pub(crate) fn start(name: &str, threads: usize, priority: Priority) -> std::io::Result<Arc<Self>> {
        let pool = Arc::new(Pool::default());
        for number in 0..threads {
            let shared = pool.clone();
            let work = move || {
                if priority == Priority::Lowest {
                    sawmill_sys::give_way();
                }
                shared.work();
            };
            let thread = std::thread::Builder::new().name(format!("{name}-{number}")).spawn(work)?;
            pool.threads.lock().push(thread);
        }
        Ok(pool)
    }

    /// Runs `job` soon.
    pub(crate) fn run(&self, job: impl FnOnce() + Send + 'static) {
        if self.threads.lock().is_empty() {
            return job();
        }
        let mut queue = self.queue.lock();
        if queue.closed {
            return;
        }
        queue.jobs.push_back(Box::new(job));
        self.bell.notify_one();
    }

    /// Runs `job` soon unless much else waits; says whether it will.
    pub(crate) fn run_if_calm(&self, job: impl FnOnce() + Send + 'static) -> bool {
        if self.queue.lock().jobs.len() >= OPTIONAL_JOBS_MAX {
            return false;
        }
        self.run(job);
        true
    }

    fn work(&self) {
        loop {
            let job = {
                let mut queue = self.queue.lock();
                loop {
                    if let Some(job) = queue.jobs.pop_front() {
                        break job;
                    }
                    if queue.closed {
                        return;
                    }
                    self.bell.wait(&mut queue);
                }
            };
            job();
        }
    }

    /// Finishes what is queued and ends the threads.
    pub(crate) fn close(&self) {
        self.queue.lock().closed = true;
        self.bell.notify_all();
        let threads = std::mem::take(&mut *self.threads.lock());
        for thread in threads {
            // A panicked job has already been reported by its thread.
            let _ = sawmill_sys::join_unless_own(thread);
        }
    }
}
