//! Every bound of the engine, with the inequality that ties it to the others, proved at compile time.

use sawmill_format::journal::RECORD_HEADER_BYTES;
use sawmill_format::segment::FENCE_WINDOW;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const TIB: u64 = 1 << 40;

/// The largest volume.
pub const SIZE_BYTES_MAX: u64 = 64 * TIB;
/// The longest read or write in one request.
pub const REQUEST_BYTES_MAX: u32 = 32 << 20;
/// The longest write that is one record, and so is whole or absent after any failure. Longer ones are split.
pub const RECORD_PAYLOAD_BYTES_MAX: u64 = MIB;
/// Size of an uncompressed frame.
pub const FRAME_BYTES: u32 = 64 << 10;

/// Smallest, usual and largest batch.
pub const SEGMENT_BYTES_MIN: u32 = 256 << 10;
/// See [`SEGMENT_BYTES_MIN`].
pub const SEGMENT_BYTES_DEFAULT: u32 = 8 << 20;
/// See [`SEGMENT_BYTES_MIN`].
pub const SEGMENT_BYTES_MAX: u32 = 64 << 20;
/// The most records one batch takes: bounds the header of a segment at 4 MiB.
pub const SEGMENT_RECORDS_MAX: usize = 128 << 10;

/// Usual and largest number of segments on their way to the store.
pub const UPLOADS_DEFAULT: u32 = 6;
/// See [`UPLOADS_DEFAULT`].
pub const UPLOADS_MAX: u32 = 32;
// A stale writer can have put nothing at or past (its first unstored sequence + UPLOADS_MAX); a fence at that
// first unstored sequence reserves FENCE_WINDOW names, so no later writer ever meets a late put.
const _: () = assert!((UPLOADS_MAX as u64) < FENCE_WINDOW);

/// Usual size of the journal.
pub const JOURNAL_BYTES_DEFAULT: u64 = GIB;
/// Usual size of the staging ring.
pub const STAGING_BYTES_DEFAULT: u64 = 32 * MIB;
/// Smallest staging ring: two of the largest records and the pad of a flush.
pub const STAGING_BYTES_MIN: u64 = 4 * MIB;
const _: () =
    assert!(STAGING_BYTES_MIN >= 2 * (RECORD_PAYLOAD_BYTES_MAX + RECORD_HEADER_BYTES as u64) + 8 * KIB);

/// Records that are not yet stored: past this, writes wait although the journal has room, so that
/// memory stays bounded (about 150 bytes each).
pub const RECORDS_UNSTORED_MAX: usize = 1 << 20;
/// Records kept for reading after they are stored, while their bytes are still in the journal.
pub const RECORDS_RESIDENT_MAX: usize = 384 << 10;

/// Usual bytes of log between two checkpoints.
pub const CHECKPOINT_BYTES_DEFAULT: u64 = GIB;
/// Usual bytes read ahead of a sequential reader.
pub const PREFETCH_BYTES_DEFAULT: u64 = MIB;
/// Threads that wait for local disks on behalf of readers.
pub const READER_THREADS: usize = 8;
/// Bytes fetched to learn a segment's header; a longer header costs a second request.
pub const HEADER_PROBE_BYTES: u64 = 64 * KIB;
/// Segment headers fetched at once by roll-forward.
pub const ROLL_FORWARD_PARALLEL: usize = 32;
/// The log is written to the journal disk in spans of about this size: each costs a wake of the journal's
/// thread and one of the keeper's.
pub const SPAN_BYTES: u64 = MIB;
// A writer that waits for staging memory waits for less than a span to become one.
const _: () = assert!(STAGING_BYTES_MIN >= SPAN_BYTES + RECORD_PAYLOAD_BYTES_MAX + 8 * KIB);
/// Bytes logged after which the superblock learns of it even when nobody else writes one.
pub const MARK_BYTES: u64 = 32 * MIB;

/// The smallest journal for a volume with batches of `segment_bytes`: one batch being filled, one being
/// uploaded, and the staging ring's reach; otherwise a full journal could wait for a batch that cannot seal.
#[must_use]
pub const fn journal_bytes_min(segment_bytes: u32) -> u64 {
    let two_batches = 4 * segment_bytes as u64;
    let floor = 16 * MIB;
    if two_batches > floor { two_batches } else { floor }
}

/// Segment sequences are kept in 32 bits in memory; a volume that reaches this many stops for good.
/// At a segment of 8 MiB that is 32 EiB written.
pub const SEQUENCE_MAX: u64 = u32::MAX as u64 - 2 * FENCE_WINDOW;
