//! The options of a vhost-user door, and its fixed limits.
//!
//! Invariant: every number that a frontend or a guest could increase has its limit here or in
//! `message`.

use std::path::PathBuf;
use std::time::Duration;

/// The options of one door.
#[derive(Clone, Debug)]
pub struct VhostOptions {
    /// The Unix socket: accessible only to its owner (mode 0600), removed at stop.
    pub socket: PathBuf,
    /// The most queues of a frontend, 1 to 256.
    pub queues_max: u16,
    /// The most entries of one queue, a power of two up to 32768.
    pub queue_size_max: u16,
    /// The serial number of the disk for the guest; at most 20 bytes of it.
    pub serial: String,
}

impl VhostOptions {
    /// The defaults for this socket: 16 queues of up to 1024 entries, no serial number.
    #[must_use]
    pub fn new(socket: PathBuf) -> Self {
        VhostOptions { socket, queues_max: 16, queue_size_max: 1024, serial: String::new() }
    }
}

/// The most queues of one door: a message names a queue with 8 bits.
pub(super) const QUEUES_MAX: u16 = 256;
/// The largest queue of virtio.
pub(super) const QUEUE_SIZE_MAX: u16 = 32768;
/// Descriptors in one indirect table.
pub(super) const INDIRECT_MAX: u32 = 1024;
/// Bytes of reads and writes in flight on one queue; above it, nothing is taken from it.
pub(super) const IN_FLIGHT_BYTES_MAX: u64 = 64 << 20;
/// Requests taken from a queue between two checks for notifications.
pub(super) const BATCH_MAX: u32 = 16;
/// Idle buffers for reads that one queue keeps.
pub(super) const SPARE_BYTES_MAX: usize = 4 << 20;
/// The time for a message to arrive completely after its first byte, and for its reply to be read.
pub(super) const MESSAGE_TIME_MAX: Duration = Duration::from_secs(5);
