//! What the read cache promises, on a disk in memory that can fail on demand.

mod release;
mod restart;

use std::collections::HashMap;
use std::sync::atomic::AtomicBool;
use std::thread;

use tempfile::TempDir;

use super::eviction::Tier;
use super::*;

const FRAME: u32 = 64 << 10;
const PAGE: usize = 4096;
type Hook = Mutex<Option<Box<dyn FnOnce() + Send>>>;

/// Pages with a lock each: a read during a write may see half of it, as on a real disk.
struct MemoryDisk {
    pages: Vec<Mutex<[u8; PAGE]>>,
    fail_writes: AtomicBool,
    fail_reads: AtomicBool,
    would_block: AtomicBool,
    writes: AtomicU64,
    /// Done once, before the bytes of the next read are taken.
    before_read: Hook,
    /// Done once, after the bytes of the next read were taken.
    after_read: Hook,
}

impl MemoryDisk {
    fn with_cells(cells: u32) -> Arc<MemoryDisk> {
        let pages = 1 + cells as usize * FRAME as usize / PAGE;
        Arc::new(MemoryDisk {
            pages: (0..pages).map(|_| Mutex::new([0; PAGE])).collect(),
            fail_writes: AtomicBool::new(false),
            fail_reads: AtomicBool::new(false),
            would_block: AtomicBool::new(false),
            writes: AtomicU64::new(0),
            before_read: Mutex::default(),
            after_read: Mutex::default(),
        })
    }

    fn corrupt(&self, at: usize) {
        self.pages[at / PAGE].lock()[at % PAGE] ^= 0x10;
    }

    /// Calls `with` for each page of a range: the page, where in the page, where in the range.
    fn pages(&self, offset: u64, length: usize, mut with: impl FnMut(&mut [u8], Range<usize>)) {
        let (offset, mut done) = (offset as usize, 0);
        while done < length {
            let (page, start) = ((offset + done) / PAGE, (offset + done) % PAGE);
            let count = (PAGE - start).min(length - done);
            with(&mut self.pages[page].lock()[start..start + count], done..done + count);
            done += count;
        }
    }
}

fn run(hook: &Hook) {
    let hook = hook.lock().take();
    hook.into_iter().for_each(|hook| hook());
}

impl Disk for MemoryDisk {
    fn size_bytes(&self) -> u64 {
        (self.pages.len() * PAGE) as u64
    }

    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        if self.fail_reads.load(Relaxed) {
            return Err(io::Error::other("the device is broken"));
        }
        run(&self.before_read);
        self.pages(offset, into.len(), |page, range| into[range].copy_from_slice(page));
        run(&self.after_read);
        Ok(())
    }

    fn read_now(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        match self.would_block.load(Relaxed) {
            true => Err(io::ErrorKind::WouldBlock.into()),
            false => self.read_at(offset, into),
        }
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.writes.fetch_add(1, Relaxed);
        if self.fail_writes.load(Relaxed) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.pages(offset, bytes.len(), |page, range| page.copy_from_slice(&bytes[range]));
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    fn has_name(&self) -> bool {
        true
    }
}

fn open(disk: &Arc<MemoryDisk>, index: Option<PathBuf>) -> ReadCache {
    ReadCache::open(disk.clone(), index, CacheOptions::default())
}

fn cache(cells: u32) -> (Arc<MemoryDisk>, ReadCache) {
    let disk = MemoryDisk::with_cells(cells);
    let cache = open(&disk, None);
    assert_eq!(cache.stats().frames_max, cells);
    (disk, cache)
}

/// Frame number `number` of segment 7 of the first volume.
fn frame(cache: &ReadCache, number: u32) -> FrameKey {
    FrameKey { owner: cache.owner(VolumeId([1; 16])), sequence: 7, epoch: 3, frame: number }
}

