//! How Sawmill's programs speak to people: [`exit`] codes and one-line errors, [`output`] as tables
//! or JSON, sizes and durations in [`units`].
//!
//! ```
//! use sawmill_console::units::{human_size, parse_size};
//!
//! assert_eq!(parse_size("10G"), Ok(10 << 30));
//! assert_eq!(human_size(10 << 30), "10 GiB");
//! ```
//!
//! Not here: commands, and what they do.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::unwrap_used))]

pub mod exit;
pub mod output;
pub mod units;

/// How a command prints its result.
#[derive(Clone, Copy, Debug)]
pub struct Console {
    /// As JSON instead of text.
    pub json: bool,
}
