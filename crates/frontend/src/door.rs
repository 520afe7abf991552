//! What every door can do, whatever it speaks to its user.
//!
//! A door is *quiet* between [`Door::quiesce`] and [`Door::resume`]: it takes no request from its user,
//! and every request it took is answered. Users wait meanwhile and see nothing of it. Only a quiet door
//! can be handed over to another process: what that one needs are a few facts and the descriptors
//! behind them.
//!
//! Invariant: until [`Door::let_go`] a door that was handed over can still resume, so a hand-off can be
//! taken back. Not here: how the pieces travel between processes.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::time::Duration;

use sawmill_device::Result;

/// A running front door.
pub trait Door: Send + Sync {
    /// What it speaks: `nbd`, `ublk`, `vhost-user` or `fuse`.
    fn kind(&self) -> &'static str;

    /// What a user opens: an address, a device node, a socket, a file.
    fn address(&self) -> String;

    /// What a user opens to have what is shown under this name; a door that shows one device has one address.
    fn address_of(&self, name: &str) -> String;

    /// The peers that have what is shown under this name, where the door knows them, the oldest first.
    fn peers_of(&self, name: &str) -> Vec<String>;

    /// What was counted since the start.
    fn counts(&self) -> DoorCounts;

    /// Takes no more requests and waits until those it took are answered. Errors: `Unavailable` when
    /// they are not after `patience`; the door has resumed then.
    fn quiesce(&self, patience: Duration) -> Result<()>;

    /// Takes requests again after [`Door::quiesce`].
    fn resume(&self);

    /// What another process needs to go on in this one's place; the door must be quiet. Descriptors are
    /// duplicates.
    fn hand_over(&self) -> Result<Vec<Handed>>;

    /// Leaves everything that was handed over to its new owner: users see no end of anything. Only a
    /// quiet door.
    fn let_go(&self);

    /// The device has another size: tells the user. Errors: `Refused` where this door or kernel cannot;
    /// the text says how the user comes to see it.
    fn resized(&self) -> Result<()>;

    /// Takes no more requests, answers those it took, and ends what the user sees.
    fn stop(&self);

    /// Ends at once. Requests in flight go on in their devices; nobody hears of them.
    fn stop_now(&self);
}

/// One piece of a door on its way to another process: a listening socket, a connection, a device.
#[derive(Debug, Default)]
pub struct Handed {
    /// Which piece, in the words of its door.
    pub what: String,
    /// Facts by name. A reader ignores names it does not know, and fails on one that it misses.
    pub facts: BTreeMap<String, String>,
    /// Bytes that were received and not understood yet.
    pub bytes: Vec<u8>,
    /// Open files, in the order the door's documentation gives.
    pub descriptors: Vec<OwnedFd>,
}

/// What every door counts, under the same names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DoorCounts {
    /// Connections (or queues, or mounts) open now.
    pub connections: u64,
    /// Connections ever made.
    pub connections_total: u64,
    /// Connections refused.
    pub connections_refused: u64,
    /// Connections cut off for others: one that did not take its replies, or did not finish its handshake.
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
    /// Requests taken and not answered yet.
    pub in_flight: u64,
    /// What a peer did against the protocol.
    pub protocol_violations: u64,
}
