//! A boot set: which ranges of a disk a start reads, in the order in which it reads them.
//!
//! Invariants: it is a hint. It names addresses, never data, so that an outdated one shows nothing
//! old. A decoder takes no more than [`RANGES_MAX`] ranges, whatever a store claims. The set with
//! the highest number counts.
//!
//! Not here: how it is recorded and used (the engine).

use crate::error::{check_field, check_identity};
use crate::ids::{PutId, VolumeId};
use crate::layout::{layout, parse_number};
use crate::preamble::{self, CRC_BYTES, Kind};
use crate::{Result, crc};

layout! {
    /// Bytes of the fixed part; the ranges and the CRC follow.
    at, "Boot set", 72;
    PREAMBLE: 0, 16, "preamble";
    VOLUME_ID: 16, 16, "volume_id";
    PUT_ID: 32, 16, "put_id";
    NUMBER: 48, 8, "number";
    WALL_UNIX_MS: 56, 8, "wall_unix_ms";
    RANGE_COUNT: 64, 4, "range_count";
    RESERVED: 68, 4, "reserved";
}

layout! {
    /// One range.
    range_at, "Range", 16;
    ADDRESS: 0, 8, "address";
    LENGTH: 8, 8, "length";
}

const KIND: Kind = Kind::BootSet;
const WHAT: &str = KIND.name();

/// The most ranges of a set.
pub const RANGES_MAX: usize = 1 << 16;
/// The longest object.
pub const BYTES_MAX: usize = at::SIZE + RANGES_MAX * range_at::SIZE + CRC_BYTES;

/// What a start reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BootSet {
    /// The volume that it belongs to: the base of what was started.
    pub volume_id: VolumeId,
    /// This put.
    pub put_id: PutId,
    /// Its number, from 1.
    pub number: u64,
    /// When it was recorded, in milliseconds since 1970, UTC: for people.
    pub wall_unix_ms: u64,
    /// Addresses and lengths in bytes, in the order of the first read.
    pub ranges: Vec<(u64, u64)>,
}

impl BootSet {
    /// Bytes of all ranges.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.ranges.iter().fold(0, |sum, (_, length)| sum.saturating_add(*length))
    }

    /// The object's bytes, or which field cannot be written.
    pub fn encode(&self) -> Result<Vec<u8>> {
        self.check()?;
        let length = at::SIZE + self.ranges.len() * range_at::SIZE + CRC_BYTES;
        let mut bytes = vec![0; at::SIZE];
        preamble::put(&mut bytes, KIND, length);
        at::VOLUME_ID.put(&mut bytes, self.volume_id.0);
        at::PUT_ID.put(&mut bytes, self.put_id.0);
        at::NUMBER.put(&mut bytes, self.number.to_le_bytes());
        at::WALL_UNIX_MS.put(&mut bytes, self.wall_unix_ms.to_le_bytes());
        at::RANGE_COUNT.put_count(&mut bytes, WHAT, self.ranges.len())?;
        for (address, length) in &self.ranges {
            let mut entry = [0; range_at::SIZE];
            range_at::ADDRESS.put(&mut entry, address.to_le_bytes());
            range_at::LENGTH.put(&mut entry, length.to_le_bytes());
            bytes.extend_from_slice(&entry);
        }
        crc::seal(&mut bytes);
        Ok(bytes)
    }

    /// Reads the whole object.
    pub fn decode(bytes: &[u8], volume_id: VolumeId, number: u64) -> Result<BootSet> {
        preamble::open_whole(bytes, KIND, at::SIZE + CRC_BYTES)?;
        let entries = &bytes[at::SIZE..bytes.len() - CRC_BYTES];
        let agrees = entries.len() == at::RANGE_COUNT.u32(bytes) as usize * range_at::SIZE;
        check_field(WHAT, "range_count", "it does not agree with the length", agrees)?;
        preamble::check_reserved(KIND, bytes, &[at::RESERVED])?;
        check_identity(WHAT, "volume_id", volume_id, VolumeId(at::VOLUME_ID.array(bytes)))?;
        check_identity(WHAT, "number", number, at::NUMBER.u64(bytes))?;
        check_count(entries.len() / range_at::SIZE)?;
        let range = |entry: &[u8]| (range_at::ADDRESS.u64(entry), range_at::LENGTH.u64(entry));
        let set = BootSet {
            volume_id,
            put_id: PutId(at::PUT_ID.array(bytes)),
            number,
            wall_unix_ms: at::WALL_UNIX_MS.u64(bytes),
            ranges: entries.chunks_exact(range_at::SIZE).map(range).collect(),
        };
        set.check()?;
        Ok(set)
    }

    /// Whether the fields keep the rules of the structure.
    pub fn check(&self) -> Result<()> {
        check_field(WHAT, "number", "numbers begin with 1", self.number > 0)?;
        check_count(self.ranges.len())?;
        let is_range =
            |(address, length): &(u64, u64)| *length > 0 && address.checked_add(*length).is_some();
        let are_ranges = self.ranges.iter().all(is_range);
        check_field(WHAT, "length", "a range is empty or has no end", are_ranges)
    }
}

fn check_count(count: usize) -> Result<()> {
    check_field(WHAT, "range_count", "there are too many", count <= RANGES_MAX)
}

/// The key of a boot set.
pub fn boot_set_key(volume_id: VolumeId, number: u64) -> String {
    format!("{volume_id}/boot/{number:020}")
}

/// Where the boot sets of a volume are.
pub fn boot_set_prefix(volume_id: VolumeId) -> String {
    format!("{volume_id}/boot/")
}

/// The volume and the number in the key of a boot set.
pub fn parse_boot_set_key(key: &str) -> Option<(VolumeId, u64)> {
    let (volume_id, rest) = key.split_once('/')?;
    let digits = rest.strip_prefix("boot/")?;
    Some((volume_id.parse().ok()?, parse_number(digits)?))
}
