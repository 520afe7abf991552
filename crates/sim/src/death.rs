//! The death of a process at any I/O: the step in which it dies is unwound, and nothing after that
//! moment happens.
//!
//! Invariant: from the moment of death until it is removed from the world, every I/O of the process
//! fails without effect.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The panic payload that unwinds a dying process.
struct DeathPayload;

/// The life of one process, as its I/O sees it.
#[derive(Default)]
pub struct Life {
    dead: AtomicBool,
    ios: AtomicU64,
    /// I/Os of the attach.
    before: AtomicU64,
    /// Dies at the I/O with this number; 0: at none.
    dies_at: AtomicU64,
    spared: AtomicBool,
}

impl Life {
    /// The process will die at the `after`-th I/O from now, before that I/O has any effect.
    pub fn dies_after(&self, after: u64) {
        self.dies_at.store(self.ios.load(Ordering::Relaxed) + after.max(1), Ordering::Relaxed);
    }

    /// Cancels the death.
    pub fn lives_on(&self) {
        self.dies_at.store(0, Ordering::Relaxed);
    }

    /// Starts to count: the attach is over.
    pub fn begin_count(&self) {
        self.before.store(self.ios.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    /// The number of I/Os since then.
    pub fn ios_after_attach(&self) -> u64 {
        self.ios.load(Ordering::Relaxed) - self.before.load(Ordering::Relaxed)
    }

    /// While `spared`, the process's reads neither fail nor are garbled: the oracle reads.
    pub fn spare(&self, spared: bool) {
        self.spared.store(spared, Ordering::Relaxed);
    }

    /// Whether it is.
    pub fn is_spared(&self) -> bool {
        self.spared.load(Ordering::Relaxed)
    }

    /// Whether it is dead.
    pub fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Relaxed)
    }

    /// The process dies now, between two of its steps.
    pub fn die(&self) {
        self.dead.store(true, Ordering::Relaxed);
    }

    /// Called before every I/O of the process; returns false if it is already dead and the I/O must
    /// not happen. Does not return if it dies here.
    pub fn tick(&self) -> bool {
        if self.is_dead() || std::thread::panicking() {
            return false;
        }
        let io = self.ios.fetch_add(1, Ordering::Relaxed) + 1;
        if io == self.dies_at.load(Ordering::Relaxed) {
            self.die();
            resume_unwind(Box::new(DeathPayload));
        }
        true
    }
}

/// Runs a part of a process's life; `None` when it died in it. Other panics propagate.
pub fn live<T>(part: impl FnOnce() -> T) -> Option<T> {
    match catch_unwind(AssertUnwindSafe(part)) {
        Ok(value) => Some(value),
        Err(payload) if payload.is::<DeathPayload>() => None,
        Err(payload) => resume_unwind(payload),
    }
}
