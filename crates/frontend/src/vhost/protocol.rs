//! virtio-blk: the configuration space and the meaning of a request, pure. Source: the virtio
//! specification 1.2, section 5.2. Numbers are little-endian; a sector is 512 bytes whatever the
//! block size is.
//!
//! Invariant: nothing here touches a guest's memory, and nothing panics, whatever a guest wrote.
//! Not here: rings.

use sawmill_device::{ErrorKind, Flags, Geometry, Operation};

/// Bytes of a request before its payload.
pub(super) const HEADER_BYTES: u64 = 16;
/// Bytes of the one range of a discard or write-zeroes.
pub(super) const RANGE_BYTES: u64 = 16;
/// Bytes of the answer to a query for the name.
pub(super) const ID_BYTES: usize = 20;
/// Bytes of the configuration space.
pub(super) const CONFIG_BYTES: usize = 60;
/// The place in the configuration space where the guest selects a write cache.
pub(super) const WRITEBACK_OFFSET: u32 = 32;
const SECTOR_BYTES: u64 = 512;
/// The most segments of one request: with header and status they fit into a queue of 128.
const SEGMENTS_MAX: u32 = 126;
/// The longest discard or write-zeroes: 2 GiB, the most that guests request.
const RANGE_SECTORS_MAX: u32 = 1 << 22;

/// Bits of the virtio features.
pub(super) mod feature {
    pub(crate) const SIZE_MAX: u64 = 1 << 1;
    pub(crate) const SEG_MAX: u64 = 1 << 2;
    pub(crate) const RO: u64 = 1 << 5;
    pub(crate) const BLK_SIZE: u64 = 1 << 6;
    pub(crate) const FLUSH: u64 = 1 << 9;
    pub(crate) const TOPOLOGY: u64 = 1 << 10;
    pub(crate) const CONFIG_WCE: u64 = 1 << 11;
    pub(crate) const MQ: u64 = 1 << 12;
    pub(crate) const DISCARD: u64 = 1 << 13;
    pub(crate) const WRITE_ZEROES: u64 = 1 << 14;
    /// A feature of vhost, not of virtio: writes go to the dirty log.
    pub(crate) const LOG_ALL: u64 = 1 << 26;
    pub(crate) const INDIRECT: u64 = 1 << 28;
    pub(crate) const EVENT_IDX: u64 = 1 << 29;
    /// A feature of vhost-user, not of virtio: there are protocol features.
    pub(crate) const PROTOCOL_FEATURES: u64 = 1 << 30;
    pub(crate) const VERSION_1: u64 = 1 << 32;
}

/// The features of a device with this geometry.
pub(super) fn features_of(geometry: &Geometry) -> u64 {
    let mut features = feature::SIZE_MAX
        | feature::SEG_MAX
        | feature::BLK_SIZE
        | feature::FLUSH
        | feature::TOPOLOGY
        | feature::CONFIG_WCE
        | feature::MQ
        | feature::INDIRECT
        | feature::EVENT_IDX
        | feature::VERSION_1;
    for (has, bit) in [
        (geometry.read_only, feature::RO),
        (geometry.operations.discard && !geometry.read_only, feature::DISCARD),
        (geometry.operations.write_zeroes && !geometry.read_only, feature::WRITE_ZEROES),
    ] {
        if has {
            features |= bit;
        }
    }
    features
}

/// What the guest knows of a write cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CacheMode {
    /// There is one: the guest flushes.
    Writeback,
    /// There is none, so each change is durable before it is answered.
    Writethrough,
}

impl CacheMode {
    /// The mode of a byte of the configuration space, which is 0 or 1.
    pub(super) fn of(byte: u8) -> Self {
        if byte == 0 { CacheMode::Writethrough } else { CacheMode::Writeback }
    }

    pub(super) fn byte(self) -> u8 {
        match self {
            CacheMode::Writeback => 1,
            CacheMode::Writethrough => 0,
        }
    }
}

/// The configuration space.
pub(super) fn config_of(
    geometry: &Geometry,
    queues: u16,
    cache_mode: CacheMode,
) -> [u8; CONFIG_BYTES] {
    let mut config = [0; CONFIG_BYTES];
    let mut put =
        |offset: usize, bytes: &[u8]| config[offset..offset + bytes.len()].copy_from_slice(bytes);
    let block = geometry.block_bytes;
    // So many segments of this length are one request that the device accepts. Guests use no
    // segments shorter than a page, so a device with short requests gets fewer of them.
    let segment_bytes = (geometry.request_bytes_max / SEGMENTS_MAX).max(4096) & !4095;
    let segments = (geometry.request_bytes_max / segment_bytes).clamp(1, SEGMENTS_MAX);
    let blocks = |bytes: u32| (bytes / block.max(1)).max(1);
    put(0, &(geometry.size_bytes / SECTOR_BYTES).to_le_bytes());
    put(8, &segment_bytes.to_le_bytes());
    put(12, &segments.to_le_bytes());
    put(20, &block.to_le_bytes());
    // Topology: the physical block as a power of two of blocks, its offset, and the preferred
    // sizes, in blocks.
    put(26, &1u16.to_le_bytes());
    put(28, &blocks(geometry.preferred_bytes).to_le_bytes());
    put(WRITEBACK_OFFSET as usize, &[cache_mode.byte()]);
    put(34, &queues.to_le_bytes());
    put(36, &RANGE_SECTORS_MAX.to_le_bytes());
    put(40, &1u32.to_le_bytes());
    put(44, &(block / SECTOR_BYTES as u32).max(1).to_le_bytes());
    put(48, &RANGE_SECTORS_MAX.to_le_bytes());
    put(52, &1u32.to_le_bytes());
    // Write-zeroes may release the space.
    put(56, &[1]);
    config
}

