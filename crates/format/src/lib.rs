//! Every byte of Sawmill that outlives a process or crosses a link: pure encoders and decoders, one
//! module per structure.
//!
//! Modules: [`ids`], [`crc`], [`preamble`] and [`layout`] are what all structures share;
//! [`name_record`] with [`volume_record`], [`segment`], [`checkpoint`] with [`kept_block`],
//! [`map_part`], [`role`], [`boot_set`] are objects in a store; [`journal`], [`staging`],
//! [`cache_index`], [`transfer`], [`export_state`], [`newest_state`] are files on the local SSD;
//! [`link`] and [`packed_write`] cross a link; [`write_log`] is a foreign format. `docs/format/`
//! has one page per structure, and a test compares the two. [`disk_image`] looks at the headers of
//! foreign files, and has no page.
//!
//! Invariants: a decoder never panics and never allocates more than its input justifies. It checks,
//! in order, length available, magic, kind, version, length, checksum, reserved bytes, identity,
//! and then each field, and reports which of them failed ([`FormatError`]). An encoder refuses what
//! its decoder would refuse. What it wrote decodes to the same value, and each value has exactly
//! one encoding.
//!
//! Not here: I/O, clocks, randomness, policy.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::unwrap_used))]

pub mod boot_set;
pub mod cache_index;
pub mod checkpoint;
pub mod crc;
pub mod disk_image;
mod error;
pub mod export_state;
pub mod ids;
pub mod journal;
pub mod kept_block;
pub mod layout;
pub mod link;
pub mod map_part;
pub mod name_record;
pub mod newest_state;
pub mod packed_write;
pub mod preamble;
pub mod role;
pub mod segment;
pub mod staging;
pub mod transfer;
pub mod volume_record;
pub mod write_log;

pub use error::{FormatError, IdentityValue};

/// The result type of this crate.
pub type Result<T, E = FormatError> = std::result::Result<T, E>;