/// The data of a frame: different in every block of every frame.
fn data(key: &FrameKey, length: u32) -> Vec<u8> {
    let mut state = index::hash(key) ^ key.epoch.wrapping_mul(0x0123_4567_89AB_CDEF) | 1;
    let mut bytes = Vec::with_capacity(length as usize + 8);
    while bytes.len() < length as usize {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(length as usize);
    bytes
}

fn insert(cache: &ReadCache, key: FrameKey) {
    cache.insert(key, &data(&key, FRAME));
}

/// Reads a whole frame; `None` is a miss. Wrong bytes fail the test.
fn get(cache: &ReadCache, key: FrameKey) -> Option<()> {
    get_written_as(cache, key, key)
}

/// As `get`, of a frame that had another key when it was inserted.
fn get_written_as(cache: &ReadCache, key: FrameKey, written: FrameKey) -> Option<()> {
    let mut bytes = vec![0; FRAME as usize];
    let hit = cache.read_now(key, 0, &mut bytes) == CacheRead::Hit;
    assert!(!hit || bytes == data(&written, FRAME), "a hit has the right bytes");
    hit.then_some(())
}

/// Runs new frames through the cache, each read in small steps right after it came in.
fn scan(cache: &ReadCache, frames: Range<u32>) {
    for number in frames {
        let key = frame(cache, number);
        insert(cache, key);
        for step in 0..16 {
            let _ = cache.read_now(key, step * 4096, &mut [0; 4096]);
        }
    }
}

#[test]
fn what_was_inserted_is_read_whole_and_in_any_part() {
    let (_disk, cache) = cache(4);
    let key = frame(&cache, 0);
    for length in [1, 511, 4096, 5000, 65_535, FRAME] {
        cache.forget_segment(key.owner, key.sequence);
        let data = data(&key, length);
        cache.insert(key, &data);
        for (start, end) in [(0, length), (0, 1), (length - 1, length), (length / 3, length / 2)] {
            let mut bytes = vec![0xEE; (end - start) as usize];
            assert_eq!(
                cache.read_now(key, start, &mut bytes),
                CacheRead::Hit,
                "{start}..{end} of {length}"
            );
            assert_eq!(bytes, data[start as usize..end as usize], "{start}..{end} of {length}");
            assert!(cache.read(key, start, &mut bytes));
        }
        assert_eq!(cache.read_now(key, length, &mut [0]), CacheRead::Miss, "past the data");
        assert_eq!(cache.read_now(key, u32::MAX, &mut [0]), CacheRead::Miss, "past the data");
        assert!(cache.contains(key), "a read past the data is no damage");
    }
}

#[test]
fn every_part_of_the_key_counts() {
    let (_disk, cache) = cache(8);
    let key = frame(&cache, 2);
    insert(&cache, key);
    let other_owner = cache.owner(VolumeId([2; 16]));
    assert_ne!(other_owner, key.owner);
    assert_eq!(cache.owner(VolumeId([1; 16])), key.owner);
    let others = [
        FrameKey { owner: other_owner, ..key },
        FrameKey { sequence: 8, ..key },
        FrameKey { epoch: 4, ..key },
        FrameKey { frame: 3, ..key },
    ];
    for other in others {
        assert_eq!(get(&cache, other), None, "{other:?}");
        insert(&cache, other);
    }
    for known in others.into_iter().chain([key]) {
        assert_eq!(get(&cache, known), Some(()), "{known:?}");
    }
    assert_eq!((cache.stats().frames, cache.stats().bytes), (5, 5 * u64::from(FRAME)));
}

#[test]
fn a_frame_is_kept_once_and_unfit_data_not_at_all() {
    let (disk, cache) = cache(8);
    let key = frame(&cache, 0);
    cache.insert(key, &[]);
    cache.insert(key, &vec![0; FRAME as usize + 1]);
    assert!(!cache.contains(key));
    insert(&cache, key);
    let writes = disk.writes.load(Relaxed);
    insert(&cache, key);
    assert_eq!(disk.writes.load(Relaxed), writes);
    assert_eq!(cache.stats().inserted, 1);
}

#[test]
fn a_forgotten_segment_is_gone_in_all_epochs_and_nothing_else_is() {
    let (_disk, cache) = cache(64);
    let other = FrameKey { sequence: 8, ..frame(&cache, 5) };
    insert(&cache, other);
    for number in 0..20 {
        insert(&cache, frame(&cache, number));
        insert(&cache, FrameKey { epoch: 9, ..frame(&cache, number) });
    }
    cache.forget_segment(other.owner, 7);
    assert_eq!(cache.stats().frames, 1);
    assert_eq!(get(&cache, other), Some(()));
    // A frame number beyond the number of cells: found by another way.
    insert(&cache, frame(&cache, 4_000_000_000));
    insert(&cache, frame(&cache, 1));
    cache.forget_segment(other.owner, 7);
    assert_eq!((cache.stats().frames, cache.stats().bytes), (1, u64::from(FRAME)));
    (0..64).for_each(|number| insert(&cache, frame(&cache, number)));
    assert_eq!(cache.stats().evicted, 1, "forgotten cells were used again");
}

/// Inserts so many frames that nobody has read, as many as there is room for.
fn insert_spare(cache: &ReadCache, frames: Range<u32>) -> Vec<FrameKey> {
    let mut keys: Vec<_> = frames.map(|number| frame(cache, number)).collect();
    keys.truncate(cache.spare_frames() as usize);
    for key in &keys {
        assert_eq!(cache.insert_spare(*key, &data(key, FRAME)), SpareInsert::Kept);
    }
    keys
}

#[test]
fn what_nobody_has_read_yet_takes_no_room_of_what_was_read_lately() {
    let (_disk, cache) = cache(100);
    assert_eq!(cache.spare_frames(), 100);
    scan(&cache, 0..60);
    let hot = (0..40).map(|number| frame(&cache, number)).collect::<Vec<_>>();
    hot.iter().for_each(|key| assert_eq!(get(&cache, *key), Some(())));
    // The free cells, and what was read once beyond a tenth of all.
    let came = insert_spare(&cache, 1000..2000);
    assert_eq!(came.len(), 40 + 10);
    assert!(hot.iter().chain(&came).all(|key| cache.contains(*key)));
    assert_eq!(cache.insert_spare(came[0], &data(&came[0], FRAME)), SpareInsert::Present);
    // Half stays as it is; the rest of what nobody reads makes room for what comes next.
    hot.iter().for_each(|key| cache.visit(*key));
    assert!(hot.iter().all(|key| cache.contains(*key)));
    let next = insert_spare(&cache, 3000..4000);
    assert!((1..=50).contains(&next.len()), "{}", next.len());
    assert!(hot.iter().chain(&next).all(|key| cache.contains(*key)));
    // A scan does not push it out, and is read as before.
    scan(&cache, 5000..5100);
    assert_eq!(get(&cache, frame(&cache, 5099)), Some(()));
    let left = next.iter().filter(|key| cache.contains(**key)).count();
    assert!(left + 2 >= next.len(), "{left} of {}", next.len());
}

#[test]
fn a_cache_of_which_all_was_read_lately_has_no_room() {
    let (_disk, cache) = cache(40);
    let all = (0..40).map(|number| frame(&cache, number)).collect::<Vec<_>>();
    all.iter().for_each(|key| insert(&cache, *key));
    // Those that came in last count as one visit.
    insert(&cache, frame(&cache, 100));
    insert(&cache, frame(&cache, 101));
    all.iter().for_each(|key| cache.visit(*key));
    assert_eq!(all.iter().filter(|key| cache.contains(**key)).count(), 38);
    let before = cache.stats().frames;
    assert_eq!(cache.spare_frames(), 0);
    let key = frame(&cache, 1000);
    assert_eq!(cache.insert_spare(key, &data(&key, FRAME)), SpareInsert::NoRoom);
    assert_eq!(cache.stats().frames, before);
    assert_eq!(all.iter().filter(|key| cache.contains(**key)).count(), 38);
}

#[test]
fn a_disk_that_takes_nothing_is_told_from_one_that_is_full() {
    let (disk, cache) = cache(8);
    let key = frame(&cache, 1);
    // What fits no cell says nothing of the disk.
    for bytes in [&[][..], &vec![1; FRAME as usize + 1]] {
        assert_eq!(cache.insert_spare(key, bytes), SpareInsert::Unfit);
    }
    disk.fail_writes.store(true, Relaxed);
    assert_eq!(cache.insert_spare(key, &data(&key, FRAME)), SpareInsert::Off);
    assert!(!cache.contains(key));
}

#[test]
fn a_hot_set_survives_a_scan_of_four_times_the_cache() {
    let (_disk, cache) = cache(200);
    let hot = 0..100;
    scan(&cache, hot.clone());
    scan(&cache, 1000..1100);
    for number in hot.clone() {
        assert_eq!(get(&cache, frame(&cache, number)), Some(()));
    }
    scan(&cache, 2000..2800);
    let left = hot.filter(|number| get(&cache, frame(&cache, *number)).is_some()).count();
    assert!(left >= 95, "{left} of 100 hot frames survived");
}

#[test]
fn a_scan_in_small_steps_does_not_make_its_frames_hot() {
    let (_disk, cache) = cache(200);
    scan(&cache, 0..1000);
    let state = cache.state.lock();
    assert_eq!(state.eviction.oldest_first(Tier::Main).count(), 0);
}

#[test]
fn a_frame_wanted_again_soon_after_it_was_given_up_stays_for_long() {
    let (_disk, cache) = cache(100);
    let key = frame(&cache, 0);
    insert(&cache, key);
    scan(&cache, 1000..1110);
    assert!(!cache.contains(key), "given up");
    insert(&cache, key);
    scan(&cache, 2000..2300);
    assert!(cache.contains(key), "the second time it came into the main queue");
}

#[test]
fn every_hit_returns_the_bytes_last_inserted() {
    let (_disk, cache) = cache(60);
    let owners = [1, 2, 3].map(|owner| cache.owner(VolumeId([owner; 16])));
    let mut lengths: HashMap<FrameKey, u32> = HashMap::new();
    let mut random = 42_u64;
    let mut below = |limit: u64| {
        random =
            random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) % limit
    };
    for _ in 0..20_000 {
        let key = FrameKey {
            owner: owners[below(3) as usize],
            sequence: below(8) as u32,
            epoch: below(2),
            frame: below(10) as u32,
        };
        match below(20) {
            0 => cache.forget_segment(key.owner, key.sequence),
            1..8 => {
                let length = *lengths.entry(key).or_insert(1 + below(9000) as u32);
                cache.insert(key, &data(&key, length));
            }
            _ => {
                let length = lengths.get(&key).copied().unwrap_or(100);
                let start = below(u64::from(length)) as u32;
                let mut bytes = vec![0; below(u64::from(length - start) + 1) as usize];
                if cache.read_now(key, start, &mut bytes) == CacheRead::Hit {
                    let end = start as usize + bytes.len();
                    assert_eq!(bytes, data(&key, length)[start as usize..end]);
                }
            }
        }
    }
    let stats = cache.stats();
    assert!(stats.hits > 1000 && stats.evicted > 1000, "the cache was used: {stats:?}");
    assert_eq!(stats.damaged + stats.stale, 0);
    let state = cache.state.lock();
    let filled: Vec<u32> =
        persist::QUEUES.into_iter().flat_map(|t| state.eviction.oldest_first(t)).collect();
    for cell in filled {
        let (key, _) = cache.index.entry(&state.turn, cell);
        assert_eq!(
            cache.index.find(&key).map(|found| found.cell),
            Some(cell),
            "each cell is found by its key"
        );
    }
}

