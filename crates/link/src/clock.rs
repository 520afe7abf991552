//! Time as a parameter: the engine never asks the machine, so a simulation can be its clock.

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
