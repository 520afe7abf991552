//! Entry points for fuzzers of parsers that they cannot reach through a server: requests from the
//! kernel, files about devices, mounts and packets from another process. Not for users.
//!
//! Not here: what must hold (`fuzzing` of each door), and where the bytes come from
//! (`crates/fuzz`); parsers that a client's socket reaches, which are fuzzed through their server.

use std::os::fd::OwnedFd;
use std::path::Path;

use sawmill_device::{Geometry, MemoryDevice};
use sawmill_sys::ublk::IoDescriptor;

use crate::{DoorPiece, buse, fuse, mount_holder, ublk};

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

/// Parses bytes as a chunk of the BUSE module with so many records; panics if a change lies
/// outside.
pub fn buse_chunk(bytes: &[u8], records: u64, write_bytes_max: u64) {
    buse::fuzzing::chunk(bytes, records, write_bytes_max);
}

/// Reads a piece as the mount of another process with this mountpoint and file; panics if it is
/// another one.
pub fn fuse_hand_over(mountpoint: &Path, file_name: &str, piece: DoorPiece) {
    fuse::fuzzing::hand_over(mountpoint, file_name, piece);
}

/// Parses a text as the file about a ublk device in the run folder, and uses it as names in such a
/// file; panics if a name is changed, or could add a variable where udev imports the file.
pub fn ublk_facts(text: &str) {
    ublk::fuzzing::facts(text);
}

/// Decodes bytes as a packet on a mount holder's socket; panics if it has another encoding.
pub fn mount_holder_packet(bytes: &[u8], descriptors: Vec<OwnedFd>) {
    mount_holder::fuzzing::packet(bytes, descriptors);
}
