//! The limits of an NBD server that nobody can set.
//!
//! Invariant: every number a peer could grow has its bound here or in [`super::options`].

/// Options one client may send before it chooses an export.
pub(super) const HANDSHAKE_OPTIONS_MAX: u32 = 64;
/// Bytes of option data one client may send before it chooses an export.
pub(super) const HANDSHAKE_BYTES_MAX: u32 = 64 << 10;
/// The longest payload of one request, whatever the device says: what clients assume at least.
pub(super) const PAYLOAD_BYTES_MAX: u32 = 32 << 20;
/// A refused payload up to this length is read and dropped; beyond it the connection is closed.
pub(super) const DRAIN_BYTES_MAX: u64 = 64 << 20;
const _: () = assert!(DRAIN_BYTES_MAX >= PAYLOAD_BYTES_MAX as u64);
/// Requests in flight on one connection; beyond it nothing more is taken from the socket.
pub(super) const IN_FLIGHT_MAX: u64 = 1024;
/// Payload bytes in flight plus replies not yet taken by the client, on one connection.
pub(super) const IN_FLIGHT_BYTES_MAX: u64 = 128 << 20;
const _: () = assert!(IN_FLIGHT_BYTES_MAX >= 2 * PAYLOAD_BYTES_MAX as u64);
/// What one receive takes at most: large enough for many small requests, small enough for the CPU's cache.
pub(super) const RECEIVE_BYTES: usize = 256 << 10;
/// Replies are sent in the middle of a batch when this much has gathered.
pub(super) const SEND_BYTES: usize = 256 << 10;
/// Idle buffers one connection keeps for later requests, of each kind.
pub(super) const SPARE_BYTES_MAX: usize = 8 << 20;
/// Runs in one answer to a block status query; a client asks again for the rest.
pub(super) const EXTENTS_MAX: usize = 1 << 16;
