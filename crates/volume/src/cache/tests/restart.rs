//! What a saved index brings back: the frames, in their order, and never a wrong byte.

use sawmill_format::cache_index::CacheIndex;

use super::*;

#[test]
fn a_restart_keeps_the_frames_and_their_owners() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("cache.index");
    let disk = MemoryDisk::with_cells(20);
    let before = open(&disk, Some(path.clone()));
    assert_eq!(before.stats().index, IndexState::New);
    before.owner(VolumeId([9; 16]));
    for number in 0..30 {
        insert(&before, frame(&before, number));
        get(&before, frame(&before, 3));
    }
    before.save_index().unwrap();
    let after = open(&disk, Some(path));
    assert_eq!(after.stats().index, IndexState::Restored { frames: 20 });
    assert_eq!(after.stats().bytes, before.stats().bytes);
    for number in 0..30 {
        let (was, is) = (frame(&before, number), frame(&after, number));
        assert_eq!(after.contains(is), before.contains(was), "frame {number}");
        assert_eq!(get_written_as(&after, is, was), get(&before, was), "frame {number}");
    }
    assert_eq!(
        after.owner(VolumeId([1; 16])),
        OwnerId(0),
        "an owner without frames is not carried along"
    );
    for tier in persist::QUEUES {
        let cells =
            |cache: &ReadCache| cache.state.lock().eviction.oldest_first(tier).collect::<Vec<_>>();
        assert_eq!(cells(&after), cells(&before), "the order of {tier:?}");
    }
    scan(&after, 100..140);
    assert_eq!(after.stats().damaged + after.stats().stale, 0);
}

#[test]
fn what_nobody_has_read_yet_takes_no_room_of_what_was_hit_before_a_restart() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("cache.index");
    let disk = MemoryDisk::with_cells(100);
    let before = open(&disk, Some(path.clone()));
    // Frames that are hit while all cells are full move to main; the others were hit just now.
    scan(&before, 0..100);
    (0..40).for_each(|number| assert_eq!(get(&before, frame(&before, number)), Some(())));
    scan(&before, 100..130);
    let hit: Vec<u32> =
        (0..130).filter(|number| before.contains(frame(&before, *number))).collect();
    (60..80).filter(|number| hit.contains(number)).for_each(|number| {
        assert_eq!(get(&before, frame(&before, number)), Some(()));
    });
    let hot: Vec<u32> = hit.into_iter().filter(|number| (0..40).contains(number)).collect();
    assert!(hot.len() >= 35, "{} are hot", hot.len());
    before.save_index().unwrap();
    let after = open(&disk, Some(path));
    let room = after.spare_frames();
    for number in 1000..1000 + 2 * 100 {
        let key = frame(&after, number);
        let _ = after.insert_spare(key, &data(&key, FRAME));
    }
    let left = hot.iter().filter(|number| after.contains(frame(&after, **number))).count();
    assert_eq!(left, hot.len(), "with room for {room}");
}

#[test]
fn a_stale_index_gives_misses_and_no_wrong_bytes() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("cache.index");
    let disk = MemoryDisk::with_cells(20);
    let before = open(&disk, Some(path.clone()));
    scan(&before, 0..20);
    before.save_index().unwrap();
    scan(&before, 100..115);
    let after = open(&disk, Some(path));
    let hits = (0..20).filter(|number| get(&after, frame(&after, *number)).is_some()).count();
    assert_eq!(hits, 5, "the cells not reused since");
    assert_eq!((after.stats().stale, after.stats().damaged, after.stats().frames), (15, 0, 5));
    scan(&after, 200..215);
    assert_eq!(after.stats().evicted, 0, "cells of dropped frames are free");
}

#[test]
fn a_damaged_index_leaves_an_empty_cache_that_takes_and_returns_frames() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("cache.index");
    let disk = MemoryDisk::with_cells(4);
    let before = open(&disk, Some(path.clone()));
    scan(&before, 0..4);
    before.save_index().unwrap();
    let good = std::fs::read(&path).unwrap();
    let damage = |at: usize| {
        let mut bytes = good.clone();
        bytes[at] ^= 4;
        bytes
    };
    let flipped = (0..good.len()).step_by(7).map(damage);
    let cut = (0..good.len()).step_by(50).map(|length| good[..length].to_vec());
    for bytes in flipped.chain(cut) {
        std::fs::write(&path, &bytes).unwrap();
        let after = open(&disk, Some(path.clone()));
        assert!(matches!(after.stats().index, IndexState::Discarded { .. }));
        assert_eq!(after.stats().frames, 0);
        insert(&after, frame(&after, 0));
        assert_eq!(get(&after, frame(&after, 0)), Some(()));
    }
}

