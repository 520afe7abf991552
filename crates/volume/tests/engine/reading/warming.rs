//! Warming: what is fetched before anybody reads it goes behind all reads, stays within its bounds,
//! and ends with the volume.
//!
//! Not here: which cells a frame may take (`cache`), recorded ranges (`boot_sets`).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use sawmill_device::{BlockDeviceExt, ErrorKind};
use sawmill_store::{Class, StoreErrorKind};
use sawmill_volume::{
    ReadCache, RealWorld, SteppedVolume, Volume, WarmStep, World, limits, open_cache,
};

use super::ahead::{FRAME, PatientStore, SIZE, read, written};
use crate::cuts::Forward;
use crate::faulty::{Machine, SEGMENT, stored, tile_version, until, write_tile};
use crate::rig::{MIB, pattern};

/// All steps of warming `ranges`.
fn warm(volume: &Volume, ranges: &[(u64, u64)], frames_max: u64) -> WarmStep {
    let mut sum = WarmStep::default();
    let mut left = ranges.to_vec();
    while let Some((address, length)) = left.pop() {
        let frames_left = frames_max - sum.fetched_frames;
        let step = volume.warm(&[(address, length)], frames_left, &|| true).unwrap();
        sum.fetched_frames += step.fetched_frames;
        sum.fetched_bytes += step.fetched_bytes;
        sum.present_bytes += step.present_bytes;
        sum.left_bytes += step.left_bytes;
        if step.done_bytes < length {
            left.push((address + step.done_bytes, length - step.done_bytes));
        }
    }
    sum
}

fn gets(store: &PatientStore) -> usize {
    store.gets.lock().len()
}

fn cached(cache: &ReadCache) -> u64 {
    cache.stats().bytes
}

#[test]
fn what_was_warmed_is_fetched_once_behind_the_reads_and_read_without_the_store() {
    let (rig, store) = written(8 * MIB);
    let cache = rig.options.cache.clone().unwrap();
    let volume = rig.open();
    store.gets.lock().clear();
    let room = volume.spare_frames().unwrap();
    let sum = warm(&volume, &[(0, SIZE)], room);
    assert_eq!((sum.fetched_bytes, sum.present_bytes, sum.left_bytes), (SIZE, 0, 0));
    assert_eq!(cached(&cache), SIZE);
    assert!(store.gets.lock().iter().all(|get| get.class == Class::Background));
    let asked = gets(&store);
    (0..SIZE / MIB).for_each(|part| read(&volume, part * MIB, MIB));
    assert_eq!(gets(&store), asked, "nothing is fetched twice");
    let again = warm(&volume, &[(0, SIZE)], room);
    assert_eq!((again.fetched_bytes, again.present_bytes), (0, SIZE));
    assert_eq!(gets(&store), asked);
}

#[test]
fn no_more_is_fetched_than_may_be_and_the_rest_is_counted() {
    let (rig, store) = written(8 * MIB);
    let volume = rig.open();
    let sum = warm(&volume, &[(0, 4 * MIB)], 10);
    assert_eq!((sum.fetched_frames, sum.fetched_bytes), (10, 10 * FRAME));
    assert_eq!(sum.left_bytes, 4 * MIB - 10 * FRAME);
    // Beyond the end there is nothing, and it is done.
    let beyond = volume.warm(&[(SIZE + MIB, MIB), (u64::MAX, 1)], 10, &|| true).unwrap();
    assert_eq!(beyond, WarmStep { done_bytes: MIB + 1, ..WarmStep::default() });
    // What was not stored yet is not in the store.
    store.gets.lock().clear();
    volume.write_at(8 * MIB, &pattern(8 * MIB, 2, MIB as usize)).unwrap();
    assert_eq!(warm(&volume, &[(8 * MIB, MIB)], 0).left_bytes, 0);
    assert_eq!(gets(&store), 0);
}

#[test]
fn a_reader_that_meets_a_frame_on_its_way_into_the_cache_raises_it_to_the_reads() {
    let (rig, store) = written(0);
    let volume = rig.open();
    store.holds.store(true, Ordering::SeqCst);
    std::thread::scope(|threads| {
        let warming = threads.spawn(|| warm(&volume, &[(0, MIB)], 100));
        until("the frames are asked for", || store.held_bytes() >= MIB);
        assert!(!store.is_any_raised());
        let reader = threads.spawn(|| read(&volume, FRAME, FRAME));
        until("the reader waits for one", || store.is_any_raised());
        store.release();
        reader.join().unwrap();
        assert_eq!(warming.join().unwrap().fetched_bytes, MIB);
    });
}

