//! Byte-granular writes across the link (BASS): packed ranges arrive as they were written.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use sawmill_device::{BlockDevice, BlockDeviceExt, ErrorKind, MemoryDevice, conformance};
use sawmill_link::PackedDevice;
use sawmill_link::cache::{Cache, Options, Policy};
use sawmill_link::initiator::InitiatorOptions;

use crate::pair::{ANSWER_TIME_MAX, Pair, attach, free_addresses, key, listen, open};

const SIZE_BYTES: u64 = 64 << 20;

#[test]
fn a_cache_over_the_link_keeps_the_contract() {
    for policy in [Policy::WriteBack, Policy::WriteThrough, Policy::WriteAround] {
        conformance::all(&|| {
            let pair = Pair::new(Arc::new(MemoryDevice::new(SIZE_BYTES)), &["udp", "udp"], &key);
            let options = Options {
                policy,
                cache_bytes_max: 1 << 20,
                dirty_bytes_max: 256 << 10,
                ..Options::default()
            };
            Arc::new(Cache::new(pair, &options).expect("options that fit"))
        });
    }
}

#[test]
fn small_writes_cross_the_link_packed_and_none_is_read_before() {
    let memory = Arc::new(MemoryDevice::new(SIZE_BYTES));
    let below: Arc<dyn BlockDevice> = Arc::<MemoryDevice>::clone(&memory);
    let pair = Pair::new(below, &["udp"], &key);
    let cache = Cache::new(pair, &Options::default()).expect("options that fit");
    let at = |index: u64| index * 4096 + index % 7 * 100;
    for index in 0..1000 {
        cache.write_at(at(index), &[index as u8; 10]).expect("taken");
    }
    cache.flush().expect("flushed");
    let stats = cache.counters();
    assert_eq!(stats.hole_fetches.load(Ordering::Relaxed), 0, "a write was read before");
    assert!(stats.packed_sent.load(Ordering::Relaxed) < 100, "{stats:?}");
    let sent = stats.bytes_sent.load(Ordering::Relaxed);
    let packed = stats.packed_sent.load(Ordering::Relaxed);
    assert!(sent <= 1000 * (10 + 8) + 16 * packed, "{sent} bytes went down for 10,000");
    for index in 0..1000 {
        assert_eq!(memory.read_at(at(index), 10).expect("there"), [index as u8; 10]);
    }
}

#[test]
fn a_target_that_lost_its_memory_fails_a_flush_of_the_cache_and_then_shows_its_bytes() {
    let addresses = free_addresses(&["udp"]);
    let with_kept = || {
        let memory = Arc::new(MemoryDevice::new(SIZE_BYTES));
        memory.write_at(0, b"kept").expect("memory takes it");
        memory
    };
    let first = listen(with_kept(), &addresses, key());
    let attached = attach(&addresses, key(), InitiatorOptions::default());
    let options = Options { flush_interval_s: 0, ..Options::default() };
    let cache = Cache::new(open(&attached), &options).expect("options that fit");
    cache.write_at(4096, b"lost").expect("taken");
    cache.tick(Instant::now());
    let began = Instant::now();
    while cache.counters().dirty_bytes.load(Ordering::Relaxed) > 0
        && began.elapsed() < ANSWER_TIME_MAX
    {
        std::thread::yield_now();
    }
    cache.write_at(8192, b"dirty").expect("taken");
    drop(first);
    let memory = with_kept();
    let _second = listen(Arc::<MemoryDevice>::clone(&memory), &addresses, key());
    let error = cache.flush().expect_err("what was answered is gone");
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert_eq!(cache.read_at(4096, 4).expect("read"), [0; 4], "the cache shows what is not there");
    assert_eq!(cache.read_at(0, 4).expect("read"), *b"kept");
    cache.flush().expect("what is dirty now is at the new target");
    assert_eq!(memory.read_at(8192, 5).expect("there"), *b"dirty");
}

#[test]
fn a_packed_write_as_long_as_a_place_goes_and_a_longer_one_is_refused() {
    let pair = Pair::new(Arc::new(MemoryDevice::new(SIZE_BYTES)), &["udp"], &key);
    let most = pair.packed_bytes_max() as usize;
    for (bytes, good) in [(most, true), (most + 1, false)] {
        let data = vec![5u8; bytes - 24];
        let mut payload = vec![0; bytes];
        let range = [(0u32, &data[..])];
        let used = sawmill_format::packed_write::encode(range, &mut payload).expect("room");
        assert_eq!(used, bytes);
        assert_eq!(pair.write_packed(0, payload).is_ok(), good, "{bytes} bytes");
    }
    assert_eq!(pair.read_at(0, 3).expect("read"), [5; 3]);
}
