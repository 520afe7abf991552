//! Failures below: no flush reports false success, no answered write is lost, no request hangs.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use sawmill_device::{BlockDevice, BlockDeviceExt, ErrorKind, Operation};
use sawmill_link::cache::{Cache, Options, Policy};

use crate::below::{FUA, LowerDevice, Mode, failed, submit, submit_with};

const SIZE_BYTES: u64 = 16 << 20;
const UNAVAILABLE: Option<Result<Vec<u8>, ErrorKind>> = Some(Err(ErrorKind::Unavailable));

fn cache_with(options: Options) -> (Arc<LowerDevice>, Cache<Arc<LowerDevice>>) {
    let below = LowerDevice::new(SIZE_BYTES, Mode::Hold);
    (below.clone(), Cache::new(below, &options).unwrap())
}

fn fail_all(below: &LowerDevice) -> usize {
    let held_requests = below.take_held();
    let count = held_requests.len();
    held_requests.into_iter().for_each(|(_, request)| request.fail(failed()));
    count
}

#[test]
fn a_failed_write_back_fails_every_flush_that_covers_it_and_the_next_flush_tries_again() {
    let (below, cache) = cache_with(Options::default());
    cache.write_at(10, b"precious").unwrap();
    let flushes = [0; 3].map(|_| submit(&cache, Operation::Flush, 0, b""));
    assert_eq!(fail_all(&below), 1);
    assert!(flushes.iter().all(|flush| flush.now() == UNAVAILABLE));
    assert!(below.take_held().is_empty(), "nothing is tried until a request wants it");
    assert_eq!(cache.read_at(10, 8).unwrap(), b"precious", "the bytes are there");
    assert_eq!(cache.counters().dirty_bytes.load(Relaxed), 8);

    let again = submit(&cache, Operation::Flush, 0, b"");
    assert_eq!(fail_all(&below), 1);
    assert_eq!(again.now(), UNAVAILABLE, "it did not claim what is not so");

    let last = submit(&cache, Operation::Flush, 0, b"");
    assert_eq!(below.release(), 2);
    assert!(last.now().unwrap().is_ok());
    assert_eq!(below.memory().read_at(10, 8).unwrap(), b"precious");
    assert_eq!(cache.counters().write_back_errors.load(Relaxed), 2);
}

#[test]
fn a_flush_that_does_not_cover_the_failed_bytes_is_not_failed() {
    let (below, cache) = cache_with(Options { write_backs_max: 4, ..Options::default() });
    cache.write_at(0, b"a").unwrap();
    let early = submit(&cache, Operation::Flush, 0, b"");
    let early_writes = below.take_held();
    cache.write_at(8 << 20, b"b").unwrap();
    let late = submit(&cache, Operation::Flush, 0, b"");
    assert_eq!(fail_all(&below), 1);
    assert_eq!((early.now(), late.now()), (None, UNAVAILABLE));
    early_writes.into_iter().for_each(|waiting| below.carry_out(waiting));
    below.release();
    assert!(early.now().unwrap().is_ok());
}

#[test]
fn bytes_written_while_a_failing_write_back_was_under_way_win() {
    let (below, cache) = cache_with(Options::default());
    cache.write_at(0, b"aaaaaaaa").unwrap();
    let flush = submit(&cache, Operation::Flush, 0, b"");
    cache.write_at(2, b"bb").unwrap();
    fail_all(&below);
    assert_eq!(flush.now(), UNAVAILABLE);
    assert_eq!(cache.counters().dirty_bytes.load(Relaxed), 8);
    let flush = submit(&cache, Operation::Flush, 0, b"");
    below.release();
    assert!(flush.now().unwrap().is_ok());
    assert_eq!(below.memory().read_at(0, 8).unwrap(), b"aabbaaaa");
}

#[test]
fn an_error_of_the_flush_below_is_the_flush_s() {
    let (below, cache) = cache_with(Options::default());
    let flush = submit(&cache, Operation::Flush, 0, b"");
    assert_eq!(fail_all(&below), 1);
    assert_eq!(flush.now(), UNAVAILABLE);
}

