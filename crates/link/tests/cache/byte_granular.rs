//! The promises of BASS, one claim per test: no fetch before a write, few bytes on the wire,
//! fetches of holes only; and that the newer bytes win below, and that memory is bounded.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use sawmill_device::{BlockDeviceExt, MemoryDevice, Operation};
use sawmill_link::Unpacker;
use sawmill_link::cache::{Cache, Options};

use crate::below::{FUA, LowerDevice, Mode, submit, submit_with};

const SIZE_BYTES: u64 = 16 << 20;
const PAGE: u64 = 4096;

fn cache_with(mode: Mode, options: Options) -> (Arc<LowerDevice>, Cache<Arc<LowerDevice>>) {
    let below = LowerDevice::new(SIZE_BYTES, mode);
    below.memory().write_at(0, &vec![0xEE; SIZE_BYTES as usize]).unwrap();
    (below.clone(), Cache::new(below, &options).unwrap())
}

fn cache() -> (Arc<LowerDevice>, Cache<Arc<LowerDevice>>) {
    cache_with(Mode::Now, Options::default())
}

fn is(counter: &AtomicU64) -> u64 {
    counter.load(Relaxed)
}

#[test]
fn a_partial_write_to_an_uncached_page_asks_nothing_below() {
    let (below, cache) = cache_with(Mode::Hold, Options::default());
    for page in 0..1000 {
        cache.write_at(page * PAGE + 100, &[1; 700]).unwrap();
    }
    assert_eq!(below.take_requests(), []);
    assert_eq!(is(&cache.counters().partial_writes), 1000);
    assert_eq!(cache.read_at(5 * PAGE + 150, 600).unwrap(), [1; 600], "and is read from the page");
    assert_eq!(below.take_requests(), []);
}

#[test]
fn all_that_there_is_of_the_last_page_is_a_whole_page() {
    let below = Unpacker::new(MemoryDevice::new(2 * PAGE + 512));
    let cache = Cache::new(below, &Options::default()).unwrap();
    cache.write_at(PAGE, &[1; PAGE as usize + 512]).unwrap();
    cache.flush().unwrap();
    let counters = cache.counters();
    assert_eq!(
        (is(&counters.partial_writes), is(&counters.whole_pages_sent), is(&counters.bytes_saved)),
        (0, 2, 0)
    );
    cache.write_at(2 * PAGE + 1, &[1; 511]).unwrap();
    assert_eq!(is(&counters.partial_writes), 1);
}

#[test]
fn a_flush_sends_little_more_than_the_bytes_that_were_written() {
    for length in [1, 100, 512, 1024, 2048] {
        let (below, cache) = cache();
        for page in 0..256 {
            cache.write_at(page * PAGE + 700, &vec![7; length]).unwrap();
        }
        cache.flush().unwrap();
        let (sent, written) = (is(&cache.counters().bytes_sent), 256 * length as u64);
        assert!(
            sent <= written + 256 * 8 + 64 * is(&cache.counters().packed_sent),
            "{length}: {sent} bytes"
        );
        assert_eq!(is(&cache.counters().bytes_saved), 256 * PAGE - sent);
        assert_eq!(below.count(Operation::Read), 0);
        let requests = (sent / (60 << 10) + 1).max(256 * PAGE / (1 << 20)) as usize;
        assert!(below.count(Operation::Write) <= requests + 1, "pages share requests (BASS 3.2)");
        let mut page = vec![0xEE; PAGE as usize];
        page[700..700 + length].fill(7);
        assert_eq!(below.memory().read_at(255 * PAGE, PAGE as usize).unwrap(), page);
    }
}

