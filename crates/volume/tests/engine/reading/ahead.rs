//! Reading ahead on real stores: what is in flight is bounded, a reader is not kept waiting behind
//! it, a long run is several gets, and random readers pay nothing.
//!
//! Not here: which reads make a row (`read::ahead`), and how far ahead the store deserves
//! (`read::pipe`).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use bytes::Bytes;
use parking_lot::Mutex;
use sawmill_device::{BlockDeviceExt, Flags, Operation};
use sawmill_format::segment::parse_segment_key;
use sawmill_store::{
    Class, Completion, Get, List, ObjectInfo, ObjectStore, Put, PutOutcome, StoreError,
    StoreErrorKind, StoreOptions,
};
use sawmill_volume::{CreateOptions, RealWorld, SteppedVolume, Volume, World, open_cache};

use crate::faulty::until;
use crate::rig::{Dice, MIB, Rig, pattern};

pub(super) const FRAME: u64 = 64 << 10;
const BLOCK: u64 = 128 << 10;
pub(super) const SIZE: u64 = 16 * MIB;

/// A store that keeps background gets until they are released, and remembers all gets.
pub(super) struct PatientStore {
    inner: Arc<dyn ObjectStore>,
    pub(super) holds: AtomicBool,
    held: Mutex<Vec<(Get, Completion<Bytes>)>>,
    pub(super) gets: Mutex<Vec<Get>>,
    pub(super) lists: AtomicUsize,
}

impl PatientStore {
    pub(super) fn release(&self) {
        self.holds.store(false, Ordering::SeqCst);
        for (get, done) in std::mem::take(&mut *self.held.lock()) {
            self.inner.get(get, done);
        }
    }

    /// Answers what is held as if the objects had been deleted.
    pub(super) fn lose(&self) {
        self.fail(StoreErrorKind::NotFound);
    }

    pub(super) fn fail(&self, kind: StoreErrorKind) {
        self.holds.store(false, Ordering::SeqCst);
        for (_, done) in std::mem::take(&mut *self.held.lock()) {
            done(Err(StoreError::new(kind, "so it is")));
        }
    }

    pub(super) fn held_bytes(&self) -> u64 {
        let length = |get: &Get| get.range.as_ref().map_or(0, |range| range.end - range.start);
        self.held.lock().iter().map(|(get, _)| length(get)).sum()
    }

    pub(super) fn is_any_raised(&self) -> bool {
        let is_raised = |get: &Get| get.raise.as_ref().is_some_and(|raise| raise.is_raised());
        self.held.lock().iter().any(|(get, _)| is_raised(get))
    }
}

impl ObjectStore for PatientStore {
    fn get(&self, get: Get, done: Completion<Bytes>) {
        self.gets.lock().push(get.clone());
        if self.holds.load(Ordering::SeqCst) && get.class == Class::Background {
            return self.held.lock().push((get, done));
        }
        self.inner.get(get, done);
    }
    fn put(&self, put: Put, done: Completion<PutOutcome>) {
        self.inner.put(put, done);
    }
    fn list(&self, list: List, done: Completion<Vec<ObjectInfo>>) {
        self.lists.fetch_add(1, Ordering::SeqCst);
        self.inner.list(list, done);
    }
    fn delete(&self, keys: Vec<String>, class: Class, done: Completion<()>) {
        self.inner.delete(keys, class, done);
    }
}

/// A volume of which every block is stored and none is cached or in the journal.
pub(super) fn written(prefetch_bytes: u64) -> (Rig, Arc<PatientStore>) {
    let inner: Arc<dyn ObjectStore> =
        sawmill_store::open("memory:", StoreOptions::default()).unwrap();
    let options = CreateOptions { segment_bytes: 4 << 20, ..CreateOptions::new(SIZE) };
    sawmill_volume::create(&*inner, "disk", &options).unwrap();
    let (held, gets, lists) = (Mutex::default(), Mutex::default(), AtomicUsize::new(0));
    let holds = AtomicBool::new(false);
    let store = Arc::new(PatientStore { inner, holds, held, gets, lists });
    let mut rig = Rig::over(store.clone());
    rig.options.journal_bytes = 32 * MIB;
    let volume = rig.open();
    for at in (0..SIZE).step_by(MIB as usize) {
        volume.write_at(at, &pattern(at, 1, MIB as usize)).unwrap();
    }
    volume.close().unwrap();
    std::fs::remove_file(rig.journal()).unwrap();
    rig.options.cache = Some(open_cache(&rig.folder.path().join("cache"), 32 * MIB).unwrap());
    rig.options.prefetch_bytes = prefetch_bytes;
    (rig, store)
}

pub(super) fn read(volume: &Volume, address: u64, length: u64) {
    let found = volume.read_at(address, length as usize).unwrap();
    assert!(found == pattern(address, 1, length as usize), "wrong bytes at {address}");
}

#[test]
fn a_reader_that_meets_what_is_fetched_ahead_raises_it_to_the_reads() {
    let (rig, store) = written(8 * MIB);
    let volume = rig.open();
    store.holds.store(true, Ordering::SeqCst);
    (0..3).for_each(|block| read(&volume, block * BLOCK, BLOCK));
    assert!(store.held_bytes() > 0, "something is fetched ahead");
    assert!(!store.is_any_raised(), "and nobody waits for it yet");
    std::thread::scope(|threads| {
        let reader = threads.spawn(|| read(&volume, 3 * BLOCK, BLOCK));
        until("the reader waits for it", || store.is_any_raised());
        store.release();
        reader.join().unwrap();
    });
    (4..32).for_each(|block| read(&volume, block * BLOCK, BLOCK));
}

