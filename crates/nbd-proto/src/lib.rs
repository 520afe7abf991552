//! The NBD protocol as pure functions, for both ends: numbers, the headers of requests, options and
//! their data. The source is the protocol's own document (`doc/proto.md` of the NBD project).
//!
//! ```
//! use sawmill_nbd_proto::{Command, RequestHeader, Style};
//!
//! let command = Command::Read as u16;
//! let header = RequestHeader { flags: 0, command, cookie: 7, offset: 0, length: 512 };
//! let bytes = header.encode(Style::Simple);
//! assert_eq!(RequestHeader::parse(Style::Simple, &bytes), Ok(Some(header)));
//! ```
//!
//! Invariant: no input makes a function here panic. All numbers are big-endian. Not here: sockets,
//! what a request does, and the replies of a server (`frontend::nbd::protocol`).
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::unwrap_used))]

use std::borrow::Cow;

/// The most bytes of a name or a text.
pub const STRING_BYTES_MAX: usize = 4096;

/// Opens the greeting: `NBDMAGIC`.
pub const GREETING_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// Opens each option: `IHAVEOPT`.
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// Opens each reply to an option.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// Opens each request.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// Opens each request with an extended header.
pub const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
/// Opens each simple reply.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// Opens each chunk of a structured reply.
pub const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;
/// Opens each chunk with an extended header.
pub const EXTENDED_REPLY_MAGIC: u32 = 0x6e8a_278c;

/// Flags of the greeting and of the client's answer.
pub mod hello {
    /// The newstyle handshake with fixed error handling.
    pub const FIXED_NEWSTYLE: u16 = 1;
    /// No padding after the old export name option.
    pub const NO_ZEROES: u16 = 1 << 1;
}

/// Option numbers.
pub mod option {
    /// Chooses an export, the old way.
    pub const EXPORT_NAME: u32 = 1;
    /// Ends the handshake.
    pub const ABORT: u32 = 2;
    /// Lists the exports.
    pub const LIST: u32 = 3;
    /// Information.
    pub const INFO: u32 = 6;
    /// Chooses an export and begins the transmission.
    pub const GO: u32 = 7;
    /// Asks for structured replies.
    pub const STRUCTURED_REPLY: u32 = 8;
    /// Lists metadata contexts.
    pub const LIST_META_CONTEXT: u32 = 9;
    /// Chooses metadata contexts.
    pub const SET_META_CONTEXT: u32 = 10;
    /// Asks for extended headers.
    pub const EXTENDED_HEADERS: u32 = 11;
}

/// Types of option replies.
pub mod reply {
    /// Done.
    pub const ACK: u32 = 1;
    /// The name of an export.
    pub const SERVER: u32 = 2;
    /// Information.
    pub const INFO: u32 = 3;
    /// A metadata context and its number.
    pub const META_CONTEXT: u32 = 4;
    /// The option is not supported.
    pub const ERR_UNSUP: u32 = 1 << 31 | 1;
    /// The option is malformed.
    pub const ERR_INVALID: u32 = 1 << 31 | 3;
    /// There is no such export.
    pub const ERR_UNKNOWN: u32 = 1 << 31 | 6;
    /// The option needs extended headers.
    pub const ERR_EXT_HEADER_REQD: u32 = 1 << 31 | 10;
}

/// Types of information in an `INFO` reply.
pub mod info {
    /// Size and transmission flags.
    pub const EXPORT: u16 = 0;
    /// The name of the export.
    pub const NAME: u16 = 1;
    /// A description for people.
    pub const DESCRIPTION: u16 = 2;
    /// Smallest, preferred and largest request.
    pub const BLOCK_SIZE: u16 = 3;
}

