//! The bytes on the wire, as pure functions: requests and options in, replies out.
//!
//! Invariant: no input makes a function here panic. All numbers are big-endian. Names follow the protocol's
//! own document. Not here: sockets, and what a request does.

use std::borrow::Cow;

use sawmill_device::{Allocation, ErrorKind};

use super::options::{EXTENTS_MAX, STRING_BYTES_MAX};

/// Opens the greeting: `NBDMAGIC`.
pub(super) const GREETING_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// Opens each option: `IHAVEOPT`.
pub(super) const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;
const EXTENDED_REPLY_MAGIC: u32 = 0x6e8a_278c;

/// Flags of the greeting and of the client's answer.
pub(super) mod hello {
    pub(in super::super) const FIXED_NEWSTYLE: u16 = 1;
    pub(in super::super) const NO_ZEROES: u16 = 1 << 1;
}

/// Option numbers.
pub(super) mod option {
    pub(in super::super) const EXPORT_NAME: u32 = 1;
    pub(in super::super) const ABORT: u32 = 2;
    pub(in super::super) const LIST: u32 = 3;
    pub(in super::super) const INFO: u32 = 6;
    pub(in super::super) const GO: u32 = 7;
    pub(in super::super) const STRUCTURED_REPLY: u32 = 8;
    pub(in super::super) const LIST_META_CONTEXT: u32 = 9;
    pub(in super::super) const SET_META_CONTEXT: u32 = 10;
    pub(in super::super) const EXTENDED_HEADERS: u32 = 11;
}

/// Types of option replies.
pub(super) mod reply {
    pub(in super::super) const ACK: u32 = 1;
    pub(in super::super) const SERVER: u32 = 2;
    pub(in super::super) const INFO: u32 = 3;
    pub(in super::super) const META_CONTEXT: u32 = 4;
    pub(in super::super) const ERR_UNSUP: u32 = 1 << 31 | 1;
    pub(in super::super) const ERR_INVALID: u32 = 1 << 31 | 3;
    pub(in super::super) const ERR_UNKNOWN: u32 = 1 << 31 | 6;
    pub(in super::super) const ERR_EXT_HEADER_REQD: u32 = 1 << 31 | 10;
}

/// Types of information in an `INFO` reply.
pub(super) mod info {
    pub(in super::super) const EXPORT: u16 = 0;
    pub(in super::super) const NAME: u16 = 1;
    pub(in super::super) const DESCRIPTION: u16 = 2;
    pub(in super::super) const BLOCK_SIZE: u16 = 3;
}

/// Transmission flags: what an export can do.
pub(super) mod transmission {
    pub(in super::super) const HAS_FLAGS: u16 = 1;
    pub(in super::super) const READ_ONLY: u16 = 1 << 1;
    pub(in super::super) const SEND_FLUSH: u16 = 1 << 2;
    pub(in super::super) const SEND_FUA: u16 = 1 << 3;
    pub(in super::super) const SEND_TRIM: u16 = 1 << 5;
    pub(in super::super) const SEND_WRITE_ZEROES: u16 = 1 << 6;
    pub(in super::super) const SEND_DF: u16 = 1 << 7;
    pub(in super::super) const CAN_MULTI_CONN: u16 = 1 << 8;
    pub(in super::super) const SEND_CACHE: u16 = 1 << 10;
    pub(in super::super) const SEND_FAST_ZERO: u16 = 1 << 11;
}

/// Flags of a request.
pub(super) mod command_flag {
    pub(in super::super) const FUA: u16 = 1;
    pub(in super::super) const NO_HOLE: u16 = 1 << 1;
    pub(in super::super) const DF: u16 = 1 << 2;
    pub(in super::super) const REQ_ONE: u16 = 1 << 3;
    pub(in super::super) const FAST_ZERO: u16 = 1 << 4;
    pub(in super::super) const PAYLOAD_LEN: u16 = 1 << 5;
}

/// The only metadata context there is.
pub(super) const BASE_ALLOCATION: &str = "base:allocation";
/// The number by which replies name [`BASE_ALLOCATION`].
pub(super) const BASE_ALLOCATION_ID: u32 = 1;

