//! The laboratory: programs that test, measure and predict. They serve no disk.
//!
//! [`verify_crash`] (what a device holds after power failed), [`mod@bench`] (a trace replayed and
//! verified), [`simulate`] (what a trace would do on a volume), [`layers`] (faults, delays and a
//! record around a device); `trace` reads block traces for all of them. Each is a command of
//! `sawmill`; `verify-crash` also builds alone, without the engine and the store: `cargo build -p
//! sawmill-lab --no-default-features --bins`.
//!
//! Not here: recording, cutting and judging (`crates/verify`), the forecast (`crates/volume`).
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::unwrap_used))]

pub mod bench;
#[doc(hidden)]
pub mod fuzzing;
pub mod layers;
#[cfg(feature = "engine")]
pub mod simulate;
mod trace;
pub mod verify_crash;

/// The seed of a command's random choices, unless its user gives one.
const SEED_DEFAULT: u64 = 1;
