//! Lets a loop's thread sleep until another thread wakes it. A notification while it is awake
//! costs one store and one load.
//!
//! Invariant: many may notify, one thread sleeps. A second sleeper could use up the notification
//! that was meant for the first.

use std::sync::atomic::Ordering;
use std::time::Duration;

use sawmill_sys::sync::{AtomicBool, Condvar, Mutex, Spin};

/// Wakes the one thread of a loop. A notification is never lost: it ends the present sleep or the
/// next one.
#[derive(Default)]
pub(crate) struct Wake {
    notified: AtomicBool,
    is_asleep: AtomicBool,
    lock: Mutex<()>,
    condvar: Condvar,
}

impl Wake {
    /// Wakes the sleeper, or makes its next sleep end at once.
    pub(crate) fn notify(&self) {
        // This stores `notified` and then loads `is_asleep`; `sleep` stores `is_asleep` and then
        // takes `notified`. In one order of all four, one side sees the other.
        self.notified.store(true, Ordering::SeqCst);
        if self.is_asleep.load(Ordering::SeqCst) {
            let _held = self.lock.lock();
            self.condvar.notify_one();
        }
    }

    /// A faulty notification, which a test must detect.
    #[cfg(all(test, feature = "shuttle"))]
    pub(crate) fn notify_if_asleep(&self) {
        if self.is_asleep.load(Ordering::SeqCst) {
            self.notified.store(true, Ordering::SeqCst);
            let _held = self.lock.lock();
            self.condvar.notify_one();
        }
    }

    /// Watches for a notification for up to `limit` without sleeping, because one may be on its
    /// way. Leaves it for [`sleep`](Self::sleep).
    pub(crate) fn watch(&self, limit: Duration) {
        let mut spin = Spin::for_up_to(limit);
        while !self.notified.load(Ordering::Relaxed) && spin.again() {
            std::hint::spin_loop();
        }
    }

    /// Sleeps until notified or until `timeout` has passed; `None` waits for a notification.
    /// Returns whether it was notified.
    pub(crate) fn sleep(&self, timeout: Option<Duration>) -> bool {
        let mut held = self.lock.lock();
        self.is_asleep.store(true, Ordering::SeqCst);
        let mut notified = self.notified.swap(false, Ordering::SeqCst);
        if !notified {
            match timeout {
                Some(timeout) => {
                    self.condvar.wait_for(&mut held, timeout);
                }
                None => self.condvar.wait(&mut held),
            }
            notified = self.notified.swap(false, Ordering::SeqCst);
        }
        self.is_asleep.store(false, Ordering::SeqCst);
        notified
    }
}