#[test]
fn a_row_of_whole_pages_goes_as_a_plain_write_and_a_mixture_packed() {
    let (below, cache) = cache();
    cache.write_at(64 * PAGE, &[1; 16 * PAGE as usize]).unwrap();
    cache.flush().unwrap();
    let writes: Vec<_> = below
        .take_requests()
        .into_iter()
        .filter(|seen| seen.operation == Operation::Write)
        .collect();
    assert_eq!(writes.len(), 1);
    assert_eq!(
        (writes[0].packed, writes[0].address, writes[0].length),
        (false, 64 * PAGE, 16 * PAGE)
    );

    cache.write_at(200 * PAGE + 10, &[2; 10]).unwrap();
    cache.write_at(201 * PAGE, &[3; PAGE as usize]).unwrap();
    cache.write_at(203 * PAGE + 5, &[4; 5]).unwrap();
    cache.write_at(210 * PAGE, &[5; 8 * PAGE as usize]).unwrap();
    cache.flush().unwrap();
    let writes: Vec<_> = below
        .take_requests()
        .into_iter()
        .filter(|seen| seen.operation == Operation::Write)
        .collect();
    let kinds: Vec<_> =
        writes.iter().map(|seen| (seen.packed, seen.address, seen.length)).collect();
    let mixture = 16 + 3 * 8 + 10 + PAGE + 5;
    assert_eq!(kinds, [(true, 200 * PAGE + 10, mixture), (false, 210 * PAGE, 8 * PAGE)]);
    assert_eq!((is(&cache.counters().packed_sent), is(&cache.counters().plain_sent)), (1, 2));
    assert_eq!(is(&cache.counters().whole_pages_sent), 16 + 1 + 8);
}

#[test]
fn a_known_page_whose_packed_form_would_be_longer_goes_whole() {
    let scatter = |cache: &Cache<Arc<LowerDevice>>| {
        (0..2048).for_each(|pair| cache.write_at(pair * 2, b"!").unwrap());
        cache.write_at(4095, b"!").unwrap();
        cache.flush().unwrap();
        is(&cache.counters().bytes_sent)
    };
    let (below, known_cache) = cache();
    known_cache.read_at(0, PAGE as usize).unwrap();
    assert_eq!(scatter(&known_cache), PAGE);
    assert_eq!(
        (is(&known_cache.counters().plain_sent), is(&known_cache.counters().whole_pages_sent)),
        (1, 1)
    );
    assert_eq!(below.memory().read_at(0, 4).unwrap(), b"!\xEE!\xEE");

    let (below, unknown) = cache();
    assert_eq!(scatter(&unknown), 16 + 2048 * 8 + 2049, "what is not known cannot be sent");
    assert_eq!(below.memory().read_at(0, 4).unwrap(), b"!\xEE!\xEE");
    assert_eq!(below.count(Operation::Read), 0);
}

#[test]
fn a_read_after_a_partial_write_fetches_only_sub_blocks_with_holes() {
    let (below, cache) = cache_with(Mode::Now, Options::default());
    cache.write_at(1000, &[1; 2072]).unwrap();
    assert_eq!(below.count(Operation::Read), 0);
    let mut page = vec![0xEE; PAGE as usize];
    page[1000..3072].fill(1);
    assert_eq!(cache.read_at(0, PAGE as usize).unwrap(), page);
    let reads: Vec<_> =
        below.take_requests().iter().map(|seen| (seen.address, seen.length)).collect();
    // Bytes 1000 to 3072 cover the sub-blocks from 1024 to 3072.
    assert_eq!(reads, [(0, 1024), (3072, 1024)]);
    assert_eq!(
        (is(&cache.counters().hole_fetches), is(&cache.counters().fetched_bytes)),
        (1, 2048)
    );
    assert_eq!(cache.read_at(1, 4000).unwrap(), page[1..4001], "now it is known");
    assert_eq!(below.take_requests(), []);
    cache.flush().unwrap();
    assert_eq!(is(&cache.counters().bytes_sent), 2072, "what was fetched is not dirty");
}

#[test]
fn the_worst_case_moves_less_than_read_modify_write() {
    let (_, cache) = cache();
    for page in 0..100 {
        cache.write_at(page * PAGE, &[1; 2048]).unwrap();
        cache.read_at(page * PAGE, PAGE as usize).unwrap();
    }
    cache.flush().unwrap();
    let moved = is(&cache.counters().fetched_bytes) + is(&cache.counters().bytes_sent);
    let read_modify_write = 100 * 2 * PAGE;
    assert!(moved < read_modify_write * 52 / 100, "{moved} bytes");
}

