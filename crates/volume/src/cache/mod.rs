//! The read cache: frames of stored segments on a local disk, shared by all volumes of a process.
//!
//! A frame is identified by the segment it is part of (owner, sequence, epoch) and its number
//! there. Segments never change, so nothing in the cache ever becomes outdated, only unneeded.
//!
//! Invariants:
//! - A hit is verified: by the checksum of every block it touches (4 KiB each in a usual frame),
//!   and by a second check, after the read, that the cell still holds the same frame. Whatever
//!   happens to the disk, to the saved index or in a race, the worst answer is a miss.
//! - No lock is held during I/O, and a look-up takes none at all.
//! - The cache never fails its user: a disk that cannot be written turns insertion off for a while,
//!   a saved index that cannot be used leaves an empty cache, and [`CacheMetrics`] shows it.
//! - Only callers that have entered the disk (`CacheDisk`) touch disk and index: once
//!   [`ReadCache::release`] has returned, another process may open both, even if this cache is
//!   still referenced.
//!
//! Modules: `index` (what lies where), `eviction` (what goes next), `persist` (the saved index),
//! `cache_disk` (the disk, until it is released), `fill_room` (memory of what waits to enter). Not
//! here: opening files, and fetching what misses.

mod cache_disk;
mod eviction;
mod fill_room;
mod index;
mod open;
mod persist;
#[cfg(test)]
mod tests;

use std::cell::RefCell;
use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use parking_lot::Mutex;
use sawmill_format::crc::payload_check;
use sawmill_format::ids::VolumeId;

use self::cache_disk::CacheDisk;
use self::eviction::Eviction;
use self::index::{CRCS, CellHit, FrameFacts, Index, WriteTurn};
use self::persist::HEADER_BYTES;
use crate::disk::Disk;
use crate::limits;
pub(crate) use fill_room::FillRoom;
pub use open::open_cache;

/// The smallest unit of verification.
const BLOCK_BYTES_MIN: u32 = 4096;
/// After a failed write the first so many insertions are skipped, and twice as many after each
/// further one.
const PAUSE_INSERTS: u32 = 64;
const PAUSE_INSERTS_MAX: u32 = 64 << 10;

/// How large the cache is.
#[derive(Clone, Copy, Debug)]
pub struct CacheOptions {
    /// Bytes of the disk to use; the disk's size if that is smaller.
    pub cache_bytes: u64,
    /// The longest frame, in bytes.
    pub frame_bytes: u32,
}

impl Default for CacheOptions {
    fn default() -> Self {
        CacheOptions { cache_bytes: u64::MAX, frame_bytes: 64 << 10 }
    }
}

/// A short name for a volume, valid in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct OwnerId(u32);

/// Which frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FrameKey {
    /// The volume whose segment it is, see [`ReadCache::owner`].
    pub owner: OwnerId,
    /// The segment's sequence.
    pub sequence: u32,
    /// The segment's epoch.
    pub epoch: u64,
    /// The frame's number in the segment.
    pub frame: u32,
}

/// What a look-up that must not wait found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheRead {
    /// The bytes are in place and verified.
    Hit,
    /// The frame is cached, but its bytes have to come from the device: call [`ReadCache::read`]
    /// where one may wait. The buffer's content is undefined.
    Slow,
    /// Not cached. The buffer's content is undefined.
    Miss,
}

/// What became of a frame that nobody has read yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpareInsert {
    /// It is in the cache now.
    Kept,
    /// It was there.
    Present,
    /// All other cells hold what was read lately, or belong to the half that stays.
    NoRoom,
    /// It is empty, or longer than a cell.
    Unfit,
    /// The disk takes nothing.
    Off,
}

/// How loading the saved index at open ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum IndexState {
    /// There was none.
    New,
    /// It was used.
    Restored {
        /// Frames it named.
        frames: u32,
    },
    /// It could not be used; the cache started empty.
    Discarded {
        /// Why.
        reason: String,
    },
}

