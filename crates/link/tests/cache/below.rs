//! The device below the cache in tests: memory that keeps a list of its requests. It answers
//! immediately, on command, or late and in any order on threads of its own, with random failures.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::{self, JoinHandle};

use sawmill_device::{
    BlockDevice, BlockDeviceExt, Error, ErrorKind, Flags, Geometry, MemoryDevice, Operation,
    Outcome, Request,
};
use sawmill_link::{PackedDevice, Unpacker};

/// A request that the device received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SeenRequest {
    pub(crate) operation: Operation,
    pub(crate) packed: bool,
    pub(crate) address: u64,
    pub(crate) length: u64,
    pub(crate) fua: bool,
}

/// A request and whether it is packed.
pub(crate) type QueuedRequest = (bool, Request);

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    Now,
    Hold,
    Late,
}

struct DiskState {
    memory: Unpacker<Arc<MemoryDevice>>,
    queue: Mutex<Queue>,
    changed: Condvar,
    /// Of a thousand requests this many fail; half of these are carried out first.
    failures: AtomicU32,
    /// The durable bytes, if they are tracked.
    durable: Mutex<Option<Vec<u8>>>,
    /// It lost what was not durable, and the next flush reports that.
    has_unreported_loss: AtomicBool,
}

struct Queue {
    mode: Mode,
    waiting: Vec<QueuedRequest>,
    requests: Vec<SeenRequest>,
    has_ended: bool,
    random: u64,
}

/// Memory below a cache that answers when and in the order that a test wants.
pub(crate) struct LowerDevice {
    inside: Arc<DiskState>,
    threads: Vec<JoinHandle<()>>,
}

impl LowerDevice {
    pub(crate) fn new(size_bytes: u64, mode: Mode) -> Arc<LowerDevice> {
        LowerDevice::over(MemoryDevice::new(size_bytes), mode, 1)
    }

    pub(crate) fn over(memory: MemoryDevice, mode: Mode, seed: u64) -> Arc<LowerDevice> {
        let queue = Queue {
            mode,
            waiting: Vec::new(),
            requests: Vec::new(),
            has_ended: false,
            random: seed,
        };
        let inside = Arc::new(DiskState {
            memory: Unpacker::new(Arc::new(memory)),
            queue: Mutex::new(queue),
            changed: Condvar::new(),
            failures: AtomicU32::new(0),
            durable: Mutex::new(None),
            has_unreported_loss: AtomicBool::new(false),
        });
        let count = if mode == Mode::Late { 2 } else { 0 };
        let thread = |_| {
            let inside = inside.clone();
            thread::spawn(move || inside.answer_late())
        };
        let threads = (0..count).map(thread).collect();
        Arc::new(LowerDevice { inside, threads })
    }

    pub(crate) fn memory(&self) -> &MemoryDevice {
        self.inside.memory.inner()
    }

    pub(crate) fn fail_per_mille(&self, failures: u32) {
        self.inside.failures.store(failures, SeqCst);
    }

    /// From now on, only the current bytes and what is flushed later are durable.
    pub(crate) fn be_volatile(&self) {
        *self.inside.durable.lock().unwrap() = Some(self.inside.bytes());
    }

    /// Loses what was not flushed; the next flush fails.
    pub(crate) fn lose(&self) {
        if let Some(durable) = &*self.inside.durable.lock().unwrap() {
            self.memory().write_at(0, durable).unwrap();
            self.inside.has_unreported_loss.store(true, SeqCst);
        }
    }

    /// Whether a loss has not been reported yet.
    pub(crate) fn has_lost(&self) -> bool {
        self.inside.has_unreported_loss.load(SeqCst)
    }

    pub(crate) fn set(&self, mode: Mode) {
        self.inside.queue.lock().unwrap().mode = mode;
    }

    /// The requests since the last call of this.
    pub(crate) fn take_requests(&self) -> Vec<SeenRequest> {
        std::mem::take(&mut self.inside.queue.lock().unwrap().requests)
    }

    /// The number of requests of one kind.
    pub(crate) fn count(&self, operation: Operation) -> usize {
        let queue = self.inside.queue.lock().unwrap();
        queue.requests.iter().filter(|seen| seen.operation == operation).count()
    }

    pub(crate) fn take_held(&self) -> Vec<QueuedRequest> {
        std::mem::take(&mut self.inside.queue.lock().unwrap().waiting)
    }

    pub(crate) fn carry_out(&self, (packed, request): QueuedRequest) {
        self.inside.carry_out(packed, request);
    }

    /// Executes waiting requests, oldest first, and those that follow from them, until none waits.
    pub(crate) fn release(&self) -> usize {
        let mut count = 0;
        loop {
            let held_requests = self.take_held();
            if held_requests.is_empty() {
                return count;
            }
            count += held_requests.len();
            held_requests.into_iter().for_each(|waiting| self.carry_out(waiting));
        }
    }

