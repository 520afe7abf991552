//! A device that keeps nothing: reads give zeroes, writes vanish. For measuring everything around a
//! device.
//!
//! It fills the buffer of a read and never copies the payload of a write; it breaks D3 for written
//! bytes on purpose.
//!
//! Not here: a device that keeps what is written (`memory`).

use crate::{Allocation, BlockDevice, Geometry, Operation, Operations, Reply, Request};

/// A device that keeps nothing.
pub struct NullDevice {
    geometry: Geometry,
}

impl NullDevice {
    /// A device of `size_bytes` zeroes forever.
    #[must_use]
    pub fn new(size_bytes: u64) -> Self {
        let geometry = Geometry {
            size_bytes,
            block_bytes: 512,
            preferred_bytes: 64 << 10,
            request_bytes_max: 32 << 20,
            read_only: false,
            shared_cache: true,
            operations: Operations { discard: true, write_zeroes: true, allocation: true },
        };
        NullDevice { geometry }
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
