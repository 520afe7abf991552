//! The hazards of `hazards`, with real threads: several submit on several queues while several
//! apply chunks in any order, and die with unfinished commands. No run is repeatable, so its
//! history is judged.
//!
//! Every block is judged as a register. Reads and the end must agree with one order of its writes,
//! in which an operation precedes all that began after its end. The judge of a flush sees only what
//! was made durable. Not here: stories that a seed repeats (`hazards`).

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};

use parking_lot::Mutex;
use sawmill_device::{Error, ErrorKind, Exchange, Flags, Operation, Outcome, Request};
use sawmill_driver::State;
use sawmill_driver::batch::chunk::entries;
use sawmill_driver::batch::{Batch, BatchOptions, Chunk, Delivery, RangeCommand, Read};
use sawmill_driver::resolve::Resolver;
use sawmill_testkit::Dice;

const BLOCK: u64 = 512;
const BLOCKS: u64 = 48;
const QUEUES: usize = 3;
const SUBMITTERS: u64 = 4;
const DRIVER_THREADS: u64 = 4;
const REQUESTS: u64 = 1500;
const OUTSTANDING: u64 = 8;

/// What a request did, between two moments of the clock.
struct Event {
    operation: Operation,
    start: u64,
    begin: u64,
    end: u64,
    /// For each block: what was written, read, or durable when a flush had ended.
    values: Vec<u64>,
}

/// What all threads share.
struct World {
    batch: Arc<Batch>,
    clock: AtomicU64,
    history: Mutex<Vec<Event>>,
    /// What the driver applied, and the part of it that a flush made durable.
    disk: Vec<Mutex<u64>>,
    durable: Vec<Mutex<u64>>,
    /// Chunks of each queue that were fetched in this life and are not applied.
    unapplied: [Mutex<BTreeSet<u64>>; QUEUES],
    /// What each chunk contained when it was first fetched.
    carried: Mutex<HashMap<(usize, u64), Vec<u64>>>,
    /// When a write was first acknowledged.
    acknowledged: Mutex<HashMap<u64, u64>>,
    counts: Mutex<BTreeMap<&'static str, u64>>,
}

impl World {
    fn now(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::SeqCst)
    }

    fn count(&self, what: &'static str) {
        *self.counts.lock().entry(what).or_default() += 1;
    }
}

/// A request that is recorded when it ends. Blocks are filled with the write's number.
struct TestExchange {
    event: Event,
    buffer: Vec<u8>,
    world: Arc<World>,
    sender: Sender<bool>,
}

impl Exchange for TestExchange {
    fn fill(&mut self, offset: u64, into: &mut [u8]) {
        for (at, byte) in into.iter_mut().enumerate() {
            *byte = self.event.values[0].to_le_bytes()[(offset as usize + at) % 8];
        }
    }

    fn buffer(&mut self) -> &mut [u8] {
        &mut self.buffer
    }

    fn complete(mut self: Box<Self>, outcome: Outcome) {
        match self.event.operation {
            Operation::Read => self.event.values = values_of(&self.buffer),
            Operation::Flush => {
                self.event.values = self.world.durable.iter().map(|block| *block.lock()).collect();
            }
            _ => {}
        }
        self.event.end = self.world.now();
        self.world.history.lock().push(self.event);
        // A submitter that has failed no longer receives.
        let _ = self.sender.send(outcome.is_ok());
    }
}

fn values_of(bytes: &[u8]) -> Vec<u64> {
    let value = |block: &[u8]| {
        assert!(block.chunks(8).all(|word| word == &block[..8]), "a block is torn");
        u64::from_le_bytes(block[..8].try_into().expect("eight bytes"))
    };
    bytes.chunks(BLOCK as usize).map(value).collect()
}

/// Submits random requests on all queues, some concurrently, and waits for the last.
fn submit(world: &Arc<World>, submitter: u64) {
    let mut dice = Dice::new(submitter * 7919 + 1);
    let (sender, receiver) = channel();
    let mut outstanding = 0;
    for number in 0..REQUESTS {
        let length = 1 + dice.below(8);
        let (operation, start, length) = match dice.below(100) {
            0..55 => (Operation::Write, dice.below(BLOCKS - length + 1), length),
            55..90 => (Operation::Read, dice.below(BLOCKS - length + 1), length),
            90..97 => (Operation::Flush, 0, 0),
            _ => (Operation::Discard, dice.below(BLOCKS - length + 1), length),
        };
        let id =
            if operation == Operation::Write { 1 + number * SUBMITTERS + submitter } else { 0 };
        let bytes = if operation == Operation::Read { length * BLOCK } else { 0 };
        let event = Event {
            operation,
            start,
            begin: world.now(),
            end: 0,
            values: vec![id; length as usize],
        };
        let buffer = vec![0; bytes as usize];
        let exchange = Box::new(TestExchange {
            event,
            buffer,
            world: Arc::clone(world),
            sender: sender.clone(),
        });
        let request =
            Request::new(operation, start * BLOCK, length * BLOCK, Flags::default(), exchange);
        world.batch.submit_to(dice.below(QUEUES as u64) as usize, request);
        outstanding += 1;
        while outstanding > 0 && (outstanding == OUTSTANDING || number + 1 == REQUESTS) {
            assert!(receiver.recv().expect("every request ends"), "nothing fails");
            outstanding -= 1;
        }
    }
}

