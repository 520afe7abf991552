//! The requests in the kernel's descriptors, and the parameters for the kernel, as pure functions.
//!
//! Invariant: no descriptor makes a function here panic, and none that exceeds the device or the
//! limits is accepted. Not here: moving bytes.

use std::borrow::Cow;

use rustix::io::Errno;
use sawmill_device::{ErrorKind, Flags, Geometry, Operation};
use sawmill_sys::ublk::{IoDescriptor, Parameters, attribute, operation, operation_flag};

/// The kernel's unit of addresses and lengths, whatever the logical block is.
pub(super) const SECTOR_BYTES: u64 = 512;
const SECTOR_SHIFT: u32 = 9;
/// The longest discard or write-zeroes: the kernel counts its bytes in 32 bits.
const CLEAR_SECTORS_MAX: u32 = u32::MAX >> SECTOR_SHIFT;
/// The unit that file systems assume is written as a whole: the journal of a byte-granular device
/// has no larger one.
const PHYSICAL_BLOCK_BYTES: u32 = 4096;

/// A request; lengths are in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BlockRequest {
    pub(super) operation: Operation,
    pub(super) address: u64,
    pub(super) length: u64,
    pub(super) flags: Flags,
}

/// A refused request: the result for the kernel, and the log text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    pub(super) errno: i32,
    pub(super) reason: Cow<'static, str>,
}

impl Refusal {
    /// A request with a tag that the queue does not have.
    pub(super) fn unknown_tag(tag: u16) -> Self {
        Refusal {
            errno: EINVAL,
            reason: format!("a tag {tag} that the queue does not have").into(),
        }
    }
}

const EINVAL: i32 = Errno::INVAL.raw_os_error();
const EIO: i32 = Errno::IO.raw_os_error();
const EOPNOTSUPP: i32 = Errno::OPNOTSUPP.raw_os_error();

impl BlockRequest {
    /// Parses a descriptor for a device of this geometry whose reads and writes have at most
    /// `bytes_max` bytes.
    pub(super) fn from_descriptor(
        descriptor: &IoDescriptor,
        geometry: &Geometry,
        bytes_max: u32,
    ) -> Result<Self, Refusal> {
        let refuse = |errno, reason: String| Err(Refusal { errno, reason: reason.into() });
        let number = descriptor.op_flags as u8;
        let has = |flag: u32| descriptor.op_flags & flag != 0;
        let flags =
            Flags { fua: has(operation_flag::FUA), no_unmap: has(operation_flag::NO_UNMAP) };
        let operation = match number {
            operation::READ => Operation::Read,
            operation::WRITE => Operation::Write,
            operation::FLUSH => {
                let flags = Flags::default();
                return Ok(BlockRequest {
                    operation: Operation::Flush,
                    address: 0,
                    length: 0,
                    flags,
                });
            }
            operation::DISCARD => Operation::Discard,
            operation::WRITE_ZEROES => Operation::WriteZeroes,
            other => return refuse(EOPNOTSUPP, format!("an unknown operation {other}")),
        };
        let length = u64::from(descriptor.sectors) * SECTOR_BYTES;
        let address = descriptor.start_sector.checked_mul(SECTOR_BYTES);
        let end = address.and_then(|address| address.checked_add(length));
        let (Some(address), Some(end)) = (address, end) else {
            return refuse(EINVAL, format!("{operation:?} past the end of any device"));
        };
        if length == 0 {
            return refuse(EINVAL, format!("{operation:?} of length zero"));
        }
        if end > geometry.size_bytes {
            return refuse(
                EINVAL,
                format!("{operation:?} of {length} bytes at {address} past the end"),
            );
        }
        let moves = matches!(operation, Operation::Read | Operation::Write);
        if moves && length > bytes_max.into() {
            return refuse(
                EINVAL,
                format!("{operation:?} of {length} bytes; the limit is {bytes_max}"),
            );
        }
        Ok(BlockRequest { operation, address, length, flags })
    }
}

