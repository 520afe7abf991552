//! The properties that every parsed descriptor must have; for [`crate::fuzzing`].
//!
//! Not here: where the descriptor comes from, and what a request does.

use sawmill_device::Geometry;
use sawmill_device::Operation::{Read, Write};
use sawmill_sys::ublk::IoDescriptor;

use super::protocol::BlockRequest;

const BYTES_MAX: u32 = 1 << 20;

/// Parses a descriptor as a request of a device; panics if the result exceeds that, or the buffer.
pub(crate) fn request(descriptor: &IoDescriptor, geometry: &Geometry) {
    if let Ok(block_request) = BlockRequest::from_descriptor(descriptor, geometry, BYTES_MAX) {
        let end = block_request.address.checked_add(block_request.length).expect("no overflow");
        assert!(end <= geometry.size_bytes, "within the device");
        let moves = matches!(block_request.operation, Read | Write);
        assert!(!moves || block_request.length <= BYTES_MAX.into(), "within the buffer");
    }
}