enum Work {
    Chunk(usize, Chunk),
    Flush(usize, u64),
    Range(usize, RangeCommand),
    Read(usize, Read),
}

/// One driver, from its start to its death.
struct Life<'a> {
    world: &'a World,
    resolver: Resolver,
    is_dying: AtomicBool,
    /// The commands until its death; `u64::MAX`: it does not die.
    remaining_commands: AtomicU64,
}

impl Life<'_> {
    /// One thread of the driver: fetches commands, or finishes one that it has.
    fn work(&self, seed: u64) {
        let (mut dice, mut hand) = (Dice::new(seed * 104_729 + 1), Vec::new());
        while !self.is_dying.load(Ordering::SeqCst) {
            if hand.len() < 6 {
                self.fetch(dice.below(QUEUES as u64) as usize, &mut hand);
            }
            if hand.is_empty() {
                if self.world.batch.state() == State::Ending && self.world.batch.is_drained() {
                    return;
                }
                std::thread::yield_now();
            } else if dice.below(2) == 0 {
                let work = hand.swap_remove(dice.below(hand.len() as u64) as usize);
                if let Some(work) = self.finish(work) {
                    hand.push(work);
                    std::thread::yield_now();
                } else if self.remaining_commands.load(Ordering::SeqCst) != u64::MAX
                    && self.remaining_commands.fetch_sub(1, Ordering::SeqCst) == 1
                {
                    self.is_dying.store(true, Ordering::SeqCst);
                }
            }
        }
        for work in &hand {
            if let Work::Chunk(_, chunk) = work {
                self.apply(chunk, dice.below(chunk.entries().len() as u64 + 1) as usize);
                self.world.count("half applied");
            }
        }
    }

    fn fetch(&self, queue: usize, hand: &mut Vec<Work>) {
        let mut unapplied = self.world.unapplied[queue].lock();
        match self.world.batch.fetch_write_now(queue) {
            Some(Delivery::Chunk(chunk)) => {
                let _ = unapplied.insert(chunk.number);
                let values = values_of(
                    &chunk.bytes()[self.world.batch.options().metadata_bytes() as usize..],
                );
                let mut carried = self.world.carried.lock();
                match carried.get(&(queue, chunk.number)) {
                    Some(before) if *before == values => self.world.count("again"),
                    Some(_) => self.world.count("mended"),
                    None => drop(carried.insert((queue, chunk.number), values)),
                }
                hand.push(Work::Chunk(queue, chunk));
            }
            Some(Delivery::Flush(number)) => hand.push(Work::Flush(queue, number)),
            Some(Delivery::Range(command)) => hand.push(Work::Range(queue, command)),
            Some(Delivery::End) | None => {}
        }
        drop(unapplied);
        hand.extend(self.world.batch.fetch_read_now(queue).map(|read| Work::Read(queue, read)));
    }

    /// Executes and acknowledges a command. Returns it if it must wait.
    fn finish(&self, work: Work) -> Option<Work> {
        let (world, batch) = (self.world, &self.world.batch);
        match work {
            Work::Chunk(queue, chunk) => {
                self.apply(&chunk, usize::MAX);
                let _ = world.unapplied[queue].lock().remove(&chunk.number);
                let values = values_of(&chunk.bytes()[batch.options().metadata_bytes() as usize..]);
                let number = chunk.number;
                drop(chunk);
                let moment = world.now();
                for value in values {
                    let _ = world.acknowledged.lock().entry(value).or_insert(moment);
                }
                batch.acknowledge_write(queue, number, Ok(())).expect("handed over");
            }
            Work::Flush(queue, number) => {
                if world.unapplied[queue].lock().first().is_some_and(|first| *first < number) {
                    return Some(work);
                }
                for (block, durable) in world.disk.iter().zip(&world.durable) {
                    let mut durable = durable.lock();
                    *durable = *block.lock();
                }
                batch.acknowledge_write(queue, number, Ok(())).expect("handed over");
            }
            Work::Range(queue, command) => {
                for block in command.address / BLOCK..(command.address + command.length) / BLOCK {
                    *world.disk[block as usize].lock() = 0;
                }
                batch.acknowledge_write(queue, command.number, Ok(())).expect("handed over");
            }
            Work::Read(queue, read) => {
                let mut at = (read.address / BLOCK) as usize;
                batch.fill_read(queue, read.number, |bytes| {
                    for block in bytes.chunks_mut(BLOCK as usize) {
                        let value = world.disk[at].lock().to_le_bytes();
                        block.chunks_mut(8).for_each(|word| word.copy_from_slice(&value));
                        at += 1;
                    }
                });
                batch.acknowledge_read(queue, read.number, Ok(())).expect("handed over");
            }
        }
        None
    }

    fn apply(&self, chunk: &Chunk, most: usize) {
        let bytes = chunk.bytes();
        let metadata_bytes = self.world.batch.options().metadata_bytes() as usize;
        for parsed in entries(&bytes, metadata_bytes, chunk.entries().len()).take(most) {
            let (entry, data) = parsed.expect("a sound entry");
            let mut written = 0;
            let write = |address: u64, data: &[u8]| -> Result<(), ()> {
                written += data.len();
                for (at, value) in values_of(data).into_iter().enumerate() {
                    *self.world.disk[(address / BLOCK) as usize + at].lock() = value;
                }
                Ok(())
            };
            self.resolver.apply(&entry, data, write).expect("memory takes everything");
            if written < data.len() {
                self.world.count("late");
            }
        }
    }
}

