//! FUSE: the volume as one file in a folder, byte by byte, and from there as a loop device.
//!
//! Works on every Linux with the fuse module, also for users other than root. Modules:
//! [`options`](FuseOptions), `limits`, `mount` (the folder), `greeting` (the agreement with the
//! kernel), `hand_over` (what another process needs), `holder_watch` (the watched mount holder),
//! `protocol` and `answer` (the codec, pure), `channel` (the shared descriptor), `worker` (request
//! handling), `ticket` and `seek` (requests in flight), [`server`](FuseDoor),
//! [`metrics`](FuseMetrics), `fuzzing` (what must hold of any request).
//!
//! A few worker threads read the same descriptor. None waits for the device: the thread that
//! completes a request sends its answer, with one system call. The page cache is bypassed (direct
//! I/O), so all users of the file see each other's writes immediately, and a sync is the device's
//! flush.
//!
//! The successor of a dead server asks the kernel to resend requests that were not answered (Linux
//! 6.9). Some are then executed twice. That is harmless: no user learned of the first execution, so
//! nothing depends on it; every request repeats the same thing at the same place (bytes, zeroes, a
//! flush); and the order of unanswered overlapping writes is up to the device (D8).
//!
//! Not here: more than one file, mappings shared for writing, the process that holds the mount
//! (`mount_holder`).

mod answer;
mod channel;
pub(crate) mod fuzzing;
mod greeting;
mod hand_over;
mod holder_watch;
mod limits;
mod metrics;
mod mount;
mod options;
mod protocol;
mod seek;
mod server;
#[cfg(test)]
mod tests;
mod ticket;
mod worker;

pub use metrics::FuseMetrics;
pub use options::{FuseOptions, MountHolderOptions};
pub use sawmill_sys::LoopDevice;
pub use server::FuseDoor;
pub use ticket::errno;
