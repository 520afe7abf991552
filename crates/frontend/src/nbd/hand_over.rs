//! The pieces of an NBD server for another process: converted to facts, and back.
//!
//! One `listener`: facts `address` (an absolute path, or an IP address with its port), `transport`
//! (`unix` or `tcp`), for a Unix socket `device` and `inode` of its file, and what was counted so
//! far, by the names in `COUNTS`; descriptor: the listening socket.
//!
//! A `connection` for each client that has chosen its export: facts `export`, `peer`, `style`
//! (`simple`, `structured`, `extended`), `block_status` (`true` or `false`); `size_bytes`, `flags`
//! and `request_bytes_max` as shown to the client; `unsent_bytes`; and, where the payload of a
//! refused request is being dropped, `refused_bytes`, `refused_cookie`, `refused_offset`,
//! `refused_errno`, `refused_text`. Bytes: what was received and not consumed (a partial request
//! from its start on), then `unsent_bytes` of replies. Descriptor: the connected socket.
//!
//! Invariant: everything received is checked completely before anything resumes. Not here: threads,
//! and the way between processes.

use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;

use rustix::net::{AddressFamily, SocketType, getsockname, sockopt};
use sawmill_device::{Error, ErrorKind, Result};

use super::listener::{Listener, reachable};
use super::metrics::NbdMetrics;
use super::options::{Listen, NbdOptions};
use super::protocol::{NbdErrno, Style};
use super::session::{Drain, ExportFacts, InputBacklog, PausedConnection, Refusal};
use crate::DoorPiece;

/// A client's connection for another process.
#[derive(Debug)]
pub(super) struct HandedConnection {
    pub(super) export: String,
    pub(super) peer: String,
    pub(super) connection: PausedConnection,
    pub(super) unsent: Vec<u8>,
    pub(super) socket: OwnedFd,
}

const STYLES: [(&str, Style); 3] =
    [("simple", Style::Simple), ("structured", Style::Structured), ("extended", Style::Extended)];

impl HandedConnection {
    /// A connection as a piece, with a duplicate of its socket.
    pub(super) fn piece(
        export: &str,
        peer: &str,
        paused_connection: &PausedConnection,
        unsent: &[u8],
        socket: &OwnedFd,
    ) -> Result<DoorPiece> {
        let style = STYLES
            .iter()
            .find(|(_, style)| *style == paused_connection.style)
            .map_or("", |(name, _)| name);
        let mut piece = DoorPiece::new("connection")
            .with("export", export)
            .with("peer", peer)
            .with("style", style)
            .with("block_status", paused_connection.block_status)
            .with("size_bytes", paused_connection.facts.size_bytes)
            .with("flags", paused_connection.facts.flags)
            .with("request_bytes_max", paused_connection.facts.request_bytes_max)
            .with("unsent_bytes", unsent.len());
        if let Some(Drain { left_bytes, cookie, offset, refusal: Refusal(errno, text) }) =
            &paused_connection.backlog.draining
        {
            piece = piece
                .with("refused_bytes", left_bytes)
                .with("refused_cookie", cookie)
                .with("refused_offset", offset)
                .with("refused_errno", *errno as u32)
                .with("refused_text", text);
        }
        piece.bytes = [&paused_connection.backlog.received, unsent].concat();
        piece.descriptors.push(duplicate(socket)?);
        Ok(piece)
    }

    /// Parses a connection. Returns `Invalid`, with the fact that is missing or wrong.
    pub(super) fn of(mut piece: DoorPiece) -> Result<Self> {
        let socket = the_socket(&mut piece)?;
        if sockopt::socket_type(&socket).ok() != Some(SocketType::STREAM) {
            return Err(invalid("the descriptor of a connection is not a stream socket".into()));
        }
        let style = piece.fact("style")?;
        let style = STYLES.iter().find(|(name, _)| *name == style).map(|(_, style)| *style);
        let style = style.ok_or_else(|| wrong(&piece, "style"))?;
        let facts = ExportFacts {
            size_bytes: piece.parsed("size_bytes")?,
            request_bytes_max: piece.parsed("request_bytes_max")?,
            flags: piece.parsed("flags")?,
        };
        let mut draining = None;
        if piece.facts.contains_key("refused_bytes") {
            let errno = NbdErrno::from_number(piece.parsed("refused_errno")?);
            let errno = errno.ok_or_else(|| wrong(&piece, "refused_errno"))?;
            draining = Some(Drain {
                left_bytes: piece.parsed("refused_bytes")?,
                cookie: piece.parsed("refused_cookie")?,
                offset: piece.parsed("refused_offset")?,
                refusal: Refusal(errno, piece.fact("refused_text")?.into()),
            });
        }
        let unsent_bytes: usize = piece.parsed("unsent_bytes")?;
        let mut received = std::mem::take(&mut piece.bytes);
        let split = received
            .len()
            .checked_sub(unsent_bytes)
            .ok_or_else(|| wrong(&piece, "unsent_bytes"))?;
        let unsent = received.split_off(split);
        let block_status = piece.parsed("block_status")?;
        let paused_connection = PausedConnection {
            style,
            block_status,
            facts,
            backlog: InputBacklog { received, draining },
        };
        let (export, peer) = (piece.fact("export")?.into(), piece.fact("peer")?.into());
        Ok(HandedConnection { export, peer, connection: paused_connection, unsent, socket })
    }
}

