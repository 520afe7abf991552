//! Lets a loop's thread sleep until another thread wakes it. A ring while it is awake costs one
//! store and one load.
//!
//! Invariant: many may ring, one thread sleeps. A second sleeper could use up the ring that was
//! meant for the first.

use std::sync::atomic::Ordering;
use std::time::Duration;

use sawmill_sys::sync::{AtomicBool, Condvar, Mutex, Spin};

/// See the head of this file. A ring is never lost: it ends the present sleep or the next one.
#[derive(Default)]
pub(crate) struct Wake {
    rung: AtomicBool,
    asleep: AtomicBool,
    lock: Mutex<()>,
    bell: Condvar,
}

impl Wake {
    /// Wakes the sleeper, or makes its next sleep end at once.
    pub(crate) fn ring(&self) {
        // This stores `rung` and then loads `asleep`; `sleep` stores `asleep` and then takes
        // `rung`. In one order of all four, one side sees the other.
        self.rung.store(true, Ordering::SeqCst);
        if self.asleep.load(Ordering::SeqCst) {
            let _held = self.lock.lock();
            self.bell.notify_one();
        }
    }

    /// A faulty bell, which a test must detect.
    #[cfg(all(test, feature = "shuttle"))]
    pub(crate) fn ring_if_asleep(&self) {
        if self.asleep.load(Ordering::SeqCst) {
            self.rung.store(true, Ordering::SeqCst);
            let _held = self.lock.lock();
            self.bell.notify_one();
        }
    }

    /// Watches for a ring for up to `limit` without sleeping, because a ring may be on its way.
    /// Leaves the ring for [`sleep`](Self::sleep).
    pub(crate) fn watch(&self, limit: Duration) {
        let mut spin = Spin::for_up_to(limit);
        while !self.rung.load(Ordering::Relaxed) && spin.again() {
            std::hint::spin_loop();
        }
    }

    /// Sleeps until rung or until `timeout` has passed; `None` waits for a ring. Returns whether it
    /// was rung.
    pub(crate) fn sleep(&self, timeout: Option<Duration>) -> bool {
        let mut held = self.lock.lock();
        self.asleep.store(true, Ordering::SeqCst);
        let mut rung = self.rung.swap(false, Ordering::SeqCst);
        if !rung {
            match timeout {
                Some(timeout) => {
                    self.bell.wait_for(&mut held, timeout);
                }
                None => self.bell.wait(&mut held),
            }
            rung = self.rung.swap(false, Ordering::SeqCst);
        }
        self.asleep.store(false, Ordering::SeqCst);
        rung
    }
}
