//! BUSE in user space: a device that collects writes of many cores into chunks of shared memory,
//! completes them immediately, and delivers the chunks to a driver (BUSE thesis, chapter 4).
//!
//! Invariants:
//! 1. A write completes when its bytes are in a chunk. The device has a volatile cache: what
//!    survives a power cut is what a flush covered.
//! 2. A read is delivered when every older write of its range has been acknowledged, so a driver
//!    that has applied what it acknowledged returns the right bytes.
//! 3. A flush is queued on every queue after the chunks of all writes that completed before it, and
//!    completes when the driver has acknowledged it on each queue.
//! 4. What was delivered and not acknowledged when a driver disappeared is delivered to the next
//!    one again, in the same order, with the same numbers. Where a newer write of the same bytes
//!    was acknowledged, the older write has the newer bytes by then: the next driver need not know
//!    what the last one had.
//! 5. Locks are taken in this order: the waiting requests, then one queue's writes (only `recover`
//!    takes those of all queues, in order), then one queue's reads; an area's lock is the last.
//! 6. A discard or write-zeroes is never in flight together with another change of the same bytes:
//!    it waits for those before it, and those after wait for it.
//!
//! Files: `options`, `chunk` (the bytes), `areas` (which write is newer), `write`, `read`, `range`
//! (discard, write-zeroes), `flush`, `deliver` (the driver's side), `lanes` (as commands),
//! `recover` (a driver is gone). Not here: processes, sockets (`host`).

pub mod chunk;
pub mod options;

mod areas;
mod deliver;
mod flush;
mod lanes;
mod range;
mod read;
mod recover;
mod write;

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use parking_lot::{Condvar, Mutex, RwLock};
use sawmill_device::{BlockDevice, Error, ErrorKind, Geometry, Operation, Request, Result};
use sawmill_sys::{Arena, ArenaPiece};

pub use deliver::{Chunk, Delivery, RangeCommand, Read};
pub use options::BatchOptions;

use crate::cores::{Cores, queue_of_thread};
use crate::request_holder::{State, StateCell};

use self::areas::{Areas, ChunkId};
use self::chunk::ChunkEntry;
use self::flush::Flush;
use self::range::Range;

/// A device in batch mode. Writes complete when their bytes are in shared memory, and reach the
/// driver in chunks (decision 0021).
pub struct Batch {
    options: BatchOptions,
    geometry: Geometry,
    areas: Areas,
    cores: Cores,
    queues: Box<[Queue]>,
    /// Requests that wait for others of the same bytes, and what they wait for.
    queue: Mutex<ResendQueue>,
    /// Whether `waiting` is not empty.
    has_waiting: AtomicBool,
    state_cell: StateCell,
    /// Chunks in the order of their opening: see `docs/format/write_chunk.md`.
    ordinals: Mutex<Ordinals>,
}

#[derive(Default)]
struct ResendQueue {
    /// In order, with their queues.
    /// Bounded by the requests that the doors admit.
    requests: VecDeque<(usize, Request)>,
    /// Discards and write-zeroes in flight to the driver: first byte and end.
    ranges: Vec<(u64, u64)>,
}

/// One write queue and one read queue with their shared memory.
struct Queue {
    write_memory: Arc<Arena>,
    writes: Mutex<Writes>,
    /// Signals an item to fetch, or the end.
    writes_wakeup: Condvar,
    reads: Mutex<Reads>,
    reads_wakeup: Condvar,
}

/// A chunk that accepts writes.
struct Open {
    number: u64,
    ordinal: u64,
    piece: ArenaPiece,
    entries: Vec<ChunkEntry>,
    data_end: usize,
    since: Instant,
}

/// A closed chunk: its content does not change any more, except for corrections by `recover`.
struct ClosedChunk {
    number: u64,
    ordinal: u64,
    horizon: u64,
    /// The length in use.
    length: usize,
    entries: Vec<ChunkEntry>,
    offset: usize,
    piece: RwLock<ArenaPiece>,
}

/// An item of a write queue.
#[derive(Clone)]
enum Item {
    Chunk(Arc<ClosedChunk>),
    Flush(Arc<Flush>),
    Range(Arc<Range>),
}

#[derive(Default)]
struct Writes {
    open: Option<Open>,
    /// Items to fetch.
    /// Bounded by the chunks that the memory has room for, and the flushes and ranges that the
    /// doors admit.
    ready: VecDeque<(u64, Item)>,
    /// Items that the driver has, by number, with the time of delivery.
    /// Bounded by what bounds `ready`, from where they come.
    fetched: BTreeMap<u64, (Item, Instant)>,
    /// Acknowledged chunks that are kept because older writes of the same bytes are in flight, and
    /// the number of such writes.
    kept: HashMap<u64, (Option<Arc<ClosedChunk>>, isize)>,
    /// Writes that wait for memory.
    /// Bounded by the requests that the doors admit.
    stalled: VecDeque<Request>,
    /// The driver's error for a chunk that it could not write, if no flush of that chunk was in
    /// flight: the next flush reports it.
    failed: Option<Error>,
    last_number: u64,
    /// Items up to this number were already delivered to a former driver, if they are still to be
    /// fetched.
    again_number: u64,
}

