//! Reads beside the keeper that deletes what they read, under schedules: who goes on is chosen anew at
//! every lock and atomic. Built with the feature `shuttle` only (`tests/run.sh`).
//!
//! The keeper is repeated here from `keeper::cleanup` as far as generations go, the map is one number.
//! Controls at the end break one rule each and must be caught. Not here: orders weaker than one total order
//! of all steps.

use std::panic::{AssertUnwindSafe, catch_unwind};

use sawmill_sys::sync::{AtomicBool, Mutex, may_switch};
use shuttle::thread;

use super::*;

const SCHEDULES: usize = 10_000;
const SEGMENTS: usize = 4;
const READS: usize = 2;

/// As much of a volume as a delete and a read share.
struct Bench {
    readers: Arc<Readers>,
    /// The segment that the map names.
    map: Mutex<usize>,
    is_there: [AtomicBool; SEGMENTS],
}

/// Which rule is kept.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Rule {
    All,
    /// The keeper deletes without waiting for reads.
    NoWait,
    /// The keeper waits for those of the generation that it has begun itself.
    WrongGeneration,
    /// A read counts after it has looked up.
    LateCount,
}

impl Bench {
    fn read(&self, rule: Rule) {
        let early = (rule != Rule::LateCount).then(|| self.readers.enter());
        let segment = *self.map.lock();
        let _reading = early.unwrap_or_else(|| self.readers.enter());
        for _ in 0..2 {
            may_switch();
            assert!(self.is_there[segment].load(Ordering::SeqCst), "a segment is deleted while it is read");
        }
    }

    fn keep(&self, rule: Rule) {
        for segment in 1..SEGMENTS {
            self.is_there[segment].store(true, Ordering::SeqCst);
            *self.map.lock() = segment;
            let before = self.readers.advance();
            let generation = if rule == Rule::WrongGeneration { before.saturating_sub(1) } else { before };
            while rule != Rule::NoWait && !self.readers.passed(generation) {
                self.readers.advance();
                thread::yield_now();
            }
            self.is_there[segment - 1].store(false, Ordering::SeqCst);
        }
    }
}

fn under_schedules(rule: Rule) {
    let run = move || {
        let bench = Arc::new(Bench {
            readers: Arc::default(),
            map: Mutex::new(0),
            is_there: std::array::from_fn(|segment| AtomicBool::new(segment == 0)),
        });
        let readers = [(); 2].map(|()| {
            let bench = bench.clone();
            thread::spawn(move || (0..READS).for_each(|_| bench.read(rule)))
        });
        bench.keep(rule);
        readers.into_iter().for_each(|reader| reader.join().expect("a reader"));
    };
    shuttle::check_random(run, SCHEDULES);
    shuttle::check_pct(run, SCHEDULES / 5, 3);
}

fn is_caught(rule: Rule) -> bool {
    catch_unwind(AssertUnwindSafe(|| under_schedules(rule))).is_err()
}

#[test]
fn no_segment_is_deleted_while_it_is_read() {
    under_schedules(Rule::All);
}

#[test]
fn control_a_keeper_that_waits_for_nobody_is_caught() {
    assert!(is_caught(Rule::NoWait));
}

#[test]
fn control_a_keeper_that_waits_for_the_generation_before_is_caught() {
    assert!(is_caught(Rule::WrongGeneration));
}

#[test]
fn control_a_read_that_counts_after_its_look_up_is_caught() {
    assert!(is_caught(Rule::LateCount));
}
