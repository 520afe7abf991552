//! Copies run without the cache's lock: what happens meanwhile neither waits for them nor shows in
//! them. A gate stops a request in the middle of its copy, or in its answer, while others go on.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use sawmill_device::{
    BlockDevice, BlockDeviceExt, Exchange, Flags, MemoryDevice, Operation, Outcome, Request,
};
use sawmill_link::cache::{Cache, Options, Policy};
use sawmill_testkit::Dice;

use crate::below::{FUA, LowerDevice, Mode, submit, submit_with};

const SIZE_BYTES: u64 = 1 << 20;
const PAGE: u64 = 4096;
/// Far longer than any copy; a request that waits for the gate itself would wait for this.
const GATE_TIME_MAX: Duration = Duration::from_secs(20);

type TestCache = Cache<Arc<LowerDevice>>;

/// Where a request stops.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stop {
    Fill,
    Buffer,
    Answer,
}

#[derive(Default)]
struct GateState {
    has_come: bool,
    is_open: bool,
}

/// Stops the first to come until it is opened.
#[derive(Default)]
struct Gate {
    state: Mutex<GateState>,
    changed: Condvar,
    /// Nobody opened it in time: somebody waited for the one that it stopped.
    held_up: AtomicBool,
}

impl Gate {
    fn pass(&self) {
        let mut state = self.state.lock().unwrap();
        state.has_come = true;
        self.changed.notify_all();
        let (_state, waited) =
            self.changed.wait_timeout_while(state, GATE_TIME_MAX, |state| !state.is_open).unwrap();
        self.held_up.fetch_or(waited.timed_out(), SeqCst);
    }

    fn wait_for_one(&self) {
        let state = self.state.lock().unwrap();
        let waited =
            self.changed.wait_timeout_while(state, GATE_TIME_MAX, |state| !state.has_come).unwrap();
        assert!(!waited.1.timed_out(), "nobody came to the gate");
    }

    fn open(&self) {
        self.state.lock().unwrap().is_open = true;
        self.changed.notify_all();
        assert!(!self.held_up.load(SeqCst), "others waited for a copy");
    }
}

/// The answer to a request, and its bytes.
type AnswerCell = Arc<Mutex<Option<(Outcome, Vec<u8>)>>>;

struct GatedExchange {
    gate: Arc<Gate>,
    stop: Stop,
    bytes: Vec<u8>,
    result: AnswerCell,
}

impl GatedExchange {
    fn pass(&self, stop: Stop) {
        if self.stop == stop {
            self.gate.pass();
        }
    }
}

impl Exchange for GatedExchange {
    fn fill(&mut self, offset: u64, into: &mut [u8]) {
        let start = offset as usize;
        let (front, back) = into.split_at_mut(into.len() / 2);
        front.copy_from_slice(&self.bytes[start..start + front.len()]);
        // In the middle of a page.
        self.pass(Stop::Fill);
        let start = start + front.len();
        back.copy_from_slice(&self.bytes[start..start + back.len()]);
    }

    fn buffer(&mut self) -> &mut [u8] {
        self.pass(Stop::Buffer);
        &mut self.bytes
    }

    fn complete(self: Box<Self>, outcome: Outcome) {
        self.pass(Stop::Answer);
        *self.result.lock().unwrap() = Some((outcome, self.bytes));
    }
}

/// Submits a request that stops at a gate on a thread of its own, runs `meanwhile` when it stands
/// there, opens the gate, and returns the answer.
fn stopped(
    cache: &TestCache,
    stop: Stop,
    operation: Operation,
    address: u64,
    bytes: Vec<u8>,
    meanwhile: impl FnOnce(),
) -> Vec<u8> {
    let (gate, result) = (Arc::<Gate>::default(), AnswerCell::default());
    let length = bytes.len() as u64;
    let exchange = GatedExchange { gate: gate.clone(), stop, bytes, result: Arc::clone(&result) };
    let request = Request::new(operation, address, length, Flags::default(), Box::new(exchange));
    thread::scope(|scope| {
        scope.spawn(|| cache.submit(request));
        gate.wait_for_one();
        meanwhile();
        gate.open();
    });
    let (outcome, bytes) = result.lock().unwrap().take().expect("an answer");
    outcome.unwrap();
    bytes
}

