//! The locks and atomics of the journal's path, under their names in `parking_lot` and the standard
//! library. They are here so that a test can replace them.
//!
//! With the feature `shuttle`, they are those of the crate of that name: each use is a point where
//! another thread may continue, and a run tries one schedule after the other. A wait with a timeout
//! then ends either at once or only by a notification, so code that relies on the timeout alone
//! hangs in some schedule, and the test finds it.
//!
//! Invariants: both variants export the same names. A `MutexGuard` holds its lock except while its
//! owner waits on a `Condvar`.
//!
//! Not here: memory orders weaker than one total order of all steps, which `shuttle` does not try.

#[cfg(not(feature = "shuttle"))]
mod real {
    use std::time::{Duration, Instant};

    pub use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
    pub use std::thread::ThreadId;

    pub use parking_lot::{Condvar, Mutex, MutexGuard, RwLock};

    /// A point where a schedule may switch to another thread, beside the locks and atomics
    /// themselves.
    #[inline(always)]
    pub fn switch_point() {}

    /// The thread that calls this.
    #[must_use]
    pub fn thread_id() -> ThreadId {
        std::thread::current().id()
    }

    /// A busy-wait for a limited time.
    pub struct Spin {
        start: Instant,
        limit: Duration,
    }

    impl Spin {
        /// Starts a busy-wait of at most `limit`.
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
    pub use shuttle::thread::ThreadId;

    /// A point where the schedule may switch to another thread, beside the locks and atomics
    /// themselves.
    pub fn switch_point() {
        shuttle::thread::yield_now();
    }

    /// The thread that calls this.
    #[must_use]
    pub fn thread_id() -> ThreadId {
        shuttle::thread::current().id()
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

        /// The guarded value.
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

    /// As `parking_lot::Condvar`, without a clock.
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
            let inner_guard = guard.0.take().expect("a guard is empty only while its owner waits");
            guard.0 = Some(self.0.wait(inner_guard).unwrap_or_else(PoisonError::into_inner));
        }

        /// Waits for a notification, or returns at once.
        pub fn wait_for<T>(&self, guard: &mut MutexGuard<'_, T>, _: Duration) {
            if shuttle::rand::thread_rng().r#gen() {
                switch_point();
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

        /// Waits for shared access.
        pub fn read(&self) -> sync::RwLockReadGuard<'_, T> {
            self.0.read().unwrap_or_else(PoisonError::into_inner)
        }

        /// Waits for exclusive access.
        pub fn write(&self) -> sync::RwLockWriteGuard<'_, T> {
            self.0.write().unwrap_or_else(PoisonError::into_inner)
        }
    }

    /// A busy-wait of a few rounds: a schedule has no clock.
    pub struct Spin(u32);

    impl Spin {
        /// Starts a busy-wait.
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
