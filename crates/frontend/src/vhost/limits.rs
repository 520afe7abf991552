//! The fixed limits of a vhost-user door.
//!
//! Invariant: every number that a frontend or a guest could increase has its limit here, in
//! [`super::options`] or in `message`.

use std::time::Duration;

/// The most queues of one door: a message names a queue with 8 bits.
pub(super) const QUEUES_MAX: u16 = 256;
/// The largest queue of virtio.
pub(super) const QUEUE_SIZE_MAX: u16 = 32768;
/// Descriptors in one indirect table.
pub(super) const INDIRECT_ENTRIES_MAX: u32 = 1024;
/// Bytes of reads and writes in flight on one queue; above it, nothing is taken from it.
pub(super) const IN_FLIGHT_BYTES_MAX: u64 = 64 << 20;
/// Requests taken from a queue between two checks for notifications.
pub(super) const BURST_REQUESTS_MAX: u32 = 16;
/// Idle buffers for reads that one queue keeps.
pub(super) const SPARE_BYTES_MAX: usize = 4 << 20;
/// The time for a message to arrive completely after its first byte, and for its reply to be read.
pub(super) const MESSAGE_TIME_MAX: Duration = Duration::from_secs(5);