/// Transmission flags: what an export can do.
pub mod transmission {
    /// Set by every server, because the protocol demands it.
    pub const HAS_FLAGS: u16 = 1;
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
    /// A read in one piece is understood.
    pub const SEND_DF: u16 = 1 << 7;
    /// A flush on one connection covers writes completed on another.
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    /// Cache is understood.
    pub const SEND_CACHE: u16 = 1 << 10;
    /// Write-zeroes that fails rather than be slow is understood.
    pub const SEND_FAST_ZERO: u16 = 1 << 11;
}

/// Flags of a request.
pub mod command_flag {
    /// Durable before it is answered.
    pub const FUA: u16 = 1;
    /// Write-zeroes: the range must stay allocated.
    pub const NO_HOLE: u16 = 1 << 1;
    /// A read must be answered by a single chunk of data.
    pub const DF: u16 = 1 << 2;
    /// Block status: one run.
    pub const REQ_ONE: u16 = 1 << 3;
    /// Write-zeroes: fail rather than be as slow as a write of zeroes.
    pub const FAST_ZERO: u16 = 1 << 4;
    /// The length is that of a payload that follows.
    pub const PAYLOAD_LEN: u16 = 1 << 5;
}

/// Types of chunks, and the flag of a reply's last one.
pub mod chunk {
    /// The flag of the last chunk of a reply.
    pub const DONE: u16 = 1;
    /// No data.
    pub const NONE: u16 = 0;
    /// Data of a read at an offset.
    pub const OFFSET_DATA: u16 = 1;
    /// A hole of a read.
    pub const OFFSET_HOLE: u16 = 2;
    /// Runs of a block status.
    pub const BLOCK_STATUS: u16 = 5;
    /// Runs of a block status, of 64 bits.
    pub const BLOCK_STATUS_EXT: u16 = 6;
    /// The bit that all types of errors have.
    pub const ERROR_BIT: u16 = 1 << 15;
    /// An error, with its text.
    pub const ERROR: u16 = ERROR_BIT | 1;
}

/// The only metadata context there is.
pub const BASE_ALLOCATION: &str = "base:allocation";
/// The number by which replies name [`BASE_ALLOCATION`].
pub const BASE_ALLOCATION_ID: u32 = 1;

/// Why a connection has to be closed: the peer broke the protocol in this way.
#[derive(Debug, PartialEq, Eq)]
pub struct Violation(pub Cow<'static, str>);

/// A command of the transmission phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Reads a range.
    Read,
    /// Writes a range.
    Write,
    /// Ends the connection.
    Disconnect,
    /// Makes completed writes durable.
    Flush,
    /// Discards a range.
    Trim,
    /// Reads a range ahead.
    Cache,
    /// Zeroes a range.
    WriteZeroes,
    /// Asks what is allocated.
    BlockStatus,
}

impl Command {
    /// The command of this number.
    pub fn from_number(number: u16) -> Option<Self> {
        use Command::{BlockStatus, Cache, Disconnect, Flush, Read, Trim, Write, WriteZeroes};
        [Read, Write, Disconnect, Flush, Trim, Cache, WriteZeroes, BlockStatus]
            .get(usize::from(number))
            .copied()
    }
}

/// What the client negotiated for the heads of requests and replies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// Simple replies to everything.
    Simple,
    /// Structured replies to reads, block status and failures; simple ones to the rest.
    Structured,
    /// Extended requests and replies only.
    Extended,
}

impl Style {
    /// Bytes of a request's header.
    pub fn request_bytes(self) -> usize {
        if self == Style::Extended { 32 } else { 28 }
    }

    /// Bytes in front of the data of a successful read.
    pub fn read_head_bytes(self) -> usize {
        match self {
            Style::Simple => 16,
            Style::Structured => 20 + 8,
            Style::Extended => 32 + 8,
        }
    }
}

/// The header of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestHeader {
    /// See [`command_flag`].
    pub flags: u16,
    /// The number of the command, known or not.
    pub command: u16,
    /// Identifies the request in its reply.
    pub cookie: u64,
    /// First byte of the range.
    pub offset: u64,
    /// Bytes of the range, or of the payload.
    pub length: u64,
}