#[test]
fn a_damaged_cell_is_a_miss_once_and_then_free() {
    let (disk, cache) = cache(4);
    let key = frame(&cache, 0);
    insert(&cache, key);
    disk.corrupt(HEADER_BYTES as usize + 5 * 4096 + 17);
    let mut bytes = [0; 4096];
    assert_eq!(
        cache.read_now(key, 4 * 4096, &mut bytes),
        CacheRead::Hit,
        "another block is not touched"
    );
    assert_eq!(cache.read_now(key, 5 * 4096 + 100, &mut bytes[..10]), CacheRead::Miss);
    assert!(!cache.contains(key));
    assert_eq!((cache.stats().damaged, cache.stats().frames, cache.stats().bytes), (1, 0, 0));
    insert(&cache, key);
    assert_eq!(get(&cache, key), Some(()));
    disk.fail_reads.store(true, Relaxed);
    assert!(!cache.read(key, 0, &mut bytes), "a read error is a miss");
    assert_eq!(cache.stats().damaged, 2);
}

/// A block of a file system that ends in its own CRC-32C, as ext4's directory blocks do.
fn self_checked_block(fill: u8) -> Vec<u8> {
    let mut block = vec![fill; PAGE - 4];
    let crc = sawmill_format::crc::crc32c(&block);
    block.extend_from_slice(&crc.to_le_bytes());
    block
}