#[test]
fn after_a_flush_that_failed_below_readers_see_what_is_there() {
    let below = LowerDevice::new(SIZE_BYTES, Mode::Now);
    below.be_volatile();
    let options = Options { flush_interval_s: 0, ..Options::default() };
    let cache = Cache::new(below.clone(), &options).unwrap();
    cache.write_at(0, b"clean and lost").unwrap();
    cache.write_at(8192, b"clean and lost").unwrap();
    cache.tick(Instant::now());
    assert_eq!(cache.counters().dirty_bytes.load(Relaxed), 0, "all of it was written below");
    cache.write_at(6, b"not").unwrap();
    below.set(Mode::Hold);
    let under_way = submit(&cache, Operation::Read, 8192, &[0; 100]);
    below.lose();
    let flush = submit(&cache, Operation::Flush, 0, b"");
    let reads = below.take_held();
    assert_eq!(reads.iter().filter(|(_, request)| request.operation == Operation::Read).count(), 1);
    let (reads, others): (Vec<_>, Vec<_>) =
        reads.into_iter().partition(|(_, request)| request.operation == Operation::Read);
    others.into_iter().for_each(|waiting| below.carry_out(waiting));
    let flushes = below.take_held();
    flushes.into_iter().for_each(|waiting| below.carry_out(waiting));
    assert_eq!(flush.now(), UNAVAILABLE);
    below.set(Mode::Now);
    assert_eq!(
        cache.read_at(0, 14).unwrap(),
        b"\0\0\0\0\0\0not\0\0\0\0\0",
        "what is lost is not shown"
    );
    reads.into_iter().for_each(|waiting| below.carry_out(waiting));
    assert!(under_way.now().unwrap().is_ok());
    assert_eq!(cache.read_at(8192, 14).unwrap(), [0; 14], "nor where a fetch was under way");
    cache.flush().unwrap();
}

#[test]
fn bytes_saved_are_those_of_write_backs_that_succeeded_less_what_others_cost() {
    let (below, cache) = cache_with(Options::default());
    let saved = || cache.counters().bytes_saved.load(Relaxed);
    let flush = |fail: bool| {
        let flush = submit(&cache, Operation::Flush, 0, b"");
        if fail {
            fail_all(&below)
        } else {
            below.release()
        };
        flush.now().unwrap().is_ok()
    };
    cache.write_at(4096 + 100, &[1; 96]).unwrap();
    assert!(!flush(true));
    assert_eq!(saved(), 0, "it has to go again");
    assert!(flush(false));
    assert_eq!(saved(), 4000);
    // In this page every second byte is known: its packed form is longer than a page.
    (0..2048).for_each(|pair| cache.write_at(8192 + pair * 2, b"!").unwrap());
    assert!(flush(false));
    let cost = 16 + 2048 * 9 - 4096;
    assert_eq!(saved(), 4000, "a counter does not go down");
    (0..10).for_each(|page| cache.write_at((page << 20) + 100, b"!").unwrap());
    assert!(flush(false));
    let sent = cache.counters().bytes_sent.load(Relaxed) - 96 - 96 - (cost + 4096);
    assert_eq!(saved(), 4000 + 10 * 4096 - cost - sent);
}

#[test]
fn writers_without_room_receive_the_failure_and_none_hangs() {
    let options =
        Options { cache_bytes_max: 64 << 10, dirty_bytes_max: 16 << 10, ..Options::default() };
    let (below, cache) = cache_with(options);
    let writes: Vec<_> =
        (0..20).map(|page| submit(&cache, Operation::Write, page * 4096, &[1; 4096])).collect();
    assert!(fail_all(&below) > 0);
    let outcomes: Vec<_> = writes.iter().filter_map(|write| write.now()).collect();
    assert_eq!(outcomes.len(), 20);
    assert_eq!(outcomes.iter().filter(|outcome| outcome.is_err()).count(), 16);
    let retried = submit(&cache, Operation::Write, 0, &[2; 4096]);
    assert!(retried.now().is_none(), "it waits for another try");
    below.release();
    assert!(retried.now().unwrap().is_ok());
}

