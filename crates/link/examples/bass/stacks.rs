//! The two stacks on one link: the byte-granular cache, and a cache of whole pages as operating
//! systems have it. Not here: their load (`main`, `replay`).

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use parking_lot::{Condvar, Mutex};
use sawmill_device::{BlockDevice, BlockDeviceExt, Exchange, Flags, Operation, Outcome, Request};
use sawmill_link::cache::{Cache, Options};
use sawmill_link::initiator::RemoteDevice;

use crate::{PAGE, Result};

/// What a workload needs of a stack.
pub(crate) trait Stack {
    /// Writes the first `length` bytes of `data`.
    fn write(&mut self, address: u64, data: &Arc<[u8]>, length: usize) -> Result;
    fn read(&mut self, address: u64, length: usize) -> Result<Vec<u8>>;
    fn flush(&mut self) -> Result;
    /// Bytes that were read from below.
    fn fetched(&self) -> u64;
}

pub(crate) struct Bytes {
    cache: Cache<RemoteDevice>,
    answer_cell: Arc<AnswerCell>,
}

/// Makes a request.
fn new_request(
    answer_cell: &Arc<AnswerCell>,
    operation: Operation,
    address: u64,
    length: u64,
    data: &Arc<[u8]>,
) -> Request {
    let read = if operation == Operation::Read { vec![0; length as usize] } else { Vec::new() };
    let exchange = Box::new(StackExchange {
        data: Arc::clone(data),
        read,
        answer_cell: Arc::clone(answer_cell),
    });
    Request::new(operation, address, length, Flags::default(), exchange)
}

impl AnswerCell {
    fn wait(&self) -> Result<Vec<u8>> {
        let mut answer = self.outcome.lock();
        loop {
            match answer.take() {
                Some((outcome, read)) => return Ok(outcome.map(|_| read)?),
                None => self.changed.wait(&mut answer),
            }
        }
    }
}

/// Receives the answer to the one request in flight.
#[derive(Default)]
struct AnswerCell {
    outcome: Mutex<Option<(Outcome, Vec<u8>)>>,
    changed: Condvar,
}

/// A request: as a door does, it has the payload in memory, and the stack takes it from there.
struct StackExchange {
    data: Arc<[u8]>,
    read: Vec<u8>,
    answer_cell: Arc<AnswerCell>,
}

impl Exchange for StackExchange {
    fn fill(&mut self, offset: u64, into: &mut [u8]) {
        let start = offset as usize;
        into.copy_from_slice(&self.data[start..start + into.len()]);
    }

    fn buffer(&mut self) -> &mut [u8] {
        &mut self.read
    }

    fn complete(self: Box<Self>, outcome: Outcome) {
        let StackExchange { read, answer_cell, .. } = *self;
        *answer_cell.outcome.lock() = Some((outcome, read));
        answer_cell.changed.notify_one();
    }
}

impl Bytes {
    pub(crate) fn new(device: RemoteDevice) -> Result<Self> {
        Ok(Bytes { cache: Cache::new(device, &Options::default())?, answer_cell: Arc::default() })
    }

    fn ask(
        &self,
        operation: Operation,
        address: u64,
        length: u64,
        data: &Arc<[u8]>,
    ) -> Result<Vec<u8>> {
        self.cache.submit(new_request(&self.answer_cell, operation, address, length, data));
        self.answer_cell.wait()
    }
}

impl Stack for Bytes {
    fn write(&mut self, address: u64, data: &Arc<[u8]>, length: usize) -> Result {
        self.ask(Operation::Write, address, length as u64, data).map(drop)
    }

    fn read(&mut self, address: u64, length: usize) -> Result<Vec<u8>> {
        self.ask(Operation::Read, address, length as u64, &Arc::default())
    }

    fn flush(&mut self) -> Result {
        self.ask(Operation::Flush, 0, 0, &Arc::default()).map(drop)
    }

    fn fetched(&self) -> u64 {
        self.cache.counters().fetched_bytes.load(Ordering::Relaxed)
    }
}

