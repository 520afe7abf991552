//! The clients of a mount holder: start it, query it, end it.
//!
//! Invariant: a socket without a listener is replaced; one with a listener is queried. Not here:
//! what the mount holder does.

use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use parking_lot::Mutex;
use sawmill_device::{Error, ErrorKind, Result};

use super::wire::{Packet, receive, send};
use crate::DoorPiece;
use crate::unix_socket::UnixSocket;

/// Time for a mount holder to answer; it has nothing else to do.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(5);

/// A running mount holder.
pub struct MountHolder {
    socket: PathBuf,
    /// The child process, if this process has started it.
    child: Mutex<Option<Child>>,
}

fn failed(path: &Path, what: &str, error: impl std::error::Error + Send + Sync + 'static) -> Error {
    let what = format!("mount holder: {}: {what}", path.display());
    Error::caused(ErrorKind::Unavailable, what, error)
}

/// It gave this answer instead of the one that was due.
fn astray(path: &Path, what: &str, answer: impl std::fmt::Debug) -> Error {
    let text = format!("mount holder: {}: {what}: it answers {answer:?}", path.display());
    Error::new(ErrorKind::Unavailable, text)
}

/// Connects to the mount holder at this path, if there is one.
fn connected(path: &Path) -> Result<Option<UnixStream>> {
    let stream = match UnixStream::connect(path) {
        Ok(stream) => stream,
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused
            ) =>
        {
            return Ok(None);
        }
        Err(error) => return Err(no_socket(path, "cannot be asked", error)),
    };
    let outcome = stream.set_read_timeout(Some(ANSWER_TIME_MAX));
    let outcome = outcome.and_then(|()| stream.set_write_timeout(Some(ANSWER_TIME_MAX)));
    outcome.map_err(|error| failed(path, "cannot be asked", error))?;
    Ok(Some(stream))
}

/// A path that is too long is the user's to fix; any other error may go away.
fn no_socket(path: &Path, what: &str, error: io::Error) -> Error {
    if error.kind() == io::ErrorKind::InvalidInput {
        let text = format!("mount holder: {}: a socket path has at most 107 bytes", path.display());
        return Error::new(ErrorKind::Invalid, text).with_source(error);
    }
    failed(path, what, error)
}

impl MountHolder {
    /// Starts a mount holder with this command, and returns when it holds `piece`. Returns
    /// `Unavailable` if it does not, and ends it then; `InUse` if one is already running there.
    pub fn start(path: &Path, command: &[OsString], piece: &DoorPiece) -> Result<Self> {
        let mount_holder = Self::spawn(path, command)?;
        mount_holder.update(piece).inspect_err(|_| mount_holder.reap())?;
        Ok(mount_holder)
    }

    /// Starts a mount holder that has nothing to hold yet, without waiting for it.
    pub(crate) fn spawn(path: &Path, command: &[OsString]) -> Result<Self> {
        let path =
            &std::path::absolute(path).map_err(|error| failed(path, "no such path", error))?;
        let Some((program, arguments)) = command.split_first() else {
            return Err(Error::new(
                ErrorKind::Invalid,
                "mount holder: there is no command to start it",
            ));
        };
        if connected(path)?.is_some() {
            let text =
                format!("mount holder: {}: another mount holder is running there", path.display());
            return Err(Error::new(ErrorKind::InUse, text));
        }
        // Listening begins here, and not in the new process: whoever asks from now on waits for its
        // answer instead of starting another one.
        let listener = UnixSocket::listen("mount holder", path)?.socket;
        let mut command = Command::new(program);
        command
            .args(arguments)
            .stdin(Stdio::from(listener))
            // It outlives this process, and must not keep open what reads this one's output.
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let child = command
            .spawn()
            .map_err(|error| failed(path, "cannot start the mount holder", error))?;
        // From here on only the mount holder has the socket: if it dies, queries end.
        drop(command);
        Ok(MountHolder { socket: path.clone(), child: Mutex::new(Some(child)) })
    }

    /// The mount holder at this path and what it holds; `None` if there is none, or nothing alive.
    pub fn find(path: &Path) -> Result<Option<(Self, DoorPiece)>> {
        let Some(socket) = connected(path)? else { return Ok(None) };
        let reply = send(&socket, &Packet::Give).and_then(|()| receive(&socket));
        match reply {
            Ok(Packet::Here(handed)) => {
                Ok(Some((MountHolder { socket: path.to_owned(), child: Mutex::default() }, handed)))
            }
            // It was about to end.
            Ok(Packet::Nothing) => Ok(None),
            Err(error) if error.kind() == ErrorKind::Closed => Ok(None),
            Ok(other) => Err(astray(path, "is not a mount holder", other)),
            Err(error) => Err(failed(path, "does not answer", error)),
        }
    }

    /// The mount holder at this path, if there is one.
    #[must_use]
    pub fn at(path: &Path) -> Option<Self> {
        let socket = connected(path).ok().flatten()?;
        drop(socket);
        Some(MountHolder { socket: path.to_owned(), child: Mutex::default() })
    }

    /// Gives it a replacement for what it holds, and returns when it holds that.
    pub fn update(&self, piece: &DoorPiece) -> Result<()> {
        let path = &self.socket;
        // A packet owns its descriptors, and the caller goes on with its own.
        let duplicates = piece.descriptors.iter().map(|fd| rustix::io::fcntl_dupfd_cloexec(fd, 3));
        let descriptors = duplicates.collect::<Result<Vec<_>, _>>();
        let descriptors =
            descriptors.map_err(|error| failed(path, "no descriptor is left", error))?;
        let (what, facts, bytes) = (piece.what.clone(), piece.facts.clone(), piece.bytes.clone());
        match self.query(&Packet::Hold(DoorPiece { what, facts, bytes, descriptors }))? {
            Packet::Done => Ok(()),
            other => Err(astray(path, "does not hold the mount", other)),
        }
    }

    /// A connection that hangs up when the mount holder ends, and not before. Returns `Unavailable`
    /// also for a mount holder whose version does not support this.
    pub fn watch(&self) -> Result<OwnedFd> {
        match self.converse(&Packet::Watch)? {
            (Packet::Done, line) => Ok(line.into()),
            (other, _) => Err(astray(&self.socket, "cannot be watched", other)),
        }
    }

    fn query(&self, packet: &Packet) -> Result<Packet> {
        Ok(self.converse(packet)?.0)
    }

    fn converse(&self, packet: &Packet) -> Result<(Packet, UnixStream)> {
        let unavailable = || {
            let text =
                format!("mount holder: {}: nothing listens: it is gone", self.socket.display());
            Error::new(ErrorKind::Unavailable, text)
        };
        let socket = connected(&self.socket)?.ok_or_else(unavailable)?;
        let answer = send(&socket, packet)
            .and_then(|()| receive(&socket))
            .map_err(|error| failed(&self.socket, "does not answer", error))?;
        Ok((answer, socket))
    }

    /// Ends it.
    pub fn end(&self) {
        if let Err(error) = self.query(&Packet::End) {
            tracing::debug!(%error, "the mount holder exited by itself");
        }
        self.reap();
    }

    /// Leaves it to another process.
    pub fn leave(&self) {
        self.child.lock().take();
    }

    /// Makes sure that a mount holder of ours is gone. A mount holder that has not answered may
    /// still read its requests and hold the mount, so it is killed and not waited for.
    pub(crate) fn reap(&self) {
        let child = self.child.lock().take();
        if let Some(mut child) = child {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
