//! Why a check could not be carried out. A finding of a check is not an error. Not here: findings
//! (`report`), exit codes (`crates/console`).

use std::fmt;
use std::io;
use std::path::Path;

use sawmill_format::FormatError;

/// Why a check could not be carried out: what happened, to what, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The system refused something.
    #[error("{what}: {source}")]
    Io {
        /// The operation, and its object.
        what: String,
        /// The error of the system.
        source: io::Error,
    },
    /// A program, a right or a kernel's ability is missing.
    #[error("{0}")]
    Missing(String),
    /// A device of the kernel cannot be opened.
    #[error("{what}: {source}; {advice}")]
    Unopened {
        /// What failed, and at which device.
        what: String,
        /// What the system said.
        source: io::Error,
        /// What to do, as the end of the message.
        advice: &'static str,
    },
    /// A write log holds what its format does not allow.
    #[error("{what}: {source}")]
    Format {
        /// The path of the log.
        what: String,
        /// What the decoder of the format refused.
        source: FormatError,
    },
    /// A write log is not what it should be.
    #[error("{0}")]
    Log(String),
    /// The device under test, or a program, did not do its part while the recording was made.
    #[error("{0}")]
    Subject(String),
    /// The device under test answered a request with an error.
    #[error("{0}")]
    Device(#[source] sawmill_device::Error),
    /// The request makes no sense.
    #[error("{0}")]
    Usage(String),
}

impl Error {
    /// An error of the system about a file.
    pub(crate) fn io(what: impl fmt::Display, path: &Path, source: io::Error) -> Self {
        Error::Io { what: format!("{what} {}", path.display()), source }
    }
}

impl From<sawmill_device::Error> for Error {
    fn from(error: sawmill_device::Error) -> Self {
        Error::Device(error)
    }
}
