//! The request rate of a null driver: the real host, the real protocol, a load in the same process
//! instead of a kernel's block layer. `scaling MODE OPERATION BYTES QUEUES SECONDS TIED MEMORY`
//! prints one JSON object; `bench/scaling.py` runs it on one core and on more, and plots. The mode
//! `copy` is a device that only copies the bytes, on the submitting thread: the upper limit of the
//! load and these cores.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use sawmill_device::{BlockDevice, Flags, Geometry, Operation, Operations, Outcome, Request};
use sawmill_driver::client::{Abilities, Chunk, ChunkDriver, Driver, Options, connect};
use sawmill_driver::host::{Event, Host};
use sawmill_driver::protocol::ControlFacts;

const SIZE_BYTES: u64 = 1 << 30;
/// Requests of a loader in flight.
const DEPTH: u64 = 64;

struct Null;

impl Driver for Null {
    fn abilities(&self) -> Abilities {
        Abilities { flush: true, ..Abilities::default() }
    }

    fn read(&self, _offset: u64, _into: &mut [u8]) -> std::io::Result<()> {
        Ok(())
    }

    fn write(&self, _offset: u64, _bytes: &[u8], _fua: bool) -> std::io::Result<()> {
        Ok(())
    }
    fn flush(&self) -> std::io::Result<()> {
        Ok(())
    }
}

impl ChunkDriver for Null {
    fn abilities(&self) -> Abilities {
        Abilities::default()
    }

    fn write(&self, _chunk: &Chunk<'_>) -> std::io::Result<()> {
        Ok(())
    }

    fn read(&self, _offset: u64, _into: &mut [u8]) -> std::io::Result<()> {
        Ok(())
    }

    fn flush(&self, _queue: usize) -> std::io::Result<()> {
        Ok(())
    }
}

/// The geometry of `Copies`.
fn geometry() -> Geometry {
    Geometry {
        size_bytes: SIZE_BYTES,
        block_bytes: 4096,
        preferred_bytes: 4096,
        request_bytes_max: 1 << 20,
        read_only: false,
        shared_cache: true,
        operations: Operations { discard: false, write_zeroes: false, allocation: false },
    }
}

/// Only copies the bytes; threads share nothing.
struct Copies(Geometry);

impl BlockDevice for Copies {
    fn geometry(&self) -> Geometry {
        self.0
    }

    fn submit(&self, mut request: Request) {
        thread_local! {
            static CHUNK: RefCell<(usize, Vec<u8>)> = RefCell::new((0, vec![0; 1 << 20]));
        }
        let length = request.length as usize;
        CHUNK.with_borrow_mut(|(at, chunk)| {
            *at = if *at + length > chunk.len() { 0 } else { *at };
            let bytes = &mut chunk[*at..*at + length];
            match request.operation {
                Operation::Read => request.buffer().copy_from_slice(bytes),
                _ => request.fill(0, bytes),
            }
            *at += length;
        });
        request.done();
    }
}

/// One loader's count, and its thread when it waits.
struct Loader {
    done: AtomicU64,
    failed: AtomicU64,
    waits: AtomicBool,
    thread: thread::Thread,
}

impl Loader {
    fn answered(&self, outcome: &Outcome) {
        if outcome.is_err() {
            self.failed.fetch_add(1, Ordering::SeqCst);
        }
        self.done.fetch_add(1, Ordering::SeqCst);
        if self.waits.swap(false, Ordering::SeqCst) {
            self.thread.unpark();
        }
    }
}

