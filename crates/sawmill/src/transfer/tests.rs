//! The plan and the workers, between ends in memory.

use std::sync::atomic::AtomicU64;

use super::*;
use sawmill_console::exit::{Exit, Failure};

/// A disk in memory that counts the requests to it.
#[derive(Default)]
struct Memory {
    bytes: Mutex<Vec<u8>>,
    holes: Vec<(u64, u64)>,
    changed: AtomicBool,
    reads: AtomicU64,
    written: AtomicU64,
    zeroed: AtomicU64,
    /// Writes past this address fail.
    breaks_at: Option<u64>,
    safe_points: AtomicU64,
}

impl Memory {
    fn of(bytes: Vec<u8>) -> Self {
        Memory { bytes: Mutex::new(bytes), ..Memory::default() }
    }

    fn content(&self) -> Vec<u8> {
        self.bytes.lock().unwrap().clone()
    }
}

impl Source for Memory {
    fn size_bytes(&self) -> u64 {
        self.bytes.lock().unwrap().len() as u64
    }

    fn request_bytes_max(&self) -> u64 {
        1 << 20
    }

    fn read(&self, address: u64, length: usize) -> Result<Vec<u8>> {
        self.reads.fetch_add(length as u64, Ordering::Relaxed);
        Ok(self.bytes.lock().unwrap()[address as usize..][..length].to_vec())
    }

    fn allocation(&self, address: u64, length: u64) -> Result<Vec<Allocation>> {
        let hole = self.holes.iter().find(|(_, end)| *end > address);
        let end = address + length;
        Ok(vec![match hole {
            Some((start, hole_end)) if *start <= address => {
                Allocation { length: end.min(*hole_end) - address, data: false }
            }
            Some((start, _)) => Allocation { length: end.min(*start) - address, data: true },
            None => Allocation { length, data: true },
        }])
    }

    fn check_unchanged(&self) -> Result<()> {
        match self.changed.load(Ordering::Relaxed) {
            true => Err(Failure::new(Exit::Refused, "it was changed")),
            false => Ok(()),
        }
    }
}

impl Destination for Memory {
    fn request_bytes_max(&self) -> u64 {
        64 << 10
    }

    fn read(&self, address: u64, length: usize) -> Result<Vec<u8>> {
        Source::read(self, address, length)
    }

    fn write(&self, address: u64, bytes: Vec<u8>) -> Result<()> {
        if self.breaks_at.is_some_and(|at| address >= at) {
            return Err(Failure::new(Exit::Full, "no space"));
        }
        self.written.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        self.bytes.lock().unwrap()[address as usize..][..bytes.len()].copy_from_slice(&bytes);
        Ok(())
    }

    fn zero(&self, address: u64, length: u64) -> Result<()> {
        self.zeroed.fetch_add(length, Ordering::Relaxed);
        self.bytes.lock().unwrap()[address as usize..][..length as usize].fill(0);
        Ok(())
    }

    fn safe_point(&self) -> Result<u64> {
        Ok(self.safe_points.fetch_add(1, Ordering::Relaxed))
    }

    fn is_durable(&self, _safe_point: u64) -> Result<bool> {
        Ok(true)
    }
}

const SIZE: usize = (3 << 20) + 512;

fn disk() -> Memory {
    let mut bytes: Vec<u8> = (0..SIZE).map(|at| (at / 512 % 255) as u8 + 1).collect();
    bytes[1 << 20..(1 << 20) + 40960].fill(0);
    bytes[2 << 20..(2 << 20) + 65536].fill(0);
    Memory { holes: vec![(2 << 20, (2 << 20) + 65536)], ..Memory::of(bytes) }
}

fn run(source: &Memory, destination: &Memory, start: Start) -> Result<TransferResult> {
    transfer(source, destination, start, &mut Bar::new("x"), &mut |_| Ok(()))
}

#[test]
fn a_transfer_moves_everything_but_holes_and_zeroes() {
    let (source, destination) = (disk(), Memory::of(vec![0; SIZE]));
    let moved = run(&source, &destination, Start { blank: true, ..Start::default() }).unwrap();
    assert_eq!(destination.content(), source.content());
    assert_eq!(moved.read_bytes, (SIZE - 65536) as u64, "the hole is not read");
    assert_eq!(moved.written_bytes, (SIZE - 65536 - 40960) as u64, "zeroes are not written");
    assert_eq!(destination.zeroed.into_inner(), 0);
}

#[test]
fn a_destination_with_another_content_is_zeroed_where_the_source_has_nothing() {
    let (source, destination) = (disk(), Memory::of(vec![9; SIZE]));
    run(&source, &destination, Start::default()).unwrap();
    assert_eq!(destination.content(), source.content());
    assert_eq!(destination.zeroed.into_inner(), 65536 + 40960);
}

#[test]
fn what_an_earlier_attempt_did_is_passed_over_or_compared() {
    let source = disk();
    let mut half = source.content();
    half[1 << 20..].fill(0);
    let destination = Memory::of(half.clone());
    let start = Start { from: 1 << 20, compare_below: 0, blank: true };
    let moved = run(&source, &destination, start).unwrap();
    assert_eq!(destination.content(), source.content());
    assert_eq!(moved.resumed_bytes, 1 << 20);
    half[4096] ^= 1;
    half[(1 << 20) + 4096] = 7;
    let destination = Memory::of(half);
    let start = Start { from: 0, compare_below: SIZE as u64, blank: false };
    let moved = run(&source, &destination, start).unwrap();
    assert_eq!(destination.content(), source.content());
    assert!(moved.written_bytes < (SIZE - (1 << 20)) as u64, "{moved:?}: what is the same stays");
}

#[test]
fn a_source_that_changed_is_never_called_done() {
    let (source, destination) = (disk(), Memory::of(vec![0; SIZE]));
    source.changed.store(true, Ordering::Relaxed);
    let failure =
        run(&source, &destination, Start { blank: true, ..Start::default() }).unwrap_err();
    assert_eq!(failure.exit(), Exit::Refused);
}

#[test]
fn the_first_failure_ends_a_transfer() {
    let destination = Memory { breaks_at: Some(2 << 20), ..Memory::of(vec![0; SIZE]) };
    let failure =
        run(&disk(), &destination, Start { blank: true, ..Start::default() }).unwrap_err();
    assert_eq!(failure.exit(), Exit::Full);
}

#[test]
fn only_a_prefix_without_gaps_counts_as_done() {
    let source = disk();
    let mut plan = CopyPlan {
        source: &source,
        at: 0,
        piece_bytes: 1 << 20,
        runs: VecDeque::new(),
        in_flight_addresses: BTreeSet::new(),
    };
    let first = plan.next().unwrap().unwrap();
    let second = plan.next().unwrap().unwrap();
    plan.in_flight_addresses.remove(&second.address);
    assert_eq!(plan.done_through(), 0);
    plan.in_flight_addresses.remove(&first.address);
    assert_eq!(plan.done_through(), 2 << 20);
}

#[test]
fn runs_cover_all_bytes_and_tell_zeroes_from_others() {
    let mut bytes = vec![0; 3 * GRAIN_BYTES + 5];
    bytes[GRAIN_BYTES + 7] = 1;
    let runs = [(0, 4096, true), (4096, 8192, false), (8192, bytes.len(), true)];
    assert_eq!(runs_of(&bytes), runs);
    assert_eq!(runs_of(&[]), []);
}
