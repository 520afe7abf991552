//! Memory for written data that waits to be inserted, shared by all volumes of a cache: a slow disk
//! must not let each of a thousand volumes hold segments for it.
//!
//! Not here: who inserts (`engine::caching::written`).

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use super::ReadCache;

/// A part of that memory, given back when dropped.
pub(crate) struct FillRoom {
    cache: Arc<ReadCache>,
    bytes: u64,
}

impl FillRoom {
    /// Takes `bytes`, if they are left.
    pub(crate) fn take(cache: &Arc<ReadCache>, bytes: u64) -> Option<Self> {
        let less = |left: u64| left.checked_sub(bytes);
        cache.fill_room_bytes.fetch_update(Relaxed, Relaxed, less).ok()?;
        Some(FillRoom { cache: cache.clone(), bytes })
    }
}

impl Drop for FillRoom {
    fn drop(&mut self) {
        self.cache.fill_room_bytes.fetch_add(self.bytes, Relaxed);
    }
}