/// For a value of a block: the earliest end and the latest start of its write and its readers.
struct Zone {
    begin: u64,
    low: u64,
    high: u64,
}

/// Every value that a block had has one zone. Zones conflict if one value was seen both before and
/// after another was written or seen. (Zeroes have many writers: `is_superseded` alone judges
/// them.)
fn judge_block(block: u64, history: &[&Event]) {
    let mut zones: HashMap<u64, Zone> = HashMap::new();
    let mut unnamed = u64::MAX;
    let touches =
        |event: &Event| (event.start..event.start + event.values.len() as u64).contains(&block);
    let changes: Vec<_> =
        history.iter().filter(|event| is_change(event) && touches(event)).collect();
    for event in &changes {
        let value = event.values[(block - event.start) as usize];
        // Each discard is a value that no operation is known to have seen.
        unnamed -= 1;
        let key = if value == 0 { unnamed } else { value };
        let _ = zones.insert(key, Zone { begin: event.begin, low: event.end, high: event.begin });
    }
    for event in history.iter().filter(|event| !is_change(event) && touches(event)) {
        let value = event.values[(block - event.start) as usize];
        let is_superseded =
            |since: u64| changes.iter().any(|new| new.begin > since && new.end < event.begin);
        if value == 0 {
            let zeroes = changes.iter().filter(|old| old.values[0] == 0 && old.begin < event.end);
            let right =
                !is_superseded(0) || zeroes.map(|old| old.end).any(|end| !is_superseded(end));
            assert!(right, "{:?} of block {block}: zeroes were superseded", event.operation);
            continue;
        }
        let zone = zones.get_mut(&value).expect("a thread wrote it");
        assert!(zone.begin < event.end, "block {block} was read before it was written");
        let written = changes.iter().find(|old| old.values[0] == value).expect("it has a zone");
        assert!(
            !is_superseded(written.end),
            "{:?} of block {block}: {value} is old",
            event.operation
        );
        // A flush may make a write durable that is still in flight: no order follows from seeing
        // it.
        if event.operation == Operation::Read {
            zone.low = zone.low.min(event.end);
            zone.high = zone.high.max(event.begin);
        }
    }
    let mut forward: Vec<_> = zones.iter().filter(|(_, zone)| zone.low < zone.high).collect();
    forward.sort_by_key(|(_, zone)| zone.low);
    for pair in forward.windows(2) {
        let [(one, first), (other, second)] = pair else { continue };
        assert!(first.high < second.low, "block {block}: {one} and {other} were seen in turns");
    }
    for (inner, zone) in zones.iter().filter(|(_, zone)| zone.low >= zone.high) {
        let around =
            forward.iter().find(|(_, outer)| outer.low < zone.high && zone.low < outer.high);
        let around = around.map(|(value, _)| value);
        assert!(
            around.is_none(),
            "block {block}: {inner} came between what was seen of {around:?}"
        );
    }
}

fn is_change(event: &Event) -> bool {
    matches!(event.operation, Operation::Write | Operation::Discard)
}

