//! The interface of every door, whatever its protocol.
//!
//! A door is *quiet* from [`Door::quiesce`] to [`QuietDoor::resume`]: it accepts no request, and
//! every accepted request is answered. Users wait in the meantime and notice nothing else. Only a
//! quiet door can be handed over to another process, which needs a few facts and the descriptors of
//! the door.
//!
//! Invariants: until [`QuietDoor::release`], a door that was handed over can still resume, so a
//! hand-off can be rolled back. Nothing but [`QuietDoor::resume`] resumes a quiet door: a process
//! that fails in the middle of a hand-off must not serve what another may have. Not here: how the
//! pieces travel between processes.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::time::Duration;

use sawmill_device::Result;

/// A running front door.
pub trait Door: Send + Sync {
    /// The protocol: `nbd`, `ublk`, `vhost-user` or `fuse`.
    fn kind(&self) -> &'static str;

    /// What a user opens: an address, a device node, a socket, a file.
    fn address(&self) -> String;

    /// The export with this name. A door with one device has one export, whatever the name.
    fn export(&self, name: &str) -> ExportStatus;

    /// The counters since the start.
    fn counts(&self) -> DoorCounts;

    /// Accepts no more requests and waits until the accepted ones are answered. Returns
    /// `Unavailable` if that takes longer than `patience`; the door has resumed then. Returns
    /// `Closed` for a door that has ended.
    ///
    /// A quiet door stays so, and the caller gets another value for it.
    fn quiesce(&self, patience: Duration) -> Result<Box<dyn QuietDoor>>;

    /// Announces the device's new size to the door's users. Errors: `Refused` where this door or
    /// kernel cannot; the text says how users come to see it.
    fn resized(&self) -> Result<()>;

    /// Closes the door, which may be quiet.
    fn stop(&self, how: Stop);
}

/// A door that accepts no request and has answered all that it accepted.
///
/// Dropping this changes nothing: the door stays quiet, and its users wait until it is resumed or
/// stopped through another value. If the door has resumed or ended in the meantime, this value is
/// stale.
#[must_use = "the users of a quiet door wait until it is resumed"]
pub trait QuietDoor: Send {
    /// What another process needs to take over this door. Descriptors are duplicates. Returns an
    /// error if this value is stale.
    fn hand_over(&self) -> Result<Vec<DoorPiece>>;

    /// Releases everything that was handed over to its new owner, without ending any connection.
    /// The door has ended then.
    fn release(self: Box<Self>);

    /// Accepts requests again.
    fn resume(self: Box<Self>);
}

/// How a door closes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// It accepts no more requests and answers the accepted ones first.
    Drained,
    /// Immediately. Requests in flight continue in their devices, without an answer to the user.
    Now,
}

/// An export of a door, as its users see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportStatus {
    /// What a user opens.
    pub address: String,
    /// The connected peers, if the door knows them, the oldest first.
    pub peers: Vec<String>,
}

/// One piece of a door for another process: a listening socket, a connection, a device.
#[derive(Debug, Default)]
pub struct DoorPiece {
    /// The kind of piece, as its door names it.
    pub what: String,
    /// Facts by name. A reader ignores unknown names, and fails if one is missing.
    pub facts: BTreeMap<String, String>,
    /// Bytes that were received and not parsed yet.
    pub bytes: Vec<u8>,
    /// Open files, in the order that the door documents.
    pub descriptors: Vec<OwnedFd>,
}

/// The counters that all doors have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DoorCounts {
    /// Connections (or queues, or mounts) open now.
    pub connections: u64,
    /// Connections ever made.
    pub connections_total: u64,
    /// Connections closed at once because a limit was reached. Zero for doors with one user.
    pub connections_refused: u64,
    /// Connections closed in favor of others: the client did not read its replies, or did not
    /// finish its handshake.
    pub connections_cut: u64,
    /// Read requests that were accepted since the start, whatever became of them.
    pub reads: u64,
    /// See `reads`.
    pub writes: u64,
    /// See `reads`.
    pub flushes: u64,
    /// See `reads`.
    pub discards: u64,
    /// See `reads`.
    pub write_zeroes: u64,
    /// See `reads`.
    pub others: u64,
    /// Bytes of writes' payload.
    pub bytes_in: u64,
    /// Bytes of reads' data.
    pub bytes_out: u64,
    /// Requests answered with an error.
    pub errors: u64,
    /// Accepted requests without an answer.
    pub in_flight: u64,
    /// Protocol violations of peers.
    pub protocol_violations: u64,
}
