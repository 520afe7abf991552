//! What persists of an export when its target is restarted: whose writes it accepts, and whether
//! flushes were lost.
//!
//! Not here: where it is kept, admission (`exports`).

use sawmill_device::Result;

/// The persistent state of an export.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    /// The reservation whose writes are accepted: another random number for each initiator; 0:
    /// none.
    pub reservation: u64,
    /// Whether several initiators may have the reservation.
    pub shared: bool,
    /// Syncs of its device that failed.
    pub failed_syncs: u64,
}

impl Standing {
    /// The volatile cache identity; it is `cache_identity` as long as no sync has failed.
    pub(super) fn cache_identity(&self, mut cache_identity: [u8; 16]) -> [u8; 16] {
        let (_, last) = cache_identity.split_at_mut(8);
        for (byte, failed) in last.iter_mut().zip(self.failed_syncs.to_le_bytes()) {
            *byte ^= failed;
        }
        cache_identity
    }
}

/// Persistent storage for a standing.
pub trait StandingStore: Send + Sync {
    /// Stores what the next target starts with. When this returns, it survives everything that the
    /// device survives.
    fn keep(&self, standing: &Standing) -> Result<()>;
}
