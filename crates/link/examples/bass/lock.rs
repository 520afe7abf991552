//! What the cache's one lock costs: threads keep requests in flight, on one cache or each on its
//! own, over a device that answers immediately. Not here: the link.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Instant;

use sawmill_device::{
    BlockDevice, BlockDeviceExt, Exchange, Flags, MemoryDevice, Operation, Outcome, Request,
};
use sawmill_link::Unpacker;
use sawmill_link::cache::{Cache, Options};

use crate::{PAGE, Result};

/// The size of all devices together: more than may be dirty, or less than starts a write-back.
const SIZE_BYTES: u64 = 64 << 20;
const HIT_SIZE_BYTES: u64 = 16 << 20;
const DEPTH: u32 = 16;

/// A request whose completion is only counted.
struct CountingExchange {
    bytes: Arc<[u8]>,
    read: Vec<u8>,
    under_way: Arc<AtomicU32>,
    asker: thread::Thread,
}

impl Exchange for CountingExchange {
    fn fill(&mut self, offset: u64, into: &mut [u8]) {
        let start = offset as usize;
        into.copy_from_slice(&self.bytes[start..start + into.len()]);
    }

    fn buffer(&mut self) -> &mut [u8] {
        &mut self.read
    }

    fn complete(self: Box<Self>, outcome: Outcome) {
        assert!(outcome.is_ok(), "memory does not fail");
        self.under_way.fetch_sub(1, Ordering::Release);
        self.asker.unpark();
    }
}

/// What the threads do.
#[derive(Clone, Copy)]
pub(crate) enum Mix {
    /// Two writes and a read in turn, more than may stay dirty: write-backs run beside them.
    Turns,
    /// Two writes and a read in turn, only of pages that are cached.
    Hits,
    /// Reads of cached pages.
    ReadHits,
    /// Writes of cached pages.
    WriteHits,
}

impl Mix {
    pub(crate) fn named(name: &str) -> Result<Mix> {
        match name {
            "hits" => Ok(Mix::Hits),
            "reads" => Ok(Mix::ReadHits),
            "writes" => Ok(Mix::WriteHits),
            _ => Err(format!("no mix {name:?}: hits, reads or writes").into()),
        }
    }

    fn is_read(self, index: u32) -> bool {
        match self {
            Mix::Turns | Mix::Hits => index % 3 == 2,
            Mix::ReadHits => true,
            Mix::WriteHits => false,
        }
    }

    /// The size of all devices together.
    fn size_bytes(self) -> u64 {
        match self {
            Mix::Turns => SIZE_BYTES,
            _ => HIT_SIZE_BYTES,
        }
    }
}

/// Submits requests of `length` bytes in random pages, at depth 16.
fn ask(device: &dyn BlockDevice, length: usize, requests: u32, seed: u64, mix: Mix) {
    let pages = (device.geometry().size_bytes - length as u64) / PAGE;
    let bytes: Arc<[u8]> = vec![0xb5; length].into();
    let under_way = Arc::<AtomicU32>::default();
    let mut random = seed;
    for index in 0..requests {
        while under_way.load(Ordering::Acquire) >= DEPTH {
            thread::park();
        }
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let address = (random >> 33) % pages * PAGE;
        let (operation, room) =
            if mix.is_read(index) { (Operation::Read, length) } else { (Operation::Write, 0) };
        under_way.fetch_add(1, Ordering::Relaxed);
        let exchange = Box::new(CountingExchange {
            bytes: Arc::clone(&bytes),
            read: vec![0; room],
            under_way: Arc::clone(&under_way),
            asker: thread::current(),
        });
        device.submit(Request::new(operation, address, length as u64, Flags::default(), exchange));
    }
    while under_way.load(Ordering::Acquire) > 0 {
        thread::park();
    }
}

/// Prints the requests per second of all threads together.
pub(crate) fn measure(
    threads: usize,
    caches: usize,
    length: usize,
    requests: u32,
    mix: Mix,
) -> Result {
    let size_bytes = mix.size_bytes() / caches as u64;
    let cache = || Cache::new(Unpacker::new(MemoryDevice::new(size_bytes)), &Options::default());
    let caches = (0..caches).map(|_| cache()).collect::<std::result::Result<Vec<_>, _>>()?;
    if !matches!(mix, Mix::Turns) {
        for cache in &caches {
            for page in 0..size_bytes / PAGE {
                cache.read_at(page * PAGE, PAGE as usize)?;
            }
        }
    }
    let began = Instant::now();
    thread::scope(|scope| {
        for number in 0..threads {
            let cache = &caches[number % caches.len()];
            scope.spawn(move || ask(cache, length, requests, number as u64 + 1, mix));
        }
    });
    let seconds = began.elapsed().as_secs_f64();
    let all = f64::from(requests) * threads as f64;
    println!("{{\"requests_per_s\": {:.0}}}", all / seconds);
    Ok(())
}
