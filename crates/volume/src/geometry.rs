//! What doors see of a volume, through its resizes.
//!
//! Invariant: only the size changes. Not here: how a resize is done ([`crate::engine`]).

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use sawmill_device::Geometry;

/// A geometry whose size can change while doors read it.
pub(crate) struct ResizableGeometry {
    fixed: Geometry,
    size_bytes: AtomicU64,
}

impl ResizableGeometry {
    pub(crate) fn new(geometry: Geometry) -> Self {
        ResizableGeometry { fixed: geometry, size_bytes: AtomicU64::new(geometry.size_bytes) }
    }

    /// The current geometry.
    pub(crate) fn now(&self) -> Geometry {
        Geometry { size_bytes: self.size_bytes.load(Relaxed), ..self.fixed }
    }

    /// Sets the disk's size. Only the engine calls this.
    pub(crate) fn resize(&self, size_bytes: u64) {
        self.size_bytes.store(size_bytes, Relaxed);
    }
}
