//! A small NBD client: it pipelines, tells when each answer came, and hides nothing.
//!
//! Written against the protocol document alone, so that it is a second reading of it beside the server's.
//! Rooms: `wire` (the bytes), `handshake`, `client` (requests in flight and their answers).

mod client;
mod handshake;
mod wire;

pub use client::{Client, Command, Extent, Failure, Pending, Reply};
pub use handshake::{Dialect, Export, list};
pub use wire::{Address, flag};