struct Reads {
    memory: Arc<Arena>,
    /// Bounded by the requests that the doors admit.
    ready: VecDeque<Request>,
    /// Reads that were delivered to a former driver: they are delivered first, in order.
    /// Bounded by what one driver had fetched.
    again: VecDeque<(u64, Request)>,
    /// Bounded by the shared memory of the queue.
    fetched: BTreeMap<u64, (Request, ArenaPiece, Instant)>,
    last_number: u64,
    /// Reads up to this number were already delivered to a former driver.
    again_number: u64,
}

impl Reads {
    fn new(memory: Arc<Arena>) -> Self {
        let (ready, again, fetched) = (VecDeque::new(), VecDeque::new(), BTreeMap::new());
        Reads { memory, ready, again, fetched, last_number: 0, again_number: 0 }
    }
}

/// The existing chunks, in the order of their opening.
#[derive(Default)]
struct Ordinals {
    last: u64,
    /// Chunks without an acknowledgment.
    open: BTreeSet<u64>,
}

impl Ordinals {
    fn next(&mut self) -> u64 {
        self.last += 1;
        self.open.insert(self.last);
        self.last
    }

    /// All ordinals below this are acknowledged.
    fn floor(&self) -> u64 {
        self.open.first().copied().unwrap_or(self.last + 1)
    }
}

fn read_memory(options: &BatchOptions) -> Result<Arc<Arena>> {
    memory_of(options.read_shm_size)
}

fn memory_of(bytes: u64) -> Result<Arc<Arena>> {
    Arena::create("sawmill-queue", bytes as usize).map_err(|error| {
        Error::caused(
            ErrorKind::Full,
            format!("no shared memory of {bytes} bytes for a queue"),
            error,
        )
    })
}

impl Batch {
    /// Makes a device that waits for a driver.
    ///
    /// # Errors
    /// `Invalid` if the options conflict; `Full` if there is no memory for the queues.
    pub fn new(options: BatchOptions) -> Result<Arc<Self>> {
        options.check()?;
        let queue = |_| -> Result<Queue> {
            Ok(Queue {
                write_memory: memory_of(options.write_shm_size)?,
                writes: Mutex::default(),
                writes_wakeup: Condvar::new(),
                reads: Mutex::new(Reads::new(read_memory(&options)?)),
                reads_wakeup: Condvar::new(),
            })
        };
        let queues = (0..options.hw_queues).map(queue).collect::<Result<_>>()?;
        Ok(Arc::new(Batch {
            geometry: options.geometry(),
            areas: Areas::new(options.collision_area_size),
            cores: Cores::new(),
            queues,
            queue: Mutex::default(),
            has_waiting: AtomicBool::new(false),
            state_cell: StateCell::new(),
            ordinals: Mutex::default(),
            options,
        }))
    }

    /// The options of the device.
    #[must_use]
    pub fn options(&self) -> &BatchOptions {
        &self.options
    }

    /// The state of the device.
    #[must_use]
    pub fn state(&self) -> State {
        self.state_cell.state()
    }

    /// The shared memory of a queue: for writes and for reads.
    #[must_use]
    pub fn memory_of(&self, queue: usize) -> (Arc<Arena>, Arc<Arena>) {
        let queue = &self.queues[queue];
        (Arc::clone(&queue.write_memory), Arc::clone(&queue.reads.lock().memory))
    }
}

impl BlockDevice for Batch {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn submit(&self, request: Request) {
        let queues = self.queues.len();
        let tied = self.options.tie_queues;
        let queue = if tied { self.cores.queue_here(queues) } else { queue_of_thread(queues) };
        self.submit_to(queue, request);
    }
}

impl Batch {
    /// As `submit`, on the queue of a caller that has queues of its own.
    pub fn submit_to(&self, queue: usize, request: Request) {
        let queue = queue % self.queues.len();
        let unit = u64::from(self.options.blocksize);
        let refused =
            request.check(&self.geometry).and_then(|()| crate::check_blocks(&request, unit)).err();
        // A wrong request is `Invalid` also on a device that has ended (D6).
        if let Some(error) = refused.or_else(|| self.state_cell.refusal()) {
            return request.fail(error);
        }
        match request.operation {
            Operation::Write => self.write(queue, request),
            Operation::Read => self.read(queue, request),
            Operation::Flush => self.flush(Some(request)),
            // A hint, and the protocol has no command for it.
            Operation::Prefetch => request.done(),
            Operation::Discard | Operation::WriteZeroes => self.wait_for_turn(queue, request),
            Operation::Allocation => {
                request.fail(Error::new(
                    ErrorKind::Invalid,
                    "drivers do not report which bytes hold data",
                ));
            }
        }
    }
}
