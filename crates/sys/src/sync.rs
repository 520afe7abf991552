//! The locks and atomics of the journal's path, under the names that `parking_lot` and the standard
//! library give them: here, so that a test can put others in their place.
//!
//! With the feature `shuttle` they are those of the crate of that name: each use is a point where
//! another thread may go on, and a run tries one such schedule after the other. Then a wait with a
//! timeout ends at once or never: whoever would have been saved by the clock alone sleeps for ever
//! in some schedule, and is found.
//!
//! Not here: orders weaker than one total order of all steps. Those `shuttle` does not try.

#[cfg(not(feature = "shuttle"))]
mod real {
    use std::time::{Duration, Instant};

    pub use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};

    pub use parking_lot::{Condvar, Mutex, MutexGuard, RwLock};

    /// A point where a schedule may switch to another thread, beside the locks and atomics
    /// themselves.
    #[inline(always)]
    pub fn may_switch() {}

    /// Looking again and again, awake, for a limited time.
    pub struct Spin {
        start: Instant,
        limit: Duration,
    }

    impl Spin {
        /// From now on, for `limit`.
        #[must_use]
        pub fn for_up_to(limit: Duration) -> Self {
            Spin { start: Instant::now(), limit }
        }

        /// Whether to look once more.
        #[inline]
        pub fn again(&mut self) -> bool {
            self.start.elapsed() < self.limit
        }
    }
}

#[cfg(feature = "shuttle")]
mod scheduled {
    use std::ops::{Deref, DerefMut};
    use std::sync::PoisonError;
    use std::time::Duration;

    use shuttle::rand::Rng;
    use shuttle::sync;
    pub use shuttle::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};

    /// A point where the schedule may switch to another thread, beside the locks and atomics
    /// themselves.
    pub fn may_switch() {
        shuttle::thread::yield_now();
    }

    /// As `parking_lot::Mutex`.
    #[derive(Debug, Default)]
    pub struct Mutex<T>(sync::Mutex<T>);

    /// As `parking_lot::MutexGuard`; empty only while its owner waits.
    pub struct MutexGuard<'a, T>(Option<sync::MutexGuard<'a, T>>);

    impl<T> Mutex<T> {
        /// An open lock.
        pub const fn new(value: T) -> Self {
            Mutex(sync::Mutex::new(value))
        }

        /// Waits for the lock.
        pub fn lock(&self) -> MutexGuard<'_, T> {
            MutexGuard(Some(self.0.lock().unwrap_or_else(PoisonError::into_inner)))
        }

        /// What it guarded.
        pub fn into_inner(self) -> T {
            self.0.into_inner().unwrap_or_else(PoisonError::into_inner)
        }
    }

    impl<T> Deref for MutexGuard<'_, T> {
        type Target = T;

        fn deref(&self) -> &T {
            self.0.as_ref().expect("a guard is empty only while its owner waits")
        }
    }

    impl<T> DerefMut for MutexGuard<'_, T> {
        fn deref_mut(&mut self) -> &mut T {
            self.0.as_mut().expect("a guard is empty only while its owner waits")
        }
    }

    /// As `parking_lot::Condvar`, but for the clock.
    #[derive(Debug, Default)]
    pub struct Condvar(sync::Condvar);

    impl Condvar {
        /// Ends one wait.
        pub fn notify_one(&self) {
            self.0.notify_one();
        }

        /// Ends all waits.
        pub fn notify_all(&self) {
            self.0.notify_all();
        }

        /// Waits for a notification.
        pub fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
            let held = guard.0.take().expect("a guard is empty only while its owner waits");
            guard.0 = Some(self.0.wait(held).unwrap_or_else(PoisonError::into_inner));
        }

        /// Waits for a notification, or for no time at all.
        pub fn wait_for<T>(&self, guard: &mut MutexGuard<'_, T>, _: Duration) {
            if shuttle::rand::thread_rng().r#gen() {
                may_switch();
            } else {
                self.wait(guard);
            }
        }
    }

    /// As `parking_lot::RwLock`.
    #[derive(Debug, Default)]
    pub struct RwLock<T>(sync::RwLock<T>);

    impl<T> RwLock<T> {
        /// An open lock.
        pub const fn new(value: T) -> Self {
            RwLock(sync::RwLock::new(value))
        }

        /// Waits for a share of the lock.
        pub fn read(&self) -> sync::RwLockReadGuard<'_, T> {
            self.0.read().unwrap_or_else(PoisonError::into_inner)
        }

        /// Waits for the whole lock.
        pub fn write(&self) -> sync::RwLockWriteGuard<'_, T> {
            self.0.write().unwrap_or_else(PoisonError::into_inner)
        }
    }

    /// Looking again and again, a few times: a schedule has no clock.
    pub struct Spin(u32);

    impl Spin {
        /// From now on.
        #[must_use]
        pub fn for_up_to(_: Duration) -> Self {
            Spin(3)
        }

        /// Whether to look once more.
        pub fn again(&mut self) -> bool {
            self.0 -= 1;
            self.0 > 0
        }
    }
}

#[cfg(not(feature = "shuttle"))]
pub use real::*;
#[cfg(feature = "shuttle")]
pub use scheduled::*;
