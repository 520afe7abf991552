//! Another process can open a cache that was let go of, even if it is still referenced.

use super::*;

#[test]
fn a_released_cache_leaves_its_file_to_the_next_though_still_referenced() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("cache");
    let held = crate::open_cache(&path, 1 << 20).unwrap();
    let key = frame(&held, 1);
    insert(&held, key);
    assert_eq!(get(&held, key), Some(()));
    assert!(crate::open_cache(&path, 1 << 20).is_err(), "one process at a time");
    held.release();
    let next = crate::open_cache(&path, 1 << 20).expect("no process holds it any more");
    // The old cache, still referenced, is empty and touches neither disk nor index.
    assert_eq!(get(&held, key), None);
    insert(&held, frame(&held, 2));
    held.save_index().unwrap();
    assert!(!path.with_extension("index").exists());
    assert_eq!((held.stats().damaged, held.stats().insertion_off), (0, None));
    insert(&next, frame(&next, 3));
    assert_eq!(get(&next, frame(&next, 3)), Some(()));
}

#[test]
fn release_waits_for_readers_of_the_disk() {
    let (disk, cache) = cache(4);
    let cache = Arc::new(cache);
    let key = frame(&cache, 1);
    insert(&cache, key);
    let (release_sender, release_receiver) = std::sync::mpsc::channel();
    let releaser = Arc::clone(&cache);
    let (reader_sender, reader_receiver) = std::sync::mpsc::channel();
    *disk.before_read.lock() = Some(Box::new(move || {
        thread::spawn(move || {
            releaser.release();
            release_sender.send(()).unwrap();
        });
        // Once `enter` fails, the other thread has begun to let go; it must not have finished.
        while reader_receiver.try_recv().is_err() {
            thread::yield_now();
        }
    }));
    thread::scope(|scope| {
        let reader = scope.spawn(|| get(&cache, key));
        while cache.place.enter().is_some() {
            thread::yield_now();
        }
        assert!(release_receiver.try_recv().is_err(), "let go of a disk that is being read");
        reader_sender.send(()).unwrap();
        assert_eq!(reader.join().unwrap(), Some(()), "the reader that was in has its bytes");
    });
    release_receiver.recv().unwrap();
    assert_eq!(Arc::strong_count(&disk), 1);
}
