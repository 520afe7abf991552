//! How the process ends: one table of exit codes, and the one error type of the commands.
//!
//! Invariants: every failure carries a code of the table and a text of one line; the mapping from
//! the library's kinds of error has no wildcard, so that a new kind cannot be forgotten. The table
//! is also `docs/guide/exit-codes.md` and a part of `sawmill --help`; tests compare them.
//!
//! Not here: printing the line (`output`), the command that explains a code (`explain` of
//! `crates/sawmill`).

use std::fmt;
use std::io;
use std::path::Path;
use std::sync::Arc;

use sawmill_device::{Error, ErrorKind};
#[cfg(feature = "store")]
use sawmill_store::{StoreError, StoreErrorKind};

/// How the process ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// Done.
    Ok = 0,
    /// The question was answered, and the answer is no.
    Negative = 1,
    /// The command line, or a value in it, is wrong.
    Usage = 2,
    /// Something named does not exist.
    NotFound = 3,
    /// Something of that name exists already.
    Exists = 4,
    /// The safe answer is to stop: to go on could lose data or hide a loss.
    Refused = 5,
    /// Another writer has the volume.
    Fenced = 6,
    /// The store, or a disk, does not answer.
    Unavailable = 7,
    /// The store or the system refuses us.
    Denied = 8,
    /// Bytes failed their checksum, or are not those that they should be.
    Corrupt = 9,
    /// No space is left.
    Full = 10,
    /// Something is held by another process.
    InUse = 11,
    /// A bug.
    Internal = 70,
}

impl Exit {
    /// The code the process ends with.
    pub const fn code(self) -> u8 {
        self as u8
    }
}

/// The table: code, what it means, what to do.
pub const TABLE: &[(Exit, &str, &str)] = &[
    (Exit::Ok, "done", ""),
    (
        Exit::Negative,
        "the answer is no",
        "`check` found damage, `verify-crash` a state that must not be, `wait` ran out of time, a \
         check of `doctor` failed, `serve`, `target` or `attach` was stopped before everything was \
         stored; the output says which",
    ),
    (
        Exit::Usage,
        "the command line, or a value in it, is wrong",
        "fix it; the text names the option",
    ),
    (
        Exit::NotFound,
        "no such volume, snapshot, segment or checkpoint; a past state that is not kept; a \
         required program that is not installed",
        "look at `sawmill list`; install the program that the text names",
    ),
    (
        Exit::Exists,
        "a volume, snapshot or file of that name exists already",
        "choose another name, or delete the old one; `import` and `export` have --overwrite",
    ),
    (
        Exit::Refused,
        "continuing could lose data or hide a loss; or a disk that is to be written is read-only",
        "read the text; it names the option to continue anyway, if there is one",
    ),
    (
        Exit::Fenced,
        "another writer has taken the volume over",
        "find the other writer; serve the volume from one place only",
    ),
    (
        Exit::Unavailable,
        "the store, a disk or a target is unreachable at present",
        "try again later",
    ),
    (
        Exit::Denied,
        "the store, the system or the other end of a link refuses access, or the bucket does not \
        exist",
        "check credentials, permissions, the bucket's name, and the key files of both ends",
    ),
    (
        Exit::Corrupt,
        "bytes failed their checksum or identity",
        "run `sawmill check`; keep everything",
    ),
    (Exit::Full, "no space is left", "free some space, or choose another place"),
    (
        Exit::InUse,
        "held by another process: journal, cache, socket; or the volume is served, or attached \
        elsewhere",
        "stop that process, or choose another path",
    ),
    (Exit::Internal, "a bug in Sawmill", "report it, with the log"),
];

/// The table as lines of a help text.
pub fn table_as_help() -> String {
    let mut text = String::from("Exit codes:\n");
    for (exit, meaning, _) in TABLE {
        text.push_str(&format!("  {:>2}  {meaning}\n", exit.code()));
    }
    text
}

/// A failure of a command: the exit code, and one line with what failed, on which object, and what
/// to do.
#[derive(Clone, Debug)]
pub struct Failure {
    exit: Exit,
    message: String,
    source: Option<Arc<dyn std::error::Error + Send + Sync>>,
}

/// One line that a terminal may get.
fn one_line(message: &str) -> String {
    // Spaces first: line ends are control characters too, and must not become marks.
    let message = message.split_whitespace().collect::<Vec<_>>().join(" ");
    message.replace(char::is_control, "\u{fffd}")
}

