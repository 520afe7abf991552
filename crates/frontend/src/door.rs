//! The interface of every door, whatever its protocol.
//!
//! A door is *quiet* between [`Door::quiesce`] and [`Door::resume`]: it accepts no request, and
//! every accepted request is answered. Users wait in the meantime and notice nothing else. Only a
//! quiet door can be handed over to another process, which needs a few facts and the descriptors of
//! the door.
//!
//! Invariant: until [`Door::let_go`], a door that was handed over can still resume, so a hand-off
//! can be rolled back. Not here: how the pieces travel between processes.

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

    /// The address for the export with this name; a door with one device has one address.
    fn address_of(&self, name: &str) -> String;

    /// The connected peers of the export with this name, if the door knows them, the oldest first.
    fn peers_of(&self, name: &str) -> Vec<String>;

    /// The counters since the start.
    fn counts(&self) -> DoorCounts;

    /// Accepts no more requests and waits until the accepted ones are answered. Returns
    /// `Unavailable` if that takes longer than `patience`; the door has resumed then.
    fn quiesce(&self, patience: Duration) -> Result<()>;

    /// Accepts requests again after [`Door::quiesce`].
    fn resume(&self);

    /// What another process needs to take over this door, which must be quiet. Descriptors are
    /// duplicates.
    fn hand_over(&self) -> Result<Vec<Handed>>;

    /// Releases everything that was handed over to its new owner, without ending any connection.
    /// Only for a quiet door.
    fn let_go(&self);

    /// The device has another size: tells the user. Errors: `Refused` where this door or kernel
    /// cannot; the text says how the user comes to see it.
    fn resized(&self) -> Result<()>;

    /// Accepts no more requests, answers the accepted ones, and closes the door.
    fn stop(&self);

    /// Closes the door immediately. Requests in flight continue in their devices, without an answer
    /// to the user.
    fn stop_now(&self);
}

/// One piece of a door for another process: a listening socket, a connection, a device.
#[derive(Debug, Default)]
pub struct Handed {
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
    /// Connections refused.
    pub connections_refused: u64,
    /// Connections closed for others: one that did not read its replies, or did not finish its
    /// handshake.
    pub connections_cut: u64,
    /// Requests by kind: read, write, flush, discard, write-zeroes, anything else.
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
