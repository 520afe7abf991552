//! What must hold of any packet on a mount holder's socket; for [`crate::fuzzing`].
//!
//! Not here: where the bytes come from, and what a packet does (`holder`, `client`).

use std::os::fd::OwnedFd;

use super::wire::{decode, encode};

/// Decodes bytes as a packet; panics if an accepted packet has another encoding.
pub(crate) fn packet(bytes: &[u8], descriptors: Vec<OwnedFd>) {
    if let Ok(packet) = decode(bytes, descriptors) {
        assert_eq!(encode(&packet), bytes, "there is one encoding for each packet");
    }
}