/// The reader of standard output has closed it (`| head`).
#[derive(Debug)]
struct NoReader(io::Error);

impl fmt::Display for NoReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for NoReader {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.0)
    }
}

/// The result of a command's parts.
pub type Result<T, E = Failure> = std::result::Result<T, E>;

impl Failure {
    /// A failure with its text. Line ends become spaces: an error is one line. Other control
    /// characters, which may come from a peer or a file, never reach a terminal.
    pub fn new(exit: Exit, message: impl Into<String>) -> Self {
        Failure { exit, message: one_line(&message.into()), source: None }
    }

    /// A wrong command line.
    pub fn usage(message: impl Into<String>) -> Self {
        Failure::new(Exit::Usage, message)
    }

    /// A failure that `source` caused: the text is `what`, a colon and the cause.
    pub fn caused(
        exit: Exit,
        what: impl fmt::Display,
        source: impl std::error::Error + Send + Sync + 'static,
    ) -> Self {
        Failure::new(exit, format!("{what}: {source}")).caused_by(source)
    }

    /// The same failure with its cause, which the text already describes.
    #[must_use]
    pub fn caused_by(self, source: impl std::error::Error + Send + Sync + 'static) -> Self {
        Failure { source: Some(Arc::new(source)), ..self }
    }

    /// The exit code of a process that ends with this failure.
    pub fn exit(&self) -> Exit {
        self.exit
    }

    /// The same failure with `volume NAME: ` before its text, unless the text names it.
    pub fn of_volume(self, name: &str) -> Self {
        // Errors of the engine often name the volume themselves.
        if self.message.contains(name) {
            return self;
        }
        let message = format!("volume {name}: {}", self.message);
        Failure { message, ..self }
    }

    /// The same failure with the file it is about before its text.
    pub fn of_file(self, path: &Path) -> Self {
        let message = one_line(&format!("{}: {}", path.display(), self.message));
        Failure { message, ..self }
    }

    /// Standard output takes nothing. That its reader is gone is known from here on
    /// ([`has_no_reader`](Self::has_no_reader)).
    pub fn output(error: io::Error) -> Self {
        let what = "cannot write to standard output";
        match error.kind() {
            io::ErrorKind::BrokenPipe => Failure::caused(Exit::Unavailable, what, NoReader(error)),
            _ => Failure::io(what, &error),
        }
    }

    /// Whether standard output failed only because its reader has closed it.
    pub fn has_no_reader(&self) -> bool {
        self.source.as_ref().is_some_and(|source| source.is::<NoReader>())
    }

    /// An error of the operating system while doing `what`, e.g. `cannot make folder /x`.
    pub fn io(what: impl fmt::Display, error: &io::Error) -> Self {
        let exit = exit_of(ErrorKind::of_io(error));
        // A system error cannot be cloned, so the cause is made from its number, or kind and text.
        let source = error.raw_os_error().map(io::Error::from_raw_os_error);
        let source = source.unwrap_or_else(|| io::Error::new(error.kind(), error.to_string()));
        Failure::caused(exit, what, source)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Failure {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_ref().map(|source| &**source as _)
    }
}

/// How a command ends that fails with this kind of error.
///
/// No wildcard in this match: a new kind of error must choose its code, and scripts rely on codes.
fn exit_of(kind: ErrorKind) -> Exit {
    match kind {
        ErrorKind::Invalid => Exit::Usage,
        ErrorKind::NotFound => Exit::NotFound,
        ErrorKind::Exists => Exit::Exists,
        ErrorKind::Refused | ErrorKind::ReadOnly => Exit::Refused,
        ErrorKind::Fenced => Exit::Fenced,
        ErrorKind::Unavailable
        | ErrorKind::TimedOut
        | ErrorKind::Unreachable
        | ErrorKind::Closed => Exit::Unavailable,
        ErrorKind::Denied => Exit::Denied,
        ErrorKind::InUse => Exit::InUse,
        ErrorKind::Full => Exit::Full,
        ErrorKind::Corrupt => Exit::Corrupt,
        ErrorKind::Internal => Exit::Internal,
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Failure::new(exit_of(error.kind()), error.to_string()).caused_by(error)
    }
}

#[cfg(feature = "store")]
impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Self {
        let exit = match error.kind() {
            StoreErrorKind::NotFound => Exit::NotFound,
            StoreErrorKind::Denied => Exit::Denied,
            StoreErrorKind::Unavailable | StoreErrorKind::Broken => Exit::Unavailable,
            // Not `Unavailable`, although it comes from the store: to try again does not help.
            StoreErrorKind::Damaged => Exit::Corrupt,
            StoreErrorKind::Invalid => Exit::Usage,
        };
        Failure::new(exit, error.to_string()).caused_by(error)
    }
}

