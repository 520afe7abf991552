//! What was written stays local: a working set that fits the read cache is read without the store,
//! also after a restart, and nobody waits for a cache that is slow.

use std::io;
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

use crate::faulty::{Machine, SEGMENT, holds, segment_get, stored, until};
use crate::rig::{Dice, MIB, pattern};
use sawmill_device::BlockDeviceExt;
use sawmill_sys::{DirectFile, OpenMode};
use sawmill_volume::cache::CacheOptions;
use sawmill_volume::{Disk, ReadCache, Volume, open_cache};

const BLOCK: usize = 16 << 10;

/// A machine whose volume holds three journals.
fn machine() -> Machine {
    let machine = Machine::new();
    assert_eq!(machine.options.journal_bytes, 16 * MIB);
    machine
}

/// Writes 48 MiB, each block once, in an order by chance. `pace` is called after each segment's
/// worth.
fn write_all(volume: &Volume, mut pace: impl FnMut()) {
    let mut blocks: Vec<u64> = (0..48 * MIB / BLOCK as u64).collect();
    let mut dice = Dice::new(7);
    for index in (1..blocks.len()).rev() {
        blocks.swap(index, dice.below(index as u64 + 1) as usize);
    }
    for (number, block) in blocks.into_iter().enumerate() {
        let address = block * BLOCK as u64;
        volume.write_at(address, &pattern(address, 1, BLOCK)).unwrap();
        if number % (SEGMENT / BLOCK) == SEGMENT / BLOCK - 1 {
            pace();
        }
    }
    stored(volume);
}

fn holds_all(volume: &Volume) {
    for address in (0..48 * MIB).step_by(BLOCK) {
        holds(volume, address, &pattern(address, 1, BLOCK));
    }
}

/// Waits until nothing written is on its way into the cache.
fn settled(volume: &Volume) {
    until("all that was written is in the cache or was left out", || {
        let status = volume.status();
        let counters = status.counters;
        let sealed = counters.written_bytes - counters.coalesced_bytes;
        status.positions.stored == status.positions.accepted
            && counters.written_cached_bytes + counters.written_uncached_bytes == sealed
    });
}

fn gets(machine: &Machine) -> usize {
    machine.count(|call| segment_get(call).is_some())
}

#[test]
fn what_fits_the_cache_is_read_without_the_store_also_after_a_restart() {
    let mut machine = machine();
    let path = machine.folder.path().join("cache");
    let cache = open_cache(&path, 64 * MIB).unwrap();
    machine.rig.options.cache = Some(cache.clone());
    let volume = machine.open();
    // An open follows the log by asking for names.
    let before = gets(&machine);
    write_all(&volume, || {
        stored(&volume);
        settled(&volume);
    });
    holds_all(&volume);
    let counters = volume.status().counters;
    assert_eq!((counters.written_cached_bytes, counters.reads_store), (48 * MIB, 0));
    volume.close().unwrap();
    assert_eq!(gets(&machine), before);
    cache.save_index().unwrap();
    cache.release();
    machine.rig.options.cache = Some(open_cache(&path, 64 * MIB).unwrap());
    let volume = machine.open();
    let before = gets(&machine);
    holds_all(&volume);
    assert_eq!(gets(&machine), before);
}

/// A disk that takes no write while it hangs.
struct HangingDisk {
    disk: DirectFile,
    hangs: Mutex<bool>,
    changed: Condvar,
}

impl HangingDisk {
    fn make(machine: &Machine, size_bytes: u64) -> Arc<Self> {
        let path = machine.folder.path().join("hanging");
        let disk = DirectFile::create(&path, size_bytes, OpenMode::Cached).unwrap();
        Arc::new(HangingDisk { disk, hangs: Mutex::new(false), changed: Condvar::new() })
    }

    fn hang(&self, hangs: bool) {
        *self.hangs.lock() = hangs;
        self.changed.notify_all();
    }
}

impl Disk for HangingDisk {
    fn size_bytes(&self) -> u64 {
        self.disk.size_bytes()
    }
    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.disk.read_at(offset, into)
    }
    fn read_now(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.disk.read_now(offset, into)
    }
    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.changed.wait_while(&mut self.hangs.lock(), |hangs| *hangs);
        self.disk.write_at(offset, bytes)
    }
    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
    fn has_name(&self) -> bool {
        true
    }
}

/// Lets the disk go on when dropped, so that a test that fails ends.
struct GoesOn(Arc<HangingDisk>);

impl Drop for GoesOn {
    fn drop(&mut self) {
        self.0.hang(false);
    }
}

/// A machine with a cache on a disk that can hang.
fn with_hanging_cache() -> (Machine, Arc<HangingDisk>, Arc<ReadCache>, GoesOn) {
    let mut machine = machine();
    let disk = HangingDisk::make(&machine, 64 * MIB);
    let cache = Arc::new(ReadCache::open(disk.clone(), None, CacheOptions::default()));
    machine.rig.options.cache = Some(cache.clone());
    (machine, disk.clone(), cache, GoesOn(disk))
}

