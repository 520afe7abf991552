//! The counters of an NBD server.
//!
//! Each connection has its own [`Counters`], so that connections do not share a cache line; a
//! snapshot adds them up.
//!
//! Invariant: a counter that is updated without an atomic addition has one writer at a time: the
//! connection's own thread, or the holder of the lock of the replies.
//!
//! Not here: names and labels for a monitoring system.

use std::ops::AddAssign;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::protocol::Command;

/// Requests received, by command.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RequestCounts {
    /// Reads.
    pub read: u64,
    /// Writes.
    pub write: u64,
    /// Flushes.
    pub flush: u64,
    /// Trims (discards).
    pub trim: u64,
    /// Cache requests (prefetches).
    pub cache: u64,
    /// Write-zeroes.
    pub write_zeroes: u64,
    /// Block status queries.
    pub block_status: u64,
    /// Commands this server does not know.
    pub unknown: u64,
}

/// A snapshot of the counters of a server since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NbdMetrics {
    /// Connections open now.
    pub connections: u64,
    /// Connections in their handshake, among these.
    pub handshakes: u64,
    /// Connections accepted.
    pub connections_total: u64,
    /// Connections closed because a limit on connections, in all or per peer, or on memory was
    /// reached.
    pub connections_refused: u64,
    /// Connections closed in favor of others: in a handshake, because another client needed
    /// one; or because the client kept memory that others waited for.
    pub connections_cut: u64,
    /// Requests received, by command.
    pub requests: RequestCounts,
    /// Bytes received after the handshake.
    pub bytes_in: u64,
    /// Bytes sent after the handshake.
    pub bytes_out: u64,
    /// Payload bytes of the writes submitted to a device.
    pub written_bytes: u64,
    /// Data bytes of successful reads.
    pub read_bytes: u64,
    /// Requests answered with an error.
    pub errors: u64,
    /// Requests submitted to a device and not answered.
    pub in_flight: u64,
    /// Connections closed because the client broke the protocol.
    pub protocol_violations: u64,
    /// Receives that a look found ([`NbdOptions::lookers`](super::NbdOptions::lookers)); not
    /// handed over.
    pub receives_awake: u64,
}

/// The counters of one connection.
#[derive(Default)]
pub(super) struct Counters {
    pub(super) bytes_in: AtomicU64,
    pub(super) bytes_out: AtomicU64,
    written_bytes: AtomicU64,
    read_bytes: AtomicU64,
    pub(super) errors: AtomicU64,
    receives_awake: AtomicU64,
    /// Accepted requests, counted by the connection's own thread.
    pub(super) submitted: AtomicU64,
    read: AtomicU64,
    write: AtomicU64,
    flush: AtomicU64,
    trim: AtomicU64,
    cache: AtomicU64,
    write_zeroes: AtomicU64,
    block_status: AtomicU64,
    unknown: AtomicU64,
}

impl Counters {
    /// Counts a request; only the connection's own thread does, so no atomic addition is needed.
    pub(super) fn request(&self, command: Option<Command>) {
        let counter = match command {
            Some(Command::Read) => &self.read,
            Some(Command::Write) => &self.write,
            Some(Command::Flush) => &self.flush,
            Some(Command::Trim) => &self.trim,
            Some(Command::Cache) => &self.cache,
            Some(Command::WriteZeroes) => &self.write_zeroes,
            Some(Command::BlockStatus) => &self.block_status,
            Some(Command::Disconnect) => return,
            None => &self.unknown,
        };
        counter.store(counter.load(Relaxed) + 1, Relaxed);
    }

    /// Counts a receive that a look found; only the connection's own thread does.
    pub(super) fn received_awake(&self) {
        self.receives_awake.store(self.receives_awake.load(Relaxed) + 1, Relaxed);
    }

    /// Counts the payload of a write; only the connection's own thread does.
    pub(super) fn written(&self, length: u64) {
        self.written_bytes.store(self.written_bytes.load(Relaxed) + length, Relaxed);
    }

    /// Counts the data of a read; only the holder of the lock of the replies does.
    pub(super) fn read(&self, length: u64) {
        self.read_bytes.store(self.read_bytes.load(Relaxed) + length, Relaxed);
    }

    /// Adds these counts to a snapshot.
    pub(super) fn add_to(&self, metrics: &mut NbdMetrics) {
        let requests = &mut metrics.requests;
        for (sum, counter) in [
            (&mut metrics.bytes_in, &self.bytes_in),
            (&mut metrics.bytes_out, &self.bytes_out),
            (&mut metrics.written_bytes, &self.written_bytes),
            (&mut metrics.read_bytes, &self.read_bytes),
            (&mut metrics.errors, &self.errors),
            (&mut metrics.receives_awake, &self.receives_awake),
            (&mut requests.read, &self.read),
            (&mut requests.write, &self.write),
            (&mut requests.flush, &self.flush),
            (&mut requests.trim, &self.trim),
            (&mut requests.cache, &self.cache),
            (&mut requests.write_zeroes, &self.write_zeroes),
            (&mut requests.block_status, &self.block_status),
            (&mut requests.unknown, &self.unknown),
        ] {
            sum.add_assign(counter.load(Relaxed));
        }
    }
}
