//! The bounds of the engine. Where bounds depend on each other, the inequality is here too, proved
//! at compile time.
//!
//! Invariants: a fence reserves more names than a stale writer can have puts in flight. The
//! smallest staging ring holds two of the largest records, and a span with one more record.
//!
//! Not here: durations, which stand beside the code that waits, and the limits of a store's client
//! (`sawmill_store`).

use sawmill_format::journal::RECORD_HEADER_BYTES;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const TIB: u64 = 1 << 40;

/// The simulation runs the engine with small sizes (feature `small-limits`, package
/// `sawmill-volume-small`), so that short histories meet the end of every ring, segment, area and
/// window. Nothing else differs.
const fn sized(usual: u64, small: u64) -> u64 {
    if cfg!(feature = "small-limits") { small } else { usual }
}

/// The largest volume.
pub const SIZE_BYTES_MAX: u64 = 64 * TIB;
/// The longest read or write in one request.
pub const REQUEST_BYTES_MAX: u32 = 32 << 20;
/// The longest write that is one record, and so is whole or absent after any failure. Longer ones
/// are split.
pub const RECORD_PAYLOAD_BYTES_MAX: u64 = sized(MIB, 16 * KIB);
/// Size of an uncompressed frame.
pub const FRAME_BYTES: u32 = sized(64 * KIB, 4 * KIB) as u32;

/// Smallest, usual and largest segment.
pub const SEGMENT_BYTES_MIN: u32 = sized(256 * KIB, 16 * KIB) as u32;
/// See [`SEGMENT_BYTES_MIN`].
pub const SEGMENT_BYTES_DEFAULT: u32 = 8 << 20;
/// See [`SEGMENT_BYTES_MIN`].
pub const SEGMENT_BYTES_MAX: u32 = 64 << 20;
/// The most records one segment takes: bounds the header of a segment at 4 MiB.
pub const SEGMENT_RECORDS_MAX: usize = sized(128 * KIB, 24) as usize;

/// The buffers that segments are built in are multiples of this size, so that segments of almost
/// equal size fit the same buffer.
pub const BUFFER_STEP_BYTES: usize = sized(256 * KIB, 8 * KIB) as usize;

/// Usual and largest number of segments in flight to the store.
pub const UPLOADS_DEFAULT: u32 = 6;
/// See [`UPLOADS_DEFAULT`].
pub const UPLOADS_MAX: u32 = sized(32, 8) as u32;
/// How many names a fence reserves.
pub const FENCE_WINDOW: u64 = sized(sawmill_format::segment::FENCE_WINDOW, 16);
/// A rollback takes two segments: the snapshot that undoes it, then the rollback.
pub const UNDO_UPLOADS_EXTRA: u64 = 1;
/// Collection may have this many segments in flight beyond the limit of uploads: otherwise writers
/// that use up the limit would keep garbage from ever being collected.
pub const MOVED_UPLOADS_EXTRA: u64 = 1;
// A stale writer can have put nothing at or past its first unstored sequence + `UPLOADS_MAX` +
// `MOVED_UPLOADS_EXTRA` + `UNDO_UPLOADS_EXTRA`. A fence at that first unstored sequence reserves
// FENCE_WINDOW names, so no later writer ever meets a late put.
const _: () =
    assert!((UPLOADS_MAX as u64) + MOVED_UPLOADS_EXTRA + UNDO_UPLOADS_EXTRA < FENCE_WINDOW);

/// Usual size of the journal.
pub const JOURNAL_BYTES_DEFAULT: u64 = GIB;
/// Bytes at the journal's end that only padding may use, so that a flush can always end in a whole
/// block.
pub(crate) const PAD_RESERVE_BYTES: u64 = 2 * sawmill_sys::BLOCK_BYTES;
/// Usual size of the staging ring.
pub const STAGING_BYTES_DEFAULT: u64 = 32 * MIB;
/// Smallest staging ring: two of the largest records and the pad of a flush.
pub const STAGING_BYTES_MIN: u64 = sized(4 * MIB, 64 * KIB);
const _: () = assert!(
    STAGING_BYTES_MIN >= 2 * (RECORD_PAYLOAD_BYTES_MAX + RECORD_HEADER_BYTES as u64) + 8 * KIB
);

