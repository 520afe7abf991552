//! One error type for the waist. Its kind tells the reader what to do; its text says what and which.
//!
//! Invariant: kinds map to errno in one table ([`ErrorKind::errno`]), matched without a wildcard.

use std::borrow::Cow;
use std::fmt;

/// What kind of failure this is, chosen by what the caller can do about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// The request is wrong (out of range, unaligned, unsupported): mend the request.
    Invalid,
    /// The device cannot be written: open it for writing, or do not write.
    ReadOnly,
    /// Something named does not exist.
    NotFound,
    /// Something of that name exists already.
    Exists,
    /// The safe answer is to stop; the text names the override that goes on regardless.
    Refused,
    /// Another writer has taken the volume over: stop using this attachment.
    Fenced,
    /// The store or a disk cannot be asked at present: try again later.
    Unavailable,
    /// The store refuses us: credentials, permissions, a missing bucket, a read-only store.
    Denied,
    /// Another process of this machine holds it.
    InUse,
    /// No space is left: free some.
    Full,
    /// Bytes failed their checksum or identity: restore them from elsewhere.
    Corrupt,
    /// The device is closed or closing.
    Closed,
    /// Nobody answered in the time that was set: see why, or wait longer.
    TimedOut,
    /// The way to where the bytes are is cut.
    Unreachable,
    /// A bug, or a device that broke its contract.
    Internal,
}

impl ErrorKind {
    /// The Linux errno that a front door answers for this kind.
    #[must_use]
    pub const fn errno(self) -> i32 {
        match self {
            ErrorKind::Invalid => 22,     // EINVAL
            ErrorKind::ReadOnly => 1,     // EPERM: what NBD prescribes for writes to a read-only export
            ErrorKind::NotFound => 2,     // ENOENT
            ErrorKind::Exists => 17,      // EEXIST
            ErrorKind::Refused => 5,      // EIO
            ErrorKind::Fenced => 108,     // ESHUTDOWN
            ErrorKind::Unavailable => 5,  // EIO
            ErrorKind::Denied => 13,      // EACCES
            ErrorKind::InUse => 16,       // EBUSY
            ErrorKind::Full => 28,        // ENOSPC
            ErrorKind::Corrupt => 5,      // EIO
            ErrorKind::Closed => 108,     // ESHUTDOWN
            ErrorKind::TimedOut => 110,   // ETIMEDOUT
            ErrorKind::Unreachable => 67, // ENOLINK
            ErrorKind::Internal => 5,     // EIO
        }
    }
}

/// A failure: its kind, and one line that says what happened, to what, and what to do.
#[derive(Clone, Debug)]
pub struct Error {
    kind: ErrorKind,
    message: Cow<'static, str>,
}

impl Error {
    /// An error of `kind` with its one-line text.
    pub fn new(kind: ErrorKind, message: impl Into<Cow<'static, str>>) -> Self {
        Error { kind, message: message.into() }
    }

    /// What the caller can do about it.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {}
