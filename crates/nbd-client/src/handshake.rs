//! The newstyle handshake: options, and what the server says about the export.
//!
//! Invariant: each read of the handshake has a time limit; only requests may wait for ever, and
//! `client` lifts the limit for them. Not here: requests (`client`), URIs (`wire`).

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use sawmill_nbd_proto::{
    BASE_ALLOCATION, GREETING_MAGIC, OPTION_MAGIC, OPTION_REPLY_MAGIC, Style, hello, info,
    info_request, meta_request, option, push_option, reply,
};

use super::wire::{Address, read_bytes, read_u16, read_u32, read_u64, violation};
use crate::PATIENCE;

/// The longest reply that is taken; a name and a text in it have at most 4096 bytes each.
const REPLY_BYTES_MAX: u32 = 64 << 10;
/// The longest list of exports.
pub const NAMES_MAX: usize = 64 << 10;

/// What the server says about the export.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Export {
    /// Size in bytes.
    pub size_bytes: u64,
    /// Transmission flags, see [`super::flag`].
    pub flags: u16,
    /// Smallest request.
    pub block_bytes_min: u32,
    /// Request size the server likes best.
    pub block_bytes_preferred: u32,
    /// Longest payload.
    pub block_bytes_max: u32,
    /// Number of the `base:allocation` context, when negotiated.
    pub allocation_context: Option<u32>,
}

/// A connected socket of either kind.
#[derive(Debug)]
pub(super) enum Socket {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl Socket {
    pub(super) fn connect(address: &Address) -> io::Result<Self> {
        let socket = match address {
            Address::Unix(path, _) => Socket::Unix(UnixStream::connect(path)?),
            Address::Tcp(host, _) => {
                let stream = TcpStream::connect(host)?;
                stream.set_nodelay(true)?;
                Socket::Tcp(stream)
            }
        };
        socket.limit(Some(PATIENCE))?;
        Ok(socket)
    }

    /// Bounds how long a read may wait.
    pub(super) fn limit(&self, wait: Option<Duration>) -> io::Result<()> {
        match self {
            Socket::Unix(stream) => stream.set_read_timeout(wait),
            Socket::Tcp(stream) => stream.set_read_timeout(wait),
        }
    }

    pub(super) fn duplicate(&self) -> io::Result<Self> {
        Ok(match self {
            Socket::Unix(stream) => Socket::Unix(stream.try_clone()?),
            Socket::Tcp(stream) => Socket::Tcp(stream.try_clone()?),
        })
    }

    pub(super) fn shut(&self) {
        // It may be shut already by the other side.
        let _ = match self {
            Socket::Unix(stream) => stream.shutdown(std::net::Shutdown::Both),
            Socket::Tcp(stream) => stream.shutdown(std::net::Shutdown::Both),
        };
    }
}

impl Read for Socket {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Socket::Unix(stream) => stream.read(into),
            Socket::Tcp(stream) => stream.read(into),
        }
    }
}

impl Write for Socket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Socket::Unix(stream) => stream.write(bytes),
            Socket::Tcp(stream) => stream.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

struct OptionReply {
    kind: u32,
    payload: Vec<u8>,
}

fn greet(socket: &mut Socket) -> io::Result<()> {
    if read_u64(socket)? != GREETING_MAGIC || read_u64(socket)? != OPTION_MAGIC {
        return Err(violation("the server's greeting is not newstyle NBD"));
    }
    let offered = read_u16(socket)?;
    if offered & hello::FIXED_NEWSTYLE == 0 {
        return Err(violation("the server does not offer fixed newstyle"));
    }
    let taken = offered & (hello::FIXED_NEWSTYLE | hello::NO_ZEROES);
    socket.write_all(&u32::from(taken).to_be_bytes())
}

fn ask(socket: &mut Socket, option: u32, data: &[u8]) -> io::Result<()> {
    let mut message = Vec::with_capacity(16 + data.len());
    push_option(&mut message, option, data);
    socket.write_all(&message)
}

