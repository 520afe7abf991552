//! Requests of the kernel, through FUSE and ublk.
//!
//! Invariant: every decoded request lies within the bytes that the kernel sent and within the
//! device.
//!
//! Not here: what must hold of a parsed request (`sawmill_frontend::fuzzing`), serving it.

use sawmill_frontend::fuzzing;
use sawmill_sys::ublk::IoDescriptor;

/// A FUSE request, as it is and with its length corrected.
pub(crate) fn fuse(bytes: &[u8]) {
    fuzzing::fuse_request(bytes);
    let mut mended = bytes.to_vec();
    let length = (mended.len() as u32).to_ne_bytes();
    if let Some(place) = mended.get_mut(..4) {
        place.copy_from_slice(&length);
    }
    fuzzing::fuse_request(&mended);
}

/// Descriptors of 24 bytes each.
pub(crate) fn ublk(bytes: &[u8]) {
    for chunk in bytes.as_chunks::<24>().0 {
        let word = |at: usize| {
            u32::from_le_bytes([chunk[at], chunk[at + 1], chunk[at + 2], chunk[at + 3]])
        };
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        let descriptor = IoDescriptor {
            op_flags: word(0),
            sectors: word(4),
            start_sector: long(8),
            addr: long(16),
        };
        fuzzing::ublk_request(&descriptor);
        // The same request, made so small that it may lie within the device.
        let sectors = descriptor.sectors % 4096;
        fuzzing::ublk_request(&IoDescriptor {
            sectors,
            start_sector: long(8) % (1 << 21),
            ..descriptor
        });
    }
}
