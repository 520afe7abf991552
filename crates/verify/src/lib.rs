//! The crash checker: records what a block device is made to do, cuts the recording wherever power could
//! fail, and judges what is left.
//!
//! Rooms. What is recorded: `recorder` (the recording device), `recording` (the write log), `image` (a
//! device's content), `cut` (what may be left at a moment), `plan` (which cuts to look at). What makes work
//! and judges it: `stamp` (blocks that say who wrote them, and the judge), `load` (a stamped load), `nbd` (a
//! client that pipelines), `dice` (seeded chance). Whom it is about: `subject` (devices under test), `faulty`
//! (a device with planted faults, by which the checker itself is checked).
//!
//! Invariant: this crate knows devices by their doors alone; nothing here names the engine or a store.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::unwrap_used))]

pub mod bridge;
pub mod campaign;
pub mod cut;
pub mod dice;
mod error;
pub mod faulty;
pub mod image;
pub mod load;
pub mod nbd;
pub mod plan;
pub mod program;
pub mod recorder;
pub mod recording;
pub mod report;
pub mod stamp;
pub mod stamped;
pub mod subject;

use std::time::Duration;

pub use error::Error;

/// The result type of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// How long anything that ought to happen may take before it is given up.
pub const PATIENCE: Duration = Duration::from_secs(60);