/// Records that are not yet stored: past this, writes wait although the journal has room, so that
/// memory stays bounded (about 150 bytes each). Writes of 512 bytes reach it in a journal of more
/// than 2.3 GiB, writes of 4 KiB in one of more than 16 GiB; discards and zeroes, which take 80
/// bytes each, after 320 MiB.
pub const RECORDS_UNSTORED_MAX: usize = sized(4 * MIB, 60) as usize;
// A journal of the usual size is full before that, however small the writes. (Short histories are
// meant to reach the small number.)
const _: () = assert!(
    cfg!(feature = "small-limits")
        || RECORDS_UNSTORED_MAX as u64 * (RECORD_HEADER_BYTES as u64 + 512)
            >= JOURNAL_BYTES_DEFAULT
);
/// Records kept for reading after they are stored, while their bytes are still in the journal.
pub const RECORDS_RESIDENT_MAX: usize = sized(384 * KIB, 20) as usize;
/// Written segments that enter the read cache at once: one at work and one that waits for it. Each
/// holds a segment in memory.
pub const SEGMENTS_CACHING_MAX: usize = sized(2, 1) as usize;
/// Bytes of memory of all volumes of a cache for written data that waits to enter it.
pub const CACHING_BYTES_MAX: u64 = sized(256 * MIB, 8 * MIB);
/// The journal may have so many times the bytes that are wanted of a segment: beyond that, reading
/// them back costs more than it is worth.
pub const READ_BACK_WASTE_MAX: u64 = 4;
/// So many bytes that follow each other on the disk and in a segment are a stream, which enters the
/// read cache when it is read and not before; half a segment, if that is less.
pub const STREAM_BYTES: u64 = MIB;

/// Orders (snapshots, retention, rollbacks) and resizes of one volume that wait at the same time:
/// more are refused.
pub const ORDERS_WAITING_MAX: usize = sized(1024, 16) as usize;

/// Usual bytes of log between two checkpoints.
pub const CHECKPOINT_BYTES_DEFAULT: u64 = GIB;
/// Usual bound of what is in flight ahead of a volume's readers, and of what has arrived and waits
/// for them in memory. It fills a way to the store of 20 ms and 1.6 GB/s.
pub const PREFETCH_BYTES_DEFAULT: u64 = sized(32 * MIB, MIB);
/// What all volumes of a process together keep in memory ahead of their readers.
pub const AHEAD_MEMORY_BYTES_MAX: u64 = sized(256 * MIB, 8 * MIB);
/// The most that one get fetches for readers: a longer run is several gets in parallel, because one
/// connection carries less than the way to the store does.
pub const RUN_BYTES_MAX: u64 = sized(MIB, 16 * KIB);
/// Threads that wait for local disks on behalf of readers.
pub const READER_THREADS_MAX: usize = 8;
/// Bytes fetched to learn a segment's header; a longer header costs a second request.
pub const HEADER_PROBE_BYTES: u64 = sized(64 * KIB, 512);
/// Segment headers fetched at once by roll-forward.
pub const ROLL_FORWARD_PARALLEL_MAX: usize = sized(32, 3) as usize;
/// How many objects a command (a clone, a promotion) puts at once, each whole in memory.
pub const PUTS_PARALLEL_MAX: usize = sized(16, 2) as usize;
/// The log is written to the journal disk in spans of about this size: each costs a wake of the
/// journal's thread and one of the engine's.
pub const SPAN_BYTES: u64 = sized(MIB, 4 * KIB);
/// How many blocks of a new journal are written ahead of its end at a time.
pub const ZEROED_AHEAD_BYTES: u64 = sized(MIB, 16 * KIB);
// The staging ring must not fill up before a whole span is waiting to be written.
const _: () = assert!(STAGING_BYTES_MIN >= SPAN_BYTES + RECORD_PAYLOAD_BYTES_MAX + 8 * KIB);
/// After this many logged bytes a superblock records them, even if nothing else writes one.
pub const MARK_BYTES: u64 = sized(32 * MIB, 64 * KIB);
/// Bytes of a journal read at once by a scan.
pub const SCAN_BYTES: u64 = sized(2 * MIB, 16 * KIB);
/// The first such read; each next one is twice as long. Usually little is left to scan, and an
/// attach waits for it.
pub const SCAN_FIRST_BYTES: u64 = sized(64 * KIB, 4 * KIB);

