//! Addresses, and byte-wise reading. The numbers are those of [`sawmill_nbd_proto`].
//!
//! Invariant: `read_bytes` allocates before the first byte arrives, so its caller must have bounded
//! the count. Not here: sockets (`handshake`).

use std::io::{self, Read};
use std::path::PathBuf;

use percent_encoding::percent_decode_str;

/// Where a server listens, and the name of the export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A socket in the file system.
    Unix(PathBuf, String),
    /// A host and port.
    Tcp(String, String),
}

impl Address {
    /// Reads `nbd+unix:///NAME?socket=PATH` or `nbd://HOST:PORT/NAME`.
    pub fn parse(uri: &str) -> io::Result<Self> {
        let bad = || io::Error::new(io::ErrorKind::InvalidInput, format!("not an NBD URI: {uri}"));
        if let Some(rest) = uri.strip_prefix("nbd+unix://") {
            let (name, socket) = rest.split_once("?socket=").ok_or_else(bad)?;
            let name = name.strip_prefix('/').unwrap_or(name);
            return Ok(Address::Unix(PathBuf::from(unescape(socket)), unescape(name)));
        }
        let rest = uri.strip_prefix("nbd://").ok_or_else(bad)?;
        // A URI without a path names the default export, whose name is empty.
        let (host, name) = rest.split_once('/').unwrap_or((rest, ""));
        // The colons inside the brackets of an IPv6 address name no port.
        let has_port = host.rsplit(']').next().is_some_and(|rest| rest.contains(':'));
        let host = if has_port { host.to_owned() } else { format!("{host}:10809") };
        Ok(Address::Tcp(host, unescape(name)))
    }
}

fn unescape(text: &str) -> String {
    percent_decode_str(text).decode_utf8_lossy().into_owned()
}

pub(super) fn read_u16(from: &mut impl Read) -> io::Result<u16> {
    let mut bytes = [0; 2];
    from.read_exact(&mut bytes)?;
    Ok(u16::from_be_bytes(bytes))
}

pub(super) fn read_u32(from: &mut impl Read) -> io::Result<u32> {
    let mut bytes = [0; 4];
    from.read_exact(&mut bytes)?;
    Ok(u32::from_be_bytes(bytes))
}

pub(super) fn read_u64(from: &mut impl Read) -> io::Result<u64> {
    let mut bytes = [0; 8];
    from.read_exact(&mut bytes)?;
    Ok(u64::from_be_bytes(bytes))
}

pub(super) fn read_bytes(from: &mut impl Read, count: usize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; count];
    from.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// A protocol violation by the server. No error of the socket has its kind, `InvalidData`.
pub(super) fn violation(what: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_without_a_port_gets_the_usual_one() {
        let host = |uri| match Address::parse(uri) {
            Ok(Address::Tcp(host, _)) => host,
            other => panic!("{uri}: {other:?}"),
        };
        assert_eq!(host("nbd://example/x"), "example:10809");
        assert_eq!(host("nbd://[::1]/x"), "[::1]:10809");
        assert_eq!(host("nbd://[::1]:7/x"), "[::1]:7");
        assert_eq!(host("nbd://127.0.0.1:7"), "127.0.0.1:7");
    }
}
