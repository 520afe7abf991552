//! Addresses that a process listens on: read from text, and checked before anything is opened.
//!
//! Invariant: reading one opens nothing.
//!
//! Not here: listening itself.

use std::fmt::Display;
use std::io;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use sawmill_device::{Error, ErrorKind, Result};
use sawmill_frontend::nbd::Listen;

/// The address of an NBD server: `unix:/path` or `tcp:host:port`.
///
/// # Errors
/// `Invalid`, with an example.
pub fn parse_listen(text: &str) -> Result<Listen> {
    match text.split_once(':') {
        Some(("unix", path)) if !path.is_empty() => Ok(Listen::Unix(PathBuf::from(path))),
        Some(("tcp", address)) => resolve(address).map(Listen::Tcp),
        _ => {
            let text = format!(
                "'{text}' is not an address; write unix:/path/of/socket or tcp:127.0.0.1:10809"
            );
            Err(Error::new(ErrorKind::Invalid, text))
        }
    }
}

/// The socket address behind `host:port`.
pub fn resolve(text: &str) -> Result<SocketAddr> {
    let wrong = |why: &dyn Display| {
        let text =
            format!("'{text}' is not an address ({why}); write host:port, as in 127.0.0.1:10809");
        Error::new(ErrorKind::Invalid, text)
    };
    let found = text.to_socket_addrs().map_err(|error| wrong(&error).with_source(error));
    found?.next().ok_or_else(|| wrong(&"the host has no IP address"))
}

/// Fails if a process already listens on the address, with advice to use `option`. (If one starts
/// after this check, listening itself fails.)
pub fn check_free(listen: &Listen, option: &str) -> Result<()> {
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
        format!("another process listens on {listen} already; give {option} another address");
    Err(Error::new(ErrorKind::InUse, text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_the_door_are_read_or_refused_with_an_example() {
        let read = |text| parse_listen(text).unwrap();
        assert_eq!(read("unix:/run/x.sock"), Listen::Unix("/run/x.sock".into()));
        assert_eq!(read("tcp:127.0.0.1:0"), Listen::Tcp("127.0.0.1:0".parse().unwrap()));
        assert_eq!(read("tcp:[::1]:10809"), Listen::Tcp("[::1]:10809".parse().unwrap()));
        for text in [
            "",
            "unix:",
            "tcp:",
            "tcp:127.0.0.1",
            "127.0.0.1:10809",
            "/run/x.sock",
            "tcp:1.2.3.4:99999",
        ] {
            let error = parse_listen(text).unwrap_err().to_string();
            assert!(error.contains("10809"), "{text}: {error}");
        }
    }
}
