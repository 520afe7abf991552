//! BUSE: a real block device, `/dev/buseN`, of our own kernel module (`kernel/buse`). The kernel
//! completes a write as soon as it is in a *chunk*, and this process gets whole chunks.
//!
//! Modules: [`options`](BuseOptions), `protocol` (packets, records and acknowledgements, pure),
//! `config` (the device's folder in configfs), `chunk` (the writes of one chunk, applied),
//! `service` (the threads of a device), `gate` (what they do, and what is in flight),
//! [`server`](BuseDoor) (make, take over, remove), `door` (the interface of every door), `fuzzing`
//! (what must hold of any chunk).
//!
//! There is one queue, and a thread for each of its two ports. The next chunk is fetched when all
//! of the last one is done and acknowledged, so only one chunk can come again after a death, and it
//! comes before anything newer: no sequence number has to be remembered
//! (`docs/decisions/0051-one-chunk-at-a-time.md`).
//!
//! When this process dies, the device waits: [`BuseDoor::open`] takes it over without errors for
//! its users.
//!
//! Not here: the interface's specification (`docs/format/buse_device.md`).

mod chunk;
mod config;
mod door;
pub(crate) mod fuzzing;
mod gate;
mod options;
mod protocol;
mod server;
mod service;
#[cfg(test)]
mod tests;

use std::time::Duration;

pub use options::BuseOptions;
pub use server::{BuseDoor, waits};

/// The name of this kind of door.
const DOOR: &str = "buse";
/// Interval of checks for conditions that the kernel does not report.
const CHECK_EVERY: Duration = Duration::from_millis(1);
