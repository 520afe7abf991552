//! Random writes, reads and flushes on several queues, a driver that applies chunks in any order,
//! dies and comes back: every read, every flush and the end are checked against a model. One
//! thread: a seed determines a story.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use sawmill_device::{Exchange, Flags, Operation, Outcome, Request};
use sawmill_driver::batch::chunk::entries;
use sawmill_driver::batch::{Batch, BatchOptions, Chunk, Delivery, RangeCommand, Read};
use sawmill_driver::resolve::Resolver;
use sawmill_testkit::Dice;

const BLOCK: u64 = 512;
const BLOCKS: u64 = 64;
const QUEUES: u32 = 3;

enum Completion {
    Written { id: u64, start: u64, end: u64 },
    Read { since: u64, start: u64, bytes: Vec<u8>, failed: bool },
    Flushed { since: u64 },
    Zeroed { start: u64, end: u64 },
    Refused { is_write: bool },
}

/// A request that tells the world how it ended. Blocks are filled with the write's id.
struct TestExchange {
    completion: Completion,
    buffer: Vec<u8>,
    sender: Sender<Completion>,
}

impl Exchange for TestExchange {
    fn fill(&mut self, offset: u64, into: &mut [u8]) {
        let Completion::Written { id, .. } = self.completion else { return };
        for (at, byte) in into.iter_mut().enumerate() {
            *byte = id.to_le_bytes()[(offset as usize + at) % 8];
        }
    }

    fn buffer(&mut self) -> &mut [u8] {
        &mut self.buffer
    }

    fn complete(mut self: Box<Self>, outcome: Outcome) {
        if let Completion::Read { bytes, failed, .. } = &mut self.completion {
            *bytes = std::mem::take(&mut self.buffer);
            *failed = outcome.is_err();
        } else if outcome.is_err() {
            // Only requests that were never accepted fail, when the device ends.
            self.completion = Completion::Refused {
                is_write: matches!(self.completion, Completion::Written { .. }),
            };
        }
        // A world that has failed no longer receives.
        let _ = self.sender.send(self.completion);
    }
}

/// The fault of a driver, if any.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Driver {
    Right,
    IgnoresWriteNumbers,
}

struct World {
    batch: Arc<Batch>,
    driver: Driver,
    dice: Dice,
    sender: Sender<Completion>,
    receiver: Receiver<Completion>,
    next_id: u64,
    moment: u64,
    /// For each block its values, each with the moment from which on it holds.
    model: Vec<Vec<(u64, u64)>>,
    /// What the driver has applied.
    disk: Vec<u64>,
    resolver: Resolver,
    chunks: Vec<(usize, Chunk)>,
    flushes: Vec<(usize, u64)>,
    ranges: Vec<(usize, RangeCommand)>,
    reads: Vec<(usize, Read)>,
    seen: BTreeMap<&'static str, u64>,
    refused: u64,
    writes_in_flight: u64,
    zeroing: Vec<(u64, u64)>,
}

impl World {
    fn new(seed: u64, driver: Driver) -> Self {
        let options = BatchOptions {
            size: BLOCKS * BLOCK,
            hw_queues: QUEUES,
            write_chunk_size: 8192,
            // Some seeds have room, others stall writes.
            write_shm_size: if seed.is_multiple_of(3) { 24 << 10 } else { 256 << 10 },
            read_shm_size: 8192,
            collision_area_size: 4096,
            can_discard: true,
            can_write_zeroes: true,
            ..BatchOptions::default()
        };
        let (sender, receiver) = channel();
        let resolver = Resolver::new(options.collision_area_size);
        let batch = Batch::new(options).expect("sound options");
        batch.start().expect("it starts once");
        World {
            batch,
            driver,
            dice: Dice::new(seed * 2 + 1),
            sender,
            receiver,
            next_id: 0,
            moment: 0,
            model: vec![vec![(0, 0)]; BLOCKS as usize],
            disk: vec![0; BLOCKS as usize],
            resolver,
            chunks: Vec::new(),
            flushes: Vec::new(),
            ranges: Vec::new(),
            reads: Vec::new(),
            seen: BTreeMap::new(),
            refused: 0,
            writes_in_flight: 0,
            zeroing: Vec::new(),
        }
    }

    fn submit(&mut self, operation: Operation, start: u64, end: u64, completion: Completion) {
        self.count("requests");
        let buffer =
            vec![
                0;
                if operation == Operation::Read { ((end - start) * BLOCK) as usize } else { 0 }
            ];
        let exchange = TestExchange { completion, buffer, sender: self.sender.clone() };
        let flags = Flags::default();
        let queue = self.dice.below(u64::from(QUEUES)) as usize;
        let request = Request::new(
            operation,
            start * BLOCK,
            (end - start) * BLOCK,
            flags,
            Box::new(exchange),
        );
        self.batch.submit_to(queue, request);
        self.receive_outcomes();
    }

    fn range(&mut self) -> (u64, u64) {
        let length = 1 + self.dice.below(12);
        let start = self.dice.below(BLOCKS - length + 1);
        (start, start + length)
    }

