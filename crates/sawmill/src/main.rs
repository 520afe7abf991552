//! The `sawmill` binary. See [`command`] for what it can do; everything else serves the commands.
//!
//! Modules: `command/` (one file per command), `config` (where things are), `wiring` (store, cache, volumes
//! and doors put together), `serving` (a process that serves), `doors/`, `handoff/` (its replacement),
//! `machine` (what this machine offers), `admin/` (HTTP: status, metrics, dashboard), `control` (the other
//! end of it), `transfer/` (a whole disk moved: import, export, copy), `trace/` (block traces), `layers/`
//! (faults, delays and a record for tests), `output`,
//! `units` and `exit` (how people are spoken to).
//!
//! Not here: the engine, the doors, the stores. This crate is the only one that knows them all.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::unwrap_used))]

mod admin;
mod attach;
mod command;
mod config;
mod control;
mod daemon;
mod doors;
mod driving;
mod durable;
mod exit;
mod file_device;
#[cfg(test)]
mod guide;
mod handoff;
mod layers;
mod link;
mod machine;
mod memory;
mod moment;
mod output;
mod past;
mod program;
mod seen;
mod serving;
mod trace;
mod transfer;
mod units;
mod unstored;
mod wiring;

fn main() -> std::process::ExitCode {
    command::run()
}
