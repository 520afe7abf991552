//! The disk that a cache is on, until the cache lets go of it.
//!
//! A cache may stay referenced for a while after its volumes are closed, by a request in flight to
//! the store for example. So the disk, and with it the lock on its file, is released by an explicit
//! call and not with the last reference.
//!
//! Invariants: entering never waits; a caller that has entered may use the disk until it drops the
//! entry; letting go waits for all entries and admits no new ones.

use std::sync::Arc;

use parking_lot::{MappedRwLockReadGuard, RwLock, RwLockReadGuard};

use crate::disk::Disk;

/// The disk of a cache, until it is released.
pub(super) struct CacheDisk {
    disk: RwLock<Option<Arc<dyn Disk>>>,
}

/// The right to use the disk.
pub(super) type Entry<'a> = MappedRwLockReadGuard<'a, Arc<dyn Disk>>;

impl CacheDisk {
    pub(super) fn of(disk: Arc<dyn Disk>) -> Self {
        CacheDisk { disk: RwLock::new(Some(disk)) }
    }

    /// The disk, unless it was let go of or is just being let go of.
    pub(super) fn enter(&self) -> Option<Entry<'_>> {
        RwLockReadGuard::try_map(self.disk.try_read()?, Option::as_ref).ok()
    }

    /// Waits until all entries are dropped, then closes the disk.
    pub(super) fn release(&self) {
        let disk = self.disk.write().take();
        drop(disk);
    }
}