fn cache_with(options: Options, mode: Mode) -> (Arc<LowerDevice>, TestCache) {
    let below = LowerDevice::over(MemoryDevice::new(SIZE_BYTES), mode, 1);
    (below.clone(), Cache::new(below, &options).unwrap())
}

fn small() -> Options {
    Options { cache_bytes_max: 64 << 10, dirty_bytes_max: 16 << 10, ..Options::default() }
}

fn pattern(length: u64, seed: u64) -> Vec<u8> {
    (0..length).map(|at| (at * 7 + at / 251 + seed * 101) as u8).collect()
}

#[test]
fn nobody_waits_for_the_copy_of_a_write_and_it_takes_effect_as_a_whole() {
    let (below, cache) = cache_with(Options::default(), Mode::Now);
    let (address, length) = (100, 2 * PAGE + 500);
    let (old, new) = (pattern(length, 1), pattern(length, 2));
    cache.write_at(address, &old).unwrap();
    stopped(&cache, Stop::Fill, Operation::Write, address, new.clone(), || {
        assert_eq!(cache.read_at(address, length as usize).unwrap(), old, "nothing of it shows");
        cache.write_at(address + 4000, b"between").unwrap();
        cache.flush().unwrap();
        let mut before = old.clone();
        before[4000..4007].copy_from_slice(b"between");
        assert_eq!(below.memory().read_at(address, length as usize).unwrap(), before);
        cache.discard(address, PAGE).unwrap();
        for page in 64..200 {
            cache.read_at(page * PAGE, 10).unwrap();
        }
    });
    assert_eq!(cache.read_at(address, length as usize).unwrap(), new);
    assert_eq!(cache.read_at(0, 100).unwrap(), [0; 100], "the bytes around it");
    cache.flush().unwrap();
    assert_eq!(below.memory().read_at(address, length as usize).unwrap(), new);
}

#[test]
fn a_read_has_the_bytes_of_its_moment_whatever_becomes_of_their_pages_during_its_copy() {
    let (below, cache) = cache_with(small(), Mode::Now);
    let (address, length) = (10, 3 * PAGE - 20);
    let old = pattern(length, 3);
    cache.write_at(address, &old).unwrap();
    let read = stopped(&cache, Stop::Buffer, Operation::Read, address, old.clone(), || {
        cache.write_at(address + 5, &[0xee; 7]).unwrap();
        cache.write_at(PAGE, &[0xee; PAGE as usize]).unwrap();
        cache.write_at(2 * PAGE + 100, &[0xee; 3000]).unwrap();
        cache.flush().unwrap();
        cache.discard(PAGE, PAGE).unwrap();
        below.fail_per_mille(1000);
        assert!(cache.flush().is_err(), "now the cache doubts its bytes");
        below.fail_per_mille(0);
        // All pages are evicted, and their buffers used again.
        for page in 16..80 {
            cache.write_at(page * PAGE + page, &[0xdd; 4000]).unwrap();
            cache.read_at((page + 100) * PAGE, PAGE as usize).unwrap();
        }
        assert!(cache.counters().evictions.load(SeqCst) > 32);
    });
    assert!(read == old, "the copy shows what came after it was read");
    assert_eq!(cache.read_at(address, 12).unwrap()[5..], [0xee; 7]);
}

#[test]
fn a_read_that_waited_for_a_page_below_has_the_bytes_of_its_moment_too() {
    let (below, cache) = cache_with(Options::default(), Mode::Hold);
    let before = pattern(2 * PAGE, 4);
    below.memory().write_at(0, &before).unwrap();
    cache.write_at(PAGE - 50, &[0xaa; 100]).unwrap();
    let short = submit(&cache, Operation::Read, 3, &[0; 300]);
    let mut expected = before.clone();
    expected[PAGE as usize - 50..PAGE as usize + 50].fill(0xaa);
    let (gate, result) = (Arc::<Gate>::default(), AnswerCell::default());
    let exchange = GatedExchange {
        gate: gate.clone(),
        stop: Stop::Buffer,
        bytes: vec![0; 2 * PAGE as usize],
        result: Arc::clone(&result),
    };
    let read = Request::new(Operation::Read, 0, 2 * PAGE, Flags::default(), Box::new(exchange));
    cache.submit(read);
    thread::scope(|scope| {
        scope.spawn(|| below.release());
        gate.wait_for_one();
        cache.write_at(10, &[0xee; 5000]).unwrap();
        assert_eq!(cache.read_at(0, 20).unwrap()[10..], [0xee; 10]);
        gate.open();
    });
    let (outcome, bytes) = result.lock().unwrap().take().expect("an answer");
    outcome.unwrap();
    assert!(bytes == expected);
    assert_eq!(short.now(), Some(Ok(before[3..303].to_vec())));
}

