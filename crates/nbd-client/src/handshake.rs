//! The newstyle handshake: options, and what the server says about the export.
//!
//! Invariants: each read of the handshake has a time limit; only requests may wait forever. An
//! export has the size that the server reports; a server that reports none is refused. The replies
//! to one option have at most [`REPLIES_BYTES_MAX`]. Not here: requests and their answers.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use sawmill_nbd_proto::{
    BASE_ALLOCATION, GREETING_MAGIC, OPTION_MAGIC, OPTION_REPLY_MAGIC, Style, hello, info,
    info_request, meta_request, option, push_option, reply,
};

use super::wire::{Address, read_bytes, read_u16, read_u32, read_u64, violation};
use crate::ANSWER_TIME_MAX;

/// Names and texts have at most 4096 bytes each.
const REPLY_BYTES_MAX: u32 = 64 << 10;
/// The most bytes of all replies to one option, with their heads: a longer list may never end.
const REPLIES_BYTES_MAX: u64 = 16 << 20;
const REPLY_HEAD_BYTES: u64 = 20;

/// The server's facts about the export.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Export {
    /// Size in bytes.
    pub size_bytes: u64,
    /// Transmission flags, see [`super::flag`].
    pub flags: u16,
    /// Smallest request.
    pub block_bytes_min: u32,
    /// Request size that the server prefers.
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
                // A request is a small message, which Nagle's algorithm would hold back while
                // another one is not acknowledged.
                stream.set_nodelay(true)?;
                Socket::Tcp(stream)
            }
        };
        // For the handshake, in which a server has nothing to wait for.
        socket.limit(Some(ANSWER_TIME_MAX))?;
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

/// The replies to one option, one after the other.
struct Replies<'a> {
    socket: &'a mut Socket,
    option: u32,
    remaining_bytes: u64,
}

impl<'a> Replies<'a> {
    /// Sends the option; the replies are yet to be received.
    fn to(socket: &'a mut Socket, option: u32, data: &[u8]) -> io::Result<Self> {
        send_option(socket, option, data)?;
        Ok(Replies { socket, option, remaining_bytes: REPLIES_BYTES_MAX })
    }

    fn next(&mut self) -> io::Result<OptionReply> {
        let reply = receive_reply(self.socket, self.option)?;
        let remaining_bytes =
            self.remaining_bytes.checked_sub(REPLY_HEAD_BYTES + reply.payload.len() as u64);
        self.remaining_bytes = remaining_bytes.ok_or_else(|| {
            let (option, max) = (self.option, REPLIES_BYTES_MAX >> 20);
            violation(format!("the replies to option {option} are longer than {max} MiB together"))
        })?;
        Ok(reply)
    }
}

fn greet(socket: &mut Socket) -> io::Result<()> {
    if read_u64(socket)? != GREETING_MAGIC || read_u64(socket)? != OPTION_MAGIC {
        return Err(violation("the server's greeting is not newstyle NBD"));
    }
    let offered = read_u16(socket)?;
    // Without it, a server closes the connection at an option that it does not know, and nobody
    // learns why.
    if offered & hello::FIXED_NEWSTYLE == 0 {
        return Err(violation("the server does not offer fixed newstyle"));
    }
    // A server drops a client that sets a flag which it has not offered.
    let flags = offered & (hello::FIXED_NEWSTYLE | hello::NO_ZEROES);
    socket.write_all(&u32::from(flags).to_be_bytes())
}

fn send_option(socket: &mut Socket, option: u32, data: &[u8]) -> io::Result<()> {
    let mut message = Vec::with_capacity(16 + data.len());
    push_option(&mut message, option, data);
    socket.write_all(&message)
}

fn receive_reply(socket: &mut Socket, option: u32) -> io::Result<OptionReply> {
    if read_u64(socket)? != OPTION_REPLY_MAGIC {
        return Err(violation("an option was answered with a wrong magic"));
    }
    let answered_option = read_u32(socket)?;
    if answered_option != option {
        return Err(violation(format!("option {option} was answered as {answered_option}")));
    }
    let kind = read_u32(socket)?;
    let length = read_u32(socket)?;
    // Before the allocation, because the length is the server's claim.
    if length > REPLY_BYTES_MAX {
        return Err(violation(format!("option {option} was answered with {length} bytes")));
    }
    Ok(OptionReply { kind, payload: read_bytes(socket, length as usize)? })
}