/// The result of a request, for the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Status {
    Ok,
    Failed,
    Unsupported,
}

impl Status {
    pub(super) fn byte(self) -> u8 {
        match self {
            Status::Ok => 0,
            Status::Failed => 1,
            Status::Unsupported => 2,
        }
    }
}

/// The status byte that the guest gets for a request that failed in this way: virtio has one for
/// all failures.
#[must_use]
pub fn status(kind: ErrorKind) -> u8 {
    Status::from(kind).byte()
}

impl From<ErrorKind> for Status {
    fn from(_kind: ErrorKind) -> Self {
        Status::Failed
    }
}

/// A request, with the number of its payload bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Command {
    /// A request for the device.
    Device { operation: Operation, address: u64, length: u64, flags: Flags },
    /// The name of the device.
    Id,
}

/// Why a request is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Refusal(pub(super) Status, pub(super) String);

/// The parts of a request besides its header.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Parts {
    /// Bytes from the guest after the header.
    pub(super) payload_bytes: u64,
    /// The start of the payload if it is long enough: the range of a discard or write-zeroes.
    pub(super) range: Option<[u8; RANGE_BYTES as usize]>,
    /// Bytes for the guest before the status.
    pub(super) data_bytes: u64,
}

/// Parses a request. `negotiated` are the virtio features.
pub(super) fn understand(
    header: &[u8; HEADER_BYTES as usize],
    parts: &Parts,
    negotiated: u64,
    cache_mode: CacheMode,
) -> Result<Command, Refusal> {
    let kind = u32::from_le_bytes([header[0], header[1], header[2], header[3]]);
    let sector = u64_at(header, 8);
    // A guest that knows of no cache never flushes: each answer must mean that the change is
    // durable.
    let fua = Flags { fua: cache_mode == CacheMode::Writethrough, no_unmap: false };
    match kind {
        0 => payload(Operation::Read, sector, parts.data_bytes, Flags::default()),
        1 => payload(Operation::Write, sector, parts.payload_bytes, fua),
        4 => Ok(Command::Device {
            operation: Operation::Flush,
            address: 0,
            length: 0,
            flags: Flags::default(),
        }),
        8 if parts.data_bytes as usize >= ID_BYTES => Ok(Command::Id),
        8 => refuse(Status::Failed, format!("a buffer of {} bytes for the name", parts.data_bytes)),
        11 if negotiated & feature::DISCARD != 0 => range(Operation::Discard, parts, fua),
        13 if negotiated & feature::WRITE_ZEROES != 0 => range(Operation::WriteZeroes, parts, fua),
        _ => refuse(Status::Unsupported, format!("requests of type {kind} are not served")),
    }
}

fn refuse<T>(status: Status, text: String) -> Result<T, Refusal> {
    Err(Refusal(status, text))
}

fn payload(
    operation: Operation,
    sector: u64,
    length: u64,
    flags: Flags,
) -> Result<Command, Refusal> {
    let address =
        sector.checked_mul(SECTOR_BYTES).filter(|address| address.checked_add(length).is_some());
    match address {
        // virtio counts addresses in sectors. A partial sector is a mistake of the guest, although
        // a device would take it.
        _ if length == 0 || !length.is_multiple_of(SECTOR_BYTES) => refuse(
            Status::Failed,
            format!("a {operation:?} of {length} bytes, which is not whole sectors"),
        ),
        None => refuse(
            Status::Failed,
            format!("a {operation:?} at sector {sector}, past the end of any device"),
        ),
        Some(address) => Ok(Command::Device { operation, address, length, flags }),
    }
}

fn range(operation: Operation, parts: &Parts, flags: Flags) -> Result<Command, Refusal> {
    let Some(range) = parts.range.filter(|_| parts.payload_bytes == RANGE_BYTES) else {
        let text = format!(
            "a {operation:?} with {} bytes of ranges, but only one range is supported",
            parts.payload_bytes
        );
        return refuse(Status::Failed, text);
    };
    let (sector, sectors) = (u64_at(&range, 0), u32_at(&range, 8));
    let (unmap, unknown) = (u32_at(&range, 12) & 1 != 0, u32_at(&range, 12) & !1);
    // The only flag belongs to write-zeroes.
    if unknown != 0 || (unmap && operation == Operation::Discard) {
        return refuse(
            Status::Unsupported,
            format!("a {operation:?} with flags {:#x}", u32_at(&range, 12)),
        );
    }
    let length = u64::from(sectors) * SECTOR_BYTES;
    let flags = Flags { no_unmap: operation == Operation::WriteZeroes && !unmap, ..flags };
    payload(operation, sector, length, flags)
}

fn u64_at(bytes: &[u8; 16], offset: usize) -> u64 {
    let at = |n: usize| u64::from(bytes[offset + n]) << (8 * n);
    (0..8).map(at).sum()
}

fn u32_at(bytes: &[u8; 16], offset: usize) -> u32 {
    let at = |n: usize| u32::from(bytes[offset + n]) << (8 * n);
    (0..4).map(at).sum()
}
