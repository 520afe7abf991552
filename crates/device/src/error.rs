//! The error type of all block devices. Its kind determines what the caller can do; its text says
//! what failed and on what.
//!
//! Invariant: each kind has a Linux errno ([`ErrorKind::errno`]), matched without a wildcard.
//!
//! Not here: the code that a door's protocol sends for a kind (each door's `errno` or `status`).

use std::borrow::Cow;
use std::fmt;
use std::io;
use std::sync::Arc;

/// The kind of a failure, by what the caller can do about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// The request is wrong (out of range, unaligned, unsupported): fix the request.
    Invalid,
    /// The device cannot be written: open it for writing, or do not write.
    ReadOnly,
    /// Something named does not exist: check the name, or create it.
    NotFound,
    /// Something of that name exists already: choose another name, or delete that first.
    Exists,
    /// The safe answer is to stop; the text names the override that goes on regardless.
    Refused,
    /// Another writer has taken the volume over: stop using this attachment.
    Fenced,
    /// The store or a disk cannot be reached at present: try again later.
    Unavailable,
    /// The store or the system refuses us: correct the credentials, the permissions or the bucket's
    /// name, or choose a store that can be written.
    Denied,
    /// Another process of this machine uses it: end that process, or use another object.
    InUse,
    /// No space is left: free some.
    Full,
    /// Bytes failed their checksum or identity: restore them from elsewhere.
    Corrupt,
    /// The device is closed or closing: open it again.
    Closed,
    /// No answer came within the time limit: find out why, or raise the limit.
    TimedOut,
    /// There is no path to the data: check the network or the link, then try again.
    Unreachable,
    /// A bug, or a device that broke its contract: report it, with the log.
    Internal,
}

impl ErrorKind {
    /// Every kind, in the order in which they are declared.
    pub const ALL: [ErrorKind; 15] = [
        ErrorKind::Invalid,
        ErrorKind::ReadOnly,
        ErrorKind::NotFound,
        ErrorKind::Exists,
        ErrorKind::Refused,
        ErrorKind::Fenced,
        ErrorKind::Unavailable,
        ErrorKind::Denied,
        ErrorKind::InUse,
        ErrorKind::Full,
        ErrorKind::Corrupt,
        ErrorKind::Closed,
        ErrorKind::TimedOut,
        ErrorKind::Unreachable,
        ErrorKind::Internal,
    ];

    /// The Linux errno of this kind, for callers without a mapping of their own. What each door
    /// answers is in `docs/guide/doors.md`.
    #[must_use]
    pub const fn errno(self) -> i32 {
        match self {
            ErrorKind::Invalid => 22,     // EINVAL
            ErrorKind::ReadOnly => 1, // EPERM: what NBD prescribes for writes to a read-only export
            ErrorKind::NotFound => 2, // ENOENT
            ErrorKind::Exists => 17,  // EEXIST
            ErrorKind::Refused => 5,  // EIO
            ErrorKind::Fenced => 108, // ESHUTDOWN
            ErrorKind::Unavailable => 5, // EIO
            ErrorKind::Denied => 13,  // EACCES
            ErrorKind::InUse => 16,   // EBUSY
            ErrorKind::Full => 28,    // ENOSPC
            ErrorKind::Corrupt => 5,  // EIO
            ErrorKind::Closed => 108, // ESHUTDOWN
            ErrorKind::TimedOut => 110, // ETIMEDOUT
            ErrorKind::Unreachable => 67, // ENOLINK
            ErrorKind::Internal => 5, // EIO
        }
    }

    /// The kind for an errno that a driver returns for a request. It maps the errnos that disks
    /// use; any other counts as a temporary failure.
    #[must_use]
    pub const fn of_driver(errno: i32) -> ErrorKind {
        match errno {
            1 | 13 => ErrorKind::Denied,  // EPERM, EACCES
            28 | 122 => ErrorKind::Full,  // ENOSPC, EDQUOT
            30 => ErrorKind::ReadOnly,    // EROFS
            67 => ErrorKind::Unreachable, // ENOLINK
            110 => ErrorKind::TimedOut,   // ETIMEDOUT
            _ => ErrorKind::Unavailable,
        }
    }

