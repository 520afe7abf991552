//! What all volumes of a process together keep in memory ahead of their readers.
//!
//! Not here: what one volume keeps (`landed`), and what is in flight (`fetch`), which the store's
//! client bounds by its requests.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::limits;

/// Memory for frames that wait for their readers, shared by the volumes that are opened with clones
/// of one set of options.
pub struct AheadMemory {
    left_bytes: AtomicU64,
}

impl AheadMemory {
    /// At most `bytes_max` for all.
    #[must_use]
    pub fn new(bytes_max: u64) -> Self {
        AheadMemory { left_bytes: AtomicU64::new(bytes_max) }
    }

    /// Takes `bytes`, if they are left.
    pub(super) fn take(&self, bytes: u64) -> bool {
        let less = |left: u64| left.checked_sub(bytes);
        self.left_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok()
    }

    pub(super) fn give_back(&self, bytes: u64) {
        self.left_bytes.fetch_add(bytes, Ordering::Relaxed);
    }
}

impl Default for AheadMemory {
    fn default() -> Self {
        Self::new(limits::AHEAD_MEMORY_BYTES_MAX)
    }
}
