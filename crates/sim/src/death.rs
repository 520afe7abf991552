//! The death of a process at any I/O: the step it dies in is unwound, and nothing it would have
//! done after that moment happens.
//!
//! Invariant: from the moment of death until it is removed from the world, every I/O of the process
//! fails without effect.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// What a dying process is unwound with.
struct Died;

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

    /// It will not.
    pub fn lives_on(&self) {
        self.dies_at.store(0, Ordering::Relaxed);
    }

    /// The attach is over.
    pub fn begin_count(&self) {
        self.before.store(self.ios.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    /// How many I/Os there were since.
    pub fn ios_after_attach(&self) -> u64 {
        self.ios.load(Ordering::Relaxed) - self.before.load(Ordering::Relaxed)
    }

    /// While it is `spared`, no read of it fails or is garbled: the judge looks.
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

    /// It dies now, between two of its steps.
    pub fn die(&self) {
        self.dead.store(true, Ordering::Relaxed);
    }

    /// Called before every I/O of the process; false when it is dead already and the I/O must not
    /// happen. Does not return if this is where it dies.
    pub fn tick(&self) -> bool {
        if self.is_dead() || std::thread::panicking() {
            return false;
        }
        let io = self.ios.fetch_add(1, Ordering::Relaxed) + 1;
        if io == self.dies_at.load(Ordering::Relaxed) {
            self.die();
            resume_unwind(Box::new(Died));
        }
        true
    }
}

/// Runs a part of a process's life; `None` when it died in it. A panic of its own goes on.
pub fn live<T>(part: impl FnOnce() -> T) -> Option<T> {
    match catch_unwind(AssertUnwindSafe(part)) {
        Ok(value) => Some(value),
        Err(payload) if payload.is::<Died>() => None,
        Err(payload) => resume_unwind(payload),
    }
}