fn hear(socket: &mut Socket, option: u32) -> io::Result<OptionReply> {
    if read_u64(socket)? != OPTION_REPLY_MAGIC {
        return Err(violation("an option was answered with a wrong magic"));
    }
    let answered = read_u32(socket)?;
    if answered != option {
        return Err(violation(format!("option {option} was answered as {answered}")));
    }
    let kind = read_u32(socket)?;
    let length = read_u32(socket)?;
    if length > REPLY_BYTES_MAX {
        return Err(violation(format!("option {option} was answered with {length} bytes")));
    }
    Ok(OptionReply { kind, payload: read_bytes(socket, length as usize)? })
}

/// Names of the exports that a server lists.
///
/// # Errors
/// What the system says, and a protocol violation: more than [`NAMES_MAX`] names is one.
pub fn list(uri: &str) -> io::Result<Vec<String>> {
    let mut socket = Socket::connect(&Address::parse(uri)?)?;
    greet(&mut socket)?;
    ask(&mut socket, option::LIST, &[])?;
    let mut names = Vec::new();
    loop {
        let reply = hear(&mut socket, option::LIST)?;
        match reply.kind {
            reply::SERVER if names.len() == NAMES_MAX => {
                return Err(violation(format!("a list of more than {NAMES_MAX} exports")));
            }
            reply::SERVER => {
                let mut rest = reply.payload.as_slice();
                let length = read_u32(&mut rest)?;
                let name = rest
                    .get(..length as usize)
                    .ok_or_else(|| violation("a name past its reply"))?;
                names.push(String::from_utf8_lossy(name).into_owned());
            }
            reply::ACK => break,
            other => return Err(violation(format!("the list was answered with {other:#x}"))),
        }
    }
    ask(&mut socket, option::ABORT, &[])?;
    Ok(names)
}

/// Negotiates the dialect, chooses the export and leaves the socket ready for requests.
pub(super) fn negotiate(socket: &mut Socket, name: &str, dialect: Style) -> io::Result<Export> {
    greet(socket)?;
    let mut export = Export::default();
    let option = match dialect {
        Style::Simple => None,
        Style::Structured => Some(option::STRUCTURED_REPLY),
        Style::Extended => Some(option::EXTENDED_HEADERS),
    };
    if let Some(option) = option {
        ask(socket, option, &[])?;
        let reply = hear(socket, option)?;
        if reply.kind != reply::ACK {
            return Err(violation(format!(
                "the server refused {dialect:?} with {:#x}",
                reply.kind
            )));
        }
        export.allocation_context = ask_for_allocation(socket, name)?;
    }
    ask(socket, option::GO, &info_request(name, &[info::BLOCK_SIZE]))?;
    loop {
        let reply = hear(socket, option::GO)?;
        match reply.kind {
            reply::ACK => return Ok(export),
            reply::INFO => note_info(&mut export, &reply.payload)?,
            other => {
                let text = String::from_utf8_lossy(&reply.payload).into_owned();
                return Err(violation(format!(
                    "the export {name:?} was refused with {other:#x}: {text}"
                )));
            }
        }
    }
}

fn note_info(export: &mut Export, mut payload: &[u8]) -> io::Result<()> {
    match read_u16(&mut payload)? {
        info::EXPORT => {
            export.size_bytes = read_u64(&mut payload)?;
            export.flags = read_u16(&mut payload)?;
        }
        info::BLOCK_SIZE => {
            export.block_bytes_min = read_u32(&mut payload)?;
            export.block_bytes_preferred = read_u32(&mut payload)?;
            export.block_bytes_max = read_u32(&mut payload)?;
        }
        _ => {}
    }
    Ok(())
}

fn ask_for_allocation(socket: &mut Socket, name: &str) -> io::Result<Option<u32>> {
    ask(socket, option::SET_META_CONTEXT, &meta_request(name, &[BASE_ALLOCATION]))?;
    let mut context = None;
    loop {
        let reply = hear(socket, option::SET_META_CONTEXT)?;
        match reply.kind {
            reply::META_CONTEXT => context = Some(read_u32(&mut reply.payload.as_slice())?),
            reply::ACK => return Ok(context),
            // A server without allocation, or without this export; the latter shows again at GO.
            _ => return Ok(None),
        }
    }
}
