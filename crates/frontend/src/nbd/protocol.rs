//! The replies of a server, as bytes. Numbers, requests and options are those of
//! [`sawmill_nbd_proto`].
//!
//! Invariant: no input makes a function here panic. Not here: sockets, and the effect of a request.

use sawmill_device::{Allocation, ErrorKind};
pub(super) use sawmill_nbd_proto::{
    BASE_ALLOCATION, BASE_ALLOCATION_ID, Command, GREETING_MAGIC, OPTION_MAGIC, RequestHeader,
    Style, Violation, command_flag, hello, info, option, parse_info_request, parse_meta_request,
    parse_option_header, push_option_reply, reply, transmission,
};
use sawmill_nbd_proto::{
    EXTENDED_REPLY_MAGIC, SIMPLE_REPLY_MAGIC, STRING_BYTES_MAX, STRUCTURED_REPLY_MAGIC, chunk,
};

const STATE_HOLE_AND_ZERO: u32 = 0b11;

/// An NBD error number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum NbdErrno {
    Perm = 1,
    Io = 5,
    Inval = 22,
    NoSpace = 28,
    Overflow = 75,
    Shutdown = 108,
}

impl NbdErrno {
    /// The error with this number.
    pub(super) fn from_number(number: u32) -> Option<Self> {
        use NbdErrno::{Inval, Io, NoSpace, Overflow, Perm, Shutdown};
        [Perm, Io, Inval, NoSpace, Overflow, Shutdown]
            .into_iter()
            .find(|errno| *errno as u32 == number)
    }
}

/// The error number of the reply to a request that failed in this way: one of the six that NBD
/// knows.
#[must_use]
pub fn errno(kind: ErrorKind) -> u32 {
    NbdErrno::from(kind) as u32
}

impl From<ErrorKind> for NbdErrno {
    fn from(kind: ErrorKind) -> Self {
        match kind {
            ErrorKind::Invalid | ErrorKind::Exists => NbdErrno::Inval,
            ErrorKind::ReadOnly => NbdErrno::Perm,
            ErrorKind::Full => NbdErrno::NoSpace,
            // Tells the client that this server will not serve any more, so that it does not retry
            // here.
            ErrorKind::Fenced | ErrorKind::Closed => NbdErrno::Shutdown,
            ErrorKind::NotFound
            | ErrorKind::Refused
            | ErrorKind::Denied
            | ErrorKind::InUse
            | ErrorKind::Unavailable
            | ErrorKind::Corrupt
            | ErrorKind::TimedOut
            | ErrorKind::Unreachable
            | ErrorKind::Internal => NbdErrno::Io,
        }
    }
}

/// The request that a reply answers, as far as the reply must identify it.
#[derive(Clone, Copy, Debug)]
pub(super) struct RequestIdentity {
    pub(super) style: Style,
    pub(super) cookie: u64,
    pub(super) offset: u64,
}

impl RequestIdentity {
    fn simple(self, errno: u32) -> [u8; 16] {
        let mut head = [0; 16];
        head[..4].copy_from_slice(&SIMPLE_REPLY_MAGIC.to_be_bytes());
        head[4..8].copy_from_slice(&errno.to_be_bytes());
        head[8..].copy_from_slice(&self.cookie.to_be_bytes());
        head
    }

    /// The head of the only chunk of a reply, and its length; not for `Style::Simple`.
    fn chunk(self, kind: u16, payload_bytes: u32) -> ([u8; 32], usize) {
        let is_extended = self.style == Style::Extended;
        let magic = if is_extended { EXTENDED_REPLY_MAGIC } else { STRUCTURED_REPLY_MAGIC };
        let mut head = [0; 32];
        head[..4].copy_from_slice(&magic.to_be_bytes());
        head[4..6].copy_from_slice(&chunk::DONE.to_be_bytes());
        head[6..8].copy_from_slice(&kind.to_be_bytes());
        head[8..16].copy_from_slice(&self.cookie.to_be_bytes());
        if is_extended {
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
            // Structured replies are compulsory for data alone. A simple one is shorter.
            Style::Simple | Style::Structured => out.extend_from_slice(&self.simple(0)),
            Style::Extended => self.push_chunk(out, chunk::NONE, 0),
        }
    }

    /// Appends a failure, with its text if the style supports one.
    pub(super) fn push_error(self, out: &mut Vec<u8>, errno: NbdErrno, text: &str) {
        if self.style == Style::Simple {
            out.extend_from_slice(&self.simple(errno as u32));
            return;
        }
        // The protocol limits strings, and a client may close the connection at a longer one.
        let text = &text[..text.floor_char_boundary(STRING_BYTES_MAX)];
        self.push_chunk(out, chunk::ERROR, 6 + text.len() as u32);
        out.extend_from_slice(&(errno as u32).to_be_bytes());
        out.extend_from_slice(&(text.len() as u16).to_be_bytes());
        out.extend_from_slice(text.as_bytes());
    }

    /// Writes the head of a successful read with `data_bytes` into `head`, which has exactly
    /// [`Style::read_head_bytes`].
    pub(super) fn write_read_head(self, head: &mut [u8], data_bytes: u32) {
        if self.style == Style::Simple {
            head.copy_from_slice(&self.simple(0));
            return;
        }
        let (chunk, length) = self.chunk(chunk::OFFSET_DATA, 8 + data_bytes);
        let (front, offset) = head.split_at_mut(length);
        front.copy_from_slice(&chunk[..length]);
        offset.copy_from_slice(&self.offset.to_be_bytes());
    }

    /// Appends the answer to a block status query. Adjacent equal runs are merged, and the list
    /// ends after `runs_max` of them. Empty runs are omitted.
    pub(super) fn push_block_status(self, out: &mut Vec<u8>, runs: &[Allocation], runs_max: usize) {
        let mut merged_runs: Vec<Allocation> = Vec::with_capacity(runs.len().min(runs_max));
        for run in runs.iter().filter(|run| run.length > 0) {
            // A run that only continues the last one is still taken when the list is full: the
            // longer the answer reaches, the fewer queries follow.
            let is_full = merged_runs.len() == runs_max;
            match merged_runs.last_mut() {
                Some(last) if last.data == run.data => {
                    last.length = last.length.saturating_add(run.length)
                }
                _ if is_full => break,
                _ => merged_runs.push(*run),
            }
        }
        let count = merged_runs.len() as u32;
        let is_extended = self.style == Style::Extended;
        if is_extended {
            self.push_chunk(out, chunk::BLOCK_STATUS_EXT, 8 + 16 * count);
            out.extend_from_slice(&BASE_ALLOCATION_ID.to_be_bytes());
            out.extend_from_slice(&count.to_be_bytes());
        } else {
            self.push_chunk(out, chunk::BLOCK_STATUS, 4 + 8 * count);
            out.extend_from_slice(&BASE_ALLOCATION_ID.to_be_bytes());
        }
        for run in merged_runs {
            let state = if run.data { 0 } else { STATE_HOLE_AND_ZERO };
            if is_extended {
                out.extend_from_slice(&run.length.to_be_bytes());
                out.extend_from_slice(&u64::from(state).to_be_bytes());
            } else {
                // The query itself has at most 32 bits, so this truncates only the answer of a
                // faulty device.
                out.extend_from_slice(&u32::try_from(run.length).unwrap_or(u32::MAX).to_be_bytes());
                out.extend_from_slice(&state.to_be_bytes());
            }
        }
    }
}