#[test]
fn an_older_version_of_a_self_checked_block_is_no_hit_after_a_lost_write() {
    let (disk, cache) = cache(1);
    let (old, new) = (frame(&cache, 0), frame(&cache, 1));
    cache.insert(old, &self_checked_block(1));
    let stale = *disk.pages[HEADER_BYTES as usize / PAGE].lock();
    cache.insert(new, &self_checked_block(2));
    let mut bytes = [0; PAGE];
    assert_eq!(cache.read_now(new, 0, &mut bytes), CacheRead::Hit);
    // The disk acknowledged the second write and did not keep it.
    *disk.pages[HEADER_BYTES as usize / PAGE].lock() = stale;
    assert_eq!(cache.read_now(new, 0, &mut bytes), CacheRead::Miss);
}

#[test]
fn a_full_disk_turns_insertion_off_for_a_while_and_reads_go_on() {
    let (disk, cache) = cache(8);
    insert(&cache, frame(&cache, 0));
    disk.fail_writes.store(true, Relaxed);
    let writes = disk.writes.load(Relaxed);
    (1..=PAUSE_INSERTS + 1).for_each(|number| insert(&cache, frame(&cache, number)));
    assert_eq!(
        disk.writes.load(Relaxed),
        writes + 1,
        "after a failure writes are not tried each time"
    );
    assert!(cache.stats().insertion_off.is_some());
    assert_eq!(get(&cache, frame(&cache, 0)), Some(()));
    assert_eq!((cache.stats().frames, cache.stats().inserted), (1, 1));

    insert(&cache, frame(&cache, 1));
    assert_eq!(disk.writes.load(Relaxed), writes + 2, "then once");
    disk.fail_writes.store(false, Relaxed);
    (0..=2 * PAUSE_INSERTS).for_each(|_| insert(&cache, frame(&cache, 2)));
    assert_eq!(get(&cache, frame(&cache, 2)), Some(()), "and insertion comes back");
    assert_eq!(cache.stats().insertion_off, None);
    (100..107).for_each(|number| insert(&cache, frame(&cache, number)));
    assert_eq!(cache.stats().frames, 8, "no cell was lost to the failures");
}

