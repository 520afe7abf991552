//! Block devices whose drivers are ordinary programs.
//!
//! Modules: [`client`] (how a program becomes a driver: start here), [`batch`] (writes collected
//! into chunks, as BUSE does in a kernel), [`resolve`] (protects a driver from late writes),
//! [`protocol`] (the messages between a host and a driver in another process).
//!
//! Not here: the doors themselves (`sawmill-doors`, `sawmill-frontend`); other languages than Rust.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::unwrap_used))]

pub mod batch;
pub mod client;
mod cores;
pub mod host;
mod options;
mod plain;
pub mod protocol;
mod request_holder;
pub mod resolve;

use sawmill_device::{Error, ErrorKind, Request, Result};

pub use options::{DeathPolicy, DeviceOptions, Mode};
pub use request_holder::State;

/// Checks that a request starts and ends at multiples of `unit_bytes`.
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