#[test]
fn a_packed_write_back_is_of_the_moment_at_which_it_began() {
    let options = Options { write_backs_max: 1, ..Options::default() };
    let (below, cache) = cache_with(options, Mode::Hold);
    let (gate, result) = (Arc::<Gate>::default(), AnswerCell::default());
    let exchange = GatedExchange {
        gate: gate.clone(),
        stop: Stop::Answer,
        bytes: vec![1; 10],
        result: Arc::clone(&result),
    };
    // The first write-back, whose end answers this and begins the next one.
    cache.submit(Request::new(Operation::Write, 0, 10, FUA, Box::new(exchange)));
    let far = 20 * PAGE;
    cache.write_at(far, b"one").unwrap();
    cache.write_at(far + 2000, b"two").unwrap();
    let flush = submit(&cache, Operation::Flush, 0, b"");
    let first = below.take_held();
    assert_eq!(first.len(), 1);
    thread::scope(|scope| {
        scope.spawn(|| first.into_iter().for_each(|waiting| below.carry_out(waiting)));
        gate.wait_for_one();
        // The next write-back is not encoded yet.
        cache.write_at(far, b"ONE and more").unwrap();
        cache.write_at(far + 2000, b"T").unwrap();
        gate.open();
    });
    let second = below.take_held();
    assert!(second.len() == 1 && second[0].0, "a packed write");
    second.into_iter().for_each(|waiting| below.carry_out(waiting));
    assert_eq!(below.memory().read_at(far, 5).unwrap(), b"one\0\0");
    assert_eq!(below.memory().read_at(far + 2000, 4).unwrap(), b"two\0");
    below.release();
    assert!(flush.now().unwrap().is_ok(), "it covers only what was written before it");
    assert_eq!(cache.counters().dirty_bytes.load(SeqCst), 13);
    let flush = submit(&cache, Operation::Flush, 0, b"");
    below.release();
    assert!(flush.now().unwrap().is_ok());
    assert_eq!(below.memory().read_at(far, 12).unwrap(), b"ONE and more");
    assert_eq!(below.memory().read_at(far + 2000, 4).unwrap(), b"Two\0");
}

#[test]
fn a_write_that_waits_for_room_keeps_the_bytes_it_was_submitted_with() {
    let (below, cache) = cache_with(small(), Mode::Hold);
    let one = submit(&cache, Operation::Write, 0, &[1; 16 << 10]);
    let two = submit(&cache, Operation::Write, 100, &pattern(9000, 5));
    let three = submit_with(&cache, Operation::Write, FUA, 200, 50, &[3; 50]);
    assert!(one.now().is_some() && two.now().is_none() && three.now().is_none());
    below.release();
    assert!(two.now().is_some() && three.now().is_some());
    let mut expected = pattern(9000, 5);
    expected[100..150].fill(3);
    assert_eq!(cache.read_at(100, 9000).unwrap(), expected);
}

/// The range in which writers meet, unaligned over four pages; a part of it, and one that is short
/// enough to be copied under the lock.
const FIRST: u64 = 1000;
const LENGTH: usize = 11_000;
const PART: Range<usize> = 2500..6000;
const FEW: Range<usize> = 7000..7100;

/// Checks that bytes from `at` on are of one write, and those of each part of one too.
fn check_untorn(bytes: &[u8], at: usize, seed: u64) {
    let (mut whole, mut part, mut few) = (None, None, None);
    for (offset, byte) in bytes.iter().enumerate() {
        let seen = match at + offset {
            at if PART.contains(&at) => &mut part,
            at if FEW.contains(&at) => &mut few,
            _ => &mut whole,
        };
        assert_eq!(*seen.get_or_insert(*byte), *byte, "seed {seed}: torn at {offset}");
    }
}

