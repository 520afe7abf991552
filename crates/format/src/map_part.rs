//! A map part: the extents of one group of addresses, for a checkpoint; or a delta: what changed in
//! many groups since the parts of older numbers. Varints of differences, since neighbors on the
//! disk are mostly neighbors in a segment.
//!
//! Invariants: extents are sorted, not empty, and do not overlap; a number has one encoding. In a
//! group, addresses that no extent covers read as zeroes. In a delta they are as in older parts,
//! and what it makes empty is an extent of [`HOLE_SEQUENCE`].
//!
//! Not here: how many addresses a group has; the writer records where it begins.

use crate::error::{check_field, check_identity};
use crate::ids::{PutId, VolumeId};
use crate::layout::{layout, parse_number};
use crate::preamble::{self, CRC_BYTES, Kind};
use crate::{FormatError, Result, crc};

layout! {
    /// Bytes of the fixed part; entries and the CRC follow.
    at, "Map part", 80;
    PREAMBLE: 0, 16, "preamble";
    VOLUME_ID: 16, 16, "volume_id";
    PUT_ID: 32, 16, "put_id";
    NUMBER: 48, 8, "number";
    GROUP: 56, 8, "group";
    EXTENT_COUNT: 64, 4, "extent_count";
    RESERVED: 68, 4, "reserved";
    FIRST_ADDRESS: 72, 8, "first_address";
}

const KIND: Kind = Kind::MapPart;
const WHAT: &str = KIND.name();
const BYTES_MIN: usize = at::SIZE + CRC_BYTES;
/// The version of deltas; groups have the first.
const DELTA_VERSION: u16 = 2;
const _: () = assert!(DELTA_VERSION == KIND.version_max());
/// The first number that no group of addresses has: a delta has the sum of it and its checkpoint's.
const DELTA_GROUPS: u64 = 1 << 63;
/// In a delta: these bytes are in no segment, and read as zeroes. No segment has this sequence.
pub const HOLE_SEQUENCE: u64 = 0;
/// An entry is four varints of at least one byte.
const ENTRY_BYTES_MIN: usize = 4;

/// A run of bytes of the disk, and the segment data that holds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MapExtent {
    /// First byte on the disk.
    pub address: u64,
    /// Bytes; not 0.
    pub length: u64,
    /// The segment.
    pub sequence: u64,
    /// Where its bytes begin in the segment's uncompressed data.
    pub data_offset: u32,
}

/// Which part is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PartIdentity {
    /// Its volume.
    pub volume_id: VolumeId,
    /// The group of addresses.
    pub group: u64,
    /// The checkpoint that wrote it.
    pub number: u64,
    /// The put.
    pub put_id: PutId,
}

/// What the delta of a checkpoint has in the place of a group.
pub fn delta_group(number: u64) -> u64 {
    DELTA_GROUPS | number
}

/// Whether this is the place of a delta.
pub fn is_delta_group(group: u64) -> bool {
    group >= DELTA_GROUPS
}

fn version_of(group: u64) -> u16 {
    if is_delta_group(group) { DELTA_VERSION } else { preamble::VERSION_FIRST }
}

/// Encodes the object. `extents` must be sorted by address, not empty, not overlap, and not begin
/// before `first_address`, the first address of the group (0 for a delta); others are refused.
pub fn encode_part(
    identity: &PartIdentity,
    first_address: u64,
    extents: &[MapExtent],
) -> Result<Vec<u8>> {
    let mut bytes = vec![0; at::SIZE];
    at::VOLUME_ID.put(&mut bytes, identity.volume_id.0);
    at::PUT_ID.put(&mut bytes, identity.put_id.0);
    at::NUMBER.put(&mut bytes, identity.number.to_le_bytes());
    at::GROUP.put(&mut bytes, identity.group.to_le_bytes());
    at::EXTENT_COUNT.put_count(&mut bytes, WHAT, extents.len())?;
    at::FIRST_ADDRESS.put(&mut bytes, first_address.to_le_bytes());
    let mut before = DeltaBase::start(first_address);
    for extent in extents {
        let gap = extent.address.checked_sub(before.address);
        let why = "the extents are not sorted, overlap, or begin before the group";
        put_varint(
            &mut bytes,
            gap.ok_or(FormatError::Field { what: WHAT, field: "address", why })?,
        );
        put_varint(&mut bytes, extent.length);
        put_varint(&mut bytes, zigzag(extent.sequence.wrapping_sub(before.sequence)));
        put_varint(&mut bytes, zigzag(u64::from(extent.data_offset).wrapping_sub(before.data)));
        check_hole(identity.group, extent)?;
        before.advance(extent)?;
    }
    let length = bytes.len() + CRC_BYTES;
    preamble::put_version(&mut bytes, KIND, version_of(identity.group), length);
    crc::seal(&mut bytes);
    Ok(bytes)
}

