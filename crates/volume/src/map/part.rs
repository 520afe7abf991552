//! A group of the object map, or a delta, as an object of the store, with the entry by which a
//! checkpoint names it.
//!
//! Invariant: no object is longer than readers accept. A longer one is refused when it is made,
//! with what to do; the checkpoint before and the log after it still lead to the same state.
//!
//! Not here: which groups are written (`freeze`, `cuts::clones`), the bytes
//! (`sawmill_format::map_part`), and fetching them (`recovery`).

use sawmill_format::checkpoint::PartEntry;
use sawmill_format::map_part::{
    PartEntries, PartIdentity, decode_part, encode_part, is_delta_group, part_crc, part_key,
};

use super::{DATA_SPACE_BYTES, GROUP_BYTES, MapExtent};
use crate::{Error, ErrorKind, Result};

/// An encoded group, its key, and its entry in the root.
pub(crate) struct MapPart {
    pub(crate) entry: PartEntry,
    pub(crate) key: String,
    pub(crate) bytes: Vec<u8>,
}

impl MapPart {
    /// Encodes all `extents` of a group or delta. `bytes_max` is at most
    /// [`MAP_PART_BYTES_MAX`](crate::limits::MAP_PART_BYTES_MAX).
    pub(crate) fn encode(
        identity: &PartIdentity,
        extents: Vec<MapExtent>,
        bytes_max: u64,
    ) -> Result<Self> {
        // Not even built: it could take more memory than the machine has.
        let least_bytes = extents.len() as u64 * EXTENT_BYTES_MIN;
        if least_bytes > bytes_max {
            return Err(too_long(identity.group, extents.len(), least_bytes, bytes_max));
        }
        let extents: Vec<_> = extents.into_iter().map(Into::into).collect();
        let first_address = first_address(identity.group);
        let bytes = encode_part(identity, first_address, &extents).map_err(|error| {
            Error::caused(ErrorKind::Internal, "the map cannot be written", error)
        })?;
        let fits = bytes.len() as u64 <= bytes_max;
        let sizes = (u32::try_from(bytes.len()), u32::try_from(extents.len()));
        let (true, (Ok(length_bytes), Ok(extent_count))) = (fits, sizes) else {
            let length_bytes = bytes.len() as u64;
            return Err(too_long(identity.group, extents.len(), length_bytes, bytes_max));
        };
        let entry = PartEntry {
            group: identity.group,
            number: identity.number,
            put_id: identity.put_id,
            bytes: length_bytes,
            extents: extent_count,
            crc: part_crc(&bytes),
        };
        Ok(MapPart { entry, key: part_key(identity), bytes })
    }
}

/// The extents of a part. `advice` ends the error.
pub(crate) fn extents_in(
    bytes: &[u8],
    identity: &PartIdentity,
    advice: &str,
) -> Result<Vec<MapExtent>> {
    let extents = decode_part(bytes, identity).map_err(|error| {
        let text = format!("{}: {error}; {advice}", part_key(identity));
        Error::new(ErrorKind::Corrupt, text).with_source(error)
    })?;
    let kept = extents.into_iter().map(|extent| {
        Ok(MapExtent {
            address: extent.address,
            length: extent.length,
            sequence: sequence32(extent.sequence)?,
            data_offset: extent.data_offset,
        })
    });
    kept.collect()
}

/// Reads a part without keeping its extents. Returns how many there are, if a map of `size_bytes`
/// takes all of them and all lie in the group; `None` otherwise. Another writer may give groups
/// another size (`docs/format/map_part.md`): then a number does not tell which bytes it is for.
pub(crate) fn extents_of_group(
    bytes: &[u8],
    identity: &PartIdentity,
    size_bytes: u64,
) -> sawmill_format::Result<Option<u32>> {
    let mut entries = PartEntries::open(bytes, identity)?;
    let (mut count, mut are_usual) = (0, true);
    while let Some(extent) = entries.next_extent()? {
        count += 1;
        // The format has no empty ones.
        let last = (extent.address + extent.length).saturating_sub(1);
        are_usual &= last < size_bytes
            && extent.address / GROUP_BYTES == identity.group
            && last / GROUP_BYTES == identity.group
            && extent.length <= DATA_SPACE_BYTES - u64::from(extent.data_offset)
            && extent.sequence <= u64::from(u32::MAX);
    }
    Ok(are_usual.then_some(count))
}

/// A sequence as the map keeps it.
pub(crate) fn sequence32(sequence: u64) -> Result<u32> {
    u32::try_from(sequence).map_err(|_| {
        let text =
            format!("segment sequence {sequence} is beyond what this version can hold in memory");
        Error::new(ErrorKind::Invalid, text)
    })
}

/// An entry is four numbers of a byte at least (`docs/format/map_part.md`).
const EXTENT_BYTES_MIN: u64 = 4;

fn first_address(group: u64) -> u64 {
    if is_delta_group(group) { 0 } else { group * GROUP_BYTES }
}

fn too_long(group: u64, extent_count: usize, length_bytes: u64, bytes_max: u64) -> Error {
    let start = first_address(group);
    let text = format!(
        "no checkpoint can be written: map group {group} (bytes {start} to {} of the disk) has \
         {extent_count} extents, which take {length_bytes} bytes or more, and the limit is \
         {bytes_max} bytes; nothing is lost: every write is in the log; export the volume and \
         import it as a new one",
        start + GROUP_BYTES
    );
    Error::new(ErrorKind::Full, text)
}

#[cfg(test)]
mod tests {
    use sawmill_format::ids::{PutId, VolumeId};

    use super::*;

    /// Extents of one byte each, with a hole after each.
    fn byte_extents(group: u64, count: u64) -> Vec<MapExtent> {
        let extent = |number: u64| MapExtent {
            address: group * GROUP_BYTES + 2 * number,
            length: 1,
            sequence: 1,
            data_offset: number as u32,
        };
        (0..count).map(extent).collect()
    }

    #[test]
    fn a_map_part_longer_than_readers_accept_is_refused_when_it_is_made() {
        let identity = PartIdentity {
            volume_id: VolumeId([1; 16]),
            group: 3,
            number: 9,
            put_id: PutId([2; 16]),
        };
        let part = MapPart::encode(&identity, byte_extents(3, 100), u64::MAX).unwrap();
        let length_bytes = part.bytes.len() as u64;
        assert_eq!((part.entry.bytes, part.entry.extents), (length_bytes as u32, 100));
        assert_eq!(decode_part(&part.bytes, &identity).unwrap().len(), 100);
        assert!(MapPart::encode(&identity, byte_extents(3, 100), length_bytes).is_ok());
        let refused = MapPart::encode(&identity, byte_extents(3, 100), length_bytes - 1);
        let error = refused.map(drop).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Full);
        assert!(error.to_string().contains("map group 3"), "{error}");
    }
}
