//! A small NBD client: it pipelines, tells when each answer came, and hides nothing.
//!
//! Modules: `wire` (addresses, reading), `handshake`, `client` (requests in flight and their
//! answers).
//!
//! Invariants: a server may say what it likes; nothing it says makes this side allocate more than
//! was asked for and a few MiB. Whoever submits a request hears how it ended, once. Not here:
//! retries, reconnecting, TLS.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::unwrap_used))]

mod client;
mod handshake;
mod wire;

pub use client::{Client, Command, Extent, Failure, Pending, Reply};
pub use handshake::{Export, NAMES_MAX, list};
pub use sawmill_nbd_proto::{Style, transmission as flag};
pub use wire::Address;

use std::time::Duration;

/// How long a server may be silent during the handshake.
const PATIENCE: Duration = Duration::from_secs(60);