/// Why a connection has to be closed: the peer broke the protocol in this way.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Violation(pub(super) Cow<'static, str>);

/// A command of the transmission phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Command {
    Read,
    Write,
    Disconnect,
    Flush,
    Trim,
    Cache,
    WriteZeroes,
    BlockStatus,
}

impl Command {
    /// The command of this number.
    pub(super) fn from_number(number: u16) -> Option<Self> {
        use Command::{BlockStatus, Cache, Disconnect, Flush, Read, Trim, Write, WriteZeroes};
        [Read, Write, Disconnect, Flush, Trim, Cache, WriteZeroes, BlockStatus]
            .get(usize::from(number))
            .copied()
    }
}

/// An NBD error number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum Errno {
    Perm = 1,
    Io = 5,
    Inval = 22,
    NoSpace = 28,
    Overflow = 75,
    Shutdown = 108,
}

impl Errno {
    /// The error of this number.
    pub(super) fn from_number(number: u32) -> Option<Self> {
        use Errno::{Inval, Io, NoSpace, Overflow, Perm, Shutdown};
        [Perm, Io, Inval, NoSpace, Overflow, Shutdown].into_iter().find(|errno| *errno as u32 == number)
    }
}

impl From<ErrorKind> for Errno {
    fn from(kind: ErrorKind) -> Self {
        match kind {
            ErrorKind::Invalid | ErrorKind::Exists => Errno::Inval,
            ErrorKind::ReadOnly => Errno::Perm,
            ErrorKind::Full => Errno::NoSpace,
            ErrorKind::Fenced | ErrorKind::Closed => Errno::Shutdown,
            ErrorKind::NotFound
            | ErrorKind::Refused
            | ErrorKind::Denied
            | ErrorKind::InUse
            | ErrorKind::Unavailable
            | ErrorKind::Corrupt
            | ErrorKind::TimedOut
            | ErrorKind::Unreachable
            | ErrorKind::Internal => Errno::Io,
        }
    }
}

/// What the client negotiated for the heads of requests and replies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Style {
    /// Simple replies to everything.
    Simple,
    /// Structured replies to reads, block status and failures; simple ones to the rest.
    Structured,
    /// Extended requests and replies only.
    Extended,
}

impl Style {
    /// Bytes of a request's header.
    pub(super) fn request_bytes(self) -> usize {
        if self == Style::Extended { 32 } else { 28 }
    }

    /// Bytes in front of the data of a successful read.
    pub(super) fn read_head_bytes(self) -> usize {
        match self {
            Style::Simple => 16,
            Style::Structured => 20 + 8,
            Style::Extended => 32 + 8,
        }
    }
}

/// The header of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RequestHeader {
    pub(super) flags: u16,
    /// The number of the command, known or not.
    pub(super) command: u16,
    /// What the reply names the request by.
    pub(super) cookie: u64,
    /// First byte of the range.
    pub(super) offset: u64,
    /// Bytes of the range, or of the payload.
    pub(super) length: u64,
}

/// Takes big-endian numbers off the front of bytes.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, length: usize) -> Option<&'a [u8]> {
        let (head, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(head)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*head)
    }

    fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_be_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_be_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_be_bytes)
    }

    /// A string with its length (32 bits) in front.
    fn string(&mut self) -> Option<&'a str> {
        let length = self.u32()? as usize;
        if length > STRING_BYTES_MAX {
            return None;
        }
        std::str::from_utf8(self.take(length)?).ok()
    }
}

