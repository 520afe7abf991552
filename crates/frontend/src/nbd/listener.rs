//! The listening socket: made with care, removed without touching anybody else's.
//!
//! Invariants: a Unix socket is never connectable for others than its owner, not even for a moment; a
//! socket somebody listens on is never replaced; at the end only the socket made here is removed.

use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::io::Errno as OsError;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
};
use sawmill_device::{Error, ErrorKind, Result};

use super::options::{Listen, NbdOptions};

/// Connections the kernel holds until they are accepted.
const BACKLOG: i32 = 128;

/// A socket that accepts connections.
pub(super) struct Listener {
    pub(super) socket: OwnedFd,
    pub(super) address: Listen,
    /// Device and inode of the Unix socket, to know it again.
    identity: Option<(u64, u64)>,
}

impl Listener {
    /// Listens; the address is the one in effect (a free port where port 0 was asked for).
    pub(super) fn open(options: &NbdOptions) -> Result<Self> {
        match &options.listen {
            Listen::Unix(path) => unix(path),
            Listen::Tcp(address) => tcp(*address, options.insecure_listen),
        }
    }

    /// Removes the Unix socket, unless something else has taken its place.
    pub(super) fn remove(&self) {
        let Listen::Unix(path) = &self.address else { return };
        if identity(path).is_some_and(|found| Some(found) == self.identity)
            && let Err(error) = std::fs::remove_file(path)
        {
            tracing::warn!(path = %path.display(), %error, "nbd: the socket could not be removed");
        }
    }
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    std::fs::symlink_metadata(path).ok().map(|found| (found.dev(), found.ino()))
}

fn unavailable(what: &str, address: &dyn std::fmt::Display, error: &dyn std::fmt::Display) -> Error {
    Error::new(ErrorKind::Unavailable, format!("nbd: cannot {what} {address}: {error}"))
}

fn invalid(text: String) -> Error {
    Error::new(ErrorKind::Invalid, text)
}

fn unix(path: &Path) -> Result<Listener> {
    let shown = path.display();
    let address = SocketAddrUnix::new(path).map_err(|error| {
        let length = path.as_os_str().len();
        invalid(format!(
            "nbd: socket path {shown} of {length} bytes cannot be used ({error}); 107 bytes is the limit"
        ))
    })?;
    let socket = new_unix_socket().map_err(|error| unavailable("make a socket for", &shown, &error))?;
    let bound = match bind(&socket, &address) {
        Err(OsError::ADDRINUSE) => {
            clear_stale(path, &address)?;
            bind(&socket, &address)
        }
        other => other,
    };
    bound.map_err(|error| unavailable("bind", &shown, &error))?;
    let listener = Listener { socket, address: Listen::Unix(PathBuf::from(path)), identity: identity(path) };
    // Until `listen` nobody can connect, whatever the mode was.
    let ready = std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))
        .and_then(|()| Ok(listen(&listener.socket, BACKLOG)?));
    if let Err(error) = ready {
        listener.remove();
        return Err(unavailable("listen on", &shown, &error));
    }
    Ok(listener)
}

fn new_unix_socket() -> rustix::io::Result<OwnedFd> {
    socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None)
}

/// Removes a socket nobody listens on; anything else at the path is an error.
fn clear_stale(path: &Path, address: &SocketAddrUnix) -> Result<()> {
    let shown = path.display();
    let found = match std::fs::symlink_metadata(path) {
        Ok(found) => found,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(unavailable("look at", &shown, &error)),
    };
    if !found.file_type().is_socket() {
        return Err(invalid(format!("nbd: {shown} exists and is not a socket; choose another path")));
    }
    let probe = new_unix_socket().map_err(|error| unavailable("probe", &shown, &error))?;
    match connect(&probe, address) {
        Err(OsError::CONNREFUSED) => {
            tracing::info!(path = %shown, "nbd: replaced a socket that nobody listened on");
            std::fs::remove_file(path).map_err(|error| unavailable("remove the stale socket", &shown, &error))
        }
        Err(OsError::NOENT) => Ok(()),
        _ => {
            let text = format!("nbd: another server listens on {shown}; stop it or choose another path");
            Err(Error::new(ErrorKind::Unavailable, text))
        }
    }
}

fn tcp(address: SocketAddr, insecure: bool) -> Result<Listener> {
    if !address.ip().is_loopback() && !insecure {
        return Err(invalid(format!(
            "nbd: {address} can be reached by other machines, and this door has no encryption or \
             authentication; listen on 127.0.0.1 or a Unix socket, or allow it with insecure_listen"
        )));
    }
    let listener = TcpListener::bind(address).map_err(|error| unavailable("listen on", &address, &error))?;
    let ready = listener.set_nonblocking(true).and_then(|()| listener.local_addr());
    let bound = ready.map_err(|error| unavailable("listen on", &address, &error))?;
    Ok(Listener { socket: listener.into(), address: Listen::Tcp(bound), identity: None })
}
