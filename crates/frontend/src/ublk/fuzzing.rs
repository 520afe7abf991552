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
    if let Ok(asked) = BlockRequest::from_descriptor(descriptor, geometry, BYTES_MAX) {
        let end = asked.address.checked_add(asked.length).expect("no overflow");
        assert!(end <= geometry.size_bytes, "within the device");
        let moves = matches!(asked.operation, Read | Write);
        assert!(!moves || asked.length <= BYTES_MAX.into(), "within the buffer");
    }
}