#[test]
fn bytes_on_the_device_are_slow_and_then_read() {
    let (disk, cache) = cache(4);
    let key = frame(&cache, 0);
    insert(&cache, key);
    disk.would_block.store(true, Relaxed);
    let mut bytes = vec![0; 100];
    assert_eq!(cache.read_now(key, 50, &mut bytes), CacheRead::Slow);
    assert_eq!(cache.read_now(frame(&cache, 1), 50, &mut bytes), CacheRead::Miss);
    assert!(cache.read(key, 50, &mut bytes));
    assert_eq!(bytes, data(&key, FRAME)[50..150]);
    assert_eq!((cache.stats().hits, cache.stats().misses, cache.stats().damaged), (1, 1, 0));
}

#[test]
fn a_cell_that_changes_hands_during_a_read_is_a_miss_and_no_damage() {
    let disk = MemoryDisk::with_cells(1);
    let cache = Arc::new(open(&disk, None));
    let (key, other) = (frame(&cache, 0), frame(&cache, 1));
    for hook in [&disk.before_read, &disk.after_read] {
        cache.forget_segment(key.owner, key.sequence);
        insert(&cache, key);
        let at_a_bad_moment = Arc::clone(&cache);
        *hook.lock() = Some(Box::new(move || insert(&at_a_bad_moment, other)));
        assert_eq!(get(&cache, key), None);
        assert_eq!(get(&cache, other), Some(()), "the new frame is not blamed for the old one");
    }
    assert_eq!(cache.stats().damaged, 0);
}

