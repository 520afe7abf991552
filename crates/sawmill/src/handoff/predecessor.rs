//! The process that serves and is being replaced. See `handoff`.
//!
//! Invariant: after a failed switch, the successor is dead before this process opens a volume
//! again. Not here: opening them again (`again`), how a hand-off is requested (`serving`).

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use sawmill_frontend::{DoorPiece, pack};
use sawmill_volume::{Safety, Volume};

use super::again::ReopenQueue;
use super::{
    HandOffResult, Message, PROTOCOL_VERSION, receive_message, send, send_message, unexpected,
};
use crate::admin::Admin;
use crate::admin::status::milliseconds;
use crate::control::protocol::HandOff;
use crate::serving::ServeProcess;
use sawmill_console::exit::{Exit, Failure, Result};

/// Time to store everything before the switch, so that little is left to replay.
const STORE_TIME_MAX: Duration = Duration::from_secs(5);

/// Time for threads that still use a closed volume to finish.
const RELEASE_TIME_MAX: Duration = Duration::from_secs(1);

/// After a rollback: time for all volumes to be open or report why not, before the requester gets
/// its answer.
const SETTLE_TIME_MAX: Duration = Duration::from_secs(5);

/// The process that is to take over. Killed when this is dropped.
struct Successor {
    child: Child,
    stream: UnixStream,
    is_free: bool,
}

impl Successor {
    /// Starts the program with this process's own arguments.
    fn start(hand_off: &HandOff) -> Result<Successor> {
        let own = crate::program::own()
            .map_err(|error| Failure::io("cannot find the sawmill program", &error))?;
        let program = hand_off.binary.as_ref().unwrap_or(&own);
        let (stream, theirs) = UnixStream::pair()
            .map_err(|error| Failure::io("cannot create a socket for a hand-off", &error))?;
        // This process may have been a successor itself: then its own arguments have the option.
        let arguments = std::env::args_os().skip(1).filter(|text| text != super::successor::OPTION);
        let child = Command::new(program)
            .args(arguments)
            .arg(super::successor::OPTION)
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .spawn()
            .map_err(|error| Failure::io(format!("cannot start {}", program.display()), &error))?;
        tracing::info!("handing off to process {}: {}", child.id(), program.display());
        Ok(Successor { child, stream, is_free: false })
    }
}

