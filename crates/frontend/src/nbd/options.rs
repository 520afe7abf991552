//! The options of an NBD server. Not here: the fixed limits ([`super::limits`]).

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::budget::Budget;
use sawmill_device::{Error, ErrorKind, Result};
use sawmill_sys::Lookers;

/// The address to listen on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Listen {
    /// A Unix socket at this path: accessible only to its owner (mode 0600), removed at stop.
    Unix(PathBuf),
    /// A TCP address; port 0 takes a free one. Must be loopback unless `insecure_listen` is set.
    Tcp(SocketAddr),
}

impl fmt::Display for Listen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Listen::Unix(path) => write!(f, "{}", path.display()),
            Listen::Tcp(address) => write!(f, "{address}"),
        }
    }
}

/// The options of one NBD server.
#[derive(Clone, Debug)]
pub struct NbdOptions {
    /// The address to listen on.
    pub listen: Listen,
    /// Allows a TCP address that other machines can reach, without encryption or authentication.
    pub insecure_listen: bool,
    /// The most concurrent clients. One more is closed immediately, and so is a client of a peer
    /// that exceeds its share. At least 1.
    pub connections_max: usize,
    /// The most concurrent handshakes, in addition to `connections_max`. For one more, the oldest
    /// one of the peer with most handshakes is closed. At least 1.
    pub handshakes_max: usize,
    /// Time for a client to finish the handshake.
    pub handshake_time_max: Duration,
    /// At the end of a connection: how long a client may read no byte of its last replies. Before
    /// that: how long it may read, or send, less than 1 MiB while others wait for the memory it
    /// keeps.
    pub linger_time_max: Duration,
    /// How many connections, of all servers that share it, may look at once for their client's
    /// next request before they sleep, up to 50 us each: where requests come one by one at short
    /// intervals.
    pub lookers: Arc<Lookers>,
    /// Memory of all servers with this budget.
    pub budget: Budget,
}

impl NbdOptions {
    /// The defaults for this address: 256 connections, 10 s for the handshake, 10 s to linger, 64
    /// handshakes, no looks before a sleep, a budget of its own.
    #[must_use]
    pub fn new(listen: Listen) -> Self {
        NbdOptions {
            listen,
            insecure_listen: false,
            connections_max: 256,
            handshakes_max: 64,
            handshake_time_max: Duration::from_secs(10),
            linger_time_max: Duration::from_secs(10),
            lookers: Arc::default(),
            budget: Budget::default(),
        }
    }
}

impl NbdOptions {
    pub(super) fn check(&self) -> Result<()> {
        for (what, count) in
            [("connections_max", self.connections_max), ("handshakes_max", self.handshakes_max)]
        {
            // Without connections, every client would be closed. Without handshakes, the acceptor
            // would wait forever.
            if count == 0 {
                let text = format!("nbd: {what} is 0; it must be at least 1");
                return Err(Error::new(ErrorKind::Invalid, text));
            }
        }
        Ok(())
    }
}
