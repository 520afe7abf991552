//! Time, randomness and local disks, passed in: the engine never uses a clock, a random source or a
//! disk of its own, so that a simulation can repeat a run exactly.
//!
//! Not here: the world of a simulation (`crates/sim`).

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::disk::{Disks, RealDisks};
use crate::{Error, ErrorKind, Result};

/// Where the engine gets time, random bytes and local disks from.
pub trait World: Send + Sync {
    /// Time since some fixed start; never goes back.
    fn now(&self) -> Duration;
    /// Wall-clock milliseconds since 1970, for people; may jump. No safety rule reads it.
    fn unix_ms(&self) -> u64;
    /// Sixteen random bytes, different at each call.
    fn random(&self) -> Result<[u8; 16]>;
    /// The id of the kernel's boot: memory outlives a process, but not a boot.
    fn boot_id(&self) -> Result<[u8; 16]>;
    /// The disks of this machine.
    fn disks(&self) -> &dyn Disks;
}

/// The real clock and disks, and the kernel's random numbers.
pub struct RealWorld {
    start: Instant,
}

impl Default for RealWorld {
    fn default() -> Self {
        RealWorld { start: Instant::now() }
    }
}

impl World for RealWorld {
    fn now(&self) -> Duration {
        self.start.elapsed()
    }

    fn unix_ms(&self) -> u64 {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
    }

    fn random(&self) -> Result<[u8; 16]> {
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes).map_err(|error| {
            Error::caused(ErrorKind::Unavailable, "the kernel returned no random bytes", error)
        })?;
        Ok(bytes)
    }

    fn boot_id(&self) -> Result<[u8; 16]> {
        sawmill_sys::boot_id().map_err(|error| {
            Error::caused(ErrorKind::Unavailable, "cannot read the boot id of the kernel", error)
        })
    }

    fn disks(&self) -> &dyn Disks {
        &RealDisks
    }
}