impl Drop for Successor {
    fn drop(&mut self) {
        if !self.is_free {
            // It may hold the volumes' locks, so it must be gone before this process resumes.
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// What the serving thread lends for a hand-off.
pub(crate) struct Predecessor<'a> {
    pub(crate) serving: &'a Arc<ServeProcess>,
    pub(crate) reopen_queue: &'a Arc<ReopenQueue>,
    pub(crate) admin: &'a Admin,
}

impl Predecessor<'_> {
    /// Hands everything over. After an error, this process continues to serve.
    pub(crate) fn hand_off(&self, hand_off: &HandOff) -> Result<HandOffResult> {
        let outcome = self.try_hand_off(hand_off);
        if outcome.is_err() {
            // The successor has made files for its staging memory that nobody will use now.
            let open_volumes =
                self.serving.volumes.iter().filter_map(|served| served.volume().ok());
            open_volumes.for_each(|volume| volume.release_preallocated());
        }
        outcome
    }

    fn try_hand_off(&self, hand_off: &HandOff) -> Result<HandOffResult> {
        let begun = Instant::now();
        let refuse = |failure: Failure| {
            Failure::caused(failure.exit(), "hand-off failed, this process still serves", failure)
        };
        let successor = Successor::start(hand_off).map_err(refuse)?;
        let version =
            self.wait_until_prepared(&successor, begun + hand_off.timeout).map_err(refuse)?;
        // Two processes must never open the same volume. No reopening is retried while this thread
        // is here.
        self.reopen_queue.wait_for_reopens(begun + hand_off.timeout).map_err(refuse)?;
        let prepared_ms = milliseconds(begun.elapsed());
        self.store_beforehand();
        // From here on no door comes or goes: the parcel must have all of them.
        let guard =
            self.serving.doors.hold(hand_off.timeout).map_err(Failure::from).map_err(refuse)?;
        let quiet_since = Instant::now();
        let deadline = quiet_since + hand_off.stall_max;
        // Half of the time is for requests in flight, half for the other process.
        let quieted = self.serving.doors.quiesce(hand_off.stall_max / 2).map_err(Failure::from);
        if let Err(failure) = quieted.and_then(|()| self.switch(&successor, deadline)) {
            // Dead before anything is reopened here, because it may hold the locks (decision 0020).
            drop(successor);
            self.reopen_queue.try_all();
            self.reopen_queue.settle(Instant::now() + SETTLE_TIME_MAX);
            return Err(with_absent(refuse(failure), self.serving));
        }
        let done = self.leave(successor, version, prepared_ms, quiet_since);
        drop(guard);
        Ok(done)
    }

    /// Waits until the successor is ready. Returns its version.
    fn wait_until_prepared(&self, successor: &Successor, deadline: Instant) -> Result<String> {
        let version = match receive_message(&successor.stream, Some(deadline)).map_err(silent)? {
            Message::Hello { conversation: PROTOCOL_VERSION, version } => version,
            Message::Hello { conversation, version } => {
                let text = format!(
                    "sawmill {version} speaks version {conversation} of the hand-off protocol, \
                     this process version {PROTOCOL_VERSION}: stop this process and start that one"
                );
                return Err(Failure::new(Exit::Refused, text));
            }
            message => return Err(unexpected(&message)),
        };
        match receive_message(&successor.stream, Some(deadline)).map_err(silent)? {
            Message::Prepared => Ok(version),
            message => Err(unexpected(&message)),
        }
    }

    /// Stores everything with a checkpoint and saves the cache's index while users continue, so
    /// that little is left to do during the switch.
    fn store_beforehand(&self) {
        std::thread::scope(|scope| {
            for volume in self.serving.volumes.iter().filter_map(|served| served.volume().ok()) {
                let store = move || {
                    if let Ok(true) = volume.wait(Safety::Stored, Some(STORE_TIME_MAX)) {
                        volume.checkpoint(STORE_TIME_MAX);
                    }
                };
                // Best effort, also if no thread can be started: what is not stored by then is
                // replayed.
                drop(
                    std::thread::Builder::new()
                        .name("handoff-upload".into())
                        .spawn_scoped(scope, store),
                );
            }
            self.serving.save_cache();
        });
    }

    /// Closes all volumes and lets the successor open them; the doors are quiet.
    fn switch(&self, successor: &Successor, deadline: Instant) -> Result<()> {
        let begun = Instant::now();
        // First, because it can fail, and nothing is closed yet.
        let mut handed = self.serving.doors.hand_over()?;
        if let Some(listener) = self.admin.listener() {
            handed.push(DoorPiece { descriptors: vec![listener?], ..DoorPiece::new("admin") });
        }
        self.release_volumes()?;
        tracing::debug!(took = ?begun.elapsed(), "hand-off: this process has closed the volumes");
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        // A successor that reads nothing must not stop this thread beyond the allowed stall.
        let timed = successor.stream.set_write_timeout(Some(left));
        timed.map_err(|error| Failure::io("cannot talk to the new process", &error))?;
        send_message(&successor.stream, &Message::Go)?;
        let (bytes, descriptors) = pack(&handed);
        send(&successor.stream, &bytes, &descriptors)?;
        match receive_message(&successor.stream, Some(deadline)).map_err(silent)? {
            // A successor that cannot be notified is dead, and has served no request.
            Message::Opened => {
                tracing::debug!(took = ?begun.elapsed(), "hand-off: the new process has opened the \
                    volumes");
                send_message(&successor.stream, &Message::Yours)
            }
            message => Err(unexpected(&message)),
        }
    }

    /// Closes volumes and cache so that another process can open them. Accepted writes are in the
    /// journals.
    fn release_volumes(&self) -> Result<()> {
        let mut closed: Vec<Arc<Volume>> = Vec::new();
        for served in &self.serving.volumes {
            closed.extend(served.close_as_it_is(RELEASE_TIME_MAX)?);
        }
        // Dropping it is not enough: a request to the store in flight would hold it until the
        // answer.
        if let Some(held) = self.serving.cache.lock().take() {
            held.cache.release();
        }
        // A thread that still uses a volume, for example for a status, finishes in a moment.
        let dropped: Vec<_> = closed.iter().map(|volume| volume.when_dropped()).collect();
        // Before the wait, which would wait for these references too.
        drop(closed);
        let deadline = Instant::now() + RELEASE_TIME_MAX;
        for volume in dropped {
            let _ = volume.recv_timeout(deadline.saturating_duration_since(Instant::now()));
        }
        Ok(())
    }

    /// The successor serves: forgets the doors and waits for its report.
    fn leave(
        &self,
        mut successor: Successor,
        version: String,
        prepared_ms: u64,
        quiet_since: Instant,
    ) -> HandOffResult {
        // First: from here on the successor must survive, whatever happens to this process.
        successor.is_free = true;
        self.serving.doors.release();
        self.admin.leave();
        // A successor that cannot receive this is dead; then the next process finds what a killed
        // server leaves.
        let _ = send_message(&successor.stream, &Message::Gone);
        tracing::debug!(
            took = ?quiet_since.elapsed(),
            "hand-off: this process has released the doors"
        );
        // No time limit while it lives: the service manager must learn of the successor before this
        // process exits.
        let outcome = receive_message(&successor.stream, None);
        let stall_ms = milliseconds(quiet_since.elapsed());
        let (unheard, lost_doors) = match outcome {
            Ok(Message::Serving { lost_doors }) => (false, lost_doors),
            Ok(message) => (true, vec![unexpected(&message).to_string()]),
            // The successor has the volumes: this process must not touch them any more.
            Err(failure) => (true, vec![format!("the new process did not report: {failure}")]),
        };
        HandOffResult {
            pid: successor.child.id(),
            version,
            prepared_ms,
            stall_ms,
            lost_doors,
            unheard,
        }
    }
}

/// Adds the volumes that could not be reopened.
fn with_absent(failure: Failure, serving: &ServeProcess) -> Failure {
    let away = serving.away().filter_map(|served| served.volume().err().map(|why| why.to_string()));
    let absent: Vec<String> = away.chain(serving.given_up()).collect();
    match absent.is_empty() {
        true => failure,
        false => Failure::new(failure.exit(), format!("{failure}; {}", absent.join("; ")))
            .caused_by(failure),
    }
}

/// The failure of a successor that did not answer, with a helpful text.
fn silent(failure: Failure) -> Failure {
    Failure::caused(failure.exit(), "the new process did not get ready", failure)
}