    fn take(&self, packed: bool, request: Request) {
        let (operation, address, length) = (request.operation, request.address, request.length);
        let seen = SeenRequest { operation, packed, address, length, fua: request.flags.fua };
        let mut queue = self.inside.queue.lock().unwrap();
        queue.requests.push(seen);
        if queue.mode != Mode::Now {
            queue.waiting.push((packed, request));
            return self.inside.changed.notify_one();
        }
        if queue.requests.len() > 1 << 16 {
            queue.requests.clear();
        }
        drop(queue);
        self.inside.by_chance(packed, request);
    }
}

pub(crate) fn failed() -> Error {
    Error::new(ErrorKind::Unavailable, "a failure by chance")
}

impl Queue {
    fn below(&mut self, limit: usize) -> usize {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.random >> 33) as usize % limit
    }
}

impl DiskState {
    fn bytes(&self) -> Vec<u8> {
        let device = self.memory.inner();
        device.read_at(0, device.geometry().size_bytes as usize).unwrap()
    }

    fn carry_out(&self, packed: bool, request: Request) {
        if request.operation == Operation::Flush {
            if self.has_unreported_loss.swap(false, SeqCst) {
                return request.fail(failed());
            }
            let mut durable = self.durable.lock().unwrap();
            *durable = durable.is_some().then(|| self.bytes());
        }
        if packed { self.memory.submit_packed(request) } else { self.memory.submit(request) }
    }

    fn by_chance(&self, packed: bool, request: Request) {
        let failures = self.failures.load(SeqCst) as usize;
        let dice = if failures > 0 { self.queue.lock().unwrap().below(1000) } else { 1000 };
        if dice >= failures {
            return self.carry_out(packed, request);
        }
        if dice % 2 == 0 {
            return request.fail(failed());
        }
        // Executed, and failed nevertheless.
        self.carry_out(packed, request.then(|_, asker| asker.complete(Err(failed()))));
    }

    /// Answers the waiting requests in random order.
    fn answer_late(&self) {
        loop {
            let mut queue = self.queue.lock().unwrap();
            while queue.waiting.is_empty() && !queue.has_ended {
                queue = self.changed.wait(queue).unwrap();
            }
            if queue.waiting.is_empty() {
                return;
            }
            let count = queue.waiting.len();
            let chosen = queue.below(count);
            let (packed, request) = queue.waiting.swap_remove(chosen);
            let pause = queue.below(4);
            queue.requests.clear();
            drop(queue);
            (0..pause).for_each(|_| thread::yield_now());
            self.by_chance(packed, request);
        }
    }
}

impl Drop for LowerDevice {
    fn drop(&mut self) {
        self.inside.queue.lock().unwrap().has_ended = true;
        self.inside.changed.notify_all();
        for thread in self.threads.drain(..) {
            // The last owner may be one of these threads itself.
            if thread.thread().id() != thread::current().id() {
                thread.join().unwrap();
            }
        }
    }
}

impl BlockDevice for LowerDevice {
    fn geometry(&self) -> Geometry {
        self.inside.memory.geometry()
    }

    fn submit(&self, request: Request) {
        self.take(false, request);
    }
}

impl PackedDevice for LowerDevice {
    fn packed_bytes_max(&self) -> u32 {
        64 << 10
    }

    fn packed_span_bytes_max(&self) -> u32 {
        1 << 20
    }

    fn submit_packed(&self, request: Request) {
        self.take(true, request);
    }
}

/// A submitted request, and its outcome once it arrives.
pub(crate) struct PendingOutcome(Receiver<(Outcome, Vec<u8>)>);

impl PendingOutcome {
    /// The bytes or the error, if the request was answered.
    pub(crate) fn now(&self) -> Option<Result<Vec<u8>, ErrorKind>> {
        let (outcome, bytes) = self.0.try_recv().ok()?;
        Some(outcome.map(|_| bytes).map_err(|error| error.kind()))
    }
}

pub(crate) const FUA: Flags = Flags { fua: true, no_unmap: false };

/// Submits a request without waiting.
pub(crate) fn submit(
    device: &dyn BlockDevice,
    operation: Operation,
    address: u64,
    bytes: &[u8],
) -> PendingOutcome {
    submit_with(device, operation, Flags::default(), address, bytes.len() as u64, bytes)
}

pub(crate) fn submit_with(
    device: &dyn BlockDevice,
    operation: Operation,
    flags: Flags,
    address: u64,
    length: u64,
    bytes: &[u8],
) -> PendingOutcome {
    let (sender, receiver) = channel();
    let listen = move |outcome, bytes| drop(sender.send((outcome, bytes)));
    let mut request = Request::with_bytes(operation, address, flags, bytes.to_vec(), listen);
    request.length = length;
    device.submit(request);
    PendingOutcome(receiver)
}