/// Takes big-endian numbers off the front of bytes.
pub struct Reader<'a>(pub &'a [u8]);

impl<'a> Reader<'a> {
    /// The next `length` bytes.
    pub fn take(&mut self, length: usize) -> Option<&'a [u8]> {
        let (head, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(head)
    }

    /// The next `N` bytes.
    pub fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*head)
    }

    /// The next number.
    pub fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_be_bytes)
    }

    /// The next number.
    pub fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_be_bytes)
    }

    /// The next number.
    pub fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_be_bytes)
    }

    /// A string with its length (32 bits) in front.
    pub fn string(&mut self) -> Option<&'a str> {
        let length = self.u32()? as usize;
        // The protocol limits strings. A longer one is refused even where its bytes are there.
        if length > STRING_BYTES_MAX {
            return None;
        }
        std::str::from_utf8(self.take(length)?).ok()
    }
}

impl RequestHeader {
    /// The header at the front of `bytes`, or `None` if it is still incomplete.
    #[inline]
    pub fn parse(style: Style, bytes: &[u8]) -> Result<Option<Self>, Violation> {
        // Nothing is judged before the header is whole, so that a header cut at any byte has the
        // same result in the process that gets the rest (P57).
        if bytes.len() < style.request_bytes() {
            return Ok(None);
        }
        let mut reader = Reader(bytes);
        let mut fields = || {
            let magic = reader.u32()?;
            let flags = reader.u16()?;
            let command = reader.u16()?;
            let cookie = reader.u64()?;
            let offset = reader.u64()?;
            let length =
                if style == Style::Extended { reader.u64()? } else { reader.u32()?.into() };
            Some((magic, RequestHeader { flags, command, cookie, offset, length }))
        };
        let Some((magic, header)) = fields() else { return Ok(None) };
        let expected =
            if style == Style::Extended { EXTENDED_REQUEST_MAGIC } else { REQUEST_MAGIC };
        if magic != expected {
            let text = format!("a request begins with {magic:#010x} instead of {expected:#010x}");
            return Err(Violation(text.into()));
        }
        Ok(Some(header))
    }

    /// The bytes this header was parsed from.
    pub fn encode(&self, style: Style) -> Vec<u8> {
        let extended = style == Style::Extended;
        let magic = if extended { EXTENDED_REQUEST_MAGIC } else { REQUEST_MAGIC };
        let mut out = magic.to_be_bytes().to_vec();
        out.extend_from_slice(&self.flags.to_be_bytes());
        out.extend_from_slice(&self.command.to_be_bytes());
        out.extend_from_slice(&self.cookie.to_be_bytes());
        out.extend_from_slice(&self.offset.to_be_bytes());
        let length = self.length.to_be_bytes();
        out.extend_from_slice(if extended { &length } else { &length[4..] });
        out
    }

    /// Bytes that follow the header.
    pub fn payload_bytes(&self, style: Style) -> u64 {
        let follows = match style {
            Style::Simple | Style::Structured => {
                // Only a write has a payload. For all other commands the length is that of the
                // range.
                Command::from_number(self.command) == Some(Command::Write)
            }
            // Here the flag says so for any command, also an unknown one, which can be skipped
            // therefore.
            Style::Extended => self.flags & command_flag::PAYLOAD_LEN != 0,
        };
        if follows { self.length } else { 0 }
    }
}

/// The header of an option: its number and the length of its data.
pub fn parse_option_header(bytes: &[u8; 16]) -> Result<(u32, u32), Violation> {
    let mut reader = Reader(bytes);
    match (reader.u64(), reader.u32(), reader.u32()) {
        (Some(OPTION_MAGIC), Some(option), Some(length)) => Ok((option, length)),
        _ => Err(Violation(Cow::Borrowed("an option does not begin with IHAVEOPT"))),
    }
}

