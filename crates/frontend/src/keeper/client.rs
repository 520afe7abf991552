//! Those who talk to a keeper: who starts it, who asks it, who ends it.
//!
//! Invariant: a socket that nobody listens on is replaced, one that somebody listens on is asked.
//! Not here: what the keeper does.

use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with, sockopt,
};
use sawmill_device::{Error, ErrorKind, Result};

use super::wire::{Packet, receive, send};
use crate::Handed;

/// How long a keeper may take to answer; it has nothing else to do.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(5);
/// Servers that may be asking at once.
const BACKLOG: i32 = 8;

/// A keeper that runs.
pub struct Keeper {
    socket: PathBuf,
    /// Where this process has started it.
    child: Mutex<Option<Child>>,
}

fn failed(path: &Path, what: &str, error: impl std::fmt::Display) -> Error {
    Error::new(ErrorKind::Unavailable, format!("keeper: {}: {what}: {error}", path.display()))
}

fn socket(path: &Path) -> Result<(OwnedFd, SocketAddrUnix)> {
    let address = SocketAddrUnix::new(path).map_err(|_| {
        let text = format!("keeper: {}: a socket's path has at most 107 bytes", path.display());
        Error::new(ErrorKind::Invalid, text)
    })?;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
        .map_err(|error| failed(path, "no socket", error))?;
    Ok((socket, address))
}

/// Connects to the keeper at this path, if one is there.
fn connected(path: &Path) -> Result<Option<OwnedFd>> {
    let (socket, address) = socket(path)?;
    match connect(&socket, &address) {
        Ok(()) => (),
        Err(Errno::NOENT | Errno::CONNREFUSED) => return Ok(None),
        Err(error) => return Err(failed(path, "cannot be asked", error)),
    }
    for timeout in [sockopt::Timeout::Recv, sockopt::Timeout::Send] {
        sockopt::set_socket_timeout(&socket, timeout, Some(ANSWER_TIME_MAX))
            .map_err(|error| failed(path, "cannot be asked", error))?;
    }
    Ok(Some(socket))
}

impl Keeper {
    /// Starts a keeper with this command, and returns when it holds `handed`.
    /// Errors: `Unavailable` when it does not; `InUse` when one runs there already.
    pub fn start(path: &Path, command: &[OsString], handed: &Handed) -> Result<Self> {
        let path = &std::path::absolute(path).map_err(|error| failed(path, "no such path", error))?;
        let Some((program, arguments)) = command.split_first() else {
            return Err(Error::new(ErrorKind::Invalid, "keeper: no command starts it"));
        };
        if connected(path)?.is_some() {
            let text = format!("keeper: {}: another keeper runs there", path.display());
            return Err(Error::new(ErrorKind::InUse, text));
        }
        let (listener, address) = socket(path)?;
        let _ = std::fs::remove_file(path);
        // Nobody can connect before it listens, so nobody can before it is its owner's alone.
        let private = std::fs::Permissions::from_mode(0o600);
        bind(&listener, &address)
            .map_err(std::io::Error::from)
            .and_then(|()| std::fs::set_permissions(path, private))
            .and_then(|()| Ok(listen(&listener, BACKLOG)?))
            .map_err(|error| failed(path, "the socket cannot be made", error))?;
        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::from(listener)).stdout(Stdio::null()).stderr(Stdio::null());
        let child = command.spawn().map_err(|error| failed(path, "the keeper cannot be started", error))?;
        // Its copy of the socket is the only one from here on: when the keeper dies, the asking ends.
        drop(command);
        let keeper = Keeper { socket: path.clone(), child: Mutex::new(Some(child)) };
        keeper.update(handed).inspect_err(|_| keeper.reap())?;
        Ok(keeper)
    }

    /// The keeper at this path and what it holds; `None` when there is none, or nothing that lives.
    pub fn find(path: &Path) -> Result<Option<(Self, Handed)>> {
        let Some(socket) = connected(path)? else { return Ok(None) };
        let asked = send(&socket, &Packet::Give).and_then(|()| receive(&socket));
        match asked {
            Ok(Packet::Here(handed)) => {
                Ok(Some((Keeper { socket: path.to_owned(), child: Mutex::default() }, handed)))
            }
            // It was about to end.
            Ok(Packet::Nothing) | Err(Errno::CONNRESET | Errno::PIPE) => Ok(None),
            Ok(other) => Err(failed(path, "is no keeper: it answers", format!("{other:?}"))),
            Err(error) => Err(failed(path, "does not answer", error)),
        }
    }

    /// The keeper at this path, if one is there.
    #[must_use]
    pub fn at(path: &Path) -> Option<Self> {
        let there = connected(path).ok().flatten()?;
        drop(there);
        Some(Keeper { socket: path.to_owned(), child: Mutex::default() })
    }

    /// Gives it this to hold instead of what it held, and returns when it does.
    pub fn update(&self, handed: &Handed) -> Result<()> {
        let path = &self.socket;
        let duplicates = handed.descriptors.iter().map(|fd| rustix::io::fcntl_dupfd_cloexec(fd, 3));
        let descriptors = duplicates.collect::<Result<Vec<_>, _>>();
        let descriptors = descriptors.map_err(|error| failed(path, "no descriptor is left", error))?;
        let (what, facts, bytes) = (handed.what.clone(), handed.facts.clone(), handed.bytes.clone());
        match self.ask(&Packet::Hold(Handed { what, facts, bytes, descriptors }))? {
            Packet::Done => Ok(()),
            other => Err(failed(path, "does not hold it: it answers", format!("{other:?}"))),
        }
    }

    /// A connection that hangs up when the keeper ends, and not before. Errors: `Unavailable`, also for a
    /// keeper of a version that does not know how.
    pub fn watch(&self) -> Result<OwnedFd> {
        match self.converse(&Packet::Watch)? {
            (Packet::Done, line) => Ok(line),
            (other, _) => Err(failed(&self.socket, "cannot be watched: it answers", format!("{other:?}"))),
        }
    }

    fn ask(&self, packet: &Packet) -> Result<Packet> {
        Ok(self.converse(packet)?.0)
    }

    fn converse(&self, packet: &Packet) -> Result<(Packet, OwnedFd)> {
        let gone = || failed(&self.socket, "the keeper has gone", "nobody listens");
        let socket = connected(&self.socket)?.ok_or_else(gone)?;
        let answer = send(&socket, packet)
            .and_then(|()| receive(&socket))
            .map_err(|error| failed(&self.socket, "does not answer", error))?;
        Ok((answer, socket))
    }

    /// Ends it.
    pub fn end(&self) {
        if let Err(error) = self.ask(&Packet::End) {
            tracing::debug!(%error, "the keeper has ended by itself");
        }
        self.reap();
    }

    /// Leaves it to another process.
    pub fn leave(&self) {
        self.child.lock().take();
    }

    /// Lets the system forget a keeper of ours that has ended, or is about to.
    pub(crate) fn reap(&self) {
        if let Some(mut child) = self.child.lock().take() {
            let _ = child.wait();
        }
    }
}
