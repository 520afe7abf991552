//! All of the `sawmill` binary but its `main`. See `command` for what it can do; everything else
//! serves the commands. A library, so that the targets of `crates/fuzz` reach its parsers.
//!
//! Modules: `command/` (one file per command), `config` (where things are), `wiring` (store, cache,
//! volumes and doors put together), `serving` (a process that serves), `handoff/` (its
//! replacement), `machine` (what this machine offers), `admin/` (HTTP: status, metrics, dashboard),
//! `control` (the other end of it), `transfer/` (a whole disk moved: import, export, copy).
//!
//! Not here: the engine, the doors, the stores, how programs speak to people (`crates/console`),
//! and the tools that test, measure and predict (`crates/lab`). Only this crate knows them all.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::unwrap_used))]

mod admin;
mod attach;
mod busy_poll;
mod command;
mod config;
mod control;
mod daemon;
mod driving;
mod durable;
mod fencing;
mod file_device;
mod folders;
pub mod fuzzing;
#[cfg(test)]
mod guide;
mod handoff;
mod link;
mod listening;
mod machine;
mod memory;
mod moment;
mod nbd_device;
mod past;
mod plan;
mod program;
mod seen;
mod serving;
mod sizes;
mod transfer;
mod unstored;
mod wiring;

/// Runs the command line of this process; returns its exit code.
#[must_use]
pub fn run() -> std::process::ExitCode {
    command::run()
}
