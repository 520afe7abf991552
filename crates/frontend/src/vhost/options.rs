//! What can be set for a vhost-user door, and the limits that cannot.
//!
//! Invariant: every number a frontend or a guest could grow has its bound here or in `message`.

use std::path::PathBuf;
use std::time::Duration;

/// The settings of one door.
#[derive(Clone, Debug)]
pub struct VhostOptions {
    /// The Unix socket: created for its owner alone (mode 0600), removed at stop.
    pub socket: PathBuf,
    /// Queues a frontend may use, 1 to 256.
    pub queues_max: u16,
    /// Entries of one queue, a power of two up to 32768.
    pub queue_size_max: u16,
    /// What the guest sees as the disk's serial number; 20 bytes of it at most.
    pub serial: String,
}

impl VhostOptions {
    /// The defaults for this socket: 16 queues of up to 1024 entries, no serial number.
    #[must_use]
    pub fn new(socket: PathBuf) -> Self {
        VhostOptions { socket, queues_max: 16, queue_size_max: 1024, serial: String::new() }
    }
}

/// Queues of one door at most: a message names a queue with 8 bits.
pub(super) const QUEUES_MAX: u16 = 256;
/// The largest queue of virtio.
pub(super) const QUEUE_SIZE_MAX: u16 = 32768;
/// Descriptors in one indirect table.
pub(super) const INDIRECT_MAX: u32 = 1024;
/// Bytes of reads and writes in flight on one queue; beyond it nothing more is taken from it.
pub(super) const IN_FLIGHT_BYTES_MAX: u64 = 64 << 20;
/// Requests taken from a queue between two looks at whom to notify.
pub(super) const BATCH: u32 = 16;
/// Idle buffers for reads that one queue keeps.
pub(super) const SPARE_BYTES_MAX: usize = 4 << 20;
/// A message whose first byte is here must be here whole within this time, and its reply be taken.
pub(super) const MESSAGE_TIME_MAX: Duration = Duration::from_secs(5);
