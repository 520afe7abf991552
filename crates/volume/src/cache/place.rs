//! The disk that a cache is on, until the cache lets go of it.
//!
//! Whoever shares a cache may hold it for a while after its volumes are closed: a request to the
//! store that is under way does. So the disk, and with it the lock on its file, does not go with
//! the last of them but when it is told to.
//!
//! Invariants: entering never waits; whoever has entered may use the disk until the entry is
//! dropped; letting go waits for them, and nobody enters any more.

use std::sync::Arc;

use parking_lot::{MappedRwLockReadGuard, RwLock, RwLockReadGuard};

use crate::disk::Disk;

/// Where a cache lies.
pub(super) struct Place {
    disk: RwLock<Option<Arc<dyn Disk>>>,
}

/// The right to use the disk.
pub(super) type Entry<'a> = MappedRwLockReadGuard<'a, Arc<dyn Disk>>;

impl Place {
    pub(super) fn of(disk: Arc<dyn Disk>) -> Self {
        Place { disk: RwLock::new(Some(disk)) }
    }

    /// The disk, unless it was let go of or is just being let go of.
    pub(super) fn enter(&self) -> Option<Entry<'_>> {
        RwLockReadGuard::try_map(self.disk.try_read()?, Option::as_ref).ok()
    }

    /// Waits for those who have entered, then closes the disk.
    pub(super) fn let_go(&self) {
        let disk = self.disk.write().take();
        drop(disk);
    }
}
