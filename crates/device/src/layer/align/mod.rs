//! Any byte range (D5) on a device that takes whole blocks only, by read-modify-write of the edge
//! blocks.
//!
//! Invariants:
//! - The device inside sees multiples of the unit only, and none longer than it can take.
//! - From the read to the write of a read-modify-write, no other change of the same blocks is in
//!   progress, not even of whole blocks: it would be overwritten with older bytes
//!   (`range_locks`). While there is no read-modify-write, whole blocks pass without a range lock,
//!   and the next read-modify-write waits for all of them (`passes`).
//! - Waiting is by age: a change waits only for changes that were submitted before it, so none
//!   starves.
//! - No mutex is held during calls to the device inside or to an exchange. Changes that an answer
//!   lets in are submitted from one loop, so a long queue of waiters needs no deep stack.
//!
//! Reads wait for nothing: a read-modify-write stores a neighbor's bytes as they are. Whole blocks
//! pass as they come: reads untouched, changes with their outcome noted. Not here: threads, and
//! resizes: the geometry of the device inside is that of the beginning.

mod passes;
mod range_locks;
mod unaligned_write;

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use self::passes::Passes;
use self::range_locks::{LockMode, RangeLocks};
use self::unaligned_write::UnalignedWrite;
use crate::{
    Allocation, BlockDevice, Error, ErrorKind, Geometry, Operation, Outcome, Reply, Request, Result,
};

/// The smallest unit: the sector of the Linux kernel.
const UNIT_BYTES_MIN: u32 = 512;

/// The device `D`, which takes whole blocks, for requests of any bytes.
///
/// If dropped with requests in flight, it answers the waiting ones with an error of kind
/// `Internal`; an answer of `D` may then drop the last reference to `D`. To avoid that, pass an
/// `Arc` and keep another.
pub struct Align<D>(Arc<Core<D>>);

/// The work of a change that has its blocks and may start.
enum Work<D> {
    /// Whole blocks, as they came.
    Pass(Request),
    /// Edges to read, then all to write.
    Unaligned(Arc<UnalignedWrite<D>>),
}

struct WaitQueue<D> {
    range_locks: RangeLocks<Work<D>>,
    /// Let in and not yet started.
    /// Bounded by the requests that callers have in flight.
    ready: VecDeque<Work<D>>,
    /// Let in, and waiting for those that passed without a range lock.
    /// Bounded by the requests that callers have in flight.
    held_work: Vec<Work<D>>,
    /// A thread starts what is ready.
    starting: bool,
}

struct Core<D> {
    inner: D,
    geometry: Geometry,
    unit_bytes: u64,
    /// The longest read or write of the device inside, in whole units.
    longest: u64,
    wait_queue: Mutex<WaitQueue<D>>,
    passes: Passes<Weak<Core<D>>>,
}

impl<D: BlockDevice + 'static> Align<D> {
    /// Accepts any bytes for `inner`, which accepts multiples of `unit_bytes` at multiples of
    /// `unit_bytes`.
    ///
    /// Returns `Invalid` if the unit is not a power of two of at least 512, does not divide the
    /// size of `inner`, or exceeds its request limit.
    pub fn new(inner: D, unit_bytes: u32) -> Result<Self> {
        let invalid = |text: String| Err(Error::new(ErrorKind::Invalid, text));
        let (unit, inner_geometry) = (u64::from(unit_bytes), inner.geometry());
        if !unit_bytes.is_power_of_two() || unit_bytes < UNIT_BYTES_MIN {
            return invalid(format!(
                "blocks of {unit_bytes} bytes: take a power of two from 512 on"
            ));
        }
        if inner_geometry.size_bytes % unit != 0 {
            return invalid(format!(
                "a device of {} bytes is not of whole blocks of {unit_bytes} bytes: give it a size \
                that is",
                inner_geometry.size_bytes
            ));
        }
        let longest = inner_geometry.request_bytes_max / unit_bytes * unit_bytes;
        if longest == 0 {
            return invalid(format!(
                "a device that takes {} bytes in a request cannot take a block of {unit_bytes}",
                inner_geometry.request_bytes_max
            ));
        }
        let preferred_bytes = inner_geometry.preferred_bytes.min(longest);
        let geometry = Geometry { request_bytes_max: longest, preferred_bytes, ..inner_geometry };
        let (ready, held_work) = (VecDeque::new(), Vec::new());
        let wait_queue =
            WaitQueue { range_locks: RangeLocks::new(), ready, held_work, starting: false };
        let (longest, wait_queue) = (longest.into(), Mutex::new(wait_queue));
        Ok(Align(Arc::new_cyclic(|core| {
            let passes = Passes::new(core);
            Core { inner, geometry, unit_bytes: unit, longest, wait_queue, passes }
        })))
    }

    /// The device inside.
    #[must_use]
    pub fn inner(&self) -> &D {
        &self.0.inner
    }

    /// How many changes wait for others.
    #[must_use]
    pub fn waiting(&self) -> usize {
        let wait_queue = self.0.wait_queue.lock();
        wait_queue.range_locks.waiting() + wait_queue.held_work.len()
    }
}

