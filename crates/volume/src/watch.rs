//! When the volume was last used, when this attachment was last known to own it, and the flushes
//! that wait for a newer confirmation.
//!
//! A writer that takes the volume over puts a fence into the log. The owner meets it when it puts
//! its next segment, but an owner that only reads and flushes puts none. So, while the volume is
//! used, the engine checks where a fence would stand (`engine::fence_check`), and a flush needs a
//! recent check: it waits for the next one, for [`STORE_ANSWER_TIME_MAX`] at most. An unavailable
//! store delays no flush for longer: logged data is on the local disk, whichever writer owns the
//! volume, and the volume's health shows the outage.
//!
//! Invariant: at the time that [`Watch::confirmed_at`] returns, this attachment was not fenced: it
//! is the start of a check that found no fence, or the first put of a segment that was stored
//! later.
//!
//! Not here: the checks (`engine::fence_check`), and answering a flush (`write::flush`).

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use sawmill_device::Request;

/// A volume that was used within this time is in use.
const IN_USE_TIME_MAX: Duration = Duration::from_secs(10);
/// Uses closer together than this count as one, so that they do not contend for a cache line.
const USE_EVERY: Duration = Duration::from_millis(250);
/// How often the engine checks for fences while the volume is in use.
pub(crate) const FENCE_CHECK_EVERY: Duration = Duration::from_secs(2);
/// A flush is answered without a wait if ownership was confirmed within this time.
const CONFIRMED_TIME_MAX: Duration = Duration::from_secs(5);
/// How long a flush waits for a confirmation.
pub(crate) const STORE_ANSWER_TIME_MAX: Duration = Duration::from_secs(1);

/// A flush that waits for a check.
struct CheckWaiter {
    through: u64,
    request: Request,
    until: Duration,
}

/// When the volume was used, when ownership was confirmed, and which flushes wait for that.
#[derive(Default)]
pub(crate) struct Watch {
    used_us: AtomicU64,
    confirmed_us: AtomicU64,
    /// The store did not answer the last check, or not in time.
    store_silent: AtomicBool,
    /// Bounded by the flushes that the doors admit.
    waiters: Mutex<Vec<CheckWaiter>>,
    count: AtomicUsize,
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

impl Watch {
    /// Records that the volume is used now. Returns whether it was idle until now.
    pub(crate) fn is_woken_by_use(&self, now: Duration) -> bool {
        let used = self.used_us.load(Ordering::Relaxed);
        let idle_us = micros(now).saturating_sub(used);
        if used == 0 || idle_us >= micros(USE_EVERY) {
            self.used_us.store(micros(now).max(1), Ordering::Relaxed);
        }
        used == 0 || idle_us >= micros(IN_USE_TIME_MAX)
    }

    pub(crate) fn is_in_use(&self, now: Duration) -> bool {
        let used = self.used_us.load(Ordering::Relaxed);
        used > 0 && micros(now).saturating_sub(used) < micros(IN_USE_TIME_MAX)
    }

    /// Records that this attachment was not fenced at time `of`.
    pub(crate) fn confirm_at(&self, of: Duration) {
        self.confirmed_us.fetch_max(micros(of), Ordering::AcqRel);
    }

    /// When ownership was last confirmed.
    pub(crate) fn confirmed_at(&self) -> Duration {
        Duration::from_micros(self.confirmed_us.load(Ordering::Acquire))
    }

    /// Records whether the store failed to answer the last check; returns the previous value.
    pub(crate) fn set_store_silent(&self, store_silent: bool) -> bool {
        self.store_silent.swap(store_silent, Ordering::AcqRel)
    }

    /// Whether a flush may be answered now: ownership was confirmed recently, or the store does not
    /// answer, so that waiting would confirm nothing.
    pub(crate) fn may_answer_flush(&self, now: Duration) -> bool {
        self.store_silent.load(Ordering::Acquire)
            || now.saturating_sub(self.confirmed_at()) <= CONFIRMED_TIME_MAX
    }

    pub(crate) fn hold(&self, through: u64, request: Request, now: Duration) {
        let mut waiting = self.waiters.lock();
        waiting.push(CheckWaiter { through, request, until: now + STORE_ANSWER_TIME_MAX });
        self.count.store(waiting.len(), Ordering::Release);
    }

    /// When the first flush will have waited long enough.
    pub(crate) fn flush_wait_ends(&self) -> Option<Duration> {
        if self.count.load(Ordering::Acquire) == 0 {
            return None;
        }
        self.waiters.lock().iter().map(|waiting| waiting.until).min()
    }

    /// Takes all waiting flushes, once there is nothing left to wait for.
    pub(crate) fn take_held(&self) -> Vec<(u64, Request)> {
        if self.count.load(Ordering::Acquire) == 0 {
            return Vec::new();
        }
        let waiters = {
            let mut waiting = self.waiters.lock();
            // Under the lock: a flush added in between would be in the list but not counted, and
            // would never be taken.
            self.count.store(0, Ordering::Release);
            std::mem::take(&mut *waiting)
        };
        waiters.into_iter().map(|waiting| (waiting.through, waiting.request)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn a_volume_is_in_use_until_ten_seconds_after_its_last_use() {
        let watch = Watch::default();
        assert!(!watch.is_in_use(at(0)) && watch.is_woken_by_use(at(0)));
        assert!(!watch.is_woken_by_use(at(9_000)) && watch.is_in_use(at(18_000)));
        assert!(!watch.is_in_use(at(19_000)) && watch.is_woken_by_use(at(19_000)));
    }

    #[test]
    fn no_flush_that_is_held_beside_a_take_is_left_behind() {
        const COUNT: usize = 100_000;
        let watch = Watch::default();
        let taken_count = std::thread::scope(|scope| {
            let holding = scope.spawn(|| {
                for _ in 0..COUNT {
                    let flags = sawmill_device::Flags::default();
                    let flush = sawmill_device::Operation::Flush;
                    watch.hold(0, Request::bare(flush, 0, 0, flags, |_| ()), at(0));
                    let began = std::time::Instant::now();
                    while !watch.waiters.lock().is_empty() {
                        assert!(began.elapsed().as_secs() < 20, "a flush was left behind");
                        std::hint::spin_loop();
                    }
                }
            });
            let mut taken_count = 0;
            while !holding.is_finished() {
                taken_count += watch.take_held().len();
            }
            taken_count + watch.take_held().len()
        });
        assert_eq!(taken_count, COUNT);
    }

    #[test]
    fn a_flush_goes_on_fresh_news_or_past_a_store_that_does_not_answer() {
        let watch = Watch::default();
        watch.confirm_at(at(3_000));
        watch.confirm_at(at(1_000));
        assert!(watch.may_answer_flush(at(8_000)) && !watch.may_answer_flush(at(8_001)));
        assert!(!watch.set_store_silent(true));
        assert!(watch.may_answer_flush(at(60_000)));
    }
}