/// A page cache: a partial write to an uncached page reads it first; pages are flushed whole,
/// adjacent ones as one request, many at a time. Write-back starts at the same limit as ours.
pub(crate) struct Pages {
    device: RemoteDevice,
    pages: BTreeMap<u64, (Vec<u8>, bool)>,
    dirty: usize,
    fetched: u64,
    answer_cell: Arc<AnswerCell>,
}

impl Pages {
    pub(crate) fn new(device: RemoteDevice) -> Self {
        Pages { device, pages: BTreeMap::new(), dirty: 0, fetched: 0, answer_cell: Arc::default() }
    }

    fn page(&mut self, page: u64) -> Result<&mut (Vec<u8>, bool)> {
        if !self.pages.contains_key(&page) {
            self.fetched += PAGE;
            let bytes = self.device.read_at(page * PAGE, PAGE as usize)?;
            self.pages.insert(page, (bytes, false));
        }
        self.pages.get_mut(&page).ok_or_else(|| "a page that was put in is not there".into())
    }

    fn write_back(&mut self) -> Result {
        let dirty: Vec<u64> =
            self.pages.iter().filter(|(_, (_, dirty))| *dirty).map(|(page, _)| *page).collect();
        let (sender, receiver) = std::sync::mpsc::channel();
        let mut under_way = 0;
        for run in dirty.chunk_by(|a, b| *b == *a + 1).flat_map(|run| run.chunks(64)) {
            let mut bytes = Vec::with_capacity(run.len() * PAGE as usize);
            for page in run {
                let (page, dirty) = self.pages.get_mut(page).ok_or("a dirty page is gone")?;
                bytes.extend_from_slice(page);
                *dirty = false;
            }
            let sender = sender.clone();
            // The flush that sent it waits.
            let on_outcome = move |outcome, _| drop(sender.send(outcome));
            let (address, flags) = (run[0] * PAGE, Flags::default());
            self.device.submit(Request::with_bytes(
                Operation::Write,
                address,
                flags,
                bytes,
                on_outcome,
            ));
            under_way += 1;
            if under_way == 64 {
                receiver.recv()??;
                under_way -= 1;
            }
        }
        for _ in 0..under_way {
            receiver.recv()??;
        }
        self.dirty = 0;
        Ok(())
    }
}

impl Stack for Pages {
    fn write(&mut self, address: u64, data: &Arc<[u8]>, length: usize) -> Result {
        let mut request =
            new_request(&self.answer_cell, Operation::Write, address, length as u64, data);
        for (page, inside, piece) in pieces(address, length) {
            if inside.len() == PAGE as usize {
                self.pages.entry(page).or_insert_with(|| (vec![0; PAGE as usize], false));
            }
            let (bytes, dirty) = self.page(page)?;
            request.fill(piece.start as u64, &mut bytes[inside]);
            let newly = !std::mem::replace(dirty, true);
            self.dirty += usize::from(newly);
        }
        if self.dirty * PAGE as usize >= (Options::default().dirty_bytes_max / 2) as usize {
            self.write_back()?;
        }
        request.done();
        self.answer_cell.wait().map(drop)
    }

    fn read(&mut self, address: u64, length: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; length];
        for (page, inside, piece) in pieces(address, length) {
            bytes[piece].copy_from_slice(&self.page(page)?.0[inside]);
        }
        Ok(bytes)
    }

    fn flush(&mut self) -> Result {
        self.write_back()?;
        Ok(self.device.flush()?)
    }

    fn fetched(&self) -> u64 {
        self.fetched
    }
}

/// What a range covers of each page: the page, the range in the page, the range in the whole.
fn pieces(address: u64, length: usize) -> impl Iterator<Item = (u64, Range<usize>, Range<usize>)> {
    let end = address + length as u64;
    (address / PAGE..end.div_ceil(PAGE)).map(move |page| {
        let (start, stop) = (address.max(page * PAGE), end.min((page + 1) * PAGE));
        let inside = (start - page * PAGE) as usize..(stop - page * PAGE) as usize;
        (page, inside, (start - address) as usize..(stop - address) as usize)
    })
}