    fn receive_outcomes(&mut self) -> u64 {
        let mut completion_count = 0;
        while let Ok(completion) = self.receiver.try_recv() {
            completion_count += 1;
            self.moment += 1;
            match completion {
                Completion::Written { id, start, end } => {
                    self.writes_in_flight -= 1;
                    for block in start..end {
                        self.model[block as usize].push((self.moment, id));
                    }
                }
                Completion::Read { since, start, bytes, failed } => {
                    assert!(!failed, "a read failed");
                    for (at, block) in bytes.chunks(BLOCK as usize).enumerate() {
                        let place = start + at as u64;
                        assert!(
                            block.chunks(8).all(|word| word == &block[..8]),
                            "block {place} is torn"
                        );
                        let value = u64::from_le_bytes(block[..8].try_into().expect("eight bytes"));
                        self.judge("read", place, value, since);
                    }
                }
                Completion::Zeroed { start, end } => {
                    let at = self.zeroing.iter().position(|range| *range == (start, end));
                    self.zeroing.swap_remove(at.expect("it was begun"));
                    for block in start..end {
                        self.model[block as usize].push((self.moment, 0));
                    }
                    self.count("ranges");
                }
                Completion::Refused { is_write } => {
                    self.refused += 1;
                    self.writes_in_flight -= u64::from(is_write);
                }
                Completion::Flushed { since } => {
                    for block in 0..BLOCKS {
                        self.judge("flush", block, self.disk[block as usize], since);
                    }
                }
            }
        }
        completion_count
    }

    /// A value is right if it held at some moment from `since` on.
    fn judge(&self, what: &str, block: u64, value: u64, since: u64) {
        let values = &self.model[block as usize];
        let first = values.iter().rposition(|(moment, _)| *moment <= since).unwrap_or(0);
        let allowed = &values[first..];
        let is_zeroed =
            value == 0 && self.zeroing.iter().any(|(start, end)| (*start..*end).contains(&block));
        assert!(
            is_zeroed || allowed.iter().any(|(_, allowed)| *allowed == value),
            "{what} of block {block}: {value} is none of {allowed:?}"
        );
    }

    fn count(&mut self, what: &'static str) {
        *self.seen.entry(what).or_default() += 1;
    }

    fn step(&mut self) {
        match self.dice.below(100) {
            0..35 => {
                let (start, end) = self.range();
                self.next_id += 1;
                self.writes_in_flight += 1;
                let id = self.next_id;
                self.submit(Operation::Write, start, end, Completion::Written { id, start, end });
            }
            35..50 => {
                let (start, end) = self.range();
                let completion = Completion::Read {
                    since: self.moment,
                    start,
                    bytes: Vec::new(),
                    failed: false,
                };
                self.submit(Operation::Read, start, end, completion);
            }
            50..53 => {
                self.submit(Operation::Flush, 0, 0, Completion::Flushed { since: self.moment })
            }
            53..55 => {
                let (start, end) = self.range();
                let kind =
                    [Operation::Discard, Operation::WriteZeroes][self.dice.below(2) as usize];
                // Of two concurrent changes of the same bytes, either may win: the model knows only
                // one.
                if self.writes_in_flight == 0 {
                    self.zeroing.push((start, end));
                    self.submit(kind, start, end, Completion::Zeroed { start, end });
                }
            }
            55..70 => self.fetch(),
            70..97 => self.finish_one(),
            97 => self.apply_half(),
            _ => self.crash(),
        }
    }

    fn fetch(&mut self) {
        let queue = self.dice.below(u64::from(QUEUES)) as usize;
        match self.batch.fetch_write_now(queue) {
            Some(Delivery::Chunk(chunk)) => self.chunks.push((queue, chunk)),
            Some(Delivery::Flush(number)) => self.flushes.push((queue, number)),
            Some(Delivery::Range(command)) => self.ranges.push((queue, command)),
            Some(Delivery::End) | None => {}
        }
        if let Some(read) = self.batch.fetch_read_now(queue) {
            self.reads.push((queue, read));
        }
    }

