//! ublk: a real block device, `/dev/ublkbN`, whose requests the kernel gives to this process over
//! io_uring.
//!
//! Modules: [`options`](UblkOptions), `limits`, `protocol` (descriptors and parameters, pure),
//! [`server`](UblkDoor) (make, remove), `door` (the interface of every door), `hand_over` (from one
//! server to the next), [`worker`](UblkWorkers) (threads and their rings), `queue` (one queue on
//! its thread), `channel` (one queue as others see it, and their messages to its thread),
//! `progress` (how many queues are quiet or gone), `ticket` (one request in flight),
//! [`registry`](devices) (the existing devices), `metrics`, `fuzzing` (what must hold of any
//! descriptor).
//!
//! There is one thread per queue, or a few threads for the queues of many devices. A thread takes
//! all arrived requests with one system call, submits them, and answers those that have completed
//! with the next call. The kernel copies the payload of a write once, to where the device wants it.
//! A request that completes on another thread wakes the queue's thread.
//!
//! When this process dies, the device waits: [`UblkDoor::recover`] takes it over without errors for
//! its users.
//!
//! Not here: zoned devices; zero copy (see `docs/decisions/0018-ublk-copies-once.md`).

mod channel;
mod door;
pub(crate) mod fuzzing;
mod hand_over;
mod limits;
mod metrics;
mod options;
mod progress;
mod protocol;
mod queue;
mod registry;
mod server;
mod serving;
#[cfg(test)]
mod tests;
mod ticket;
mod worker;

/// The name of this kind of door.
const DOOR: &str = "ublk";

pub use options::UblkOptions;
pub use protocol::errno;
pub use registry::{DeviceInfo, delete, devices};
pub use sawmill_sys::ublk::DeviceState;
pub use server::UblkDoor;
pub use worker::UblkWorkers;
