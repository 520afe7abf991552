//! Entry points for fuzzers of parsers that no socket reaches: requests from the kernel. Not for
//! users.
//!
//! Not here: what must hold (`fuzzing` of each door), and where the bytes come from
//! (`crates/fuzz/src/kernel.rs`); parsers that a socket reaches, which are fuzzed through their
//! server.

use sawmill_device::{Geometry, MemoryDevice};
use sawmill_sys::ublk::IoDescriptor;

use crate::{fuse, ublk};

/// Parses bytes as a FUSE request; panics if the result lies outside of them.
pub fn fuse_request(bytes: &[u8]) {
    fuse::fuzzing::request(bytes);
}

/// Parses a descriptor as a ublk request of a device of 1 GiB; panics if the result exceeds that.
pub fn ublk_request(descriptor: &IoDescriptor) {
    let geometry: Geometry = sawmill_device::BlockDevice::geometry(&MemoryDevice::new(1 << 20));
    let geometry = Geometry { size_bytes: 1 << 30, ..geometry };
    ublk::fuzzing::request(descriptor, &geometry);
}
