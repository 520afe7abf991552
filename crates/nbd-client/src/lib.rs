//! A small NBD client: it pipelines, tells when each answer came, and hides nothing.
//!
//! Modules: `wire` (addresses, reading), `handshake`, `request` (what is asked), `answer` (what
//! comes back), `client` (requests in flight).
//!
//! Invariants: a server may say what it likes. Beyond what was asked for, nothing it says makes
//! this side keep more than the bounds of one handshake, one chunk and one answer (see there). Each
//! request has one outcome. Not here: retries, reconnecting, TLS.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::unwrap_used))]

mod answer;
mod client;
mod handshake;
mod request;
mod wire;

pub use answer::{Extent, Failure, Reply};
pub use client::{Client, Pending};
pub use handshake::{Export, list};
pub use request::Command;
pub use sawmill_nbd_proto::{Style, transmission as flag};
pub use wire::Address;

use std::time::Duration;

/// How long a server may be silent during the handshake.
const PATIENCE: Duration = Duration::from_secs(60);