#[test]
fn a_cache_that_hangs_holds_back_no_writer_and_what_it_missed_is_counted() {
    let (machine, disk, _cache, _goes_on) = with_hanging_cache();
    let volume = machine.open();
    disk.hang(true);
    // Three journals' worth: each journal's space was used again and again.
    write_all(&volume, || ());
    disk.hang(false);
    settled(&volume);
    let counters = volume.status().counters;
    assert!(counters.written_uncached_bytes > 24 * MIB, "{counters:?}");
    holds_all(&volume);
    assert!(gets(&machine) > 0, "what was left out comes from the store");
}

#[test]
fn what_had_to_wait_for_the_cache_is_read_back_from_the_journal() {
    let (machine, disk, cache, _goes_on) = with_hanging_cache();
    let volume = machine.open();
    disk.hang(true);
    // Half a journal. Records of odd lengths: frames begin and end inside of them.
    let lengths = [5000, 61_000, 4096, 99_999, 512];
    let records = || (0..200).map(|at| (at * 150_000, lengths[at as usize % lengths.len()]));
    for (address, length) in records() {
        volume.write_at(address, &pattern(address, 2, length)).unwrap();
    }
    stored(&volume);
    disk.hang(false);
    settled(&volume);
    let counters = volume.status().counters;
    let written_bytes = records().map(|(_, length)| length as u64).sum();
    assert_eq!(
        (counters.written_cached_bytes, counters.written_uncached_bytes),
        (written_bytes, 0)
    );
    // The next attachment knows nothing of what its journal holds.
    volume.close().unwrap();
    let volume = machine.open();
    let (before, hits) = (gets(&machine), cache.stats().hits);
    for (address, length) in records() {
        holds(&volume, address, &pattern(address, 2, length));
    }
    assert_eq!(gets(&machine), before);
    assert!(cache.stats().hits > hits);
}

#[test]
fn a_hot_set_stays_in_the_cache_under_a_load_of_writes() {
    let mut machine = machine();
    // A quarter of the cache is hot, and what is written is eight times as large as the cache.
    let cache = open_cache(&machine.folder.path().join("cache"), 8 * MIB).unwrap();
    machine.rig.options.cache = Some(cache.clone());
    let volume = machine.open();
    // No two blocks follow each other.
    let hot = || (0..4 * MIB).step_by(2 * BLOCK);
    for address in hot() {
        volume.write_at(address, &pattern(address, 1, BLOCK)).unwrap();
    }
    stored(&volume);
    settled(&volume);
    for number in 0..64 * MIB / SEGMENT as u64 {
        let start = 4 * MIB + number * 2 * SEGMENT as u64 % (60 * MIB);
        for address in (start..start + 2 * SEGMENT as u64).step_by(2 * BLOCK) {
            volume.write_at(address, &pattern(address, number, BLOCK)).unwrap();
        }
        stored(&volume);
        settled(&volume);
        for address in hot() {
            holds(&volume, address, &pattern(address, 1, BLOCK));
        }
    }
    let counters = volume.status().counters;
    assert_eq!((counters.written_uncached_bytes, counters.reads_store), (0, 0));
    assert!(cache.stats().evicted > 0, "what was written went through the cache");
    assert!(counters.reads_cache > 0, "the hot set was in the cache");
}

#[test]
fn a_stream_of_writes_passes_by_the_cache() {
    let mut machine = machine();
    let cache = open_cache(&machine.folder.path().join("cache"), 8 * MIB).unwrap();
    machine.rig.options.cache = Some(cache.clone());
    let volume = machine.open();
    for address in (0..4 * MIB).step_by(SEGMENT) {
        volume.write_at(address, &pattern(address, 1, SEGMENT)).unwrap();
    }
    stored(&volume);
    // Segments enter in order: when these have, those before them would have.
    for address in (8 * MIB..9 * MIB).step_by(2 * BLOCK) {
        volume.write_at(address, &pattern(address, 1, BLOCK)).unwrap();
    }
    stored(&volume);
    let beside_bytes = MIB / 2;
    until("what was written beside the stream is in the cache", || {
        volume.status().counters.written_cached_bytes >= beside_bytes
    });
    let counters = volume.status().counters;
    assert_eq!((counters.written_cached_bytes, counters.written_uncached_bytes), (beside_bytes, 0));
}

#[test]
fn small_records_that_take_much_of_the_journal_are_not_read_back_from_it() {
    let (machine, disk, _cache, _goes_on) = with_hanging_cache();
    let volume = machine.open();
    disk.hang(true);
    let mut address = 0;
    // The first two wait for the cache in memory.
    for _ in 0..3 {
        for _ in 0..16 {
            volume.write_at(address, &pattern(address, 1, 512)).unwrap();
            volume.flush().unwrap();
            address += MIB;
        }
        stored(&volume);
    }
    disk.hang(false);
    settled(&volume);
    let counters = volume.status().counters;
    let (round_bytes, cached_bytes) = (16 * 512, counters.written_cached_bytes);
    assert_eq!(cached_bytes + counters.written_uncached_bytes, 3 * round_bytes);
    // On a busy machine a round may be more than one segment: then more of them wait in memory.
    assert!(counters.written_uncached_bytes > 0, "{counters:?}");
}
