//! A listening Unix socket: created safely, and removed without touching any other.
//!
//! Invariants: only the socket's owner can connect, from its creation on. A socket with a listener
//! is never replaced. Only the socket that was made here is removed.
//!
//! Not here: accepting connections (each door's server), messages with descriptors (`passing`), TCP
//! addresses (`nbd::listener`).

use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
};
use sawmill_device::{Error, ErrorKind, Result};

/// Connections that the kernel queues until they are accepted.
const CONNECTIONS_PENDING_MAX: i32 = 128;

/// A Unix socket that accepts connections. It does not block.
pub(crate) struct UnixSocket {
    pub(crate) socket: OwnedFd,
    pub(crate) path: PathBuf,
    /// Device and inode of the socket's file, by which `remove` recognizes it.
    pub(crate) identity: Option<(u64, u64)>,
    /// The door, for messages: `nbd`, `vhost-user`.
    door: &'static str,
}

impl UnixSocket {
    /// Listens at `path` with mode 0600; replaces a socket there that has no listener.
    pub(crate) fn listen(door: &'static str, path: &Path) -> Result<Self> {
        let path_text = path.display();
        let address = SocketAddrUnix::new(path).map_err(|error| {
            let length = path.as_os_str().len();
            let text = format!(
                "{door}: cannot use the socket path {path_text} of {length} bytes ({error})"
            );
            Error::new(ErrorKind::Invalid, format!("{text}; the limit is 107 bytes"))
                .with_source(error)
        })?;
        let failed = |what, error| unavailable(door, what, path, error);
        let socket = new_socket().map_err(|error| failed("create a socket for", error.into()))?;
        let bound = match bind(&socket, &address) {
            Err(Errno::ADDRINUSE) => {
                clear_stale(door, path, &address)?;
                bind(&socket, &address)
            }
            other => other,
        };
        bound.map_err(|error| failed("bind", error.into()))?;
        let listening = Self::adopt(door, path, socket);
        // Until `listen`, no process can connect, whatever the mode is.
        let outcome = std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))
            .and_then(|()| Ok(listen(&listening.socket, CONNECTIONS_PENDING_MAX)?));
        if let Err(error) = outcome {
            listening.remove();
            return Err(failed("listen on", error));
        }
        Ok(listening)
    }

    /// Takes over a socket at `path` on which another process listens.
    pub(crate) fn adopt(door: &'static str, path: &Path, socket: OwnedFd) -> Self {
        Self::known(door, path, socket, identity(path))
    }

    /// As [`adopt`](Self::adopt), with the device and inode that the other process handed over.
    pub(crate) fn known(
        door: &'static str,
        path: &Path,
        socket: OwnedFd,
        identity: Option<(u64, u64)>,
    ) -> Self {
        UnixSocket { socket, path: PathBuf::from(path), identity, door }
    }

    /// Removes the socket, unless something else has taken its place.
    pub(crate) fn remove(&self) {
        if identity(&self.path).is_some_and(|found| Some(found) == self.identity)
            && let Err(error) = std::fs::remove_file(&self.path)
        {
            let path = self.path.display();
            tracing::warn!(%path, %error, "{}: cannot remove the socket", self.door);
        }
    }
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    std::fs::symlink_metadata(path).ok().map(|found| (found.dev(), found.ino()))
}

fn unavailable(door: &str, what: &str, path: &Path, error: std::io::Error) -> Error {
    let what = format!("{door}: cannot {what} {}", path.display());
    Error::caused(ErrorKind::Unavailable, what, error)
}

fn new_socket() -> rustix::io::Result<OwnedFd> {
    socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )
}

/// Removes a socket without a listener; anything else at the path is an error.
fn clear_stale(door: &str, path: &Path, address: &SocketAddrUnix) -> Result<()> {
    let path_text = path.display();
    let failed = |what, error| unavailable(door, what, path, error);
    let metadata = match std::fs::symlink_metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(failed("look at", error)),
    };
    if !metadata.file_type().is_socket() {
        let text = format!("{door}: {path_text} exists and is not a socket; choose another path");
        return Err(Error::new(ErrorKind::Invalid, text));
    }
    // A file alone says nothing: a killed server leaves its socket behind. Only a connection shows
    // whether somebody listens.
    let probe = new_socket().map_err(|error| failed("probe", error.into()))?;
    match connect(&probe, address) {
        Err(Errno::CONNREFUSED) => {
            tracing::info!(path = %path_text, "{door}: replaced a socket without a listener");
            std::fs::remove_file(path).map_err(|error| failed("remove the stale socket", error))
        }
        // Its server has removed it in the meantime.
        Err(Errno::NOENT) => Ok(()),
        _ => {
            let text = format!(
                "{door}: another server listens on {path_text}; stop it or choose another path"
            );
            Err(Error::new(ErrorKind::Unavailable, text))
        }
    }
}