impl RequestHeader {
    /// The header at the front of `bytes`, or `None` when it is not there whole yet.
    #[inline]
    pub(super) fn parse(style: Style, bytes: &[u8]) -> Result<Option<Self>, Violation> {
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
            let length = if style == Style::Extended { reader.u64()? } else { reader.u32()?.into() };
            Some((magic, RequestHeader { flags, command, cookie, offset, length }))
        };
        let Some((magic, header)) = fields() else { return Ok(None) };
        let expected = if style == Style::Extended { EXTENDED_REQUEST_MAGIC } else { REQUEST_MAGIC };
        if magic != expected {
            let text = format!("a request begins with {magic:#010x} instead of {expected:#010x}");
            return Err(Violation(text.into()));
        }
        Ok(Some(header))
    }

    /// The bytes this header was parsed from.
    pub(super) fn encode(&self, style: Style) -> Vec<u8> {
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
    pub(super) fn payload_bytes(&self, style: Style) -> u64 {
        let follows = match style {
            Style::Simple | Style::Structured => Command::from_number(self.command) == Some(Command::Write),
            Style::Extended => self.flags & command_flag::PAYLOAD_LEN != 0,
        };
        if follows { self.length } else { 0 }
    }
}

/// The header of an option: its number and the length of its data.
pub(super) fn parse_option_header(bytes: &[u8; 16]) -> Result<(u32, u32), Violation> {
    let mut reader = Reader(bytes);
    match (reader.u64(), reader.u32(), reader.u32()) {
        (Some(OPTION_MAGIC), Some(option), Some(length)) => Ok((option, length)),
        _ => Err(Violation(Cow::Borrowed("an option does not begin with IHAVEOPT"))),
    }
}

/// The data of `INFO` and `GO`: the export's name and the types of information asked for.
pub(super) fn parse_info_request(data: &[u8]) -> Option<(&str, Vec<u16>)> {
    let mut reader = Reader(data);
    let name = reader.string()?;
    let count = reader.u16()?;
    let wanted = (0..count).map(|_| reader.u16()).collect::<Option<_>>()?;
    reader.0.is_empty().then_some((name, wanted))
}

/// The data of `LIST_META_CONTEXT` and `SET_META_CONTEXT`: the export's name and the queries.
pub(super) fn parse_meta_request(data: &[u8]) -> Option<(&str, Vec<&str>)> {
    let mut reader = Reader(data);
    let name = reader.string()?;
    let count = reader.u32()?;
    let mut queries = Vec::new();
    // Each query takes at least four bytes of `data`, so a false count ends the loop soon.
    for _ in 0..count {
        queries.push(reader.string()?);
    }
    reader.0.is_empty().then_some((name, queries))
}

/// Appends a reply to an option.
pub(super) fn push_option_reply(out: &mut Vec<u8>, option: u32, kind: u32, data: &[u8]) {
    out.extend_from_slice(&OPTION_REPLY_MAGIC.to_be_bytes());
    out.extend_from_slice(&option.to_be_bytes());
    out.extend_from_slice(&kind.to_be_bytes());
    out.extend_from_slice(&(data.len() as u32).to_be_bytes());
    out.extend_from_slice(data);
}

const CHUNK_DONE: u16 = 1;
const CHUNK_NONE: u16 = 0;
const CHUNK_OFFSET_DATA: u16 = 1;
const CHUNK_BLOCK_STATUS: u16 = 5;
const CHUNK_BLOCK_STATUS_EXT: u16 = 6;
const CHUNK_ERROR: u16 = 1 << 15 | 1;
const STATE_HOLE_AND_ZERO: u32 = 0b11;

/// The request a reply answers, as far as the reply has to name it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Answered {
    pub(super) style: Style,
    pub(super) cookie: u64,
    pub(super) offset: u64,
}

impl Answered {
    fn simple(self, errno: u32) -> [u8; 16] {
        let mut head = [0; 16];
        head[..4].copy_from_slice(&SIMPLE_REPLY_MAGIC.to_be_bytes());
        head[4..8].copy_from_slice(&errno.to_be_bytes());
        head[8..].copy_from_slice(&self.cookie.to_be_bytes());
        head
    }

    /// The head of the only chunk of a reply, and its length; not for `Style::Simple`.
    fn chunk(self, kind: u16, payload_bytes: u32) -> ([u8; 32], usize) {
        let extended = self.style == Style::Extended;
        let magic = if extended { EXTENDED_REPLY_MAGIC } else { STRUCTURED_REPLY_MAGIC };
        let mut head = [0; 32];
        head[..4].copy_from_slice(&magic.to_be_bytes());
        head[4..6].copy_from_slice(&CHUNK_DONE.to_be_bytes());
        head[6..8].copy_from_slice(&kind.to_be_bytes());
        head[8..16].copy_from_slice(&self.cookie.to_be_bytes());
        if extended {
            head[16..24].copy_from_slice(&self.offset.to_be_bytes());
            head[24..].copy_from_slice(&u64::from(payload_bytes).to_be_bytes());
            (head, 32)
        } else {
            head[16..20].copy_from_slice(&payload_bytes.to_be_bytes());
            (head, 20)
        }
    }

