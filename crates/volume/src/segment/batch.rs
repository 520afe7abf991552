//! When a batch is full. Not here: age and demand, which seal one earlier (`engine::log_tail`).

use crate::limits;

/// Whether a batch of this size takes no more records. The record that fills it is still in it, so
/// a segment may hold up to a record more than `segment_bytes`.
pub(crate) fn is_full(payload_bytes: u64, records: usize, segment_bytes: u32) -> bool {
    payload_bytes >= u64::from(segment_bytes) || records >= limits::SEGMENT_RECORDS_MAX
}