/// The data of `INFO` and `GO`: the export's name and the types of information asked for.
pub fn parse_info_request(data: &[u8]) -> Option<(&str, Vec<u16>)> {
    let mut reader = Reader(data);
    let name = reader.string()?;
    let count = reader.u16()?;
    // The count has 16 bits, and the first missing number ends the loop.
    let wanted = (0..count).map(|_| reader.u16()).collect::<Option<_>>()?;
    // Bytes left over mean that the client understands the option differently.
    reader.0.is_empty().then_some((name, wanted))
}

/// The data of `LIST_META_CONTEXT` and `SET_META_CONTEXT`: the export's name and the queries.
pub fn parse_meta_request(data: &[u8]) -> Option<(&str, Vec<&str>)> {
    let mut reader = Reader(data);
    let name = reader.string()?;
    let count = reader.u32()?;
    let mut queries = Vec::new();
    // Each query takes at least four bytes of `data`, so a wrong count ends the loop soon.
    for _ in 0..count {
        queries.push(reader.string()?);
    }
    reader.0.is_empty().then_some((name, queries))
}

/// Appends a reply to an option.
pub fn push_option_reply(out: &mut Vec<u8>, option: u32, kind: u32, data: &[u8]) {
    out.extend_from_slice(&OPTION_REPLY_MAGIC.to_be_bytes());
    out.extend_from_slice(&option.to_be_bytes());
    out.extend_from_slice(&kind.to_be_bytes());
    out.extend_from_slice(&(data.len() as u32).to_be_bytes());
    out.extend_from_slice(data);
}

/// Appends an option with its data.
pub fn push_option(out: &mut Vec<u8>, option: u32, data: &[u8]) {
    out.extend_from_slice(&OPTION_MAGIC.to_be_bytes());
    out.extend_from_slice(&option.to_be_bytes());
    out.extend_from_slice(&(data.len() as u32).to_be_bytes());
    out.extend_from_slice(data);
}

/// The data of `INFO` and `GO`; see [`parse_info_request`].
#[must_use]
pub fn info_request(name: &str, wanted: &[u16]) -> Vec<u8> {
    let mut data = string(name);
    data.extend_from_slice(&(wanted.len() as u16).to_be_bytes());
    wanted.iter().for_each(|wanted| data.extend_from_slice(&wanted.to_be_bytes()));
    data
}

/// The data of `LIST_META_CONTEXT` and `SET_META_CONTEXT`; see [`parse_meta_request`].
#[must_use]
pub fn meta_request(name: &str, queries: &[&str]) -> Vec<u8> {
    let mut data = string(name);
    data.extend_from_slice(&(queries.len() as u32).to_be_bytes());
    queries.iter().for_each(|query| data.extend_from_slice(&string(query)));
    data
}

/// A string with its length (32 bits) in front.
fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u32).to_be_bytes()[..], text.as_bytes()].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_one_end_writes_the_other_reads() {
        let wanted = [info::BLOCK_SIZE, info::NAME];
        assert_eq!(
            parse_info_request(&info_request("disk1", &wanted)),
            Some(("disk1", wanted.to_vec()))
        );
        let queries = [BASE_ALLOCATION, "x"];
        assert_eq!(parse_meta_request(&meta_request("", &queries)), Some(("", queries.to_vec())));
        let mut message = Vec::new();
        push_option(&mut message, option::GO, b"abc");
        let (head, data) = message.split_first_chunk().unwrap();
        assert_eq!((parse_option_header(head), data), (Ok((option::GO, 3)), &b"abc"[..]));
        for style in [Style::Simple, Style::Structured, Style::Extended] {
            let header = RequestHeader {
                flags: command_flag::FUA,
                command: 1,
                cookie: 1 << 60,
                offset: 4096,
                length: 512,
            };
            let bytes = header.encode(style);
            assert_eq!(bytes.len(), style.request_bytes());
            assert_eq!(RequestHeader::parse(style, &bytes), Ok(Some(header)));
            assert_eq!(RequestHeader::parse(style, &bytes[1..]), Ok(None), "not whole yet");
        }
    }
}