    /// Applies and acknowledges something, in any order.
    fn finish_one(&mut self) {
        let choice = self.dice.below(4);
        if choice == 0 && !self.reads.is_empty() {
            let at = self.dice.below(self.reads.len() as u64) as usize;
            let (queue, read) = self.reads.swap_remove(at);
            let disk = &self.disk;
            self.batch.fill_read(queue, read.number, |bytes| {
                for (at, block) in bytes.chunks_mut(BLOCK as usize).enumerate() {
                    let value = disk[(read.address / BLOCK) as usize + at];
                    block.chunks_mut(8).for_each(|word| word.copy_from_slice(&value.to_le_bytes()));
                }
            });
            self.batch.acknowledge_read(queue, read.number, Ok(())).expect("handed over");
            self.count("reads");
        } else if choice == 1 && !self.flushes.is_empty() {
            let at = self.dice.below(self.flushes.len() as u64) as usize;
            let (queue, number) = self.flushes[at];
            // Earlier chunks of this queue must be durable first.
            if !self.chunks.iter().any(|(of, chunk)| *of == queue && chunk.number < number) {
                self.flushes.swap_remove(at);
                self.batch.acknowledge_write(queue, number, Ok(())).expect("handed over");
                self.count("flushes");
            }
        } else if choice == 2 && !self.ranges.is_empty() {
            let at = self.dice.below(self.ranges.len() as u64) as usize;
            let (queue, command) = self.ranges.swap_remove(at);
            let (start, end) =
                (command.address / BLOCK, (command.address + command.length) / BLOCK);
            self.disk[start as usize..end as usize].fill(0);
            if self.dice.below(4) == 0 {
                // The driver dies between a command and its acknowledgment.
                return self.crash();
            }
            self.batch.acknowledge_write(queue, command.number, Ok(())).expect("handed over");
        } else if !self.chunks.is_empty() {
            let at = self.dice.below(self.chunks.len() as u64) as usize;
            let (queue, chunk) = self.chunks.swap_remove(at);
            self.apply(&chunk, usize::MAX);
            let number = chunk.number;
            drop(chunk);
            self.batch.acknowledge_write(queue, number, Ok(())).expect("handed over");
            self.count("chunks");
        }
        self.receive_outcomes();
    }

    fn apply(&mut self, chunk: &Chunk, entries_max: usize) {
        let metadata_bytes = self.batch.options().metadata_bytes() as usize;
        let bytes = chunk.bytes();
        let parsed = entries(&bytes, metadata_bytes, chunk.entries().len());
        for (wire, expected) in parsed.zip(chunk.entries()).take(entries_max) {
            let (entry, data) = wire.expect("a sound entry");
            assert_eq!(entry, *expected);
            let disk = &mut self.disk;
            let mut write = |address: u64, data: &[u8]| -> Result<(), ()> {
                for (at, block) in data.chunks(BLOCK as usize).enumerate() {
                    let value = u64::from_le_bytes(block[..8].try_into().expect("eight bytes"));
                    disk[(address / BLOCK) as usize + at] = value;
                }
                Ok(())
            };
            match self.driver {
                Driver::Right => self.resolver.apply(&entry, data, write),
                Driver::IgnoresWriteNumbers => write(entry.address, data),
            }
            .expect("memory takes everything");
        }
    }

    /// Applies some entries of a chunk without an acknowledgment: a crash may follow.
    fn apply_half(&mut self) {
        if let Some((queue, chunk)) = self.chunks.pop() {
            let entries_max = self.dice.below(chunk.entries().len() as u64 + 1) as usize;
            self.apply(&chunk, entries_max);
            self.chunks.push((queue, chunk));
        }
    }

    /// The driver dies, and its commands and memory are lost; another one connects.
    fn crash(&mut self) {
        self.chunks.clear();
        self.flushes.clear();
        self.ranges.clear();
        self.reads.clear();
        self.resolver = Resolver::new(self.batch.options().collision_area_size);
        self.batch.recover();
        self.batch.start().expect("it starts once");
        self.receive_outcomes();
        self.count("crashes");
    }

    /// Ends the device: the driver must have what was written last.
    fn end(mut self) -> BTreeMap<&'static str, u64> {
        self.receive_outcomes();
        assert_eq!(self.refused, 0, "nothing is refused while the device is there");
        self.batch.begin_end();
        let mut patience = 1_000_000;
        while !self.batch.is_drained() {
            patience -= 1;
            assert!(patience > 0, "the device never ends");
            for _ in 0..QUEUES {
                self.fetch();
            }
            self.finish_one();
        }
        self.receive_outcomes();
        for block in 0..BLOCKS {
            let last = self.model[block as usize].last().expect("at least zero").1;
            assert_eq!(self.disk[block as usize], last, "block {block} at the end");
        }
        self.seen
    }
}

fn story(seed: u64, steps: u64, driver: Driver) -> BTreeMap<&'static str, u64> {
    let mut world = World::new(seed, driver);
    for _ in 0..steps {
        world.step();
    }
    world.end()
}

/// The number of stories: `SAWMILL_SEEDS`, 40 without it.
fn seeds() -> u64 {
    std::env::var("SAWMILL_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(40)
}

#[test]
fn each_read_flush_and_final_byte_agrees_with_the_model_in_any_order() {
    let mut counts = BTreeMap::new();
    for seed in 1..=seeds() {
        for (what, count) in story(seed, 3000, Driver::Right) {
            *counts.entry(what).or_insert(0) += count;
        }
    }
    println!("{counts:?}");
    for what in ["reads", "flushes", "ranges", "chunks", "crashes"] {
        assert!(
            counts.get(what).is_some_and(|count| *count > 30),
            "{what} were to happen: {counts:?}"
        );
    }
}

#[test]
fn a_driver_that_ignores_write_numbers_is_caught() {
    let caught = (1..=50).filter(|seed| {
        std::panic::catch_unwind(|| story(*seed, 3000, Driver::IgnoresWriteNumbers)).is_err()
    });
    assert!(caught.count() > 25, "late writes do harm in most stories");
}
