//! The fixed limits of a FUSE door.
//!
//! Invariant: every number that users of the kernel could increase has its limit here or in
//! [`super::options`].

/// The longest name of a file on Linux.
pub(super) const NAME_BYTES_MAX: usize = 255;
/// More threads than this do not help.
pub(super) const WORKERS_MAX: usize = 64;
/// The longest read or write in one request: what the kernel allows by default.
pub(super) const REQUEST_BYTES_MAX: u32 = 1 << 20;
/// The smallest limit on requests that a device may have: the kernel's page.
pub(super) const REQUEST_BYTES_MIN: u32 = 4096;
/// Background requests that the kernel may have in flight.
pub(super) const REQUESTS_MAX: u16 = 512;
/// Payload and data in flight; above it no request is taken.
pub(super) const IN_FLIGHT_BYTES_MAX: u64 = 128 << 20;
const _: () = assert!(IN_FLIGHT_BYTES_MAX >= 2 * REQUEST_BYTES_MAX as u64);
/// A payload up to this length is copied out of its receive buffer; a longer one keeps the buffer.
pub(super) const COPY_BYTES_MAX: usize = 64 << 10;
/// Idle receive buffers that are kept.
pub(super) const SPARE_BUFFERS_MAX: usize = 16;
/// The range of one allocation query during a seek.
pub(super) const SEEK_BYTES: u64 = 1 << 30;
