//! Lets a loop rest until another thread wakes it: its thread sleeps, or the loop is parked without
//! a thread. A notification while it runs costs one store and one load.
//!
//! Invariants: many may notify, one loop rests. A second one could use up the notification that was
//! meant for the first. A parked loop is resumed once for each time it is parked.
//!
//! Not here: which thread runs a loop that is resumed (`loops`).

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use sawmill_sys::sync::{AtomicBool, Condvar, Mutex, Spin};

/// A loop that can rest without a thread.
pub(crate) trait ParkedLoop: Send + Sync {
    /// Finds the loop a thread.
    fn resume(self: Arc<Self>);
}

/// Wakes one loop. A notification is never lost: it ends the present rest or the next one.
#[derive(Default)]
pub(crate) struct Wake {
    notified: AtomicBool,
    is_asleep: AtomicBool,
    parked: Mutex<Option<Arc<dyn ParkedLoop>>>,
    condvar: Condvar,
}

impl Wake {
    /// Wakes the loop, or makes its next rest end at once.
    pub(crate) fn notify(&self) {
        // This stores `notified` and then loads `is_asleep`; `sleep` and `park` store `is_asleep`
        // and then take `notified`. In one order of all four, one side sees the other.
        self.notified.store(true, Ordering::SeqCst);
        if self.is_asleep.load(Ordering::SeqCst) {
            self.end_rest();
        }
    }

    fn end_rest(&self) {
        let mut parked = self.parked.lock();
        match parked.take() {
            Some(resumed) => {
                self.is_asleep.store(false, Ordering::SeqCst);
                // Used up. A later one stays for the next rest. A swap, because the loop must see
                // what led to each notification that this one uses up.
                self.notified.swap(false, Ordering::SeqCst);
                drop(parked);
                resumed.resume();
            }
            None => {
                self.condvar.notify_one();
            }
        }
    }

    /// A faulty notification, which a test must detect.
    #[cfg(all(test, feature = "shuttle"))]
    pub(crate) fn notify_if_asleep(&self) {
        if self.is_asleep.load(Ordering::SeqCst) {
            self.notified.store(true, Ordering::SeqCst);
            self.end_rest();
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
        let mut held = self.parked.lock();
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

    /// Leaves the loop to the next notification, which resumes it. Returns false if there was one
    /// already: then the loop goes on. After true, it may be running again on another thread.
    pub(crate) fn park(&self, parked_loop: Arc<dyn ParkedLoop>) -> bool {
        let mut parked = self.parked.lock();
        self.is_asleep.store(true, Ordering::SeqCst);
        if self.notified.swap(false, Ordering::SeqCst) {
            self.is_asleep.store(false, Ordering::SeqCst);
            return false;
        }
        *parked = Some(parked_loop);
        true
    }

    /// Takes the loop back from its rest without a notification; `None` if it does not rest.
    pub(crate) fn unpark(&self) -> Option<Arc<dyn ParkedLoop>> {
        let mut parked = self.parked.lock();
        let resumed = parked.take()?;
        self.is_asleep.store(false, Ordering::SeqCst);
        Some(resumed)
    }
}