/// The entries of a verified part, and how many there are to be.
fn open_part<'a>(bytes: &'a [u8], expected: &PartIdentity) -> Result<(&'a [u8], usize)> {
    preamble::open_whole(bytes, KIND, BYTES_MIN)?;
    preamble::check_reserved(KIND, bytes, &[at::RESERVED])?;
    check_identity(WHAT, "volume_id", expected.volume_id, VolumeId(at::VOLUME_ID.array(bytes)))?;
    check_identity(WHAT, "group", expected.group, at::GROUP.u64(bytes))?;
    check_identity(WHAT, "number", expected.number, at::NUMBER.u64(bytes))?;
    check_identity(WHAT, "put_id", expected.put_id, PutId(at::PUT_ID.array(bytes)))?;
    let version = preamble::Preamble::decode(bytes)?.version;
    let agrees = version == version_of(expected.group);
    check_field(WHAT, "group", "only version 2 is a delta, and it is nothing else", agrees)?;
    let entries = &bytes[at::SIZE..bytes.len() - CRC_BYTES];
    let extent_count = at::EXTENT_COUNT.u32(bytes) as usize;
    let justified = extent_count <= entries.len() / ENTRY_BYTES_MIN;
    check_field(WHAT, "extent_count", "the entries are too short for it", justified)?;
    Ok((entries, extent_count))
}

/// Reads the whole object.
pub fn decode_part(bytes: &[u8], expected: &PartIdentity) -> Result<Vec<MapExtent>> {
    let mut entries = PartEntries::open(bytes, expected)?;
    let mut extents = Vec::with_capacity(entries.left);
    while let Some(extent) = entries.next_extent()? {
        extents.push(extent);
    }
    Ok(extents)
}

/// The extents of a part, one after the other, for those who need not keep them.
pub struct PartEntries<'a> {
    entries: &'a [u8],
    left: usize,
    group: u64,
    before: DeltaBase,
}

impl<'a> PartEntries<'a> {
    /// Checks everything but the entries.
    pub fn open(bytes: &'a [u8], expected: &PartIdentity) -> Result<Self> {
        let (entries, left) = open_part(bytes, expected)?;
        let before = DeltaBase::start(at::FIRST_ADDRESS.u64(bytes));
        Ok(PartEntries { entries, left, group: expected.group, before })
    }

    /// The next one; `None` after the last, if nothing follows it.
    pub fn next_extent(&mut self) -> Result<Option<MapExtent>> {
        if self.left == 0 {
            let is_empty = self.entries.is_empty();
            check_field(WHAT, "extent_count", "bytes follow after the last entry", is_empty)?;
            return Ok(None);
        }
        self.left -= 1;
        let extent = get_entry(&mut self.entries, &self.before)?;
        check_hole(self.group, &extent)?;
        self.before.advance(&extent)?;
        Ok(Some(extent))
    }
}

/// What is in no segment has no place there.
fn check_hole(group: u64, extent: &MapExtent) -> Result<()> {
    let is_hole = is_delta_group(group) && extent.sequence == HOLE_SEQUENCE;
    let why = "it is not 0, and the extent is in no segment";
    check_field(WHAT, "data_offset", why, !is_hole || extent.data_offset == 0)
}

/// The CRC at the end of a part, which the checkpoint repeats; 0 for bytes that are too short.
pub fn part_crc(bytes: &[u8]) -> u32 {
    bytes.last_chunk().map_or(0, |crc| u32::from_le_bytes(*crc))
}

