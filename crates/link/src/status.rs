//! How an error crosses the wire: its kind as a number, and its text.
//!
//! Invariant: every kind has one number, numbers are never reused, and an unknown number is a bug
//! of the peer, not ours.

use sawmill_device::{Error, ErrorKind};

use ErrorKind::*;
const KINDS: [(u8, ErrorKind); 15] = [
    (1, Invalid),
    (2, ReadOnly),
    (3, NotFound),
    (4, Exists),
    (5, Refused),
    (6, Fenced),
    (7, Unavailable),
    (8, Denied),
    (9, InUse),
    (10, Full),
    (11, Corrupt),
    (12, Closed),
    (13, TimedOut),
    (14, Unreachable),
    (15, Internal),
];

/// The number of a kind, from 1: the status of a reply to a command that failed in this way.
#[must_use]
pub fn status_of(kind: ErrorKind) -> u8 {
    KINDS.iter().find(|(_, other)| *other == kind).map_or(15, |(code, _)| *code)
}

/// The kind of a reply's status other than 0, at the initiator.
#[must_use]
pub fn kind_of(status: u8) -> ErrorKind {
    KINDS.iter().find(|(code, _)| *code == status).map_or(Internal, |(_, kind)| *kind)
}

/// The error for a status and its text.
pub(crate) fn error_of(status: u8, text: &str) -> Error {
    Error::new(kind_of(status), format!("target: {}", crate::legible(text)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_comes_back_as_itself() {
        for (code, kind) in KINDS {
            assert_eq!(status_of(kind), code);
            assert_eq!(error_of(code, "x").kind(), kind);
        }
        assert_eq!(error_of(99, "x").kind(), Internal);
    }
}
