//! What doors see of a volume, through its resizes.
//!
//! A geometry is handed out by reference for as long as the volume lives, so a resize adds one behind the
//! others and never changes or frees any: some bytes for each resize of one attachment, and no lock to look.
//!
//! Invariant: the last is the current one. Not here: what a resize takes ([`crate::keeper`]).

use std::sync::OnceLock;

use sawmill_device::Geometry;

/// See the head of this file.
pub(crate) struct Geometries {
    geometry: Geometry,
    next: OnceLock<Box<Geometries>>,
}

impl Geometries {
    pub(crate) fn new(geometry: Geometry) -> Self {
        Geometries { geometry, next: OnceLock::new() }
    }

    /// The current one.
    pub(crate) fn now(&self) -> &Geometry {
        &self.last().geometry
    }

    /// The disk has another size from now on. The keeper alone resizes.
    pub(crate) fn resize(&self, size_bytes: u64) {
        let last = self.last();
        let next = Geometry { size_bytes, ..last.geometry };
        let added = last.next.set(Box::new(Geometries::new(next)));
        debug_assert!(added.is_ok(), "there is one keeper");
    }

    fn last(&self) -> &Geometries {
        let mut last = self;
        while let Some(next) = last.next.get() {
            last = next;
        }
        last
    }
}
