//! The interface of a block device, which every door, driver, layer and volume uses.
//!
//! Modules: [`contract`](BlockDevice) (the trait and its numbered clauses), [`geometry`](Geometry),
//! [`operation`](Operation), [`request`](Request), [`exchange`](Exchange), [`error`](Error),
//! `layer/` (devices around devices), `memory` and `null` (devices without a disk), `blocking` (for
//! callers that want to wait), `conformance` (the contract as public tests, run on every layer and
//! on every device that does more than refuse).
//!
//! Not here: I/O, threads of its own, an async runtime, anything about stores or networks.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::unwrap_used))]

mod blocking;
pub mod conformance;
mod contract;
mod error;
mod exchange;
mod geometry;
pub mod layer;
mod memory;
mod null;
mod operation;
mod request;

pub use blocking::BlockDeviceExt;
pub use contract::BlockDevice;
pub use error::{Error, ErrorKind};
pub use exchange::Exchange;
pub use geometry::{Geometry, Operations};
pub use memory::MemoryDevice;
pub use null::NullDevice;
pub use operation::{Allocation, Flags, Operation, Outcome, Reply};
pub use request::Request;

/// The result type of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;