#[test]
fn what_only_a_prefetch_misses_moves_no_reader_to_a_newer_state() {
    let (mut rig, store) = written(8 * MIB);
    rig.options.read_only = true;
    let volume = rig.open();
    store.holds.store(true, Ordering::SeqCst);
    (0..3).for_each(|block| read(&volume, block * BLOCK, BLOCK));
    assert!(store.held_bytes() > 0, "something is fetched ahead");
    let lists = store.lists.load(Ordering::SeqCst);
    store.lose();
    (3..16).for_each(|block| read(&volume, block * BLOCK, BLOCK));
    assert_eq!(store.lists.load(Ordering::SeqCst), lists, "no state was looked for");
}

#[test]
fn what_is_in_flight_ahead_of_all_readers_is_bounded() {
    let (rig, store) = written(MIB);
    let volume = rig.open();
    store.holds.store(true, Ordering::SeqCst);
    for reader in 0..8 {
        (0..3).for_each(|block| read(&volume, reader * 2 * MIB + block * BLOCK, BLOCK));
        assert!(store.held_bytes() <= MIB, "{} bytes ahead", store.held_bytes());
    }
    assert!(store.held_bytes() > MIB / 2);
    store.release();
}

#[test]
fn what_arrived_ahead_is_read_without_another_get_also_without_a_cache() {
    for has_cache in [true, false] {
        let (mut rig, store) = written(32 * MIB);
        rig.options.cache = rig.options.cache.take().filter(|_| has_cache);
        let volume = rig.open();
        store.gets.lock().clear();
        // Half a frame at a time, so that a frame is read twice.
        (0..SIZE / (FRAME / 2)).for_each(|half| read(&volume, half * FRAME / 2, FRAME / 2));
        let frames = |get: &Get| {
            let range = get.range.clone().unwrap_or_default();
            // Each is somewhat longer than its data.
            (range.end - range.start) / FRAME
        };
        let of_segments = |get: &&Get| parse_segment_key(&get.key).is_some();
        let fetched: u64 = store.gets.lock().iter().filter(of_segments).map(frames).sum();
        let all = SIZE / FRAME;
        // The first two, before the reads are a row.
        assert!((all..all + 3).contains(&fetched), "{fetched} of {all}, cache: {has_cache}");
    }
}

#[test]
fn a_long_run_is_several_gets_of_a_mebibyte() {
    let (rig, store) = written(0);
    let volume = rig.open();
    store.gets.lock().clear();
    read(&volume, 0, 4 * MIB);
    let gets = store.gets.lock();
    assert!(gets.len() >= 4, "{} gets", gets.len());
    let longest =
        gets.iter().filter_map(|get| get.range.as_ref()).map(|range| range.end - range.start);
    assert!(longest.max().unwrap() <= MIB + 16 * 64, "a mebibyte and its checksums");
}

#[test]
fn random_reads_of_a_small_volume_fetch_little_more_than_they_need() {
    let (rig, _store) = written(32 * MIB);
    let volume = rig.open();
    let mut dice = Dice::new(11);
    let frames = SIZE / FRAME;
    for _ in 0..60 {
        read(&volume, dice.below(frames) * FRAME, 4096);
    }
    let ahead = volume.status().counters.prefetched_frames;
    assert!(ahead <= 60, "{ahead} frames ahead of 60 random reads");
}

#[test]
fn hints_take_no_more_room_than_all_that_is_fetched_ahead_and_what_is_left_out_is_counted() {
    let (rig, store) = written(MIB);
    let volume = rig.open();
    let hint = |address, length| {
        volume.call(Operation::Prefetch, address, length, Flags::default(), Vec::new()).unwrap();
        volume.status().counters.prefetches_cut
    };
    store.holds.store(true, Ordering::SeqCst);
    assert_eq!(hint(0, MIB / 2), 0);
    assert_eq!(hint(0, SIZE), 1, "more than there is room for");
    assert!((MIB / 2..=MIB).contains(&store.held_bytes()), "{} bytes", store.held_bytes());
    assert_eq!(hint(8 * MIB, BLOCK), 2, "no room is left");
    store.release();
    until("the room is given back", || hint(12 * MIB, BLOCK) == hint(13 * MIB, BLOCK));
}

#[test]
fn a_hint_where_the_map_is_not_loaded_yet_is_counted_as_cut() {
    let (mut rig, store) = written(MIB);
    rig.options.bounds.map_held_from_bytes = 0;
    let world: Arc<dyn World> = Arc::new(RealWorld::default());
    let stepped = SteppedVolume::open(world, store, "disk", &rig.options).unwrap();
    let volume = stepped.volume();
    let hint = || {
        volume.call(Operation::Prefetch, 0, BLOCK, Flags::default(), Vec::new()).unwrap();
        volume.status().counters.prefetches_cut
    };
    assert_eq!(hint(), 1);
    read(volume, 0, 4096);
    assert_eq!(hint(), 1, "the read has loaded it");
}
