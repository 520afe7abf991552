//! The fixed limits of an NBD server.
//!
//! Invariant: every number that a peer could increase has its limit here or in [`super::options`].

/// Options one client may send before it chooses an export.
pub(super) const HANDSHAKE_OPTIONS_MAX: u32 = 64;
/// Bytes of option data one client may send before it chooses an export.
pub(super) const HANDSHAKE_BYTES_MAX: u32 = 64 << 10;
/// The longest payload of one request. A client may assume this much if a server states no limit.
pub(super) const PAYLOAD_BYTES_MAX: u32 = 32 << 20;
/// A refused payload up to this length is read and dropped; for a longer one the connection is
/// closed.
pub(super) const DRAIN_BYTES_MAX: u64 = 64 << 20;
const _: () = assert!(DRAIN_BYTES_MAX >= PAYLOAD_BYTES_MAX as u64);
/// The most requests in flight on one connection; above it, nothing is taken from the socket.
pub(super) const REQUESTS_IN_FLIGHT_MAX: u64 = 1024;
/// Payload bytes in flight plus replies not yet taken by the client, on one connection.
pub(super) const IN_FLIGHT_BYTES_MAX: u64 = 128 << 20;
const _: () = assert!(IN_FLIGHT_BYTES_MAX >= 2 * PAYLOAD_BYTES_MAX as u64);
/// The most bytes of one receive: enough for many small requests, and small enough for the CPU's
/// cache.
pub(super) const RECEIVE_BYTES_MAX: usize = 256 << 10;
/// Replies are sent in the middle of a burst when they reach this size.
pub(super) const SEND_BYTES: usize = 256 << 10;
/// Idle buffers one connection keeps for later requests, of each kind.
pub(super) const SPARE_BYTES_MAX: usize = 8 << 20;
/// The most runs in one answer to a block status query; the client asks again for the rest.
pub(super) const EXTENTS_MAX: usize = 1 << 16;
