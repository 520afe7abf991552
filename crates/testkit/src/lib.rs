//! Seeded random numbers, waiting for a condition, skipping a test, golden vectors: what tests,
//! workloads and conformance suites share.
//!
//! Invariant: the same seed gives the same rolls forever, so a failure can be reproduced. Not
//! here: rigs that know a crate (each crate's `tests/` has its own), and anything that a server
//! runs.
#![forbid(unsafe_code)]

mod dice;
mod skip;
pub mod vectors;
mod wait;

pub use dice::{Dice, mix};
pub use skip::skip;
pub use wait::{wait_for, wait_until};
