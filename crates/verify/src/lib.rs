//! The crash checker: records what a block device is made to do, cuts the recording wherever power
//! could fail, and judges what is left.
//!
//! Modules. The recording: `recorder` (the recording device), `recording` (the write log), `image`
//! (a device's content), `power_cut` (what may be left by one), `plan` (which of them to look at).
//! The devices: `subject` (those under test), `target` (a user's disk), `faulty` (planted faults,
//! to test the checker itself). The work and its judges: `stamp` (blocks that record which write
//! made them, and the judge), `load` (a stamped load), `files` (files that prove themselves),
//! `file_system` (made, mounted, checked). A server killed under its users: `crash`. A check of
//! power failures as a whole: `run` (the work, recorded), `recorded_run` (what it leaves),
//! `campaign` (one power cut after another), `cut_check` (one of them), `report`. Tools: `nbd` (the
//! client of `crates/nbd-client`), `bridge` (an export as file, block device, mount), `program`
//! (third-party programs).
//!
//! Invariant: this crate knows devices only by their doors; nothing here names the engine or a
//! store.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::unwrap_used))]

pub mod bridge;
pub mod campaign;
pub mod crash;
pub mod cut_check;
mod error;
pub mod faulty;
pub mod file_system;
pub mod files;
pub mod image;
pub mod load;
pub mod plan;
pub mod power_cut;
pub mod program;
pub mod recorded_run;
pub mod recorder;
pub mod recording;
pub mod report;
pub mod run;
pub mod stamp;
pub mod subject;
pub mod target;

use std::time::Duration;

pub use error::Error;
pub use sawmill_nbd_client as nbd;

/// The result type of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// How long to wait for anything that is expected to happen.
pub const ANSWER_TIME_MAX: Duration = Duration::from_secs(60);
