//! Replaces a serving process by another, without disconnecting its users: `sawmill handoff`.
//!
//! The process that serves (the *predecessor*) starts the new one (the *successor*) with the same
//! arguments and a Unix socket as its standard input. They exchange [`Message`]s:
//!
//! | predecessor | successor |
//! |---|---|
//! | | `Hello`: its version |
//! | still serves | reads volumes and stores in advance; `Prepared` |
//! | quiesces its doors, closes volumes and cache; `Go`, and a parcel of doors | |
//! | | opens the volumes; `Opened` |
//! | `Yours`; forgets its doors; `Gone` | |
//! | | resumes the doors; notifies the service manager; `Serving` |
//! | exits | |
//!
//! Invariants: a volume is never open in both. Until `Yours` the predecessor alone decides:
//! whatever the successor does, it can kill it, reopen its volumes and resume the doors that it
//! still has. After `Yours` it touches neither. A successor that dies then is like a killed server:
//! no accepted write is lost. Modules: [`predecessor`], [`successor`], [`again`] (after a
//! rollback). Reasons: decision 0020.
//!
//! Not here: how a hand-off is requested (`serving`), how open doors travel
//! (`sawmill_frontend::passing`).

pub(crate) mod again;
pub(crate) mod fuzzing;
pub(crate) mod predecessor;
pub(crate) mod successor;

use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::SyncSender;
use std::time::{Duration, Instant};

use sawmill_frontend::passing;
use sawmill_volume::OpenOptions;
use serde::{Deserialize, Serialize};

use crate::control::protocol::HandOff;
use sawmill_console::exit::{self, Exit, Failure, Result};

/// The version of this protocol. Another version is refused before anything is touched.
pub(crate) const PROTOCOL_VERSION: u32 = 1;

/// The longest message.
const MESSAGE_BYTES_MAX: usize = 64 << 10;

/// The options of a server for the process that opens its volumes next: the losses that the user
/// accepted when the server started do not apply again.
pub(crate) fn accepting_nothing(options: &OpenOptions) -> OpenOptions {
    OpenOptions {
        accept_journal_loss: false,
        accept_memory_loss: false,
        accept_older_store: false,
        ..options.clone()
    }
}

/// A requested hand-off, for the thread that serves.
pub(crate) struct HandOffRequest {
    pub(crate) hand_off: HandOff,
    pub(crate) answer: SyncSender<Result<HandOffResult>>,
}

/// The result of a hand-off.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct HandOffResult {
    /// The process that serves now.
    pub(crate) pid: u32,
    /// Its version.
    pub(crate) version: String,
    /// Time the new process took to get ready.
    pub(crate) prepared_ms: u64,
    /// Time from the first door that was quiet to the first that resumed.
    pub(crate) stall_ms: u64,
    /// Doors that could not be handed over, each with the reason.
    pub(crate) lost_doors: Vec<String>,
    /// The new process had everything but did not report. It may be dead, which is like a killed
    /// server.
    #[serde(default)]
    pub(crate) unheard: bool,
}

/// The messages between the two processes. Versions that talk to each other know the tag as `word`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "word", rename_all = "snake_case")]
enum Message {
    Hello {
        conversation: u32,
        version: String,
    },
    Prepared,
    Go,
    Opened,
    Yours,
    Gone,
    Serving {
        lost_doors: Vec<String>,
    },
    /// The successor cannot take over; it exits.
    Failed {
        text: String,
        exit: u8,
    },
}

fn send_message(stream: &UnixStream, message: &Message) -> Result<()> {
    let bytes = serde_json::to_vec(message).map_err(|error| {
        Failure::caused(Exit::Internal, "cannot encode a hand-off message", error)
    })?;
    send(stream, &bytes, &[])
}

/// The other process does not talk: whatever kind the error has, it counts as its failure.
fn unheard(error: sawmill_device::Error) -> Failure {
    Failure::new(Exit::Unavailable, error.to_string()).caused_by(error)
}

/// Sends a message.
fn send(stream: &UnixStream, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> Result<()> {
    passing::send(stream, bytes, descriptors).map_err(unheard)
}

/// Receives the next message by `deadline`. A failure of the other process becomes this one's.
fn receive_message(stream: &UnixStream, deadline: Option<Instant>) -> Result<Message> {
    let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
    // Zero would mean no time limit.
    let left = left.map(|left| left.max(Duration::from_millis(1)));
    stream
        .set_read_timeout(left)
        .map_err(|error| Failure::io("cannot wait for the other process", &error))?;
    // No descriptors: those of the doors come with the parcel.
    let (bytes, _) = passing::receive(stream, MESSAGE_BYTES_MAX, 0).map_err(unheard)?;
    let message = serde_json::from_slice(&bytes).map_err(|error| {
        Failure::caused(Exit::Unavailable, "the other process sent an invalid message", error)
    })?;
    match message {
        Message::Failed { text, exit } => {
            // A successor of a newer version may know codes that this one does not.
            let known =
                exit::TABLE.iter().map(|(known, _, _)| *known).find(|known| known.code() == exit);
            Err(Failure::new(known.unwrap_or(Exit::Unavailable), text))
        }
        message => Ok(message),
    }
}

fn unexpected(message: &Message) -> Failure {
    let text = format!(
        "the other process sent {message:?} out of turn: it may be of a version that does not fit \
         this one; its log says more"
    );
    Failure::new(Exit::Unavailable, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_loss_is_accepted_twice() {
        let mut options = OpenOptions::new("journal");
        (options.accept_journal_loss, options.accept_memory_loss) = (true, true);
        options.accept_older_store = true;
        let after = accepting_nothing(&options);
        assert!(
            !after.accept_journal_loss && !after.accept_memory_loss && !after.accept_older_store
        );
    }
}