#[test]
fn a_failed_fetch_fails_its_readers_and_the_next_read_tries_again() {
    let (below, cache) = cache_with(Options::default());
    below.memory().write_at(0, &[5; 8192]).unwrap();
    cache.write_at(0, b"mine").unwrap();
    let both = submit(&cache, Operation::Read, 0, &[0; 8192]);
    let second = submit(&cache, Operation::Read, 4096, &[0; 100]);
    let covered = submit(&cache, Operation::Read, 0, &[0; 4]);
    assert_eq!(covered.now().unwrap().unwrap(), b"mine");
    assert_eq!(fail_all(&below), 1);
    assert_eq!((both.now(), second.now()), (UNAVAILABLE, UNAVAILABLE));
    let again = submit(&cache, Operation::Read, 0, &[0; 6]);
    below.release();
    assert_eq!(again.now().unwrap().unwrap(), b"mine\x05\x05");
}

#[test]
fn a_write_through_or_with_fua_that_failed_says_so_and_can_be_read() {
    for (policy, flags) in [(Policy::WriteThrough, Default::default()), (Policy::WriteBack, FUA)] {
        let (below, cache) = cache_with(Options { policy, ..Options::default() });
        let write = submit_with(&cache, Operation::Write, flags, 5, 3, b"abc");
        assert_eq!(fail_all(&below), 1);
        assert_eq!(write.now(), UNAVAILABLE);
        assert_eq!(cache.read_at(5, 3).unwrap(), b"abc", "either may be, but the same for all");
        let flush = submit(&cache, Operation::Flush, 0, b"");
        below.release();
        assert!(flush.now().unwrap().is_ok());
        assert_eq!(below.memory().read_at(5, 3).unwrap(), b"abc");
    }
}

#[test]
fn a_discard_fails_with_the_write_back_before_it_and_loses_nothing() {
    let (below, cache) = cache_with(Options::default());
    cache.write_at(100, b"dirty").unwrap();
    let discard = submit_with(&cache, Operation::Discard, Default::default(), 0, 1 << 20, b"");
    let read = submit(&cache, Operation::Read, 100, &[0; 5]);
    assert_eq!((discard.now(), read.now()), (None, None));
    assert_eq!(fail_all(&below), 1);
    assert_eq!(discard.now(), UNAVAILABLE);
    assert_eq!(read.now().unwrap().unwrap(), b"dirty");
}

#[test]
fn a_cache_that_goes_away_answers_what_waits_in_it() {
    let (below, cache) = cache_with(Options {
        cache_bytes_max: 64 << 10,
        dirty_bytes_max: 16 << 10,
        ..Options::default()
    });
    let writes: Vec<_> =
        (0..20).map(|page| submit(&cache, Operation::Write, page * 4096, &[1; 4096])).collect();
    let read = submit(&cache, Operation::Read, 1 << 20, &[0; 100]);
    let flush = submit(&cache, Operation::Flush, 0, b"");
    drop(cache);
    let internal = Some(Err(ErrorKind::Internal));
    assert_eq!((read.now(), flush.now()), (internal.clone(), internal));
    assert_eq!(writes.iter().filter_map(|write| write.now()).count(), 20);
    assert!(below.release() > 0, "late answers find no waiter");
}

#[test]
fn options_out_of_range_are_refused() {
    let kind = |options: Options| {
        let below = LowerDevice::new(SIZE_BYTES, Mode::Now);
        Cache::new(below, &options)
            .map(|cache| cache.geometry().size_bytes)
            .map_err(|error| error.kind())
    };
    let good = Options::default();
    assert_eq!(kind(good), Ok(SIZE_BYTES));
    for bad in [
        Options { cache_bytes_max: 1000, dirty_bytes_max: 1000, ..good },
        Options { dirty_bytes_max: 100, ..good },
        Options { dirty_bytes_max: good.cache_bytes_max + 1, ..good },
        Options { write_backs_max: 0, ..good },
    ] {
        assert_eq!(kind(bad), Err(ErrorKind::Invalid), "{bad:?}");
    }
}