/// The state of the cache. Counters count from open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheMetrics {
    /// Reads answered from the cache.
    pub hits: u64,
    /// Reads that found nothing (valid).
    pub misses: u64,
    /// Frames inserted.
    pub inserted: u64,
    /// Frames given up for others.
    pub evicted: u64,
    /// Frames dropped because their bytes were not those written, or could not be read.
    pub damaged: u64,
    /// Frames of the saved index dropped because their cell had been reused since it was saved.
    pub stale: u64,
    /// Data bytes cached.
    pub bytes: u64,
    /// Frames cached.
    pub frames: u32,
    /// Frames that fit.
    pub frames_max: u32,
    /// Memory used for the index.
    pub memory_bytes: u64,
    /// Why nothing is inserted at present, or `None`.
    pub insertion_off: Option<String>,
    /// How loading the saved index at open ended.
    pub index: IndexState,
}

/// Where things lie on the disk.
#[derive(Clone, Copy)]
struct Layout {
    frame_bytes: u32,
    /// The unit of verification: 4 KiB for frames up to 64 KiB, larger for larger ones.
    block_bytes: u32,
    cells: u32,
}

impl Layout {
    fn new(options: CacheOptions, disk_bytes: u64) -> Self {
        // A multiple of 4 KiB, so that cells are aligned for the device; at least one page and at
        // most what the arithmetic below can handle.
        let frame_bytes =
            options.frame_bytes.clamp(BLOCK_BYTES_MIN, 1 << 30).next_multiple_of(BLOCK_BYTES_MIN);
        let block_bytes = frame_bytes.div_ceil(CRCS as u32).next_multiple_of(BLOCK_BYTES_MIN);
        let room = options.cache_bytes.min(disk_bytes).saturating_sub(HEADER_BYTES);
        let cells = (room / u64::from(frame_bytes)).min(u64::from(u32::MAX / 2)) as u32;
        Layout { frame_bytes, block_bytes, cells }
    }

    fn cell_offset(&self, cell: u32) -> u64 {
        HEADER_BYTES + u64::from(cell) * u64::from(self.frame_bytes)
    }

    /// The blocks that hold `[offset, offset + length)` of a frame of `data_bytes`, as a range of
    /// bytes.
    fn blocks(&self, offset: u32, length: usize, data_bytes: u32) -> Option<Range<usize>> {
        let (block, data_bytes) = (self.block_bytes as usize, data_bytes as usize);
        let end = (offset as usize).checked_add(length).filter(|end| *end <= data_bytes)?;
        Some(offset as usize / block * block..end.next_multiple_of(block).min(data_bytes))
    }
}

/// What changes together, behind one mutex.
struct CacheState {
    eviction: Eviction,
    turn: WriteTurn,
    bytes: u64,
    /// The largest frame number ever inserted: where a search for a segment's frames may end.
    frame_number_max: u32,
    pause: Pause,
}

/// Insertion after a failed write.
#[derive(Default)]
struct Pause {
    /// Insertions still to be skipped.
    skips_left: u32,
    /// How many insertions the last failure skips.
    length: u32,
    /// The failure, until a write succeeds.
    reason: Option<String>,
}

#[derive(Default)]
struct Counters {
    hits: AtomicU64,
    misses: AtomicU64,
    inserted: AtomicU64,
    evicted: AtomicU64,
    damaged: AtomicU64,
    stale: AtomicU64,
}

/// The read cache. All methods may be called by any number of threads at once.
pub struct ReadCache {
    place: CacheDisk,
    layout: Layout,
    index: Index,
    state: Mutex<CacheState>,
    owners: Mutex<Vec<VolumeId>>,
    counters: Counters,
    index_path: Option<PathBuf>,
    index_state: IndexState,
    /// Ties the saved index to this disk; `None` when the disk could not be marked.
    tag: Option<u64>,
    saving: Mutex<()>,
    /// Bytes that are left for written data on its way into the cache.
    fill_room_bytes: AtomicU64,
}