#[test]
fn readers_beside_insertions_and_deletions_never_see_wrong_bytes() {
    let (_disk, cache) = cache(24);
    thread::scope(|scope| {
        for thread in 0..4_u32 {
            let cache = &cache;
            scope.spawn(move || {
                let mut random = thread + 1;
                for step in 0..3000 {
                    random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    let key =
                        FrameKey { sequence: random >> 28, ..frame(cache, (random >> 20) % 6) };
                    if get(cache, key).is_none() {
                        insert(cache, key);
                    }
                    if step % 100 == 0 {
                        cache.forget_segment(key.owner, key.sequence);
                    }
                }
            });
        }
    });
    let stats = cache.stats();
    assert_eq!((stats.damaged, stats.stale), (0, 0));
    assert!(stats.hits > 0 && stats.evicted > 0, "{stats:?}");
    assert_eq!(stats.bytes, u64::from(stats.frames) * u64::from(FRAME));
    (0..24).for_each(|number| insert(&cache, frame(&cache, 1000 + number)));
    assert_eq!(cache.stats().frames, 24, "no cell was lost");
}

#[test]
fn a_cache_without_room_misses_and_does_nothing_else() {
    for cells in [0, 1] {
        let (_disk, cache) = cache(cells);
        scan(&cache, 0..10);
        assert_eq!(get(&cache, frame(&cache, 0)), None);
        assert_eq!(cache.stats().frames, cells);
        cache.forget_segment(cache.owner(VolumeId([1; 16])), 7);
        assert_eq!(cache.stats().frames, 0);
    }
}

#[test]
fn other_frame_sizes_are_verified_too() {
    for frame_bytes in [1, 4096, 10_000, 64 << 10, 100_000, 1 << 20] {
        let disk = MemoryDisk::with_cells(80);
        let options = CacheOptions { frame_bytes, ..CacheOptions::default() };
        let cache = ReadCache::open(disk.clone(), None, options);
        let key = frame(&cache, 0);
        let data = data(&key, frame_bytes);
        cache.insert(key, &data);
        let mut bytes = vec![0; data.len()];
        assert!(cache.read(key, 0, &mut bytes) && bytes == data, "{frame_bytes}");
        disk.corrupt(HEADER_BYTES as usize + data.len() - 1);
        assert!(!cache.read(key, frame_bytes - 1, &mut [0]), "{frame_bytes}");
    }
}

#[test]
fn the_index_takes_at_most_140_bytes_a_cell() {
    let (index, _turn) = Index::new(100_000, 10);
    let bytes = index.memory_bytes() + Eviction::new(100_000).memory_bytes();
    assert!(bytes <= 140 * 100_000, "{} bytes a cell", bytes / 100_000);
}

#[test]
fn all_volumes_together_hold_no_more_for_the_cache_than_the_process_has() {
    let cache = Arc::new(open(&MemoryDisk::with_cells(4), None));
    let take = || FillRoom::take(&cache, limits::CACHING_BYTES_MAX / 4);
    let taken: Vec<_> = (0..5).map(|_| take()).collect();
    assert_eq!(taken.iter().flatten().count(), 4);
    drop(taken);
    assert!(take().is_some(), "what was inserted holds nothing any more");
}