/// What the threads of a meeting share.
struct Meeting {
    cache: TestCache,
    is_evicted: bool,
    seed: u64,
    writers: AtomicU64,
    value: AtomicU64,
}

impl Meeting {
    fn is_over(&self) -> bool {
        self.writers.load(SeqCst) == 0
    }

    fn write(&self, range: &Range<usize>) {
        let evictions = &self.cache.counters().evictions;
        let wants_more =
            |writes: u64| writes < 1500 || (self.is_evicted && evictions.load(SeqCst) < 100);
        for _ in (0..).take_while(|writes| wants_more(*writes)) {
            let byte = self.value.fetch_add(1, SeqCst) as u8;
            self.cache.write_at(FIRST + range.start as u64, &vec![byte; range.len()]).unwrap();
        }
        self.writers.fetch_sub(1, SeqCst);
    }

    fn read(&self, number: u64) {
        let mut random = Dice::new(self.seed * 10 + number);
        while !self.is_over() {
            // Pages that are fetched may be of different moments.
            let page = random.below(3) as usize * PAGE as usize;
            let range = match self.is_evicted {
                false => 0..LENGTH,
                true => {
                    let end = (page + PAGE as usize - FIRST as usize).min(LENGTH);
                    page.saturating_sub(FIRST as usize)..end
                }
            };
            let bytes = self.cache.read_at(FIRST + range.start as u64, range.len()).unwrap();
            check_untorn(&bytes, range.start, self.seed);
        }
    }

    /// Uses other pages, flushes and writes back.
    fn disturb(&self) {
        let mut random = Dice::new(self.seed);
        while !self.is_over() {
            let page = 8 + random.below(200);
            self.cache.read_at(page * PAGE, PAGE as usize).unwrap();
            let later = Instant::now() + Duration::from_secs(random.below(1 << 20));
            match random.below(8) {
                0 => self.cache.flush().unwrap(),
                1 => self.cache.tick(later),
                2 => self.cache.write_at(page * PAGE + 5, &[9; 3000]).unwrap(),
                _ => {}
            }
        }
    }
}

/// Writers fill one range with one value each time, or a part of it; readers find the whole range
/// of one write, and each part of one write.
fn meet_in_one_range(options: Options, is_evicted: bool, seed: u64) {
    let (below, cache) = cache_with(options, Mode::Late);
    cache.write_at(FIRST, &[0; LENGTH]).unwrap();
    let (writers, value) = (AtomicU64::new(4), AtomicU64::new(0));
    let meeting = Meeting { cache, is_evicted, seed, writers, value };
    thread::scope(|scope| {
        let meeting = &meeting;
        for range in [0..LENGTH, 0..LENGTH, PART, FEW] {
            scope.spawn(move || meeting.write(&range));
        }
        (0..2).for_each(|number| drop(scope.spawn(move || meeting.read(number))));
        scope.spawn(|| meeting.disturb());
    });
    let cache = &meeting.cache;
    cache.flush().unwrap();
    let bytes = cache.read_at(FIRST, LENGTH).unwrap();
    check_untorn(&bytes, 0, seed);
    assert!(below.memory().read_at(FIRST, LENGTH).unwrap() == bytes);
    assert_eq!(cache.counters().dirty_bytes.load(SeqCst), 0);
    assert_eq!(is_evicted, cache.counters().evictions.load(SeqCst) > 0);
}

#[test]
fn no_read_is_torn_by_writers_that_meet_in_its_range() {
    meet_in_one_range(Options::default(), false, 1);
    let through = Options { policy: Policy::WriteThrough, ..Options::default() };
    meet_in_one_range(through, false, 2);
}

#[test]
fn no_page_is_torn_by_writers_evictions_and_write_backs() {
    meet_in_one_range(Options { dirty_bytes_max: 64 << 10, ..small() }, true, 3);
    meet_in_one_range(Options { write_backs_max: 2, ..small() }, true, 4);
}
