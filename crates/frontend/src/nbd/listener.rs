//! The listening socket of an NBD server: a Unix socket, or a TCP address of this machine.
//!
//! Invariant: an address that other machines can reach must be allowed explicitly. Not here:
//! creating and removing a Unix socket safely.

use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;

use sawmill_device::{Error, ErrorKind, Result};

use super::options::{Listen, NbdOptions};
use crate::unix_socket::UnixSocket;

/// A socket that accepts connections.
pub(super) struct Listener {
    socket: Socket,
    pub(super) address: Listen,
}

enum Socket {
    Unix(UnixSocket),
    Tcp(OwnedFd),
}

impl Listener {
    /// Listens. The address is the actual one (a free port for port 0).
    pub(super) fn open(options: &NbdOptions) -> Result<Self> {
        match &options.listen {
            Listen::Unix(path) => Ok(Listener {
                socket: Socket::Unix(UnixSocket::listen("nbd", path)?),
                address: options.listen.clone(),
            }),
            Listen::Tcp(address) => tcp(*address, options.insecure_listen),
        }
    }

    /// Device and inode of the Unix socket.
    pub(super) fn identity(&self) -> Option<(u64, u64)> {
        match &self.socket {
            Socket::Unix(unix) => unix.identity,
            Socket::Tcp(_) => None,
        }
    }

    /// A listener that another process made. For `identity` see [`Self::identity`].
    pub(super) fn adopt(address: Listen, socket: OwnedFd, identity: Option<(u64, u64)>) -> Self {
        let socket = match &address {
            Listen::Unix(path) => Socket::Unix(UnixSocket::known("nbd", path, socket, identity)),
            Listen::Tcp(_) => Socket::Tcp(socket),
        };
        Listener { socket, address }
    }

    /// The socket to accept from.
    pub(super) fn socket(&self) -> &OwnedFd {
        match &self.socket {
            Socket::Unix(unix) => &unix.socket,
            Socket::Tcp(socket) => socket,
        }
    }

    /// Removes the Unix socket, unless something else has taken its place.
    pub(super) fn remove(&self) {
        if let Socket::Unix(unix) = &self.socket {
            unix.remove();
        }
    }
}

/// Why an address that is not loopback is refused, and how to allow it.
pub(super) fn reachable(address: SocketAddr) -> String {
    format!(
        "{address} can be reached by other machines, and this door has no encryption or \
         authentication; listen on 127.0.0.1 or a Unix socket, or allow it with --insecure-listen \
         (a door that is added: nbd-insecure=ADDRESS; the library: NbdOptions::insecure_listen)"
    )
}

fn tcp(address: SocketAddr, insecure: bool) -> Result<Listener> {
    if !address.ip().is_loopback() && !insecure {
        return Err(Error::new(ErrorKind::Invalid, format!("nbd: {}", reachable(address))));
    }
    let failed = |error: std::io::Error| {
        Error::caused(ErrorKind::Unavailable, format!("nbd: cannot listen on {address}"), error)
    };
    let listener = TcpListener::bind(address).map_err(failed)?;
    // A client may be gone between `poll` and `accept`. A blocking `accept` would then keep the
    // thread from seeing a stop.
    let local_address = listener.set_nonblocking(true).and_then(|()| listener.local_addr());
    let bound_address = local_address.map_err(failed)?;
    Ok(Listener { socket: Socket::Tcp(listener.into()), address: Listen::Tcp(bound_address) })
}
