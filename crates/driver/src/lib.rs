//! Block devices whose drivers are ordinary programs.
//!
//! Modules: [`client`] (how a program becomes a driver: begin here), [`batch`] (writes collected into chunks,
//! as BUSE does in a kernel), [`resolve`] (a driver's defence against late writes), [`protocol`] (what a host
//! and a driver in another process say to each other).
//!
//! Not here: doors (`sawmill-frontend`); any language but Rust.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::unwrap_used))]

mod backend;
pub mod batch;
pub mod client;
mod cores;
pub mod host;
mod options;
mod plain;
pub mod protocol;
pub mod resolve;

use sawmill_device::{Error, ErrorKind, Request, Result};

pub use backend::State;
pub use options::{DeviceOptions, Mode, OnDeath};

/// Whether a request begins and ends at multiples of this.
fn check_blocks(request: &Request, unit_bytes: u64) -> Result<()> {
    if request.address.is_multiple_of(unit_bytes) && request.length.is_multiple_of(unit_bytes) {
        return Ok(());
    }
    let text = format!(
        "{:?} of {} bytes at {} is not whole blocks of {unit_bytes} bytes",
        request.operation, request.length, request.address
    );
    Err(Error::new(ErrorKind::Invalid, text))
}