/// The first address of the group, as recorded in the part, for tools. Nothing but the length is
/// checked.
pub fn part_first_address(bytes: &[u8]) -> Result<u64> {
    preamble::check_available(WHAT, bytes, at::SIZE)?;
    Ok(at::FIRST_ADDRESS.u64(bytes))
}

/// The values that an entry's differences are relative to.
struct DeltaBase {
    address: u64,
    sequence: u64,
    data: u64,
}

impl DeltaBase {
    fn start(first_address: u64) -> Self {
        Self { address: first_address, sequence: 0, data: 0 }
    }

    fn advance(&mut self, extent: &MapExtent) -> Result<()> {
        check_field(WHAT, "length", "an extent is empty", extent.length > 0)?;
        let end = extent.address.checked_add(extent.length);
        let why = "an extent ends past the last address";
        self.address = end.ok_or(FormatError::Field { what: WHAT, field: "length", why })?;
        self.sequence = extent.sequence;
        self.data = u64::from(extent.data_offset).wrapping_add(extent.length);
        Ok(())
    }
}

fn get_entry(entries: &mut &[u8], base: &DeltaBase) -> Result<MapExtent> {
    let mut next = || get_varint(entries);
    let (gap, length, sequence, data) = (next()?, next()?, next()?, next()?);
    let why = "an extent begins past the last address";
    let address = base.address.checked_add(gap);
    let data_offset = u32::try_from(base.data.wrapping_add(unzigzag(data)));
    Ok(MapExtent {
        address: address.ok_or(FormatError::Field { what: WHAT, field: "address", why })?,
        length,
        sequence: base.sequence.wrapping_add(unzigzag(sequence)),
        data_offset: data_offset.map_err(|_| {
            let why = "it does not fit 32 bits";
            FormatError::Field { what: WHAT, field: "data_offset", why }
        })?,
    })
}

/// Maps small differences of either sign to small numbers: 0, -1, 1, -2, ... to 0, 1, 2, 3, ...
fn zigzag(difference: u64) -> u64 {
    (difference << 1) ^ ((difference as i64 >> 63) as u64)
}

fn unzigzag(number: u64) -> u64 {
    (number >> 1) ^ (number & 1).wrapping_neg()
}

/// Seven bits per byte, lowest first; all bytes but the last have the highest bit set.
fn put_varint(bytes: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        bytes.push(number as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
}

fn get_varint(bytes: &mut &[u8]) -> Result<u64> {
    let bad = |why| FormatError::Field { what: WHAT, field: "entries", why };
    let mut number = 0;
    for shift in (0..64).step_by(7) {
        let (&byte, rest) = bytes.split_first().ok_or(bad("a number is cut short"))?;
        *bytes = rest;
        let bits = u64::from(byte & 0x7f);
        if bits << shift >> shift != bits {
            return Err(bad("a number does not fit 64 bits"));
        }
        number |= bits << shift;
        if byte < 0x80 {
            return if byte == 0 && shift > 0 {
                Err(bad("a number is longer than needed"))
            } else {
                Ok(number)
            };
        }
    }
    Err(bad("a number does not fit 64 bits"))
}

/// The key of a part.
pub fn part_key(identity: &PartIdentity) -> String {
    let PartIdentity { volume_id, group, number, put_id } = identity;
    format!("{}{number:020}-{put_id}/{group:08x}", map_prefix(*volume_id))
}

/// The prefix of all parts of a volume, for listing.
pub fn map_prefix(volume_id: VolumeId) -> String {
    format!("{volume_id}/map/")
}

/// The identity in a part's key; `None` when it is another key.
pub fn parse_part_key(key: &str) -> Option<PartIdentity> {
    let (volume_id, rest) = key.split_once("/map/")?;
    let (directory, group) = rest.split_once('/')?;
    let (number, put_id) = directory.split_once('-')?;
    let identity = PartIdentity {
        volume_id: volume_id.parse().ok()?,
        group: u64::from_str_radix(group, 16).ok()?,
        number: parse_number(number)?,
        put_id: put_id.parse().ok()?,
    };
    (part_key(&identity) == key).then_some(identity)
}
