//! Policies, and changes that go below directly.

use std::sync::Arc;

use sawmill_device::{Allocation, BlockDeviceExt, Operation};
use sawmill_link::cache::{Cache, Options, Policy};

use crate::below::{LowerDevice, Mode, submit, submit_with};

const SIZE_BYTES: u64 = 16 << 20;

fn cache(policy: Policy, mode: Mode) -> (Arc<LowerDevice>, Cache<Arc<LowerDevice>>) {
    let below = LowerDevice::new(SIZE_BYTES, mode);
    (below.clone(), Cache::new(below, &Options { policy, ..Options::default() }).unwrap())
}

#[test]
fn a_write_through_is_answered_when_it_is_below_and_then_read_from_the_cache() {
    let (below, cache) = cache(Policy::WriteThrough, Mode::Hold);
    let write = submit(&cache, Operation::Write, 100, b"through");
    assert_eq!(write.now(), None);
    let requests = below.take_requests();
    assert_eq!(
        (requests.len(), requests[0].address, requests[0].length),
        (1, 100, 7),
        "just its bytes"
    );
    below.release();
    assert!(write.now().unwrap().is_ok());
    assert_eq!(below.memory().read_at(100, 7).unwrap(), b"through");
    assert_eq!(cache.read_at(100, 7).unwrap(), b"through");
    assert_eq!(below.take_requests(), [], "nothing was read");
}

#[test]
fn a_write_around_is_not_cached_and_cached_bytes_do_not_outlive_it() {
    let (below, cache) = cache(Policy::WriteAround, Mode::Now);
    assert_eq!(cache.read_at(0, 4096).unwrap(), [0; 4096]);
    cache.write_at(10, b"around").unwrap();
    assert_eq!(below.take_requests().last().unwrap().length, 6);
    assert_eq!(cache.read_at(0, 5).unwrap(), [0; 5]);
    assert_eq!(below.take_requests(), [], "its neighbors are still cached");
    assert_eq!(cache.read_at(9, 8).unwrap(), b"\0around\0");
    assert_eq!(below.take_requests().len(), 1, "its bytes are not");
}

#[test]
fn reads_and_writes_of_a_page_wait_for_the_change_before_them_and_others_do_not() {
    let (below, cache) = cache(Policy::WriteBack, Mode::Hold);
    cache.write_at(0, &[1; 100]).unwrap();
    let zeroes = submit_with(&cache, Operation::WriteZeroes, Default::default(), 10, 50, b"");
    let read = submit(&cache, Operation::Read, 0, &[9; 100]);
    let write = submit(&cache, Operation::Write, 20, b"after");
    let other_write = submit(&cache, Operation::Write, 4096, b"beside");
    assert!(other_write.now().unwrap().is_ok());
    assert_eq!((zeroes.now(), read.now(), write.now()), (None, None, None));
    below.release();
    assert!(zeroes.now().unwrap().is_ok() && write.now().unwrap().is_ok());
    let mut expected = [1; 100];
    expected[10..60].fill(0);
    let first = read.now().unwrap().unwrap();
    // The read and the write waited at the same time.
    assert!(first[..20] == expected[..20] && first[25..] == expected[25..]);
    expected[20..25].copy_from_slice(b"after");
    let flush = submit(&cache, Operation::Flush, 0, b"");
    below.release();
    assert!(flush.now().unwrap().is_ok());
    assert_eq!(below.memory().read_at(0, 100).unwrap(), expected);
}

#[test]
fn changes_of_one_page_go_below_one_after_the_other_and_none_overtakes() {
    let (below, cache) = cache(Policy::WriteAround, Mode::Hold);
    let first = submit(&cache, Operation::Write, 0, b"first");
    let read = submit(&cache, Operation::Read, 0, &[0; 5]);
    let second = submit(&cache, Operation::Write, 0, b"later");
    assert_eq!(below.take_requests().len(), 1);
    below.release();
    assert!(first.now().unwrap().is_ok() && second.now().unwrap().is_ok());
    assert_eq!(read.now().unwrap().unwrap(), b"first", "the read was before the second");
    assert_eq!(below.memory().read_at(0, 5).unwrap(), b"later");
}

#[test]
fn a_question_about_allocation_sees_what_was_dirty() {
    let (_, cache) = cache(Policy::WriteBack, Mode::Now);
    let hole = [Allocation { length: 1 << 20, data: false }];
    assert_eq!(cache.allocation(0, 1 << 20).unwrap(), hole);
    cache.write_at(500_000, b"data").unwrap();
    let runs = cache.allocation(0, 1 << 20).unwrap();
    assert!(runs.iter().any(|run| run.data), "{runs:?}");
    cache.discard(0, SIZE_BYTES).unwrap();
    assert_eq!(cache.allocation(0, 1 << 20).unwrap(), hole);
    assert_eq!(cache.read_at(500_000, 4).unwrap(), [0; 4]);
}
