//! The newstyle handshake: options, and what the server says about the export.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use super::wire::{
    Address, HELLO, OPTION, OPTION_REPLY, read_bytes, read_u16, read_u32, read_u64, violation,
};
use crate::PATIENCE;

const OPT_ABORT: u32 = 2;
const OPT_LIST: u32 = 3;
const OPT_GO: u32 = 7;
const OPT_STRUCTURED_REPLY: u32 = 8;
const OPT_SET_META_CONTEXT: u32 = 10;
const OPT_EXTENDED_HEADERS: u32 = 11;
const REP_ACK: u32 = 1;
const REP_SERVER: u32 = 2;
const REP_INFO: u32 = 3;
const REP_META_CONTEXT: u32 = 4;
/// Names and texts have at most 4096 bytes each.
const REPLY_BYTES_MAX: u32 = 64 << 10;

/// How the two sides speak after the handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// Simple replies only.
    Simple,
    /// Structured replies, and `base:allocation` where the server has it.
    Structured,
    /// Extended headers (64-bit lengths), and `base:allocation` where the server has it.
    Extended,
}

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
    if read_u64(socket)? != HELLO || read_u64(socket)? != OPTION {
        return Err(violation("the server's greeting is not newstyle NBD"));
    }
    let offered = read_u16(socket)?;
    if offered & 1 == 0 {
        return Err(violation("the server does not offer fixed newstyle"));
    }
    // Fixed newstyle, and no padding after the old export name option.
    socket.write_all(&u32::from(offered & 3).to_be_bytes())
}

fn ask(socket: &mut Socket, option: u32, payload: &[u8]) -> io::Result<()> {
    let mut message = Vec::with_capacity(16 + payload.len());
    message.extend(OPTION.to_be_bytes());
    message.extend(option.to_be_bytes());
    message.extend((payload.len() as u32).to_be_bytes());
    message.extend(payload);
    socket.write_all(&message)
}

fn hear(socket: &mut Socket, option: u32) -> io::Result<OptionReply> {
    if read_u64(socket)? != OPTION_REPLY {
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
pub fn list(uri: &str) -> io::Result<Vec<String>> {
    let mut socket = Socket::connect(&Address::parse(uri)?)?;
    greet(&mut socket)?;
    ask(&mut socket, OPT_LIST, &[])?;
    let mut names = Vec::new();
    loop {
        let reply = hear(&mut socket, OPT_LIST)?;
        match reply.kind {
            REP_SERVER => {
                let mut rest = reply.payload.as_slice();
                let length = read_u32(&mut rest)?;
                let name = rest.get(..length as usize).ok_or_else(|| violation("a name past its reply"))?;
                names.push(String::from_utf8_lossy(name).into_owned());
            }
            REP_ACK => break,
            other => return Err(violation(format!("the list was answered with {other:#x}"))),
        }
    }
    ask(&mut socket, OPT_ABORT, &[])?;
    Ok(names)
}

/// Negotiates the dialect, chooses the export and leaves the socket ready for requests.
pub(super) fn negotiate(socket: &mut Socket, name: &str, dialect: Dialect) -> io::Result<Export> {
    greet(socket)?;
    let mut export = Export::default();
    let option = match dialect {
        Dialect::Simple => None,
        Dialect::Structured => Some(OPT_STRUCTURED_REPLY),
        Dialect::Extended => Some(OPT_EXTENDED_HEADERS),
    };
    if let Some(option) = option {
        ask(socket, option, &[])?;
        let reply = hear(socket, option)?;
        if reply.kind != REP_ACK {
            return Err(violation(format!("the server refused {dialect:?} with {:#x}", reply.kind)));
        }
        export.allocation_context = ask_for_allocation(socket, name)?;
    }
    let mut payload = Vec::new();
    payload.extend((name.len() as u32).to_be_bytes());
    payload.extend(name.as_bytes());
    // One piece of information is asked for: block size constraints (3).
    payload.extend([0, 1, 0, 3]);
    ask(socket, OPT_GO, &payload)?;
    loop {
        let reply = hear(socket, OPT_GO)?;
        match reply.kind {
            REP_ACK => return Ok(export),
            REP_INFO => note_info(&mut export, &reply.payload)?,
            other => {
                let text = String::from_utf8_lossy(&reply.payload).into_owned();
                return Err(violation(format!("the export {name:?} was refused with {other:#x}: {text}")));
            }
        }
    }
}

fn note_info(export: &mut Export, mut payload: &[u8]) -> io::Result<()> {
    match read_u16(&mut payload)? {
        0 => {
            export.size_bytes = read_u64(&mut payload)?;
            export.flags = read_u16(&mut payload)?;
        }
        3 => {
            export.block_bytes_min = read_u32(&mut payload)?;
            export.block_bytes_preferred = read_u32(&mut payload)?;
            export.block_bytes_max = read_u32(&mut payload)?;
        }
        _ => {}
    }
    Ok(())
}

fn ask_for_allocation(socket: &mut Socket, name: &str) -> io::Result<Option<u32>> {
    const CONTEXT: &str = "base:allocation";
    let mut payload = Vec::new();
    payload.extend((name.len() as u32).to_be_bytes());
    payload.extend(name.as_bytes());
    payload.extend(1_u32.to_be_bytes());
    payload.extend((CONTEXT.len() as u32).to_be_bytes());
    payload.extend(CONTEXT.as_bytes());
    ask(socket, OPT_SET_META_CONTEXT, &payload)?;
    let mut context = None;
    loop {
        let reply = hear(socket, OPT_SET_META_CONTEXT)?;
        match reply.kind {
            REP_META_CONTEXT => context = Some(read_u32(&mut reply.payload.as_slice())?),
            REP_ACK => return Ok(context),
            // A server without allocation, or without this export; the latter shows again at GO.
            _ => return Ok(None),
        }
    }
}