/// The smallest journal for a volume with segments of `segment_bytes`: four times that. One is
/// being filled and one uploaded, and headers, padding and the staging ring's reach take room too.
/// In a smaller one, a full journal could wait for a segment that cannot be sealed.
#[must_use]
pub const fn journal_bytes_min(segment_bytes: u32) -> u64 {
    let four_segments = 4 * segment_bytes as u64;
    let floor = sized(16 * MIB, 128 * KIB);
    if four_segments > floor { four_segments } else { floor }
}

/// Positions never get here: at 10 GiB a second it takes 13 years of writing. A position beyond it
/// is damage, and is refused before any arithmetic with it.
pub const POSITION_MAX: u64 = 1 << 62;

/// Segment sequences are kept in 32 bits in memory; a volume that reaches this many stops for good.
/// At a segment of 8 MiB that is 32 PiB written.
pub const SEQUENCE_MAX: u64 = u32::MAX as u64 - 2 * FENCE_WINDOW;

/// Bytes of address space in one group: the unit in which a checkpoint writes the object map.
pub const MAP_GROUP_BYTES: u64 = sized(16 * GIB, 512 * KIB);
/// The longest object of each kind that is read as a whole: one that claims to be longer is
/// damaged, and no memory is allocated for it. A checkpoint of this size names 19 million segments:
/// 150 TiB of them at their usual size. A writer whose checkpoint would be longer stops instead.
pub const CHECKPOINT_BYTES_MAX: u64 = GIB;
/// A map part: the extents of one group of addresses. A checkpoint gives its length 32 bits. An
/// extent takes four numbers of 1 to 10 bytes. An extent may be a single byte, so no size of a
/// group makes all parts fit: a writer refuses a longer part (`map::part`). Four bytes an extent,
/// the least, make a billion extents in this length; a map of as many takes more memory than that.
pub const MAP_PART_BYTES_MAX: u64 = u32::MAX as u64;
// Extents of whole sectors always fit: each of their four numbers has 34 bits at most, so 5 bytes.
const _: () = assert!(20 * (MAP_GROUP_BYTES / 512) <= MAP_PART_BYTES_MAX);
/// A segment: its data, one record more, and its header.
pub const SEGMENT_OBJECT_BYTES_MAX: u64 = 2 * SEGMENT_BYTES_MAX as u64;
/// Frames on their way while a volume's read cache is warmed: 16 MiB.
pub const WARM_FRAMES_MAX: usize = 256;
/// Addresses looked at in one step of warming.
pub const WARM_LOOK_BYTES_MAX: u64 = GIB;
/// Of a boot set, fetched when a volume was opened if its user chooses nothing: whoever may write
/// below the base can have each of its clones fetch so much.
pub const BOOT_SET_FETCH_BYTES_DEFAULT: u64 = 512 << 20;
/// Ranges of a boot set, and their bytes: what a start reads, not a whole disk.
pub const BOOT_SET_RANGES_MAX: usize = sawmill_format::boot_set::RANGES_MAX;
/// See [`BOOT_SET_RANGES_MAX`].
pub const BOOT_SET_BYTES_MAX: u64 = 4 << 30;
/// Records of names and volumes, pins, roles, and all else that is small.
pub const RECORD_OBJECT_BYTES_MAX: u64 = MIB;

