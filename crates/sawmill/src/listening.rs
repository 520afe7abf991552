//! Addresses that a process listens on: read from options, and checked before anything is opened.
//! Not here: listening itself.

use std::fmt::Display;
use std::io;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::os::unix::net::UnixStream;

use clap::Args;
use sawmill_console::exit::{Exit, Failure, Result};
use sawmill_frontend::nbd::Listen;

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

/// The socket address behind `host:port`.
pub(crate) fn resolve(text: &str) -> Result<SocketAddr> {
    let wrong = |why: &dyn Display| {
        Failure::usage(format!(
            "'{text}' is not an address ({why}); write host:port, as in 127.0.0.1:10809"
        ))
    };
    let found = text.to_socket_addrs().map_err(|error| wrong(&error).caused_by(error));
    found?.next().ok_or_else(|| wrong(&"the host has no IP address"))
}

/// Fails if a process already listens on the address, with advice to use `option`. (If one starts
/// after this check, listening itself fails.)
pub(crate) fn check_free(listen: &Listen, option: &str) -> Result<()> {
    let is_taken = match listen {
        // A socket without a listener was left by a dead process and takes nothing.
        Listen::Unix(path) => UnixStream::connect(path).is_ok(),
        Listen::Tcp(address) => {
            // Any other error is left to the door, which reports it when it listens.
            TcpListener::bind(address).is_err_and(|error| error.kind() == io::ErrorKind::AddrInUse)
        }
    };
    if !is_taken {
        return Ok(());
    }
    let text =
        format!("another process listens on {listen} already; give another address with {option}");
    Err(Failure::new(Exit::InUse, text))
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
