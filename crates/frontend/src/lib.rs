//! The front doors: each shows any block device to its user, in the words that user speaks.
//!
//! One folder per door, the same drawers in each: `mod` (what it is), `options` (what can be set),
//! `protocol` (the bytes on the wire, pure), `server` (start, exports, stop), `metrics`, `tests`.
//!
//! Invariants: a door knows a device only as [`sawmill_device::BlockDevice`]; a peer that breaks the
//! protocol loses its own connection, with a logged reason, and touches nothing else.
//!
//! Not here: volumes, stores, configuration files, an async runtime.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::unwrap_used))]

pub mod nbd;
