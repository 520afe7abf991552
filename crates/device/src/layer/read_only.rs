//! A device that refuses changes (D7). Everything else passes through. Not here: resizes. Its
//! geometry is that of the device inside when the layer was made.

use crate::{BlockDevice, Geometry, Request};

/// The device `D` without writes, discards and write-zeroes.
pub struct ReadOnly<D> {
    geometry: Geometry,
    inner: D,
}

impl<D: BlockDevice> ReadOnly<D> {
    /// Refuses changes to `inner` from now on, through this layer.
    #[must_use]
    pub fn new(inner: D) -> Self {
        ReadOnly { geometry: Geometry { read_only: true, ..inner.geometry() }, inner }
    }
}

impl<D: BlockDevice> BlockDevice for ReadOnly<D> {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn submit(&self, request: Request) {
        match request.check(&self.geometry) {
            Ok(()) => self.inner.submit(request),
            Err(error) => request.fail(error),
        }
    }
}