/// The errno that the kernel gets for a request that failed in this way, as a positive number.
/// Errors that the kernel would retry become plain failures here: the device has retried already.
#[must_use]
pub fn errno(kind: ErrorKind) -> i32 {
    match kind {
        ErrorKind::InUse
        | ErrorKind::Closed
        | ErrorKind::Fenced
        | ErrorKind::ReadOnly
        | ErrorKind::NotFound => EIO,
        ErrorKind::Invalid
        | ErrorKind::Exists
        | ErrorKind::Refused
        | ErrorKind::Unavailable
        | ErrorKind::Denied
        | ErrorKind::Full
        | ErrorKind::Corrupt
        | ErrorKind::TimedOut
        | ErrorKind::Unreachable
        | ErrorKind::Internal => kind.errno(),
    }
}

/// The longest read or write with this geometry and option: whole blocks.
pub(super) fn request_bytes_max(geometry: &Geometry, option: u32) -> u32 {
    let bytes = geometry.request_bytes_max.min(option);
    // A limit inside a block would make the kernel split requests there, and each end would be a
    // partial block.
    bytes - bytes % PHYSICAL_BLOCK_BYTES.max(geometry.block_bytes)
}

/// The parameters of a device with this geometry for the kernel.
pub(super) fn parameters(geometry: &Geometry, request_bytes_max: u32) -> Parameters {
    let shift = |bytes: u32| bytes.max(1).ilog2() as u8;
    let block_bytes = geometry.block_bytes.max(SECTOR_BYTES as u32);
    let physical = block_bytes.max(PHYSICAL_BLOCK_BYTES);
    let clear = |able: bool| if able && !geometry.read_only { CLEAR_SECTORS_MAX } else { 0 };
    let discard = clear(geometry.operations.discard);
    let read_only = if geometry.read_only { attribute::READ_ONLY } else { 0 };
    Parameters {
        // Without a volatile cache in its parameters, the kernel sends no flush at all, and an
        // fsync would mean nothing.
        attributes: attribute::VOLATILE_CACHE | attribute::FUA | read_only,
        logical_block_shift: shift(block_bytes),
        physical_block_shift: shift(physical),
        io_opt_shift: shift(
            geometry.preferred_bytes.clamp(physical, request_bytes_max.max(physical)),
        ),
        io_min_shift: shift(physical),
        request_sectors_max: request_bytes_max >> SECTOR_SHIFT,
        device_sectors: sectors(geometry),
        discard_granularity: physical,
        discard_sectors_max: discard,
        write_zeroes_sectors_max: clear(geometry.operations.write_zeroes),
        discard_segments_max: u16::from(discard > 0),
        ..Parameters::default()
    }
}

/// The size in sectors: whole blocks, rounded down.
pub(super) fn sectors(geometry: &Geometry) -> u64 {
    let block_bytes = u64::from(geometry.block_bytes).max(SECTOR_BYTES);
    // Rounded down: the last partial block of a device cannot be addressed by the kernel.
    geometry.size_bytes / block_bytes * (block_bytes / SECTOR_BYTES)
}

/// The signature of a device of this volume in the ublk driver: our prefix, and a hash of the
/// identity.
pub(super) fn signature(volume: &str) -> u64 {
    // FNV-1a, 64 bits: the same in every version of this program.
    let hash = volume.bytes().fold(0xCBF2_9CE4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01B3)
    });
    u64::from(SIGNATURE_PREFIX) << 48 | (hash ^ hash >> 48) & ((1 << 48) - 1)
}

/// Whether a signature is ours.
pub(super) fn is_ours(signature: u64) -> bool {
    signature >> 48 == u64::from(SIGNATURE_PREFIX)
}

/// The upper 16 bits of every signature: "SM".
const SIGNATURE_PREFIX: u16 = 0x534D;
