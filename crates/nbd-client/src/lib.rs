//! A small NBD client: it pipelines, tells when each answer came, and hides nothing.
//!
//! Written against the protocol document alone, so that it is a second reading of it beside the server's.
//! Modules: `wire` (the bytes), `handshake`, `client` (requests in flight and their answers).
//!
//! Invariant: a server may say what it likes; nothing it says makes this side allocate more than was asked
//! for. Not here: retries, reconnecting, TLS.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::unwrap_used))]

mod client;
mod handshake;
mod wire;

pub use client::{Client, Command, Extent, Failure, Pending, Reply};
pub use handshake::{Dialect, Export, list};
pub use wire::{Address, flag};

use std::time::Duration;

/// How long a server may be silent during the handshake.
const PATIENCE: Duration = Duration::from_secs(60);
