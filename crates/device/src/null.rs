//! A device that keeps nothing: reads give zeroes, writes vanish. For measuring everything around a
//! device.
//!
//! It fills the buffer of a read and never copies the payload of a write; it breaks D3 for written
//! bytes on purpose.
//!
//! Not here: a device that keeps what is written (`memory`).

use crate::{Allocation, BlockDevice, Geometry, Operation, Reply, Request};

/// A device that keeps nothing.
pub struct NullDevice {
    geometry: Geometry,
}

impl NullDevice {
    /// A device of `size_bytes` zeroes forever.
    #[must_use]
    pub fn new(size_bytes: u64) -> Self {
        NullDevice { geometry: Geometry::of_size(size_bytes) }
    }
}

impl BlockDevice for NullDevice {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn submit(&self, mut request: Request) {
        if let Err(error) = request.check(&self.geometry) {
            return request.fail(error);
        }
        let reply = match request.operation {
            Operation::Read => {
                request.buffer().fill(0);
                Reply::Done
            }
            Operation::Allocation => {
                Reply::Allocation(vec![Allocation { length: request.length, data: false }])
            }
            Operation::Write
            | Operation::Flush
            | Operation::Discard
            | Operation::WriteZeroes
            | Operation::Prefetch => Reply::Done,
        };
        request.complete(Ok(reply));
    }
}