    /// The kind for an error of the operating system about a file, a folder or a socket. What its
    /// user can act on has a kind; any other error counts as a temporary failure.
    ///
    /// A caller for which an error means something else, such as a lock's `WouldBlock`, decides
    /// that before.
    #[must_use]
    pub fn of_io(error: &io::Error) -> ErrorKind {
        match error.kind() {
            io::ErrorKind::NotFound => ErrorKind::NotFound,
            io::ErrorKind::AlreadyExists => ErrorKind::Exists,
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
                ErrorKind::Denied
            }
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => ErrorKind::Full,
            io::ErrorKind::AddrInUse | io::ErrorKind::ResourceBusy => ErrorKind::InUse,
            io::ErrorKind::InvalidInput => ErrorKind::Invalid,
            io::ErrorKind::TimedOut => ErrorKind::TimedOut,
            io::ErrorKind::HostUnreachable | io::ErrorKind::NetworkUnreachable => {
                ErrorKind::Unreachable
            }
            // Without a row for each kind: the standard library adds some with each version.
            _ => ErrorKind::Unavailable,
        }
    }
}

/// The cause of an error: an error of the system or of a library.
type Source = Arc<dyn std::error::Error + Send + Sync>;

/// A failure: its kind, and one line with what happened, to what, and what to do. The line includes
/// the cause as text; [`source`](std::error::Error::source) returns the original error, if the
/// cause was one.
#[derive(Clone, Debug)]
pub struct Error {
    kind: ErrorKind,
    message: Cow<'static, str>,
    source: Option<Source>,
}

impl Error {
    /// An error of `kind` with its one-line text.
    pub fn new(kind: ErrorKind, message: impl Into<Cow<'static, str>>) -> Self {
        Error { kind, message: message.into(), source: None }
    }

    /// An error of `kind` that `source` caused: the text is `what`, a colon and the cause.
    pub fn caused(
        kind: ErrorKind,
        what: impl fmt::Display,
        source: impl std::error::Error + Send + Sync + 'static,
    ) -> Self {
        Error::new(kind, format!("{what}: {source}")).with_source(source)
    }

    /// The same error with its cause; its text already includes the cause.
    #[must_use]
    pub fn with_source(self, source: impl std::error::Error + Send + Sync + 'static) -> Self {
        Error { source: Some(Arc::new(source)), ..self }
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

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_deref().map(|source| source as &(dyn std::error::Error + 'static))
    }
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;

    use super::*;

    #[test]
    fn all_has_every_kind_once() {
        let place = |kind| match kind {
            ErrorKind::Invalid => 0,
            ErrorKind::ReadOnly => 1,
            ErrorKind::NotFound => 2,
            ErrorKind::Exists => 3,
            ErrorKind::Refused => 4,
            ErrorKind::Fenced => 5,
            ErrorKind::Unavailable => 6,
            ErrorKind::Denied => 7,
            ErrorKind::InUse => 8,
            ErrorKind::Full => 9,
            ErrorKind::Corrupt => 10,
            ErrorKind::Closed => 11,
            ErrorKind::TimedOut => 12,
            ErrorKind::Unreachable => 13,
            ErrorKind::Internal => 14,
        };
        let places: Vec<usize> = ErrorKind::ALL.into_iter().map(place).collect();
        assert_eq!(places, (0..15).collect::<Vec<_>>(), "a new kind is in ALL, too");
    }

    #[test]
    fn an_error_of_the_system_that_a_user_can_act_on_has_a_kind_and_others_may_pass() {
        let kind = |errno| ErrorKind::of_io(&io::Error::from_raw_os_error(errno));
        assert_eq!(kind(2), ErrorKind::NotFound, "ENOENT");
        assert_eq!(kind(17), ErrorKind::Exists, "EEXIST");
        assert_eq!([1, 13, 30].map(kind), [ErrorKind::Denied; 3], "EPERM, EACCES, EROFS");
        assert_eq!([28, 122].map(kind), [ErrorKind::Full; 2], "ENOSPC, EDQUOT");
        assert_eq!([16, 98].map(kind), [ErrorKind::InUse; 2], "EBUSY, EADDRINUSE");
        assert_eq!(kind(22), ErrorKind::Invalid, "EINVAL");
        assert_eq!(kind(110), ErrorKind::TimedOut, "ETIMEDOUT");
        assert_eq!([101, 113].map(kind), [ErrorKind::Unreachable; 2], "ENETUNREACH, EHOSTUNREACH");
        assert_eq!([5, 12, 11].map(kind), [ErrorKind::Unavailable; 3], "EIO, ENOMEM, EAGAIN");
    }

    #[test]
    fn an_error_keeps_its_cause_and_says_it_in_its_line() {
        let full = io::Error::from_raw_os_error(28);
        let error = Error::caused(ErrorKind::Full, "cannot write /srv/journal", full).clone();
        assert_eq!(
            error.to_string(),
            "cannot write /srv/journal: No space left on device (os error 28)"
        );
        let cause = error.source().and_then(|source| source.downcast_ref::<io::Error>());
        assert_eq!(cause.and_then(io::Error::raw_os_error), Some(28));
        assert!(Error::new(ErrorKind::Full, "full").source().is_none());
    }
}
