//! The kernel's ublk driver: block devices whose requests are served by a process.
//!
//! Modules: `abi` (the structures and numbers of the driver, pure), [`Control`] (commands about a
//! device: add, start, stop, delete, recover), [`CharDevice`] (the node behind a device, through
//! which its bytes move), [`Descriptors`] (the requests of one queue, written by the kernel),
//! [`QueueRing`] (the io_uring over which requests come and answers go, for any number of queues).
//!
//! Invariant: no call here hands the kernel memory that could be freed while the kernel may still
//! write to it. Not here: which thread serves what; what a request means.

mod abi;
mod char_device;
mod control;
mod ring;

pub use abi::{
    DeviceInfo, DeviceState, IoDescriptor, Parameters, QUEUE_DEPTH_MAX, REQUEST_BYTES_MAX,
    attribute, feature, operation, operation_flag,
};
pub use char_device::{CharDevice, Descriptors};
pub use control::{Control, char_path, node_path};
pub use ring::{QueueRing, RingEvent};