impl<D: BlockDevice + 'static> BlockDevice for Align<D> {
    fn geometry(&self) -> Geometry {
        self.0.geometry
    }

    fn submit(&self, request: Request) {
        let core = &self.0;
        if let Err(error) = request.check(&core.geometry) {
            return request.fail(error);
        }
        let whole = (request.address | request.length) & (core.unit_bytes - 1) == 0;
        match request.operation {
            Operation::Flush => core.inner.submit(request),
            Operation::Read | Operation::Prefetch | Operation::Allocation if whole => {
                core.inner.submit(request);
            }
            Operation::Read => core.read(request),
            Operation::Prefetch => {
                let blocks = core.around(&request_range(&request));
                core.inner.submit(to(request, &blocks));
            }
            Operation::Allocation => core.allocation(request),
            Operation::Discard => core.discard(request),
            Operation::Write | Operation::WriteZeroes if whole => core.pass(request),
            Operation::Write | Operation::WriteZeroes => {
                let blocks = core.around(&request_range(&request));
                core.enter(blocks, LockMode::Exclusive, |range_lock| {
                    Work::Unaligned(UnalignedWrite::new(core, range_lock, request))
                });
            }
        }
    }
}

/// The byte range of a request that has been checked.
fn request_range(request: &Request) -> Range<u64> {
    request.address..request.address + request.length
}

/// The request for another range.
fn to(mut request: Request, range: &Range<u64>) -> Request {
    (request.address, request.length) = (range.start, range.end - range.start);
    request
}

impl<D: BlockDevice + 'static> Core<D> {
    /// The blocks that hold the bytes.
    fn around(&self, bytes: &Range<u64>) -> Range<u64> {
        let mask = self.unit_bytes - 1;
        // The size is a multiple of the unit, so rounding up does not overflow.
        bytes.start & !mask..(bytes.end + mask) & !mask
    }

    /// Cuts blocks into pieces that the device inside accepts.
    fn pieces(&self, blocks: Range<u64>) -> impl Iterator<Item = Range<u64>> {
        let longest = self.longest;
        let count = (blocks.end - blocks.start).div_ceil(longest);
        (0..count).map(move |number| {
            let start = blocks.start + number * longest;
            start..blocks.end.min(start + longest)
        })
    }

    fn read(&self, request: Request) {
        let bytes = request_range(&request);
        let pieces: Vec<_> = self.pieces(self.around(&bytes)).collect();
        let gather =
            UnalignedRead { request: Some(request), pieces_left: pieces.len(), error: None };
        let gather = Arc::new(Mutex::new(gather));
        for piece in pieces {
            let (address, length) = (piece.start, piece.end - piece.start);
            let (gather, range) = (gather.clone(), bytes.clone());
            let on_outcome = move |outcome, bytes: Vec<u8>| {
                let completion = gather.lock().answered(outcome, (address, &bytes), &range);
                if let Some((request, outcome)) = completion {
                    request.complete(outcome);
                }
            };
            let (operation, flags) = (Operation::Read, Default::default());
            self.inner.submit(Request::with_bytes(
                operation,
                address,
                flags,
                vec![0; length as usize],
                on_outcome,
            ));
        }
    }

    fn allocation(&self, request: Request) {
        let (bytes, length) = (request_range(&request), request.length);
        let blocks = self.around(&bytes);
        let skip = bytes.start - blocks.start;
        let request = request.then(move |outcome, asker| {
            asker.complete(outcome.map(|reply| trimmed(reply, skip, length)));
        });
        self.inner.submit(to(request, &blocks));
    }

    /// Discards the blocks that lie entirely in the range; the rest keeps its bytes (D9).
    fn discard(self: &Arc<Self>, request: Request) {
        let mask = self.unit_bytes - 1;
        let bytes = request_range(&request);
        let blocks = (bytes.start + mask) & !mask..bytes.end & !mask;
        if blocks.is_empty() {
            return request.done();
        }
        self.pass(to(request, &blocks));
    }

    /// A change of whole blocks: no edge to read, but it must not slip in between the read and the
    /// write of a read-modify-write of the same blocks.
    fn pass(self: &Arc<Self>, request: Request) {
        if let Some(stripe) = self.passes.pass() {
            return self.inner.submit(request.then(move |outcome, asker| {
                let core = stripe.leave().and_then(Weak::upgrade);
                asker.complete(outcome);
                core.iter().for_each(|core| core.start_waiting());
            }));
        }
        self.start_waiting();
        self.enter(request_range(&request), LockMode::Shared, |range_lock| {
            let core = Arc::downgrade(self);
            Work::Pass(request.then(move |outcome, asker| {
                let core = core.upgrade();
                core.iter().for_each(|core| core.leave(range_lock));
                asker.complete(outcome);
                core.iter().for_each(|core| core.start_ready());
            }))
        });
    }

    /// Starts a change when it has its blocks: now, or when those before it have left.
    fn enter(
        self: &Arc<Self>,
        blocks: Range<u64>,
        mode: LockMode,
        work: impl FnOnce(usize) -> Work<D>,
    ) {
        let is_exclusive = mode == LockMode::Exclusive;
        if is_exclusive {
            self.passes.close();
        }
        let mut wait_queue = self.wait_queue.lock();
        let (range_lock, free) = wait_queue.range_locks.enter(blocks, mode);
        if !free {
            wait_queue.range_locks.wait(range_lock, work(range_lock));
        } else if is_exclusive && !self.passes.is_empty() {
            wait_queue.held_work.push(work(range_lock));
            drop(wait_queue);
            // The passes may have left before they could find this change in `held_work`.
            self.start_waiting();
        } else {
            drop(wait_queue);
            self.start(work(range_lock));
        }
    }

    /// A pass without a range lock has left: changes that wait for all such passes may start.
    fn start_waiting(&self) {
        let mut wait_queue = self.wait_queue.lock();
        self.release_held(&mut wait_queue);
        drop(wait_queue);
        self.start_ready();
    }

    fn release_held(&self, wait_queue: &mut WaitQueue<D>) {
        if !wait_queue.held_work.is_empty() && self.passes.is_empty() {
            let WaitQueue { held_work, ready, .. } = wait_queue;
            ready.extend(held_work.drain(..));
        }
    }

    fn start(&self, work: Work<D>) {
        match work {
            Work::Pass(request) => self.inner.submit(request),
            Work::Unaligned(unaligned) => unaligned.read_edges(self),
        }
    }

    /// A change has ended: changes that waited only for it are ready. Call `start_ready` next.
    fn leave(&self, range_lock: usize) {
        let mut wait_queue = self.wait_queue.lock();
        let WaitQueue { range_locks, ready, held_work, .. } = &mut *wait_queue;
        let was_exclusive = range_locks.leave(range_lock, |work| match work {
            Work::Pass(_) => ready.push_back(work),
            Work::Unaligned(_) => held_work.push(work),
        });
        self.release_held(&mut wait_queue);
        if was_exclusive {
            self.passes.open();
        }
    }

    /// Starts what is ready, unless a caller further up the stack or another thread does.
    fn start_ready(&self) {
        let mut wait_queue = self.wait_queue.lock();
        if wait_queue.starting {
            return;
        }
        wait_queue.starting = true;
        while let Some(work) = wait_queue.ready.pop_front() {
            drop(wait_queue);
            self.start(work);
            wait_queue = self.wait_queue.lock();
        }
        wait_queue.starting = false;
    }
}

