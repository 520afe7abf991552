//! A small NBD client: it pipelines, reports each answer as it arrives, and hides nothing.
//!
//! Modules: `wire` (addresses, reading), `handshake`, `request` (commands), `answer` (replies),
//! `client` (requests in flight).
//!
//! Invariants: whatever a server sends, this side keeps no more than was requested plus the bounds
//! of one handshake, one chunk and one answer (see there). Each request has one outcome. Not here:
//! retries, reconnecting, TLS.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::unwrap_used))]

mod answer;
mod client;
mod handshake;
mod request;
mod wire;

pub use answer::{Extent, Failure, Reply};
pub use client::{Client, PendingReply};
pub use handshake::{Export, list};
pub use request::Command;
pub use sawmill_nbd_proto::{Style, transmission as flag};
pub use wire::Address;

use std::time::Duration;

/// How long a server may be silent during the handshake.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(60);
