//! One read-modify-write: the edge blocks are read, then all blocks are written, with the blocks
//! locked.
//!
//! Invariants: nothing is written when an edge could not be read. The range lock is released
//! exactly once, when the device inside has answered every request that was submitted to it. A
//! write's payload is copied once, from its exchange into the device inside.
//!
//! Not here: which changes wait for which (`range_locks`), and requests for whole blocks
//! (`passes`).

use std::ops::Range;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::{Core, request_range};
use crate::{BlockDevice, Error, ErrorKind, Exchange, Flags, Operation, Outcome, Reply, Request};

/// A write or write-zeroes whose range does not begin or end at a block boundary.
pub(super) struct UnalignedWrite<D> {
    core: Weak<Core<D>>,
    range_lock: usize,
    operation: Operation,
    flags: Flags,
    bytes: Range<u64>,
    body: Mutex<Body>,
}

struct Body {
    request: Option<Request>,
    /// Blocks at the ends as they were read, by address.
    edges: Vec<(u64, Vec<u8>)>,
    /// Requests to the device inside that are not answered yet.
    parts_left: usize,
    error: Option<Error>,
}

impl<D: BlockDevice + 'static> UnalignedWrite<D> {
    pub(super) fn new(core: &Arc<Core<D>>, range_lock: usize, request: Request) -> Arc<Self> {
        let (operation, flags, bytes) = (request.operation, request.flags, request_range(&request));
        let body = Body { request: Some(request), edges: Vec::new(), parts_left: 0, error: None };
        Arc::new(UnalignedWrite {
            core: Arc::downgrade(core),
            range_lock,
            operation,
            flags,
            bytes,
            body: Mutex::new(body),
        })
    }

    /// First step: reads the blocks of which some bytes are kept.
    pub(super) fn read_edges(self: Arc<Self>, core: &Core<D>) {
        let edges = self.edges(core);
        self.body.lock().parts_left = edges.len();
        for edge in edges {
            let (address, length) = (edge.start, edge.end - edge.start);
            let (unaligned, bytes) = (self.clone(), vec![0; length as usize]);
            let on_outcome =
                move |outcome, bytes| match unaligned.answered(outcome, Some((address, bytes))) {
                    Some(Ok(_)) => unaligned.write(),
                    Some(Err(error)) => unaligned.answer(Err(error)),
                    None => (),
                };
            let (operation, flags) = (Operation::Read, Flags::default());
            core.inner.submit(Request::with_bytes(operation, address, flags, bytes, on_outcome));
        }
    }

    fn edges(&self, core: &Core<D>) -> Vec<Range<u64>> {
        let (blocks, unit) = (core.around(&self.bytes), core.unit_bytes);
        if blocks.end - blocks.start <= core.longest.min(2 * unit) {
            return vec![blocks];
        }
        let first = (self.bytes.start != blocks.start).then(|| blocks.start..blocks.start + unit);
        let last = (self.bytes.end != blocks.end).then(|| blocks.end - unit..blocks.end);
        first.into_iter().chain(last).collect()
    }

    /// Second step: writes all blocks.
    fn write(self: Arc<Self>) {
        // The layer is gone, so nothing can be written.
        let Some(core) = self.core.upgrade() else {
            let text = "the device was closed between the read and the write of a part of a block";
            return self.answer(Err(Error::new(ErrorKind::Closed, text)));
        };
        let parts = self.parts(&core);
        self.body.lock().parts_left = parts.len();
        for (operation, blocks) in parts {
            let (address, length) = (blocks.start, blocks.end - blocks.start);
            let part = WritePart { write: self.clone(), address };
            core.inner.submit(Request::new(operation, address, length, self.flags, Box::new(part)));
        }
    }

    fn parts(&self, core: &Core<D>) -> Vec<(Operation, Range<u64>)> {
        let blocks = core.around(&self.bytes);
        let writes = |blocks| core.pieces(blocks).map(|piece| (Operation::Write, piece));
        if self.operation == Operation::Write {
            return writes(blocks).collect();
        }
        // Write-zeroes: the edges are written; the blocks between them are zeroed without a
        // payload.
        let head = (self.bytes.start.next_multiple_of(core.unit_bytes)).min(blocks.end);
        let tail = (self.bytes.end & !(core.unit_bytes - 1)).max(head);
        let zeroes = (head < tail).then_some((Operation::WriteZeroes, head..tail));
        writes(blocks.start..head).chain(zeroes).chain(writes(tail..blocks.end)).collect()
    }

    /// Fills `into` with the bytes to write from `address` on.
    fn content(&self, address: u64, into: &mut [u8]) {
        let end = address + into.len() as u64;
        let mut body = self.body.lock();
        let Body { request, edges, .. } = &mut *body;
        for (start, bytes) in edges.iter() {
            let (from, to) = (address.max(*start), end.min(start + bytes.len() as u64));
            if from < to {
                into[(from - address) as usize..(to - address) as usize]
                    .copy_from_slice(&bytes[(from - start) as usize..(to - start) as usize]);
            }
        }
        let (from, to) = (address.max(self.bytes.start), end.min(self.bytes.end));
        if from < to {
            let into = &mut into[(from - address) as usize..(to - address) as usize];
            match request {
                Some(request) if self.operation == Operation::Write => {
                    request.fill(from - self.bytes.start, into);
                }
                _ => into.fill(0),
            }
        }
    }

    /// Records an answer of the device inside. Returns the outcome of the step after its last
    /// answer.
    fn answered(&self, outcome: Outcome, edge: Option<(u64, Vec<u8>)>) -> Option<Outcome> {
        let mut body = self.body.lock();
        match outcome {
            Ok(_) => body.edges.extend(edge),
            Err(error) => body.error = Some(error),
        }
        body.parts_left -= 1;
        (body.parts_left == 0).then(|| body.error.take().map_or(Ok(Reply::Done), Err))
    }

    fn answer(&self, outcome: Outcome) {
        let core = self.core.upgrade();
        core.iter().for_each(|core| core.leave(self.range_lock));
        let request = self.body.lock().request.take();
        request.into_iter().for_each(|request| request.complete(outcome.clone()));
        core.iter().for_each(|core| core.start_ready());
    }
}

/// The exchange of one of the writes.
struct WritePart<D> {
    write: Arc<UnalignedWrite<D>>,
    address: u64,
}

impl<D: BlockDevice + 'static> Exchange for WritePart<D> {
    fn fill(&mut self, offset: u64, into: &mut [u8]) {
        self.write.content(self.address + offset, into);
    }

    fn buffer(&mut self) -> &mut [u8] {
        &mut []
    }

    fn complete(self: Box<Self>, outcome: Outcome) {
        if let Some(outcome) = self.write.answered(outcome, None) {
            self.write.answer(outcome);
        }
    }
}
