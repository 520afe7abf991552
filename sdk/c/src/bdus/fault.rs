//! Errors as BDUS reports them: false, errno, a message of the thread. Not here: what an errno
//! means.

use std::path::Path;

use sawmill_device::{Error, ErrorKind};

use crate::text::remember_text;

/// An errno with a message, which a BDUS function reports as `false`.
#[derive(Debug)]
pub(super) struct Fault {
    pub(super) errno: i32,
    pub(super) message: String,
}

impl Fault {
    pub(super) fn new(errno: i32, message: &str) -> Self {
        Fault { errno, message: message.to_owned() }
    }

    pub(super) fn invalid(message: &str) -> Self {
        Fault::new(libc::EINVAL, message)
    }

    /// The same fault, with the file that it is about before its message.
    pub(super) fn about(mut self, path: &Path) -> Self {
        self.message = format!("{}: {}", path.display(), self.message);
        self
    }

    /// Returns true, or false and records the error.
    pub(super) fn report(outcome: Result<(), Fault>) -> bool {
        let Err(fault) = outcome else { return true };
        remember_text(&fault.message);
        // SAFETY: the address of this thread's errno is always valid.
        unsafe { *libc::__errno_location() = fault.errno }
        false
    }
}

impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        let errno = match error.kind() {
            ErrorKind::Closed => libc::ENODEV,
            ErrorKind::Refused => libc::EIO,
            kind => kind.errno(),
        };
        Fault::new(errno, &error.to_string())
    }
}

impl From<std::io::Error> for Fault {
    fn from(error: std::io::Error) -> Self {
        Fault::new(error.raw_os_error().unwrap_or(libc::EIO), &error.to_string())
    }
}