/// Submits requests until the time is over. Returns the number of answers.
fn load(
    device: &dyn BlockDevice,
    operation: Operation,
    bytes: u64,
    seed: u64,
    until: Instant,
) -> (u64, u64) {
    let (done, failed, waits) = (AtomicU64::new(0), AtomicU64::new(0), AtomicBool::new(false));
    let loader = Arc::new(Loader { done, failed, waits, thread: thread::current() });
    let (mut submitted_count, mut dice) = (0, seed);
    while Instant::now() < until {
        for _ in 0..16 {
            dice = dice
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let address = (dice >> 20) % (SIZE_BYTES / bytes) * bytes;
            let callback_loader = Arc::clone(&loader);
            let receiver = move |outcome, _| callback_loader.answered(&outcome);
            let payload = vec![0; bytes as usize];
            device.submit(Request::with_bytes(
                operation,
                address,
                Flags::default(),
                payload,
                receiver,
            ));
            submitted_count += 1;
            settle(&loader, submitted_count, DEPTH - 1);
        }
    }
    settle(&loader, submitted_count, 0);
    (loader.done.load(Ordering::SeqCst), loader.failed.load(Ordering::SeqCst))
}

/// Waits until no more than so many are in flight.
fn settle(loader: &Loader, submitted_count: u64, in_flight_max: u64) {
    while submitted_count - loader.done.load(Ordering::SeqCst) > in_flight_max {
        loader.waits.store(true, Ordering::SeqCst);
        if submitted_count - loader.done.load(Ordering::SeqCst) > in_flight_max {
            thread::park();
        }
    }
}

fn main() {
    let arguments: Vec<String> =
        std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    let [mode, operation, bytes, queues, seconds, tied, memory] = &arguments[..] else {
        // As a test of the workspace, it does nothing.
        return println!("usage: scaling plain|batch read|write BYTES QUEUES SECONDS TIED MEMORY");
    };
    let (bytes, queues): (u64, usize) =
        (bytes.parse().expect("bytes"), queues.parse().expect("queues"));
    let seconds = Duration::from_secs_f64(seconds.parse().expect("seconds"));
    let operation = if operation == "read" { Operation::Read } else { Operation::Write };
    if mode == "copy" {
        let device: Arc<dyn BlockDevice> = Arc::new(Copies(geometry()));
        return measure(&device, operation, bytes, queues, seconds);
    }
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("sock");
    let (sender, receiver) = mpsc::channel();
    let sender = Box::new(move |event| drop(sender.send(event)));
    let facts = ControlFacts::default()
        .with("mode", mode)
        .with("hw_queues", queues)
        .with("blocksize", 4096);
    let chunk = (memory.parse::<u64>().expect("bytes") / 8).min(2 << 20);
    let facts = facts
        .with("tie_queues", tied)
        .with("write_shm_size", memory)
        .with("write_chunk_size", chunk);
    let host = Host::start("null", &path, facts, sender).expect("a host");
    let options = Options::sized(SIZE_BYTES).socket(&path);
    let is_batch = mode == "batch";
    let driver = thread::spawn(move || {
        let connection = connect(&[], &options).expect("a host");
        if is_batch { connection.serve_chunks(&Null) } else { connection.serve(Null) }
    });
    while !matches!(receiver.recv().expect("a driver"), Event::Declared) {}
    let device = host.device().expect("declared");
    // Until the doors are known, a driver has one thread for everything.
    host.show_doors(ControlFacts::default());
    measure(&device, operation, bytes, queues, seconds);
    host.finish().expect("it ends");
    driver.join().expect("no panic").expect("it serves");
    host.close();
}

/// Loads a device with a thread for each queue, and prints the rates.
fn measure(
    device: &Arc<dyn BlockDevice>,
    operation: Operation,
    bytes: u64,
    queues: usize,
    seconds: Duration,
) {
    let begin = Instant::now();
    let loaders: Vec<_> = (0..queues as u64)
        .map(|seed| {
            let device = Arc::clone(device);
            thread::spawn(move || load(&*device, operation, bytes, seed + 1, begin + seconds))
        })
        .collect();
    let counts = loaders.into_iter().map(|loader| loader.join().expect("no panic"));
    let (done, failed) = counts.fold((0, 0), |(done, failed), (loader_done, loader_failed)| {
        (done + loader_done, failed + loader_failed)
    });
    let took = begin.elapsed().as_secs_f64();
    assert_eq!(failed, 0, "a null driver refuses nothing");
    let rate = done as f64 / took;
    println!("{{\"requests_per_s\": {rate:.0}, \"bytes_per_s\": {:.0}}}", rate * bytes as f64);
}