#[cfg(feature = "verify")]
impl From<sawmill_verify::Error> for Failure {
    fn from(error: sawmill_verify::Error) -> Self {
        use sawmill_verify::Error;
        let exit = match error {
            Error::Device(error) => return error.into(),
            Error::Io { what, source } => return Failure::io(what, &source),
            Error::Missing(_) | Error::Unopened { .. } => Exit::NotFound,
            // A file that the user did not write: to change the command line does not help.
            Error::Format { .. } | Error::Log(_) => Exit::Corrupt,
            Error::Usage(_) => Exit::Usage,
            Error::Subject(_) => Exit::Unavailable,
        };
        Failure::new(exit, error.to_string()).caused_by(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_of_the_table_are_distinct_and_ascending() {
        let codes: Vec<u8> = TABLE.iter().map(|(exit, _, _)| exit.code()).collect();
        assert!(codes.windows(2).all(|pair| pair[0] < pair[1]), "{codes:?}");
        assert_eq!(codes.first(), Some(&0));
        assert_eq!(codes.last(), Some(&70));
    }

    #[test]
    fn a_failure_is_one_line_whatever_its_cause_says() {
        let failure = Failure::new(Exit::Internal, "first\nsecond\r\n  third").of_volume("disk1");
        assert_eq!(failure.to_string(), "volume disk1: first second third");
        let failure = Failure::usage("no export \x1b]0;title\x07");
        assert_eq!(failure.to_string(), "no export \u{fffd}]0;title\u{fffd}");
        let failure = Failure::usage("is empty").of_file(Path::new("/x\n\x1b[31m"));
        assert_eq!(failure.to_string(), "/x \u{fffd}[31m: is empty");
    }

    #[test]
    fn a_failure_keeps_its_cause_and_says_it_in_its_line() {
        use std::error::Error as _;
        let invented = io::Error::new(io::ErrorKind::TimedOut, "nobody answered");
        for error in [io::Error::from_raw_os_error(28), invented] {
            let failure = Failure::io("cannot write /x", &error);
            assert_eq!(failure.to_string(), format!("cannot write /x: {error}"));
            let cause = failure.source().and_then(|cause| cause.downcast_ref::<io::Error>());
            assert_eq!(cause.map(io::Error::kind), Some(error.kind()));
            assert_eq!(cause.map(ToString::to_string), Some(error.to_string()));
        }
    }

    #[test]
    fn only_standard_output_without_a_reader_has_none() {
        let broken_pipe = || io::Error::from(io::ErrorKind::BrokenPipe);
        assert!(Failure::output(broken_pipe()).of_volume("disk1").has_no_reader());
        assert!(!Failure::output(io::Error::from_raw_os_error(28)).has_no_reader());
        assert!(!Failure::io("cannot write to the NBD server", &broken_pipe()).has_no_reader());
        assert_eq!(Failure::output(broken_pipe()).exit(), Exit::Unavailable);
    }

    #[test]
    fn fenced_missing_and_damaged_end_with_their_own_codes() {
        let code = |kind| Failure::from(Error::new(kind, "x")).exit().code();
        assert_eq!(code(ErrorKind::Fenced), 6);
        assert_eq!(code(ErrorKind::NotFound), 3);
        assert_eq!(code(ErrorKind::Corrupt), 9);
        assert_eq!(code(ErrorKind::Refused), 5);
    }

    #[cfg(feature = "verify")]
    #[test]
    fn a_write_log_that_is_damaged_is_no_wrong_command_line() {
        use sawmill_verify::Error;
        let code = |error: Error| Failure::from(error).exit().code();
        assert_eq!(code(Error::Log("log: entry 7 overflows".to_owned())), 9);
        assert_eq!(code(Error::Usage("no such mode".to_owned())), 2);
    }
}
