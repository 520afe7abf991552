//! A million random requests against a vector of bytes, from one thread and from several, over a
//! device below that answers late and in any order, and fails at random.
//!
//! A failed write may have taken effect or not, byte by byte; but once a reader has seen which, it
//! stays so (D8). After a successful flush, the device below has exactly the bytes of the model
//! (D4).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};

use sawmill_device::{BlockDevice, BlockDeviceExt, Flags, MemoryDevice, Operation};
use sawmill_link::cache::{Cache, Options, Policy};
use sawmill_testkit::Dice;

use crate::below::{FUA, LowerDevice, Mode};

const NO_FLAGS: Flags = Flags { fua: false, no_unmap: false };

type TestCache = Cache<Arc<LowerDevice>>;

/// What one thread owns of the device: ranges of `range_bytes` bytes, every `every` bytes.
struct Owner<'a> {
    cache: &'a TestCache,
    below: &'a LowerDevice,
    random: Dice,
    model: Vec<u8>,
    first: u64,
    range_bytes: u64,
    every: u64,
    /// No other owner flushes, discards or fails at the same time.
    alone: bool,
}

impl Owner<'_> {
    fn address(&self, at: u64) -> u64 {
        self.first + at / self.range_bytes * self.every + at % self.range_bytes
    }

    /// A read that retries, because failures are random.
    fn read(&self, address: u64, length: usize) -> Vec<u8> {
        loop {
            if let Ok(bytes) = self.cache.read_at(address, length) {
                return bytes;
            }
        }
    }

    /// Determines the content of a range in which each byte may be old or `new`.
    fn settle(&mut self, at: usize, new: &[u8], step: u64) {
        let now = self.read(self.address(at as u64), new.len());
        for (offset, byte) in now.iter().enumerate() {
            let old = self.model[at + offset];
            let sound = *byte == old || *byte == new[offset];
            assert!(
                sound,
                "step {step}: byte {} is {byte}, not {old} or {}",
                at + offset,
                new[offset]
            );
        }
        self.model[at..at + new.len()].copy_from_slice(&now);
    }

    fn step(&mut self, step: u64) {
        let longest = if self.random.below(16) == 0 { 12_000 } else { 900 };
        let at = self.random.below(self.model.len() as u64);
        let room = (self.range_bytes - at % self.range_bytes).min(self.model.len() as u64 - at);
        let length = 1 + self.random.below(longest.min(room)) as usize;
        let (address, at) = (self.address(at), at as usize);
        let range = at..at + length;
        match self.random.below(100) {
            0..45 => {
                let first = self.random.below(256) as u8;
                let bytes: Vec<u8> =
                    (0..length).map(|offset| first.wrapping_add(offset as u8)).collect();
                let flags = if self.random.below(40) == 0 { FUA } else { NO_FLAGS };
                let outcome =
                    self.cache.call(Operation::Write, address, length as u64, flags, bytes.clone());
                match outcome {
                    Ok(_) => self.model[range].copy_from_slice(&bytes),
                    Err(_) => self.settle(at, &bytes, step),
                }
            }
            45..93 => {
                if let Ok(bytes) = self.cache.read_at(address, length) {
                    assert!(
                        bytes == self.model[range],
                        "step {step}: {length} bytes at {address} differ"
                    );
                }
            }
            93..95 => {
                let zeroed = self.cache.write_zeroes(address, length as u64);
                if zeroed.is_ok() {
                    self.model[range].fill(0);
                } else {
                    self.settle(at, &vec![0; length], step);
                }
            }
            95..96 => {
                let _ = self.cache.discard(address, length as u64);
                self.settle(at, &vec![0; length], step);
            }
            96..97 => match self.random.below(8) {
                0 if self.alone => self.lose(),
                1..4 => drop(self.cache.call(
                    Operation::Prefetch,
                    address,
                    length as u64,
                    NO_FLAGS,
                    vec![],
                )),
                _ => drop(self.cache.allocation(address, length as u64)),
            },
            97..98 => self.cache.tick(Instant::now() + Duration::from_secs(step)),
            _ => {
                let flushed = self.cache.flush().is_ok();
                if flushed && (self.alone || step.is_multiple_of(16)) {
                    self.check_below(step);
                }
            }
        }
    }

    /// The device below loses what was not flushed: then a flush fails, and later reads return what
    /// the device has.
    fn lose(&mut self) {
        self.below.lose();
        while self.below.has_lost() {
            assert!(self.cache.flush().is_err(), "a flush must report the loss");
        }
        let starts = (0..self.model.len()).step_by(5000);
        for at in starts {
            let end = self.model.len().min(at + 5000);
            let now = self.read(self.address(at as u64), end - at);
            self.model[at..end].copy_from_slice(&now);
        }
    }

    /// Checks after a successful flush that the device below has everything. No other owner writes
    /// these bytes.
    fn check_below(&self, step: u64) {
        let range_bytes = self.range_bytes as usize;
        for (number, bytes) in self.model.chunks(range_bytes).enumerate() {
            let address = self.first + number as u64 * self.every;
            let same = self.below.memory().read_at(address, bytes.len()).unwrap() == bytes;
            assert!(same, "step {step}: a flush succeeded, and range {number} is not below");
        }
    }
}

fn options(random: &mut Dice, policy: Policy) -> Options {
    Options {
        policy,
        cache_bytes_max: (64 << 10) << random.below(4),
        dirty_bytes_max: (16 << 10) << random.below(3),
        flush_interval_s: 40,
        write_backs_max: 1 + random.below(8) as u32,
    }
}