/// Names of the exports that a server lists.
pub fn list(uri: &str) -> io::Result<Vec<String>> {
    let mut socket = Socket::connect(&Address::parse(uri)?)?;
    greet(&mut socket)?;
    let mut replies = Replies::to(&mut socket, option::LIST, &[])?;
    let mut names = Vec::new();
    loop {
        let reply = replies.next()?;
        match reply.kind {
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
    send_option(&mut socket, option::ABORT, &[])?;
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
        let reply = Replies::to(socket, option, &[])?.next()?;
        if reply.kind != reply::ACK {
            return Err(violation(format!(
                "the server refused {dialect:?} with {:#x}",
                reply.kind
            )));
        }
        // Before the export is chosen: afterwards there are no options.
        export.allocation_context = request_allocation(socket, name)?;
    }
    let request = info_request(name, &[info::BLOCK_SIZE]);
    let mut replies = Replies::to(socket, option::GO, &request)?;
    let mut has_size = false;
    loop {
        let reply = replies.next()?;
        match reply.kind {
            reply::ACK if has_size => return Ok(export),
            reply::ACK => return Err(violation("the server does not say how large the export is")),
            reply::INFO => has_size |= note_info(&mut export, &reply.payload)? == info::EXPORT,
            other => {
                let text = String::from_utf8_lossy(&reply.payload).into_owned();
                return Err(violation(format!(
                    "the export {name:?} was refused with {other:#x}: {text}"
                )));
            }
        }
    }
}

/// Records the content of an `INFO`; returns its type.
fn note_info(export: &mut Export, mut payload: &[u8]) -> io::Result<u16> {
    let about = read_u16(&mut payload)?;
    match about {
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
    Ok(about)
}

fn request_allocation(socket: &mut Socket, name: &str) -> io::Result<Option<u32>> {
    let request = meta_request(name, &[BASE_ALLOCATION]);
    let mut replies = Replies::to(socket, option::SET_META_CONTEXT, &request)?;
    let mut context = None;
    loop {
        let reply = replies.next()?;
        match reply.kind {
            reply::META_CONTEXT => {
                let mut payload = reply.payload.as_slice();
                let number = read_u32(&mut payload)?;
                // Another context's flags mean something else.
                if payload == BASE_ALLOCATION.as_bytes() {
                    context = Some(number);
                }
            }
            reply::ACK => return Ok(context),
            // The server does not support allocation queries, or does not know the export. In the
            // second case GO fails too, with the reason.
            _ => return Ok(None),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    fn greeting() -> Vec<u8> {
        let flags = hello::FIXED_NEWSTYLE | hello::NO_ZEROES;
        [&GREETING_MAGIC.to_be_bytes()[..], &OPTION_MAGIC.to_be_bytes(), &flags.to_be_bytes()]
            .concat()
    }

    fn answer(option: u32, kind: u32, data: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        sawmill_nbd_proto::push_option_reply(&mut bytes, option, kind, data);
        bytes
    }

    /// The client's result for these bytes of a server that does not listen.
    fn negotiate_with(dialect: Style, server_bytes: &[u8]) -> io::Result<Export> {
        let (near, mut far) = UnixStream::pair().unwrap();
        far.write_all(server_bytes).unwrap();
        far.shutdown(std::net::Shutdown::Write).unwrap();
        negotiate(&mut Socket::Unix(near), "disk", dialect)
    }

    fn size(bytes: u64) -> Vec<u8> {
        let info = [&info::EXPORT.to_be_bytes()[..], &bytes.to_be_bytes(), &[0, 1]].concat();
        answer(option::GO, reply::INFO, &info)
    }

    #[test]
    fn an_export_without_a_size_is_refused() {
        let agreed = answer(option::GO, reply::ACK, &[]);
        let export =
            negotiate_with(Style::Simple, &[greeting(), size(77), agreed.clone()].concat());
        assert_eq!(export.unwrap().size_bytes, 77);
        let error = negotiate_with(Style::Simple, &[greeting(), agreed].concat()).unwrap_err();
        assert!(error.to_string().contains("how large"), "{error}");
    }

    #[test]
    fn the_number_of_another_context_is_not_that_of_the_allocation() {
        let context = |name: &str, number: u8| {
            let data = [&[0, 0, 0, number][..], name.as_bytes()].concat();
            answer(option::SET_META_CONTEXT, reply::META_CONTEXT, &data)
        };
        let replies = [
            greeting(),
            answer(option::STRUCTURED_REPLY, reply::ACK, &[]),
            context("base:allocation", 4),
            context("qemu:allocation-depth", 5),
            answer(option::SET_META_CONTEXT, reply::ACK, &[]),
            size(1),
            answer(option::GO, reply::ACK, &[]),
        ];
        let export = negotiate_with(Style::Structured, &replies.concat()).unwrap();
        assert_eq!(export.allocation_context, Some(4));
    }

    #[test]
    fn replies_to_one_option_have_an_end() {
        let (near, mut far) = UnixStream::pair().unwrap();
        let endless = thread::spawn(move || {
            let packet = size(1).repeat(2000);
            let mut outcome = far.write_all(&greeting());
            while outcome.is_ok() {
                outcome = far.write_all(&packet);
            }
        });
        let error = negotiate(&mut Socket::Unix(near), "disk", Style::Simple).unwrap_err();
        assert!(error.to_string().contains("longer than 16 MiB"), "{error}");
        endless.join().unwrap();
    }
}
