//! The address of the admin page, read from an option.
//!
//! Invariant: no other machine can reach it.
//!
//! Not here: listening itself; the addresses of doors (`sawmill_doors::listening`).

use std::net::SocketAddr;

use clap::Args;
use sawmill_console::exit::{Failure, Result};
use sawmill_doors::listening::resolve;

/// The address of the admin page, as an option of a command.
#[derive(Args)]
pub(crate) struct AdminOption {
    /// Also serve dashboard, metrics and status over HTTP on this loopback address, for example
    /// 127.0.0.1:9100.
    #[arg(long = "admin", value_name = "ADDRESS", value_parser = parse_loopback)]
    pub(crate) address: Option<SocketAddr>,
}

/// The page asks for no password, so no other machine may reach it.
fn parse_loopback(text: &str) -> Result<SocketAddr> {
    let address = resolve(text)?;
    if address.ip().is_loopback() {
        return Ok(address);
    }
    Err(Failure::usage(format!(
        "'{text}' can be reached by other machines; write a loopback address such as 127.0.0.1:9100"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_admin_address_must_be_of_this_machine() {
        assert!(parse_loopback("127.0.0.1:0").is_ok());
        assert!(parse_loopback("[::1]:9100").is_ok());
        assert!(parse_loopback("0.0.0.0:9100").unwrap_err().to_string().contains("loopback"));
        assert!(parse_loopback("192.0.2.7:9100").unwrap_err().to_string().contains("loopback"));
    }
}