/// Bytes of address space under one lock of the object map.
pub const MAP_AREA_BYTES: u64 = sized(16 * MIB, 8 * KIB);
/// A list of the object map shorter than this is never made dense.
pub const MAP_DENSE_FROM_RUNS: usize = sized(2048, 8) as usize;
/// Bytes of address space under one lock of the journal map.
pub const JOURNAL_AREA_BYTES: u64 = sized(MIB, 16 * KIB);
/// Entries of the journal map longer than this go to its wide layer.
pub const JOURNAL_NARROW_BYTES_MAX: u64 = sized(16 * MIB, 64 * KIB);
/// Bytes of address space in one area of the wide layer.
pub const JOURNAL_WIDE_AREA_BYTES: u64 = sized(16 * GIB, 128 * KIB);

/// One plan of collection may move at least this many segments of live data, because each plan
/// costs a pass over the map.
pub const GC_PLAN_SEGMENTS_MIN: u64 = sized(8, 3);
/// A plan for a large map may be larger: this many bytes for each of its extents.
pub const GC_PLAN_BYTES_PER_EXTENT: u64 = 16;
/// The longest hole between two pieces of victims that is plugged with other segments' data.
pub const GC_HOLE_BYTES_MAX: u64 = sized(8 * KIB, 600);
/// Writers whose segments have more bytes than this a second are busy: collection waits for them,
/// as long as garbage is not pressing.
pub const BUSY_BYTES_PER_S: u64 = sized(64 * 1024 * KIB, 256 * KIB);
/// The most extents of one moved segment: bounds its header at 5 MiB.
pub const GC_EXTENTS_MAX: usize = sized(128 * KIB, 40) as usize;
/// Two wanted frames with at most this many between them are fetched by one request.
pub const GC_GAP_FRAMES_MAX: u32 = sized(4, 2) as u32;

/// Changes of one group that are told apart, for a delta: when there are more, the whole group is
/// written. Each takes 8 bytes until the next checkpoint.
pub const MAP_CHANGES_MAX: usize = sized(512 * KIB, 16) as usize;
/// A checkpoint has a delta when the groups that it would otherwise write whole have this many
/// bytes together. Smaller maps are written as all versions can read them.
pub const MAP_DELTA_FROM_BYTES: u64 = sized(4 * MIB, 64);
/// About the most deltas of one checkpoint: each is an object more to read when a volume is opened.
pub const MAP_DELTAS_MAX: u64 = sized(128, 8);
/// A volume opens without loading a map whose parts have this many bytes together: each group is
/// loaded when it is first needed, and all of them soon. Loading a smaller one takes less than a
/// fifth of a second.
pub const MAP_HELD_FROM_BYTES: u64 = sized(16 * MIB, 0);

/// The bounds of one attachment that nothing but a huge volume reaches. A test sets them lower.
#[derive(Clone, Copy, Debug)]
pub struct AttachmentBounds {
    /// [`RECORDS_UNSTORED_MAX`], or fewer.
    pub records_unstored_max: usize,
    /// [`MAP_PART_BYTES_MAX`], or fewer.
    pub map_part_bytes_max: u64,
    /// [`MAP_DELTA_FROM_BYTES`], or fewer.
    pub map_delta_from_bytes: u64,
    /// [`MAP_HELD_FROM_BYTES`], or fewer.
    pub map_held_from_bytes: u64,
}

impl Default for AttachmentBounds {
    fn default() -> Self {
        AttachmentBounds {
            records_unstored_max: RECORDS_UNSTORED_MAX,
            map_part_bytes_max: MAP_PART_BYTES_MAX,
            map_delta_from_bytes: MAP_DELTA_FROM_BYTES,
            map_held_from_bytes: MAP_HELD_FROM_BYTES,
        }
    }
}

/// Checkpoints in one retention window from which retained moments start: each checkpoint repeats
/// their list (some 80 bytes each). A moment is rebuilt by rolling forward from one of them,
/// through at most this fraction of the window's log.
pub const RETAINED_PER_WINDOW_MAX: u64 = sized(256, 3);

/// `check` lists at most this many effects of one damaged object, and counts the rest.
pub const CHECK_COSTS_MAX: usize = 16;
/// `check` lists at most this many stranded segments, and counts the rest.
pub const CHECK_STRANDED_MAX: usize = 16;
