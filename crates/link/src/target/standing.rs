//! What lasts of an export when its target is started anew: whose writes it takes, and what its flushes are
//! worth.
//!
//! Not here: where it is kept, who is let in (`exports`).

use sawmill_device::Result;

/// How an export stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    /// Whose writes it takes: another random number for everybody who comes; 0: nobody's.
    pub reservation: u64,
    /// Several may have the reservation.
    pub shared: bool,
    /// Syncs of its device that failed.
    pub failed_syncs: u64,
}

impl Standing {
    /// Who keeps what is not durable, of whom `keeper` is the name while all goes well.
    pub(super) fn keeper(&self, mut keeper: [u8; 16]) -> [u8; 16] {
        let (_, last) = keeper.split_at_mut(8);
        for (byte, failed) in last.iter_mut().zip(self.failed_syncs.to_le_bytes()) {
            *byte ^= failed;
        }
        keeper
    }
}

/// Where a standing lasts.
pub trait KeepStanding: Send + Sync {
    /// Makes it what the next target begins with: when this returns, it survives everything that the device
    /// survives.
    fn keep(&self, standing: &Standing) -> Result<()>;
}