    fn push_chunk(self, out: &mut Vec<u8>, kind: u16, payload_bytes: u32) {
        let (head, length) = self.chunk(kind, payload_bytes);
        out.extend_from_slice(&head[..length]);
    }

    /// Appends a reply of success without data.
    pub(super) fn push_done(self, out: &mut Vec<u8>) {
        match self.style {
            Style::Simple | Style::Structured => out.extend_from_slice(&self.simple(0)),
            Style::Extended => self.push_chunk(out, CHUNK_NONE, 0),
        }
    }

    /// Appends a reply of failure, with its text where the style has room for one.
    pub(super) fn push_error(self, out: &mut Vec<u8>, errno: Errno, text: &str) {
        if self.style == Style::Simple {
            out.extend_from_slice(&self.simple(errno as u32));
            return;
        }
        let text = &text[..text.floor_char_boundary(STRING_BYTES_MAX)];
        self.push_chunk(out, CHUNK_ERROR, 6 + text.len() as u32);
        out.extend_from_slice(&(errno as u32).to_be_bytes());
        out.extend_from_slice(&(text.len() as u16).to_be_bytes());
        out.extend_from_slice(text.as_bytes());
    }

    /// Writes what goes in front of the `data_bytes` of a successful read into `head`, which has exactly
    /// [`Style::read_head_bytes`].
    pub(super) fn write_read_head(self, head: &mut [u8], data_bytes: u32) {
        if self.style == Style::Simple {
            head.copy_from_slice(&self.simple(0));
            return;
        }
        let (chunk, length) = self.chunk(CHUNK_OFFSET_DATA, 8 + data_bytes);
        let (front, offset) = head.split_at_mut(length);
        front.copy_from_slice(&chunk[..length]);
        offset.copy_from_slice(&self.offset.to_be_bytes());
    }

    /// Appends the answer to a block status query: neighbours alike are joined, and the list ends early at
    /// the limit or, with `one`, after its first run. Runs of length zero are left out.
    pub(super) fn push_block_status(self, out: &mut Vec<u8>, runs: &[Allocation], one: bool) {
        let limit = if one { 1 } else { EXTENTS_MAX };
        let mut joined: Vec<Allocation> = Vec::with_capacity(runs.len().min(limit));
        for run in runs.iter().filter(|run| run.length > 0) {
            let full = joined.len() == limit;
            match joined.last_mut() {
                Some(last) if last.data == run.data => last.length = last.length.saturating_add(run.length),
                _ if full => break,
                _ => joined.push(*run),
            }
        }
        let count = joined.len() as u32;
        let extended = self.style == Style::Extended;
        if extended {
            self.push_chunk(out, CHUNK_BLOCK_STATUS_EXT, 8 + 16 * count);
            out.extend_from_slice(&BASE_ALLOCATION_ID.to_be_bytes());
            out.extend_from_slice(&count.to_be_bytes());
        } else {
            self.push_chunk(out, CHUNK_BLOCK_STATUS, 4 + 8 * count);
            out.extend_from_slice(&BASE_ALLOCATION_ID.to_be_bytes());
        }
        for run in joined {
            let state = if run.data { 0 } else { STATE_HOLE_AND_ZERO };
            if extended {
                out.extend_from_slice(&run.length.to_be_bytes());
                out.extend_from_slice(&u64::from(state).to_be_bytes());
            } else {
                // The query itself was not longer than 32 bits, so only a device at fault is cut here.
                out.extend_from_slice(&u32::try_from(run.length).unwrap_or(u32::MAX).to_be_bytes());
                out.extend_from_slice(&state.to_be_bytes());
            }
        }
    }
}
