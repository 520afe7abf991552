//! The facts of a device that a door shows to its user. Only a resize changes them (D10).
//!
//! Not here: the check of a request against them (`Request::check`).

/// Which optional operations a device carries out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operations {
    /// Discard: the range reads as zeroes afterwards, or keeps its bytes, as the device chooses.
    pub discard: bool,
    /// Write-zeroes without a payload.
    pub write_zeroes: bool,
    /// Allocation queries.
    pub allocation: bool,
}

/// Size, granularity, limits and abilities of a device. All lengths are bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// The size of the device.
    pub size_bytes: u64,
    /// The logical block a door with sectors shows: 512 or 4096. Requests need not be aligned to
    /// it.
    pub block_bytes: u32,
    /// The request size that the device prefers.
    pub preferred_bytes: u32,
    /// The longest read or write in one request; discard and write-zeroes may be as long as the
    /// device.
    pub request_bytes_max: u32,
    /// No write, discard or write-zeroes is accepted.
    pub read_only: bool,
    /// A write completed through one door, and a flush through another, act on the same device
    /// (what NBD calls multi-conn).
    pub shared_cache: bool,
    /// The optional operations.
    pub operations: Operations,
}

impl Geometry {
    /// A device of this size that does every operation, with blocks of 512 bytes: what a device
    /// says whose medium wants nothing else.
    #[must_use]
    pub const fn of_size(size_bytes: u64) -> Self {
        Geometry {
            size_bytes,
            block_bytes: 512,
            preferred_bytes: 64 << 10,
            request_bytes_max: 32 << 20,
            read_only: false,
            shared_cache: true,
            operations: Operations { discard: true, write_zeroes: true, allocation: true },
        }
    }
}