thread_local! {
    /// Whole blocks around a range that does not begin and end with blocks.
    static BLOCKS: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Which cells a frame may take.
#[derive(Clone, Copy, PartialEq, Eq)]
enum CellChoice {
    /// The next one to be given up.
    Any,
    /// One that costs no frame that was read lately.
    Spare,
}

/// Why the bytes of a found frame are not there.
enum ReadMiss {
    WouldBlock,
    Wrong,
}

impl ReadCache {
    /// A cache on `disk`, warm if the index saved at `index_path` belongs to it, otherwise empty.
    ///
    /// The disk has its full size already (a sparse file will do). Without a path nothing is saved.
    pub fn open(
        disk: Arc<dyn Disk>,
        index_path: Option<PathBuf>,
        options: CacheOptions,
    ) -> ReadCache {
        let layout = Layout::new(options, disk.size_bytes());
        let (index, turn) = Index::new(layout.cells, eviction::probation_cells(layout.cells) / 2);
        let eviction = Eviction::new(layout.cells);
        let mut cache = ReadCache {
            place: CacheDisk::of(disk),
            layout,
            index,
            state: Mutex::new(CacheState {
                eviction,
                turn,
                bytes: 0,
                frame_number_max: 0,
                pause: Pause::default(),
            }),
            owners: Mutex::default(),
            counters: Counters::default(),
            index_path,
            index_state: IndexState::New,
            tag: None,
            saving: Mutex::default(),
            fill_room_bytes: AtomicU64::new(limits::CACHING_BYTES_MAX),
        };
        cache.restore();
        cache
    }

    /// Lets go of disk and index for good: when this returns, they are no longer read or written
    /// and another process may open them, even if this cache is still referenced. From then on,
    /// every look-up in it is a miss.
    pub fn release(&self) {
        self.place.release();
    }

    /// The short name of a volume.
    pub fn owner(&self, volume: VolumeId) -> OwnerId {
        let mut owners = self.owners.lock();
        let known = owners.iter().position(|owner| *owner == volume);
        let number = known.unwrap_or_else(|| {
            owners.push(volume);
            owners.len() - 1
        });
        OwnerId(number as u32)
    }

    /// Whether the frame is cached. Does not check its bytes, and does not count as a visit.
    pub fn contains(&self, key: FrameKey) -> bool {
        self.index.find(&key).is_some()
    }

    /// Counts a visit of a frame, if it is cached, whose bytes were nearer elsewhere.
    pub fn visit(&self, key: FrameKey) {
        if let Some(found) = self.index.find(&key) {
            self.index.visit(found.cell);
        }
    }

    /// Reads `[offset, offset + into.len())` of a frame without waiting for the device.
    pub fn read_now(&self, key: FrameKey, offset: u32, into: &mut [u8]) -> CacheRead {
        self.look_up(key, offset, into, |disk, at, bytes| disk.read_now(at, bytes))
    }

    /// Reads `[offset, offset + into.len())` of a frame; may wait for the device. `false` is a
    /// miss, with undefined bytes in `into`.
    pub fn read(&self, key: FrameKey, offset: u32, into: &mut [u8]) -> bool {
        self.look_up(key, offset, into, |disk, at, bytes| disk.read_at(at, bytes)) == CacheRead::Hit
    }

    fn look_up(
        &self,
        key: FrameKey,
        offset: u32,
        into: &mut [u8],
        read: impl Fn(&dyn Disk, u64, &mut [u8]) -> io::Result<()>,
    ) -> CacheRead {
        let (Some(found), Some(disk)) = (self.index.find(&key), self.place.enter()) else {
            self.counters.misses.fetch_add(1, Relaxed);
            return CacheRead::Miss;
        };
        let outcome = self.verified(&found, offset, into, |at, bytes| read(&**disk, at, bytes));
        // Checked after the read: if the cell was reused meanwhile, the bytes may not be this
        // frame's.
        let is_unchanged = self.index.is_still(&found);
        match outcome {
            Some(Ok(())) if is_unchanged => {
                self.index.visit(found.cell);
                self.counters.hits.fetch_add(1, Relaxed);
                return CacheRead::Hit;
            }
            Some(Err(ReadMiss::WouldBlock)) => return CacheRead::Slow,
            Some(Err(ReadMiss::Wrong)) if is_unchanged => self.drop_damaged(&key, &found),
            _ => (),
        }
        self.counters.misses.fetch_add(1, Relaxed);
        CacheRead::Miss
    }

    /// Reads and verifies the blocks around a range. `None` when the frame is shorter than the
    /// range.
    fn verified(
        &self,
        hit: &CellHit,
        offset: u32,
        into: &mut [u8],
        read: impl Fn(u64, &mut [u8]) -> io::Result<()>,
    ) -> Option<Result<(), ReadMiss>> {
        let range = self.layout.blocks(offset, into.len(), hit.data_bytes)?;
        let at = self.layout.cell_offset(hit.cell) + range.start as u64;
        let get = |bytes: &mut [u8]| {
            read(at, bytes).map_err(|error| match error.kind() {
                io::ErrorKind::WouldBlock => ReadMiss::WouldBlock,
                _ => ReadMiss::Wrong,
            })?;
            let block_bytes = self.layout.block_bytes as usize;
            let first = range.start / block_bytes;
            let mut blocks = bytes.chunks(block_bytes).zip(first..);
            let valid = blocks
                .all(|(block, number)| payload_check(block) == self.index.crc(hit.cell, number));
            if valid { Ok(()) } else { Err(ReadMiss::Wrong) }
        };
        if range.len() == into.len() {
            return Some(get(into));
        }
        Some(BLOCKS.with_borrow_mut(|blocks| {
            if blocks.len() < range.len() {
                blocks.resize(range.len(), 0);
            }
            let blocks = &mut blocks[..range.len()];
            get(blocks)?;
            let start = offset as usize - range.start;
            into.copy_from_slice(&blocks[start..start + into.len()]);
            Ok(())
        }))
    }

    /// Forgets a frame whose bytes are wrong, unless its cell has been reused by now.
    fn drop_damaged(&self, key: &FrameKey, hit: &CellHit) {
        let mut state = self.state.lock();
        if !self.index.is_still(hit) {
            return;
        }
        self.remove(&mut state, hit.cell);
        state.eviction.free(hit.cell);
        drop(state);
        if hit.is_restored() {
            self.counters.stale.fetch_add(1, Relaxed);
        } else {
            self.counters.damaged.fetch_add(1, Relaxed);
            tracing::warn!(?key, cell = hit.cell, "read cache: damaged frame dropped");
        }
    }

    /// Takes the frame in a filled cell out of the index.
    fn remove(&self, state: &mut CacheState, cell: u32) {
        state.bytes -= u64::from(self.index.clear(&mut state.turn, cell));
    }

    /// Inserts a frame's data, unless it is there, empty, or longer than a cell. May wait for the
    /// disk. See [`contains`](Self::contains) for whether it is there now.
    pub fn insert(&self, key: FrameKey, data: &[u8]) {
        self.insert_for(CellChoice::Any, key, data);
    }

    /// As [`insert`](Self::insert), for a frame that nobody has read yet: no frame that was read
    /// lately makes room for it, and half of the cache stays as it is.
    pub fn insert_spare(&self, key: FrameKey, data: &[u8]) -> SpareInsert {
        self.insert_for(CellChoice::Spare, key, data)
    }

    /// Frames for which [`insert_spare`](Self::insert_spare) has room at present: with more, the
    /// later ones take the place of the earlier.
    pub fn spare_frames(&self) -> u32 {
        self.state.lock().eviction.spare(&self.index)
    }

    fn insert_for(&self, choice: CellChoice, key: FrameKey, data: &[u8]) -> SpareInsert {
        if data.is_empty() || data.len() > self.layout.frame_bytes as usize {
            return SpareInsert::Unfit;
        }
        let Some(disk) = self.place.enter() else { return SpareInsert::Off };
        let cell = match self.take_cell(choice, &key) {
            Ok(cell) => cell,
            Err(why) => return why,
        };
        let mut facts = FrameFacts { data_bytes: data.len() as u32, crcs: [0; CRCS] };
        for (crc, block) in facts.crcs.iter_mut().zip(data.chunks(self.layout.block_bytes as usize))
        {
            *crc = payload_check(block);
        }
        let written = disk.write_at(self.layout.cell_offset(cell), data);

        let mut state = self.state.lock();
        if let Err(error) = written {
            state.eviction.free(cell);
            state.pause.after_failure(&error);
            return SpareInsert::Off;
        }
        state.pause.after_success();
        if self.contains(key) {
            // Another thread has inserted it already.
            state.eviction.free(cell);
            return SpareInsert::Present;
        }
        let state = &mut *state;
        self.index.publish(&mut state.turn, cell, &key, &facts);
        match choice {
            CellChoice::Any => state.eviction.admit(cell, index::hash(&key)),
            CellChoice::Spare => state.eviction.admit_spare(cell),
        }
        state.bytes += data.len() as u64;
        state.frame_number_max = state.frame_number_max.max(key.frame);
        self.counters.inserted.fetch_add(1, Relaxed);
        SpareInsert::Kept
    }

    /// A cell to fill with `key`, for this thread alone, or why the frame is not to be inserted.
    fn take_cell(&self, choice: CellChoice, key: &FrameKey) -> Result<u32, SpareInsert> {
        if self.contains(*key) {
            return Err(SpareInsert::Present);
        }
        let mut state = self.state.lock();
        if state.pause.skips() {
            return Err(SpareInsert::Off);
        }
        let hash_of = |cell| self.index.hash_of(cell);
        let taken = match choice {
            CellChoice::Any => state.eviction.take(&self.index, hash_of),
            CellChoice::Spare => state.eviction.take_spare(&self.index, hash_of),
        };
        let (cell, filled) = taken.ok_or(SpareInsert::NoRoom)?;
        if filled {
            self.remove(&mut state, cell);
            self.counters.evicted.fetch_add(1, Relaxed);
        }
        Ok(cell)
    }

    /// Forgets all frames of a segment, of any epoch: it was deleted from the store.
    pub fn forget_segment(&self, owner: OwnerId, sequence: u32) {
        let state = &mut *self.state.lock();
        let cells: Vec<u32> = if state.frame_number_max < self.layout.cells {
            let key = |frame| FrameKey { owner, sequence, epoch: 0, frame };
            (0..=state.frame_number_max)
                .flat_map(|frame| self.index.any_epoch(&state.turn, &key(frame)))
                .collect()
        } else {
            let of_segment = |key: FrameKey| key.owner == owner && key.sequence == sequence;
            let filled =
                persist::QUEUES.into_iter().flat_map(|tier| state.eviction.oldest_first(tier));
            filled.filter(|cell| of_segment(self.index.entry(&state.turn, *cell).0)).collect()
        };
        for cell in cells {
            self.remove(state, cell);
            state.eviction.free(cell);
        }
    }

    /// The state of the cache.
    pub fn stats(&self) -> CacheMetrics {
        let state = self.state.lock();
        CacheMetrics {
            hits: self.counters.hits.load(Relaxed),
            misses: self.counters.misses.load(Relaxed),
            inserted: self.counters.inserted.load(Relaxed),
            evicted: self.counters.evicted.load(Relaxed),
            damaged: self.counters.damaged.load(Relaxed),
            stale: self.counters.stale.load(Relaxed),
            bytes: state.bytes,
            frames: state.eviction.filled(),
            frames_max: self.layout.cells,
            memory_bytes: (self.index.memory_bytes() + state.eviction.memory_bytes()) as u64,
            insertion_off: state.pause.reason.clone(),
            index: self.index_state.clone(),
        }
    }
}

impl Pause {
    /// Whether to skip this insertion.
    fn skips(&mut self) -> bool {
        let skips = self.skips_left > 0;
        self.skips_left -= u32::from(skips);
        skips
    }

    fn after_failure(&mut self, error: &io::Error) {
        self.length = (self.length * 2).clamp(PAUSE_INSERTS, PAUSE_INSERTS_MAX);
        self.skips_left = self.length;
        if self.reason.is_none() {
            tracing::warn!(%error, "read cache: cannot write the disk; pausing inserts");
        }
        self.reason = Some(error.to_string());
    }

    fn after_success(&mut self) {
        if self.reason.is_some() {
            tracing::info!("read cache: inserting again");
            *self = Pause::default();
        }
    }
}
