//! Where segments lie in the store. The low digits come first, to spread the load over a store's
//! partitions.
//!
//! Invariant: a segment has one key. A key that `segment_key` would not make does not parse.

use crate::ids::VolumeId;
use crate::layout::parse_number;

/// The key of a segment.
pub fn segment_key(volume_id: VolumeId, sequence: u64) -> String {
    format!("{volume_id}/seg/{:02x}/{sequence:020}", sequence % 256)
}

/// The prefix of all segments of a volume, for listing.
pub fn segment_prefix(volume_id: VolumeId) -> String {
    format!("{volume_id}/seg/")
}

/// The volume and sequence in a segment's key; `None` when it is another key.
pub fn parse_segment_key(key: &str) -> Option<(VolumeId, u64)> {
    let (volume_id, rest) = key.split_once("/seg/")?;
    let (_, sequence) = rest.split_once('/')?;
    let parsed = (volume_id.parse().ok()?, parse_number(sequence)?);
    (segment_key(parsed.0, parsed.1) == key).then_some(parsed)
}