#[test]
fn reads_of_one_page_share_a_fetch_and_a_write_meanwhile_is_kept() {
    let (below, cache) = cache_with(Mode::Hold, Options::default());
    let first = submit(&cache, Operation::Read, 0, &[0; 4096]);
    let second = submit(&cache, Operation::Read, 100, &[0; 1000]);
    assert_eq!(below.count(Operation::Read), 1);
    let covered = submit(&cache, Operation::Write, 300, &[1; 50]);
    assert!(covered.now().unwrap().is_ok(), "a write does not wait for a fetch");
    let own = submit(&cache, Operation::Read, 310, &[0; 30]);
    assert_eq!(own.now().unwrap().unwrap(), [1; 30], "nor does a read of what was written");
    below.release();
    let mut page = vec![0xEE; 4096];
    page[300..350].fill(1);
    assert_eq!(first.now().unwrap().unwrap(), page);
    assert_eq!(second.now().unwrap().unwrap(), page[100..1100]);
}

#[test]
fn a_page_on_its_way_may_be_written_again_and_the_newer_bytes_come_last() {
    let (below, cache) = cache_with(Mode::Hold, Options::default());
    cache.write_at(0, b"old and old").unwrap();
    let flush = submit(&cache, Operation::Flush, 0, b"");
    let first = below.take_held();
    assert_eq!(first.len(), 1);
    cache.write_at(0, b"new").unwrap();
    let second_flush = submit(&cache, Operation::Flush, 0, b"");
    assert!(below.take_held().is_empty(), "no second write-back of a page while one is under way");
    first.into_iter().for_each(|waiting| below.carry_out(waiting));
    assert_eq!(below.memory().read_at(0, 11).unwrap(), b"old and old");
    below.release();
    assert!(flush.now().unwrap().is_ok() && second_flush.now().unwrap().is_ok());
    assert_eq!(below.memory().read_at(0, 11).unwrap(), b"new and old");
}

#[test]
fn a_flush_waits_for_what_was_written_before_it_and_not_for_more() {
    let (below, cache) = cache_with(Mode::Hold, Options::default());
    cache.write_at(0, b"covered").unwrap();
    let flush = submit(&cache, Operation::Flush, 0, b"");
    cache.write_at(100 * PAGE, b"after it").unwrap();
    assert_eq!(flush.now(), None);
    let requests: Vec<_> =
        below.take_requests().iter().map(|seen| (seen.operation, seen.address)).collect();
    assert_eq!(requests, [(Operation::Write, 0)]);
    let held_requests = below.take_held();
    held_requests.into_iter().for_each(|waiting| below.carry_out(waiting));
    let requests: Vec<_> = below.take_requests().iter().map(|seen| seen.operation).collect();
    assert_eq!(
        (requests, flush.now()),
        (vec![Operation::Flush], None),
        "then the device below flushes"
    );
    below.release();
    assert!(flush.now().unwrap().is_ok());
    assert_eq!(below.memory().read_at(100 * PAGE, 1).unwrap(), [0xEE]);
}

#[test]
fn a_write_with_fua_goes_through_with_fua() {
    let (below, cache) = cache_with(Mode::Hold, Options::default());
    cache.write_at(0, b"plain").unwrap();
    let fua = submit_with(&cache, Operation::Write, FUA, 2, 3, b"fua");
    assert_eq!(fua.now(), None);
    let requests = below.take_requests();
    assert_eq!(requests.len(), 1);
    assert!(requests[0].fua && requests[0].address == 0 && requests[0].length == 5);
    below.release();
    assert!(fua.now().unwrap().is_ok());
    assert_eq!(below.memory().read_at(0, 5).unwrap(), b"plfua");
    assert_eq!(below.take_requests(), [], "no flush besides");
}

