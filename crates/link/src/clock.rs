//! Time as a parameter: initiators and targets never ask the machine, so a simulation can be their
//! clock.
//!
//! Invariant: every [`SteadyClock`] of a process counts from the same start, because the receiving
//! threads compare the deadlines of an initiator or a target with a clock of their own.

use std::sync::OnceLock;
use std::time::Instant;

/// Returns the time in nanoseconds since some start. Never goes back.
pub trait Clock: Send + Sync {
    /// Now.
    fn now_ns(&self) -> u64;
}

/// The machine's steady clock.
pub struct SteadyClock;

impl Clock for SteadyClock {
    fn now_ns(&self) -> u64 {
        static BEGAN: OnceLock<Instant> = OnceLock::new();
        BEGAN.get_or_init(Instant::now).elapsed().as_nanos() as u64
    }
}

pub(crate) const US: u64 = 1_000;
pub(crate) const MS: u64 = 1_000_000;
pub(crate) const SECOND: u64 = 1_000_000_000;
