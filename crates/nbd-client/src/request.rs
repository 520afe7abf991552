//! The commands for a server, and their encoding.
//!
//! Invariant: a length is never truncated; a length that the style cannot hold is not encoded
//! ([`is_too_long`]). Not here: replies (`answer`), sockets.

use sawmill_nbd_proto::{RequestHeader, Style, command_flag};

/// A command for the server.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(
    missing_docs,
    reason = "the fields say it: where, how much, what bytes, force unit access, keep the space"
)]
pub enum Command {
    Read { offset: u64, length: u32 },
    Write { offset: u64, bytes: Vec<u8>, fua: bool },
    Flush,
    Trim { offset: u64, length: u64, fua: bool },
    WriteZeroes { offset: u64, length: u64, fua: bool, no_hole: bool },
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
    let (kind, offset, length, bytes): (Kind, u64, u64, &[u8]) = match command {
        Command::Read { offset, length } => (Kind::Read, *offset, u64::from(*length), &[]),
        Command::Write { offset, bytes, .. } => (Kind::Write, *offset, bytes.len() as u64, bytes),
        Command::Flush => (Kind::Flush, 0, 0, &[]),
        Command::Trim { offset, length, .. } => (Kind::Trim, *offset, *length, &[]),
        Command::WriteZeroes { offset, length, .. } => (Kind::WriteZeroes, *offset, *length, &[]),
        Command::BlockStatus { offset, length } => (Kind::BlockStatus, *offset, *length, &[]),
    };
    let flags = flags_of(command, style);
    let mut message =
        RequestHeader { flags, command: kind as u16, cookie, offset, length }.encode(style);
    // In one message, so that the header and its payload go out with one system call.
    message.extend_from_slice(bytes);
    message
}

fn flags_of(command: &Command, style: Style) -> u16 {
    let when = |is_set: bool, flag: u16| if is_set { flag } else { 0 };
    match command {
        Command::Write { fua, .. } => {
            when(*fua, command_flag::FUA)
                | when(style == Style::Extended, command_flag::PAYLOAD_LEN)
        }
        Command::Trim { fua, .. } => when(*fua, command_flag::FUA),
        Command::WriteZeroes { fua, no_hole, .. } => {
            when(*fua, command_flag::FUA) | when(*no_hole, command_flag::NO_HOLE)
        }
        Command::Read { .. } | Command::Flush | Command::BlockStatus { .. } => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_length_that_the_style_has_no_room_for_is_never_sent_short() {
        let trim = Command::Trim { offset: 0, length: (4 << 30) + 4096, fua: false };
        assert!(is_too_long(&trim, Style::Simple) && is_too_long(&trim, Style::Structured));
        assert!(!is_too_long(&trim, Style::Extended));
        let bytes = encode(&trim, 1, Style::Extended);
        assert_eq!(bytes[24..], ((4u64 << 30) + 4096).to_be_bytes());
    }

    #[test]
    fn a_change_without_payload_carries_its_flags() {
        let flags = |command: &Command| {
            let bytes = encode(command, 1, Style::Simple);
            u16::from_be_bytes([bytes[4], bytes[5]])
        };
        let (offset, length) = (0, 4096);
        assert_eq!(flags(&Command::Trim { offset, length, fua: false }), 0);
        assert_eq!(flags(&Command::Trim { offset, length, fua: true }), command_flag::FUA);
        let zeroes = |fua, no_hole| flags(&Command::WriteZeroes { offset, length, fua, no_hole });
        assert_eq!(zeroes(false, false), 0);
        assert_eq!(zeroes(true, false), command_flag::FUA);
        assert_eq!(zeroes(false, true), command_flag::NO_HOLE);
        assert_eq!(zeroes(true, true), command_flag::FUA | command_flag::NO_HOLE);
    }
}