#[test]
fn warming_takes_nothing_from_what_is_fetched_ahead() {
    let (rig, store) = written(8 * MIB);
    let volume = rig.open();
    store.holds.store(true, Ordering::SeqCst);
    let is_wanted = AtomicBool::new(true);
    std::thread::scope(|threads| {
        let step =
            || volume.warm(&[(8 * MIB, 8 * MIB)], 1000, &|| is_wanted.load(Ordering::SeqCst));
        let warming = threads.spawn(step);
        until("the frames are asked for", || store.held_bytes() >= 8 * MIB);
        (0..3).for_each(|block| read(&volume, block * 2 * FRAME, 2 * FRAME));
        until("a reader has its own fetched ahead", || store.held_bytes() > 8 * MIB);
        is_wanted.store(false, Ordering::SeqCst);
        let stopped = warming.join().unwrap().unwrap();
        assert_eq!(stopped.fetched_frames, 0, "it did not wait for the store");
    });
    store.release();
}

#[test]
fn warming_ends_with_its_volume() {
    let (rig, store) = written(0);
    let volume = rig.open();
    store.holds.store(true, Ordering::SeqCst);
    std::thread::scope(|threads| {
        let warming = threads.spawn(|| volume.warm(&[(0, MIB)], 100, &|| true));
        until("the frames are asked for", || store.held_bytes() >= MIB);
        volume.close_now();
        assert_eq!(warming.join().unwrap().unwrap_err().kind(), ErrorKind::Closed);
    });
    assert_eq!(volume.warm(&[(0, MIB)], 100, &|| true).unwrap_err().kind(), ErrorKind::Closed);
    store.release();
}

#[test]
fn a_volume_without_a_cache_has_nothing_to_warm() {
    let (mut rig, _store) = written(0);
    rig.options.cache = None;
    let volume: Arc<Volume> = rig.open();
    let error = volume.warm(&[(0, MIB)], 100, &|| true).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Refused);
    assert!(volume.spare_frames().unwrap_err().to_string().contains("without a read cache"));
}

#[test]
fn a_step_looks_at_a_bounded_part_of_the_longest_range() {
    let (rig, _store) = written(8 * MIB);
    let volume = rig.open();
    let long = 3 * limits::WARM_LOOK_BYTES_MAX;
    volume.resize(long).unwrap();
    let all = warm(&volume, &[(0, SIZE)], 1000);
    assert_eq!(all.fetched_bytes, SIZE);
    // All of it is there already, and with no room for any of it.
    for frames_max in [1000, 0] {
        let step = volume.warm(&[(0, long)], frames_max, &|| true).unwrap();
        assert_eq!(step.done_bytes, limits::WARM_LOOK_BYTES_MAX);
        assert_eq!((step.fetched_frames, step.present_bytes), (0, SIZE));
    }
    let halves = vec![(0, limits::WARM_LOOK_BYTES_MAX / 2); 6];
    assert_eq!(volume.warm(&halves, 0, &|| true).unwrap().done_bytes, limits::WARM_LOOK_BYTES_MAX);
    assert_eq!(warm(&volume, &[(0, long)], 0).present_bytes, SIZE);
}

/// Warms 1 MiB; a reader joins a frame of it, and then the store answers so. The frame that the
/// reader fetched is in the cache.
fn joined(
    volume: &Volume,
    cache: &ReadCache,
    store: &PatientStore,
    kind: StoreErrorKind,
) -> sawmill_volume::Result<WarmStep> {
    store.holds.store(true, Ordering::SeqCst);
    std::thread::scope(|threads| {
        let warming = threads.spawn(|| volume.warm(&[(0, MIB)], 100, &|| true));
        until("the frames are asked for", || store.held_bytes() >= MIB);
        let reader = threads.spawn(|| read(volume, FRAME, FRAME));
        until("the reader waits for one", || store.is_any_raised());
        store.fail(kind);
        reader.join().unwrap();
        // A reader is answered before its frame is in the cache.
        until("what was read is in the cache", || cached(cache) == FRAME);
        warming.join().unwrap()
    })
}

