//! The doors: each exports any block device in the protocol of its users.
//!
//! One folder per door, with the same files in each: `mod` (what it is), `options` (the options),
//! `protocol` (the bytes on the wire, pure), `server` (start, exports, stop), `metrics`, `tests`.
//!
//! All doors implement [`Door`]. What one process hands to another travels as a parcel ([`pack`])
//! in messages with open files ([`passing`]). [`mount_holder`] holds a door's descriptor while no
//! server runs.
//!
//! Invariants: a door knows a device only as [`sawmill_device::BlockDevice`]. A peer that breaks
//! the protocol loses its own connection, with a logged reason, and affects nothing else.
//!
//! Not here: volumes, stores, configuration files, an async runtime.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::unwrap_used))]

pub mod buse;
mod device_facts;
mod door;
pub mod fuse;
#[doc(hidden)]
pub mod fuzzing;
pub mod mount_holder;
pub mod nbd;
mod parcel;
pub mod passing;
pub mod ublk;
mod unix_socket;
pub mod vhost;

pub use door::{Door, DoorCounts, DoorPiece, ExportStatus, QuietDoor, Stop};
pub use parcel::{pack, unpack};