impl Listener {
    /// The listening socket as a piece, with a duplicate of the descriptor.
    pub(super) fn piece(&self, metrics: &NbdMetrics) -> Result<DoorPiece> {
        let mut piece = DoorPiece::new("listener");
        piece = match &self.address {
            Listen::Tcp(address) => piece.with("transport", "tcp").with("address", address),
            Listen::Unix(path) => {
                // A stop removes the socket by this path, whatever folder the process that stops
                // runs in.
                let path = std::path::absolute(path).unwrap_or_else(|_| path.clone());
                let text = path.to_str().ok_or_else(|| {
                    invalid(format!(
                        "the socket's path {} is not UTF-8 and cannot be handed over",
                        path.display()
                    ))
                })?;
                piece.with("transport", "unix").with("address", text)
            }
        };
        if let Some((device, inode)) = self.identity() {
            piece = piece.with("device", device).with("inode", inode);
        }
        let mut metrics = *metrics;
        for (name, count) in counts(&mut metrics) {
            piece = piece.with(name, count);
        }
        piece.descriptors.push(duplicate(self.socket())?);
        Ok(piece)
    }

    /// Parses the listening socket, and the counters with it. Returns `Invalid`, with the fact that
    /// is missing or wrong.
    pub(super) fn of(mut piece: DoorPiece, options: &NbdOptions) -> Result<(Self, NbdMetrics)> {
        let socket = the_socket(&mut piece)?;
        let (address, family) = match piece.fact("transport")? {
            "unix" => (Listen::Unix(PathBuf::from(piece.fact("address")?)), AddressFamily::UNIX),
            "tcp" => {
                let address: SocketAddr = piece.parsed("address")?;
                // The successor checks again: a hand-off is no way to keep a door open that its own
                // options forbid.
                if !address.ip().is_loopback() && !options.insecure_listen {
                    return Err(invalid(reachable(address)));
                }
                let family =
                    if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
                (Listen::Tcp(address), family)
            }
            _ => return Err(wrong(&piece, "transport")),
        };
        // The accepting thread must never block in `accept`, or it would miss a stop; the flag is
        // set here because the descriptor comes from another program.
        let listens = sockopt::socket_acceptconn(&socket).unwrap_or(false);
        let fits = getsockname(&socket).is_ok_and(|name| name.address_family() == family);
        if !listens || !fits || rustix::io::ioctl_fionbio(&socket, true).is_err() {
            return Err(invalid(format!(
                "the descriptor of the listener does not listen on {address}"
            )));
        }
        let mut identity = None;
        if piece.facts.contains_key("inode") {
            identity = Some((piece.parsed("device")?, piece.parsed("inode")?));
        }
        let mut metrics = NbdMetrics::default();
        for (name, count) in counts(&mut metrics) {
            // A counter that another version does not have starts at zero.
            if piece.facts.contains_key(name) {
                *count = piece.parsed(name)?;
            }
        }
        Ok((Listener::adopt(address, socket, identity), metrics))
    }
}

/// The counters by the names of their facts, without current values (`connections`, `in_flight`).
fn counts(metrics: &mut NbdMetrics) -> [(&'static str, &mut u64); 17] {
    let requests = &mut metrics.requests;
    [
        ("connections_total", &mut metrics.connections_total),
        ("connections_refused", &mut metrics.connections_refused),
        ("connections_cut", &mut metrics.connections_cut),
        ("reads", &mut requests.read),
        ("writes", &mut requests.write),
        ("flushes", &mut requests.flush),
        ("trims", &mut requests.trim),
        ("caches", &mut requests.cache),
        ("write_zeroes", &mut requests.write_zeroes),
        ("block_statuses", &mut requests.block_status),
        ("unknown_requests", &mut requests.unknown),
        ("bytes_in", &mut metrics.bytes_in),
        ("bytes_out", &mut metrics.bytes_out),
        ("written_bytes", &mut metrics.written_bytes),
        ("read_bytes", &mut metrics.read_bytes),
        ("errors", &mut metrics.errors),
        ("protocol_violations", &mut metrics.protocol_violations),
    ]
}

fn duplicate(socket: impl AsFd) -> Result<OwnedFd> {
    // A duplicate, because the predecessor goes on with its own if the successor fails (decision
    // 0020).
    socket.as_fd().try_clone_to_owned().map_err(|error| {
        let text = format!(
            "nbd: cannot duplicate a socket for the hand-over: {error}; check the limit of open \
            files"
        );
        Error::new(ErrorKind::Unavailable, text).with_source(error)
    })
}

/// The only descriptor of a piece.
fn the_socket(piece: &mut DoorPiece) -> Result<OwnedFd> {
    match (piece.descriptors.pop(), piece.descriptors.len()) {
        (Some(only), 0) => Ok(only),
        _ => Err(invalid(format!("a {} needs exactly one descriptor", piece.what))),
    }
}

fn wrong(piece: &DoorPiece, name: &str) -> Error {
    let value = piece.facts.get(name).map_or("", String::as_str);
    invalid(format!("the fact {name:?} of a {} cannot be {value:?}", piece.what))
}

fn invalid(text: String) -> Error {
    Error::new(ErrorKind::Invalid, format!("nbd hand-over: {text}"))
}
