//! Entry points for fuzzers of what the program reads from others: requests and answers over its
//! sockets, messages of a hand-off, configuration files. Not for users.
//!
//! Not here: where the bytes come from (`crates/fuzz`); addresses and doors alone, which are parts
//! of these inputs.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use crate::{admin, command, control, handoff};

/// What the admin server did for one connection.
#[derive(Debug, Default)]
pub struct ServedConnection {
    /// What it sent.
    pub answers: Vec<u8>,
    /// The requests that it carried out, as JSON.
    pub carried_out: Vec<String>,
    /// The time limit of each wait.
    pub waits: Vec<Option<Duration>>,
}

/// A path that only the user of the process may see: it is in the status.
pub const OWN_PATH: &str = "/home/ada/the-journal";

/// Serves these bytes to the end as a connection to the control socket of a volume.
#[must_use]
pub fn control_connection(bytes: &[u8]) -> ServedConnection {
    admin::fuzzing::own_connection(bytes)
}

/// Serves these bytes to the end as a connection to the loopback address.
#[must_use]
pub fn loopback_connection(bytes: &[u8]) -> ServedConnection {
    admin::fuzzing::loopback_connection(bytes)
}

/// Reads bytes as a request to a control socket; panics if its JSON is another request. Returns the
/// JSON.
///
/// # Errors
/// Why it is none.
pub fn control_request(bytes: &[u8]) -> Result<String, String> {
    control::fuzzing::request(bytes)
}

/// Asks the process behind this socket for its status. Returns the body of the answer; none if the
/// process closed the connection without one.
///
/// # Errors
/// What the process refused, or what was wrong with the answer.
pub fn control_answer(socket: &Path) -> Result<Option<Vec<u8>>, String> {
    control::fuzzing::answer(socket)
}

/// Receives the messages of a hand-off until one is refused; panics if one is not the same when it
/// is sent again. Returns their number and the refusal.
#[must_use]
pub fn hand_off_messages(stream: &UnixStream) -> (usize, String) {
    handoff::fuzzing::messages(stream)
}

/// The command line, which knows the commands and options that a configuration file may have.
pub struct KnownOptions(clap::Command);

impl KnownOptions {
    /// Those of this program.
    #[must_use]
    pub fn of_this_version() -> Self {
        KnownOptions(command::command_line())
    }

    /// Reads a configuration file with this content for a command, and returns the arguments that
    /// it adds; panics if one of them is no option of the command.
    ///
    /// # Errors
    /// What is wrong with the file.
    pub fn arguments(&self, text: &str, name: &str) -> Result<Vec<String>, String> {
        command::config_file::fuzzing::arguments(text, &self.0, name)
    }
}
