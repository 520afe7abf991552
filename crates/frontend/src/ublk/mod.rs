//! ublk: a real block device, `/dev/ublkbN`, whose requests the kernel gives to this process over
//! io_uring.
//!
//! Modules: [`options`](UblkOptions), `limits`, `protocol` (descriptors and parameters, pure),
//! [`server`](UblkDoor) (make, take over, hand over, remove), [`worker`](UblkWorkers) (threads and
//! their rings), `queue` (one queue on its thread), `link` (one queue as others see it, and their
//! messages to its thread), `progress` (how many queues are quiet or gone), `ticket` (one request
//! in flight), [`registry`](devices) (the existing devices), `metrics`.
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

mod limits;
mod link;
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

pub use options::UblkOptions;
pub use registry::{DeviceInfo, delete, devices};
pub use sawmill_sys::ublk::DeviceState;
pub use server::UblkDoor;
pub use worker::UblkWorkers;

/// See [`crate::fuzzing`].
pub(crate) fn fuzz_request(
    descriptor: &sawmill_sys::ublk::IoDescriptor,
    geometry: &sawmill_device::Geometry,
) {
    const BYTES_MAX: u32 = 1 << 20;
    if let Ok(asked) = protocol::Asked::from_descriptor(descriptor, geometry, BYTES_MAX) {
        use sawmill_device::Operation::{Read, Write};
        let end = asked.address.checked_add(asked.length).expect("no overflow");
        assert!(end <= geometry.size_bytes, "within the device");
        let moves = matches!(asked.operation, Read | Write);
        assert!(!moves || asked.length <= BYTES_MAX.into(), "within the buffer");
    }
}