/// Returns how often rare events happened.
fn run_alone(seed: u64, mode: Mode, failures: u32, steps: u64) -> [u64; 5] {
    const SIZE_BYTES: u64 = 300_000;
    let mut random = Dice::new(seed);
    let policy = [Policy::WriteBack, Policy::WriteBack, Policy::WriteThrough, Policy::WriteAround];
    let policy = policy[random.below(4) as usize];
    let below = LowerDevice::over(MemoryDevice::new(SIZE_BYTES), mode, seed);
    below.be_volatile();
    below.fail_per_mille(failures);
    let cache = Cache::new(below.clone(), &options(&mut random, policy)).unwrap();
    let model = vec![0; SIZE_BYTES as usize];
    let (first, range_bytes, every, alone) = (0, SIZE_BYTES, SIZE_BYTES, true);
    let mut owner =
        Owner { cache: &cache, below: &below, random, model, first, range_bytes, every, alone };
    (0..steps).for_each(|step| owner.step(step));
    below.fail_per_mille(0);
    cache.flush().unwrap();
    owner.check_below(steps);
    let counters = cache.counters();
    assert_eq!(counters.dirty_bytes.load(SeqCst), 0);
    [
        &counters.evictions,
        &counters.hole_fetches,
        &counters.packed_sent,
        &counters.plain_sent,
        &counters.write_back_errors,
    ]
    .map(|counter| counter.load(SeqCst))
}

#[test]
fn half_a_million_requests_agree_with_a_vector_of_bytes() {
    let mut totals = [0; 5];
    for seed in 0..20 {
        let counts = run_alone(seed, Mode::Now, if seed % 2 == 0 { 0 } else { 100 }, 26_000);
        totals = std::array::from_fn(|index| totals[index] + counts[index]);
    }
    assert!(totals.iter().all(|count| *count > 1000), "the rare happens: {totals:?}");
}

#[test]
fn late_answers_in_any_order_and_failures_change_nothing_about_that() {
    for seed in 100..116 {
        run_alone(seed, Mode::Late, [0, 20, 200, 500][seed as usize % 4], 10_000);
    }
}

/// Four threads own interleaved ranges that share pages; two more use one shared range, in which
/// each write is newer than the one before.
fn run_together(seed: u64, policy: Policy, failures: u32, steps: u64) {
    const OWNERS: u64 = 4;
    const RANGE_BYTES: u64 = 1500;
    const RANGES: u64 = 40;
    const SHARED: u64 = OWNERS * RANGE_BYTES * RANGES;
    const SHARED_BYTES: usize = 10_000;
    let below = LowerDevice::over(MemoryDevice::new(SHARED + 20_000), Mode::Late, seed);
    below.fail_per_mille(failures);
    let cache = Cache::new(below.clone(), &options(&mut Dice::new(seed), policy)).unwrap();
    let (submitted, completed) = (AtomicU64::new(0), AtomicU64::new(0));
    thread::scope(|scope| {
        let mut owners = Vec::new();
        for number in 0..OWNERS {
            let (cache, below) = (&cache, &*below);
            let model = vec![0; (RANGE_BYTES * RANGES) as usize];
            let random = Dice::new(seed * 100 + number);
            let (first, range_bytes, every, alone) =
                (number * RANGE_BYTES, RANGE_BYTES, OWNERS * RANGE_BYTES, false);
            let mut owner = Owner { cache, below, random, model, first, range_bytes, every, alone };
            owners.push(scope.spawn(move || (0..steps).for_each(|step| owner.step(step))));
        }
        let (cache, submitted, completed) = (&cache, &submitted, &completed);
        scope.spawn(|| {
            for value in 1..=250_u64 {
                submitted.store(value, SeqCst);
                // A failed write may take effect at any time, so it is repeated until it succeeds.
                while cache.write_at(SHARED + 77, &[value as u8; SHARED_BYTES]).is_err() {}
                completed.store(value, SeqCst);
            }
        });
        for _ in 0..2 {
            scope.spawn(|| {
                while submitted.load(SeqCst) < 250 {
                    let oldest = completed.load(SeqCst);
                    let Ok(bytes) = cache.read_at(SHARED + 77, SHARED_BYTES) else { continue };
                    let newest = submitted.load(SeqCst);
                    let wrong = bytes
                        .iter()
                        .position(|byte| !(oldest..=newest).contains(&u64::from(*byte)));
                    assert_eq!(wrong, None, "this byte is not from writes {oldest} to {newest}");
                }
            });
        }
        owners.into_iter().for_each(|owner| owner.join().unwrap());
    });
    below.fail_per_mille(0);
    cache.flush().unwrap();
    assert_eq!(below.memory().read_at(SHARED + 77, SHARED_BYTES).unwrap(), [250; SHARED_BYTES]);
    let size = cache.geometry().size_bytes as usize;
    for start in (0..size).step_by(4000) {
        let length = 4000.min(size - start);
        let same = cache.read_at(start as u64, length).unwrap()
            == below.memory().read_at(start as u64, length).unwrap();
        assert!(same, "the cache and the device below differ near {start}");
    }
}

#[test]
fn threads_side_by_side_keep_their_bytes_and_see_no_old_ones() {
    run_together(1, Policy::WriteBack, 0, 20_000);
    run_together(2, Policy::WriteBack, 100, 20_000);
    run_together(3, Policy::WriteThrough, 50, 10_000);
    run_together(4, Policy::WriteAround, 50, 10_000);
    run_together(5, Policy::WriteBack, 300, 20_000);
}