/// A read of more than was requested, until all its pieces have arrived.
struct UnalignedRead {
    request: Option<Request>,
    pieces_left: usize,
    error: Option<Error>,
}

impl UnalignedRead {
    /// Copies an arrived piece to its place. The last piece returns the request and its outcome.
    fn answered(
        &mut self,
        outcome: Outcome,
        piece: (u64, &[u8]),
        range: &Range<u64>,
    ) -> Option<(Request, Outcome)> {
        let (address, bytes) = piece;
        match (outcome, self.request.as_mut()) {
            (Ok(_), Some(request)) => {
                let end = address + bytes.len() as u64;
                let (start, end) = (address.max(range.start), end.min(range.end));
                let from = (start - address) as usize..(end - address) as usize;
                let into = (start - range.start) as usize..(end - range.start) as usize;
                if let Some(into) = request.buffer().get_mut(into) {
                    into.copy_from_slice(&bytes[from]);
                } else {
                    let text = format!("a read of {range:?} came with a buffer too short for it");
                    self.error = Some(Error::new(ErrorKind::Internal, text));
                }
            }
            (Err(error), _) => self.error = Some(error),
            (Ok(_), None) => (),
        }
        self.pieces_left -= 1;
        let request = if self.pieces_left == 0 { self.request.take() } else { None };
        request.map(|request| (request, self.error.take().map_or(Ok(Reply::Done), Err)))
    }
}

/// Trims the runs of an answer that covers more than was requested: drops the first `skip` bytes,
/// and keeps `length`.
fn trimmed(reply: Reply, mut skip: u64, mut length: u64) -> Reply {
    let Reply::Allocation(runs) = reply else { return reply };
    let mut trimmed = Vec::with_capacity(runs.len());
    for run in runs {
        let of_run = (run.length - run.length.min(skip)).min(length);
        skip = skip.saturating_sub(run.length);
        length -= of_run;
        if of_run > 0 {
            trimmed.push(Allocation { length: of_run, data: run.data });
        }
    }
    Reply::Allocation(trimmed)
}