#[test]
fn a_store_that_is_away_ends_a_step_and_fails_no_reader() {
    let (rig, store) = written(0);
    let cache = rig.options.cache.clone().unwrap();
    let volume = rig.open();
    let error = joined(&volume, &cache, &store, StoreErrorKind::Unavailable).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    // Nothing goes on asking, and the next step fetches the rest.
    assert_eq!(warm(&volume, &[(0, MIB)], 100).fetched_bytes, MIB - FRAME);
}

#[test]
fn a_store_that_sends_nothing_for_long_ends_a_step() {
    let (rig, store) = written(0);
    let world = Arc::new(Forward(RealWorld::default(), AtomicU64::new(0), 0));
    let dynamic: Arc<dyn World> = world.clone();
    let stepped = SteppedVolume::open(dynamic, store.clone(), "disk", &rig.options).unwrap();
    let volume = stepped.volume().clone();
    store.holds.store(true, Ordering::SeqCst);
    std::thread::scope(|threads| {
        let warming = threads.spawn(|| volume.warm(&[(0, MIB)], 100, &|| true));
        until("the frames are asked for", || store.held_bytes() >= MIB);
        world.1.fetch_add(31_000, Ordering::SeqCst);
        let error = warming.join().unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        assert!(error.to_string().contains("sent nothing for 30 s"), "{error}");
    });
    store.release();
}

#[test]
fn an_object_that_was_collected_meanwhile_is_no_damage() {
    let (rig, store) = written(0);
    let cache = rig.options.cache.clone().unwrap();
    let volume = rig.open();
    let step = joined(&volume, &cache, &store, StoreErrorKind::NotFound).unwrap();
    assert_eq!((step.fetched_frames, step.done_bytes), (0, MIB));
    assert_eq!(warm(&volume, &[(0, MIB)], 100).fetched_bytes, MIB - FRAME);
}

#[test]
fn what_only_warming_misses_moves_no_reader_to_a_newer_state() {
    let (mut rig, store) = written(0);
    rig.options.read_only = true;
    let volume = rig.open();
    store.holds.store(true, Ordering::SeqCst);
    std::thread::scope(|threads| {
        let warming = threads.spawn(|| volume.warm(&[(0, MIB)], 100, &|| true));
        until("the frames are asked for", || store.held_bytes() >= MIB);
        let lists = store.lists.load(Ordering::SeqCst);
        store.lose();
        assert_eq!(warming.join().unwrap().unwrap().fetched_frames, 0);
        assert_eq!(store.lists.load(Ordering::SeqCst), lists, "no state was looked for");
    });
    read(&volume, 0, MIB);
}

#[test]
fn one_damaged_frame_is_left_out_and_all_others_are_fetched() {
    let mut machine = Machine::new();
    let volume = machine.open();
    (0..4).for_each(|tile| write_tile(&volume, tile, 1));
    stored(&volume);
    volume.close().unwrap();
    std::fs::remove_file(machine.journal()).unwrap();
    let key = machine.keys("/seg/").remove(1);
    machine.tamper(&key, |bytes| {
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
    });
    let path = machine.folder.path().join("cache");
    machine.rig.options.cache = Some(open_cache(&path, 32 * MIB).unwrap());
    let volume = machine.open();
    let all = 4 * SEGMENT as u64;
    let sum = warm(&volume, &[(0, all)], 1000);
    assert_eq!((sum.fetched_bytes, sum.left_bytes), (all - FRAME, FRAME));
    assert_eq!(tile_version(&volume, 3, 1), 1);
}

#[test]
fn what_lies_in_a_part_of_the_map_that_is_not_loaded_is_warmed_too() {
    let (mut rig, store) = written(8 * MIB);
    rig.options.bounds.map_held_from_bytes = 0;
    let world: Arc<dyn World> = Arc::new(RealWorld::default());
    let stepped = SteppedVolume::open(world, store, "disk", &rig.options).unwrap();
    // No loop has made a step yet, so nothing has been loaded.
    let volume = stepped.volume();
    let sum = warm(volume, &[(0, SIZE)], volume.spare_frames().unwrap());
    assert_eq!(sum.fetched_bytes + sum.present_bytes, SIZE);
}
