//! The numbers of the protocol, addresses, and byte-wise reading.

use std::io::{self, Read};
use std::path::PathBuf;

use percent_encoding::percent_decode_str;

pub(super) const HELLO: u64 = 0x4e42_444d_4147_4943;
pub(super) const OPTION: u64 = 0x4948_4156_454f_5054;
pub(super) const OPTION_REPLY: u64 = 0x0003_e889_0455_65a9;
pub(super) const REQUEST: u32 = 0x2560_9513;
pub(super) const EXTENDED_REQUEST: u32 = 0x21e4_1c71;
pub(super) const SIMPLE_REPLY: u32 = 0x6744_6698;
pub(super) const CHUNK: u32 = 0x668e_33ef;
pub(super) const EXTENDED_CHUNK: u32 = 0x6e8a_278c;

/// Transmission flags that a server announces.
pub mod flag {
    /// The export cannot be written.
    pub const READ_ONLY: u16 = 1 << 1;
    /// Flush is understood.
    pub const SEND_FLUSH: u16 = 1 << 2;
    /// FUA is understood.
    pub const SEND_FUA: u16 = 1 << 3;
    /// Trim is understood.
    pub const SEND_TRIM: u16 = 1 << 5;
    /// Write-zeroes is understood.
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    /// A flush on one connection covers writes completed on another.
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
}

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
        let (host, name) = rest.split_once('/').unwrap_or((rest, ""));
        let host = if host.contains(':') { host.to_owned() } else { format!("{host}:10809") };
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

/// A protocol violation by the server.
pub(super) fn violation(what: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.into())
}
