//! The fixed limits of a ublk device. Not here: the ranges of options (`options`), the kernel's own
//! limits (`sawmill_sys::ublk`).

use std::time::Duration;

/// Idle read buffers that one thread keeps while there is work; without work it keeps none.
pub(super) const SPARE_BYTES_MAX: usize = 8 << 20;
/// After this long without a request, a thread frees its idle buffers.
pub(super) const IDLE_TIME_MAX: Duration = Duration::from_secs(1);
/// The most commands in one system call.
pub(super) const COMMANDS_PER_CALL_MAX: u32 = 256;
/// The most queues of one shared thread, if the process may open that many files.
pub(super) const SHARED_SLOTS_MAX: u64 = 4096;
/// Time for the node of a new device to appear, and to become accessible to us.
pub(super) const NODE_TIME_MAX: Duration = Duration::from_secs(10);
/// Interval of checks for conditions that the kernel does not report.
pub(super) const CHECK_EVERY: Duration = Duration::from_millis(1);
