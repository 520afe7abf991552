//! The commands for a server, and their encoding.
//!
//! Invariant: a length is never truncated; a length that the style cannot hold is not encoded
//! ([`is_too_long`]). Not here: replies (`answer`), sockets.

use sawmill_nbd_proto::{RequestHeader, Style, command_flag};

/// A command for the server.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(
    missing_docs,
    reason = "the fields say it: where, how much, what bytes, and force unit access"
)]
pub enum Command {
    Read { offset: u64, length: u32 },
    Write { offset: u64, bytes: Vec<u8>, fua: bool },
    Flush,
    Trim { offset: u64, length: u64 },
    WriteZeroes { offset: u64, length: u64 },
    BlockStatus { offset: u64, length: u64 },
}

/// The error number of a length that is too large.
pub(crate) const OVERFLOW: u32 = 75;

/// Whether a command's length needs extended headers, which the style lacks.
pub(crate) fn is_too_long(command: &Command, style: Style) -> bool {
    let length = match command {
        Command::Read { length, .. } => u64::from(*length),
        Command::Write { bytes, .. } => bytes.len() as u64,
        Command::Flush => 0,
        Command::Trim { length, .. }
        | Command::WriteZeroes { length, .. }
        | Command::BlockStatus { length, .. } => *length,
    };
    style != Style::Extended && length > u64::from(u32::MAX)
}

/// The bytes of a request.
pub(crate) fn encode(command: &Command, cookie: u64, style: Style) -> Vec<u8> {
    use sawmill_nbd_proto::Command as Kind;
    let (kind, fua, offset, length, bytes): (Kind, bool, u64, u64, &[u8]) = match command {
        Command::Read { offset, length } => (Kind::Read, false, *offset, u64::from(*length), &[]),
        Command::Write { offset, bytes, fua } => {
            (Kind::Write, *fua, *offset, bytes.len() as u64, bytes)
        }
        Command::Flush => (Kind::Flush, false, 0, 0, &[]),
        Command::Trim { offset, length } => (Kind::Trim, false, *offset, *length, &[]),
        Command::WriteZeroes { offset, length } => {
            (Kind::WriteZeroes, false, *offset, *length, &[])
        }
        Command::BlockStatus { offset, length } => {
            (Kind::BlockStatus, false, *offset, *length, &[])
        }
    };
    let is_extended = style == Style::Extended;
    let mut flags = if fua { command_flag::FUA } else { 0 };
    // With extended headers, the flag tells the server that bytes follow.
    if is_extended && kind == Kind::Write {
        flags |= command_flag::PAYLOAD_LEN;
    }
    let mut message =
        RequestHeader { flags, command: kind as u16, cookie, offset, length }.encode(style);
    // In one message, so that the header and its payload go out with one system call.
    message.extend_from_slice(bytes);
    message
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_length_that_the_style_has_no_room_for_is_never_sent_short() {
        let trim = Command::Trim { offset: 0, length: (4 << 30) + 4096 };
        assert!(is_too_long(&trim, Style::Simple) && is_too_long(&trim, Style::Structured));
        assert!(!is_too_long(&trim, Style::Extended));
        let bytes = encode(&trim, 1, Style::Extended);
        assert_eq!(bytes[24..], ((4u64 << 30) + 4096).to_be_bytes());
    }
}
