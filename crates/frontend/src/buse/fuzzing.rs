//! The properties that every parsed chunk must have; for [`crate::fuzzing`].
//!
//! Not here: where the bytes come from, and what a change does.

use sawmill_device::Operation;

use super::protocol::ChunkLayout;

const BLOCK_BYTES: u64 = 512;

/// Parses bytes as a chunk with so many records; panics if a change lies outside of it, or is
/// longer than a write may be.
pub(crate) fn chunk(bytes: &[u8], records: u64, write_bytes_max: u64) {
    let chunk_bytes = bytes.len() as u64 / BLOCK_BYTES * BLOCK_BYTES;
    let layout = ChunkLayout { chunk_bytes, block_bytes: BLOCK_BYTES };
    for change in layout.changes(bytes, records, write_bytes_max).unwrap_or_default() {
        assert!(change.address.checked_add(change.length).is_some() && change.length > 0);
        if change.operation == Operation::Write {
            assert!(change.length <= write_bytes_max, "as long as a write may be");
            assert!(change.data_at as u64 + change.length <= chunk_bytes, "within the chunk");
            assert!(change.data_at as u64 >= chunk_bytes / BLOCK_BYTES * 32, "behind the records");
        }
    }
}