#[test]
fn time_flushes_what_no_user_flushes() {
    let (below, cache) =
        cache_with(Mode::Now, Options { flush_interval_s: 5, ..Options::default() });
    let start = Instant::now();
    cache.tick(start);
    cache.write_at(0, b"x").unwrap();
    cache.tick(start + Duration::from_secs(4));
    assert_eq!(below.take_requests(), []);
    cache.tick(start + Duration::from_secs(5));
    assert_eq!(below.take_requests().len(), 1);
    cache.tick(start + Duration::from_secs(60));
    assert_eq!(below.take_requests(), [], "it is clean");
    assert_eq!(is(&cache.counters().dirty_bytes), 0);
}

#[test]
fn at_the_bound_of_dirty_bytes_writers_wait_and_memory_is_bounded() {
    let options =
        Options { cache_bytes_max: 1 << 20, dirty_bytes_max: 64 << 10, ..Options::default() };
    let (below, cache) = cache_with(Mode::Hold, options);
    let writes: Vec<_> =
        (0..100).map(|page| submit(&cache, Operation::Write, page * PAGE, &[1; 4096])).collect();
    let answered_count = writes.iter().filter_map(|write| write.now()).count();
    assert_eq!(answered_count, 16, "as many as fit");
    assert_eq!(is(&cache.counters().writes_held), 84);
    assert!(is(&cache.counters().dirty_bytes) <= 64 << 10);
    below.release();
    assert_eq!(writes.iter().filter_map(|write| write.now()).count(), 84, "the others");
    assert!(is(&cache.counters().pages_peak) <= 256);
}

#[test]
fn single_dirty_bytes_cannot_fill_the_memory_either() {
    let options =
        Options { cache_bytes_max: 1 << 20, dirty_bytes_max: 1 << 20, ..Options::default() };
    let (below, cache) = cache_with(Mode::Hold, options);
    let writes: Vec<_> =
        (0..400).map(|page| submit(&cache, Operation::Write, page * PAGE, b"x")).collect();
    assert_eq!(writes.iter().filter_map(|write| write.now()).count(), 224, "7 of 8 pages");
    below.release();
    assert_eq!(writes.iter().filter_map(|write| write.now()).count(), 176);
    below.set(Mode::Now);
    for page in 0..2000 {
        cache.read_at(page * PAGE, 4096).unwrap();
    }
    cache.flush().unwrap();
    assert!(is(&cache.counters().pages_peak) <= 256, "{}", is(&cache.counters().pages_peak));
    assert!(is(&cache.counters().evictions) >= 1700);
    for page in 0..400 {
        assert_eq!(below.memory().read_at(page * PAGE, 2).unwrap(), b"x\xEE");
    }
}

#[test]
fn reads_under_way_are_all_that_may_exceed_the_memory_and_only_until_they_end() {
    let options =
        Options { cache_bytes_max: 64 << 10, dirty_bytes_max: 16 << 10, ..Options::default() };
    let (below, cache) = cache_with(Mode::Hold, options);
    let reads: Vec<_> =
        (0..50).map(|page| submit(&cache, Operation::Read, page * PAGE, &[0; 4096])).collect();
    assert_eq!(is(&cache.counters().pages), 50);
    below.release();
    assert!(reads.iter().all(|read| read.now().unwrap().is_ok()));
    assert_eq!(is(&cache.counters().pages), 16);
}

#[test]
fn no_packed_write_has_more_entries_than_one_may_have() {
    let below = Unpacker::new(MemoryDevice::new(SIZE_BYTES));
    let cache = Cache::new(below, &Options::default()).unwrap();
    for page in 0..40 {
        for pair in 0..2048 {
            cache.write_at(page * PAGE + pair * 2, b"!").unwrap();
        }
    }
    cache.flush().unwrap();
    assert_eq!(is(&cache.counters().packed_sent), 2, "40 pages have 81920 entries");
    let expected = b"!\0".repeat(40 * 2048);
    assert!(cache.inner().read_at(0, expected.len()).unwrap() == expected);
}