/// Counts the reads that began before the driver had acknowledged what they must see.
fn read_after_write(world: &World, history: &[&Event]) -> u64 {
    let acknowledged = world.acknowledged.lock();
    let ends: HashMap<u64, u64> = history
        .iter()
        .filter(|event| is_change(event))
        .map(|event| (event.values[0], event.end))
        .collect();
    let reads = history.iter().filter(|event| event.operation == Operation::Read);
    let is_met = |read: &&&Event| {
        read.values.iter().any(|value| {
            ends.get(value).is_some_and(|end| *value > 0 && *end < read.begin)
                && acknowledged.get(value).is_some_and(|moment| *moment > read.begin)
        })
    };
    reads.filter(is_met).count() as u64
}

fn run_counted(write_shm_size: u64) -> BTreeMap<&'static str, u64> {
    let options = BatchOptions {
        size: BLOCKS * BLOCK,
        hw_queues: QUEUES as u32,
        write_chunk_size: 8192,
        write_shm_size,
        read_shm_size: 16384,
        collision_area_size: 4096,
        can_discard: true,
        ..BatchOptions::default()
    };
    let batch = Batch::new(options).expect("sound options");
    let blocks = || (0..BLOCKS).map(|_| Mutex::default()).collect();
    let world = Arc::new(World {
        batch,
        clock: AtomicU64::new(1),
        history: Mutex::default(),
        disk: blocks(),
        durable: blocks(),
        unapplied: Default::default(),
        carried: Mutex::default(),
        acknowledged: Mutex::default(),
        counts: Mutex::default(),
    });
    let submitting = AtomicU64::new(SUBMITTERS);
    std::thread::scope(|scope| {
        for submitter in 0..SUBMITTERS {
            let (world, submitting) = (&world, &submitting);
            let _ = scope.spawn(move || {
                // Even if it fails, the driver must end.
                let judged = catch_unwind(AssertUnwindSafe(|| submit(world, submitter)));
                if submitting.fetch_sub(1, Ordering::SeqCst) == 1 {
                    world.batch.begin_end();
                }
                if let Err(panic) = judged {
                    resume_unwind(panic);
                }
            });
        }
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| drive(&world, &submitting))) {
            // No request waits for a driver that was found wrong.
            world.batch.end_now(&Error::new(ErrorKind::Closed, "the driver was found wrong"));
            resume_unwind(panic);
        }
    });
    let end = world.now();
    let values = world.disk.iter().map(|block| *block.lock()).collect();
    world.history.lock().push(Event {
        operation: Operation::Read,
        start: 0,
        begin: end,
        end,
        values,
    });
    let history = world.history.lock();
    let events: Vec<&Event> = history.iter().collect();
    (0..BLOCKS).for_each(|block| judge_block(block, &events));
    let mut counts = world.counts.lock().clone();
    let _ = counts.insert("read after write", read_after_write(&world, &events));
    let count =
        |operation| history.iter().filter(|event| event.operation == operation).count() as u64;
    let _ = counts.insert("flushes", count(Operation::Flush));
    let _ = counts.insert("discards", count(Operation::Discard));
    counts
}

/// One driver after another, until there is nothing to do.
fn drive(world: &World, submitting: &AtomicU64) {
    let mut dice = Dice::new(4711);
    for life in 1.. {
        world.unapplied.iter().for_each(|queue| queue.lock().clear());
        let is_last = submitting.load(Ordering::SeqCst) == 0;
        world.batch.start().expect("it starts once");
        let remaining_commands = if is_last { u64::MAX } else { 20 + dice.below(100) };
        let resolver = Resolver::new(world.batch.options().collision_area_size);
        let (is_dying, remaining_commands) =
            (AtomicBool::new(false), AtomicU64::new(remaining_commands));
        let driver = Life { world, resolver, is_dying, remaining_commands };
        std::thread::scope(|scope| {
            for thread in 0..DRIVER_THREADS {
                let driver = &driver;
                let _ = scope.spawn(move || {
                    let seed = life * DRIVER_THREADS + thread;
                    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| driver.work(seed))) {
                        driver.is_dying.store(true, Ordering::SeqCst);
                        resume_unwind(panic);
                    }
                });
            }
        });
        if is_last {
            return;
        }
        world.batch.recover();
        world.count("deaths");
    }
}

#[test]
fn threads_that_meet_in_every_hazard_see_one_order_of_writes_after_any_death() {
    let mut counts = BTreeMap::new();
    // With ample memory, and with so little that writers wait for it.
    for write_shm_size in [256 << 10, 32 << 10] {
        for (what, count) in run_counted(write_shm_size) {
            *counts.entry(what).or_insert(0) += count;
        }
    }
    println!("{counts:?}");
    for what in [
        "read after write",
        "late",
        "again",
        "mended",
        "half applied",
        "deaths",
        "flushes",
        "discards",
    ] {
        assert!(
            counts.get(what).is_some_and(|count| *count > 0),
            "{what} was to be met: {counts:?}"
        );
    }
}