#[test]
fn the_index_of_another_disk_or_frame_size_is_not_used() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("cache.index");
    let (disk, other) = (MemoryDisk::with_cells(4), MemoryDisk::with_cells(4));
    drop(open(&other, None));
    let before = open(&disk, Some(path.clone()));
    scan(&before, 0..4);
    before.save_index().unwrap();
    let index = |disk: &Arc<MemoryDisk>, frame_bytes| {
        let options = CacheOptions { frame_bytes, ..CacheOptions::default() };
        ReadCache::open(disk.clone(), Some(path.clone()), options).stats().index
    };
    assert!(matches!(index(&other, FRAME), IndexState::Discarded { .. }));
    assert!(matches!(index(&disk, FRAME / 2), IndexState::Discarded { .. }));
    assert_eq!(index(&disk, FRAME), IndexState::Restored { frames: 4 });
}

#[test]
fn a_cache_made_smaller_or_larger_keeps_what_still_fits() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("cache.index");
    let disk = MemoryDisk::with_cells(20);
    let sized = |cells: u64| {
        let cache_bytes = HEADER_BYTES + cells * u64::from(FRAME);
        ReadCache::open(
            disk.clone(),
            Some(path.clone()),
            CacheOptions { cache_bytes, frame_bytes: FRAME },
        )
    };
    let cache = sized(10);
    scan(&cache, 0..10);
    cache.save_index().unwrap();
    let larger = sized(20);
    assert_eq!((larger.stats().frames, larger.stats().frames_max), (10, 20));
    let smaller = sized(6);
    assert_eq!((smaller.stats().frames, smaller.stats().frames_max), (6, 6));
    assert_eq!(
        (0..10).filter(|number| get(&smaller, frame(&smaller, *number)).is_some()).count(),
        6
    );
}

#[test]
fn a_disk_that_cannot_be_marked_serves_and_does_not_save() {
    let folder = TempDir::new().unwrap();
    let disk = MemoryDisk::with_cells(4);
    disk.fail_writes.store(true, Relaxed);
    let cache = open(&disk, Some(folder.path().join("cache.index")));
    disk.fail_writes.store(false, Relaxed);
    insert(&cache, frame(&cache, 0));
    assert_eq!(get(&cache, frame(&cache, 0)), Some(()));
    assert!(cache.save_index().is_err());
}

#[test]
fn an_index_saved_beside_insertions_is_sound() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("cache.index");
    let disk = MemoryDisk::with_cells(16);
    let cache = open(&disk, Some(path.clone()));
    thread::scope(|scope| {
        scope.spawn(|| scan(&cache, 0..400));
        (0..20).for_each(|_| cache.save_index().unwrap());
    });
    let after = open(&disk, Some(path));
    assert!(matches!(after.stats().index, IndexState::Restored { .. }));
    let hits =
        (0..400).filter(|number| get(&after, frame(&after, *number)).is_some()).count() as u64;
    assert_eq!(hits, after.stats().hits);
}

#[test]
fn an_index_of_an_older_version_starts_a_cold_cache() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("cache.index");
    let disk = MemoryDisk::with_cells(4);
    let before = open(&disk, Some(path.clone()));
    scan(&before, 0..4);
    before.save_index().unwrap();
    let tag = before.tag.unwrap();
    let saved = CacheIndex::decode(&std::fs::read(&path).unwrap(), tag).unwrap();
    std::fs::write(&path, CacheIndex { version: 1, ..saved }.encode().unwrap()).unwrap();
    let after = open(&disk, Some(path));
    let IndexState::Discarded { reason } = after.stats().index else {
        panic!("its checksums may let stale bytes pass")
    };
    assert!(reason.contains("older version"), "{reason}");
    scan(&after, 0..4);
    assert_eq!(after.stats().frames, 4);
}
