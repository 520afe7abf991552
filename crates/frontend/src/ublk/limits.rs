//! The limits of a ublk device that nobody can set.

use std::time::Duration;

/// Idle buffers for reads that one thread keeps while there is work; without work it keeps none.
pub(super) const SPARE_BYTES_MAX: usize = 8 << 20;
/// After this long without a request a thread gives its idle buffers back.
pub(super) const IDLE_TIME: Duration = Duration::from_secs(1);
/// Commands that one system call takes to the kernel at most.
pub(super) const RING_ENTRIES: u32 = 256;
/// Queues that one shared thread can serve, where the process may open as many files.
pub(super) const SHARED_SLOTS_MAX: u64 = 4096;
/// How long the node of a new device may take to appear, and to be ours to open.
pub(super) const NODE_TIME_MAX: Duration = Duration::from_secs(10);
/// How often a condition of the kernel is looked at that it does not tell of.
pub(super) const LOOK_AGAIN: Duration = Duration::from_millis(1);
/// How long another living server may take to leave a device that is taken over.
pub(super) const LEAVE_TIME_MAX: Duration = Duration::from_secs(5);
