//! One error type for stores. The kind decides what the engine may conclude: only `NotFound` means
//! "not there".
//!
//! Not here: which kinds are tried again (`client`), and what an answer of a network store means
//! (`cloud`).

use std::fmt;
use std::sync::Arc;

/// What kind of failure this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StoreErrorKind {
    /// The store reported, definitely, that the object is not there. The caller judges it; only
    /// this kind may be taken for absence.
    NotFound,
    /// The store refused us: credentials, permissions, a missing bucket or a read-only store. Stop
    /// and report it: a person must change the credentials or the store.
    Denied,
    /// The store could not be reached, or did not answer in time, or answered with a passing error.
    /// Nothing is known about the object: retry later; a put or delete may still take effect.
    Unavailable,
    /// The store answered with something that cannot be right (a short body, say), more than once:
    /// check the store and what lies between.
    Broken,
    /// The caller cannot have put what is under the key: it is larger than asked for, or not a
    /// file. A retry does not help: leave it, and report the key.
    Damaged,
    /// The call or the URL is wrong: correct it.
    Invalid,
}

/// The cause of an error: the system's, or a library's.
type Source = Arc<dyn std::error::Error + Send + Sync>;

/// A failure: its kind and one line that tells what happened, to which object, and what to do. The
/// line includes the cause in words; [`source`](std::error::Error::source) has the original.
#[derive(Clone, Debug)]
pub struct StoreError {
    kind: StoreErrorKind,
    message: String,
    source: Option<Source>,
}

impl StoreError {
    /// An error of `kind` with its one-line text.
    pub fn new(kind: StoreErrorKind, message: impl Into<String>) -> Self {
        StoreError { kind, message: message.into(), source: None }
    }

    /// The same error with its cause, which the text already includes.
    #[must_use]
    pub fn with_source(self, source: impl std::error::Error + Send + Sync + 'static) -> Self {
        // Shared, because errors are cloned: one of the runtime's start goes to every later call.
        StoreError { source: Some(Arc::new(source)), ..self }
    }

    /// The kind, which determines what may be concluded.
    #[must_use]
    pub fn kind(&self) -> StoreErrorKind {
        self.kind
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for StoreError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_deref().map(|source| source as &(dyn std::error::Error + 'static))
    }
}
