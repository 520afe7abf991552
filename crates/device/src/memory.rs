//! A sparse device in memory: the reference implementation of the contract, and a fast disk for
//! tests.
//!
//! Invariants: a page that is absent reads as zeroes; no lock is held while an outcome is
//! delivered, so its receiver may submit at once. Not here: durability. A flush has nothing to do.

use std::collections::HashMap;
use std::ops::Range;

use parking_lot::RwLock;

use crate::{
    Allocation, BlockDevice, Error, ErrorKind, Geometry, Operation, Reply, Request, Result,
};

/// The unit of sparseness. Small enough for scattered writes, large enough that look-ups stay
/// cheap.
const PAGE_BYTES: u64 = 16 << 10;
/// Neighboring pages lie in different shards, so that writers to one region do not queue on one
/// lock.
const SHARDS: u64 = 64;

type Page = Box<[u8]>;

/// A sparse device in memory, shared by any number of threads.
pub struct MemoryDevice {
    geometry: Geometry,
    shards: Box<[RwLock<HashMap<u64, Page>>]>,
}

/// One request's part of one page.
struct PageRange {
    page: u64,
    /// Where in the page.
    inside: Range<usize>,
    /// Where in the request.
    offset: u64,
}

impl PageRange {
    fn covers_page(&self) -> bool {
        self.inside.len() as u64 == PAGE_BYTES
    }

    fn place<'a>(&self, buffer: &'a mut [u8]) -> &'a mut [u8] {
        let start = self.offset as usize;
        &mut buffer[start..start + self.inside.len()]
    }
}

/// The part of `[address, end)` that lies in `page`.
fn page_range(page: u64, address: u64, end: u64) -> PageRange {
    let first = page * PAGE_BYTES;
    let start = address.max(first);
    // Subtract before adding, so that the last page of the largest device does not overflow.
    let stop = if end - first < PAGE_BYTES { end } else { first + PAGE_BYTES };
    PageRange {
        page,
        inside: (start - first) as usize..(stop - first) as usize,
        offset: start - address,
    }
}

/// The pages that `[address, end)` touches. The range is not empty.
fn pages(address: u64, end: u64) -> Range<u64> {
    address / PAGE_BYTES..(end - 1) / PAGE_BYTES + 1
}

impl MemoryDevice {
    /// A device of `size_bytes` zeroes. Memory is used only for what is written.
    #[must_use]
    pub fn new(size_bytes: u64) -> Self {
        let geometry = Geometry::of_size(size_bytes);
        MemoryDevice { geometry, shards: (0..SHARDS).map(|_| RwLock::default()).collect() }
    }

    /// A device of zeroes that shows and enforces these facts: for tests of how a door shows them.
    #[must_use]
    pub fn with_geometry(geometry: Geometry) -> Self {
        MemoryDevice { geometry, ..MemoryDevice::new(geometry.size_bytes) }
    }

    /// Bytes of memory that hold data.
    #[must_use]
    pub fn resident_bytes(&self) -> u64 {
        self.shards.iter().map(|shard| shard.read().len() as u64 * PAGE_BYTES).sum()
    }

    fn shard(&self, page: u64) -> &RwLock<HashMap<u64, Page>> {
        &self.shards[(page % SHARDS) as usize]
    }

    fn read(&self, request: &mut Request) -> Result<Reply> {
        let (address, length) = (request.address, request.length);
        let buffer = request.buffer();
        if buffer.len() as u64 != length {
            let text = format!("a read of {length} bytes came with a buffer of {}", buffer.len());
            return Err(Error::new(ErrorKind::Internal, text));
        }
        let end = address + length;
        for range in pages(address, end).map(|page| page_range(page, address, end)) {
            match self.shard(range.page).read().get(&range.page) {
                Some(page) => range.place(buffer).copy_from_slice(&page[range.inside]),
                None => range.place(buffer).fill(0),
            }
        }
        Ok(Reply::Done)
    }

    fn write(&self, request: &mut Request) -> Result<Reply> {
        let (address, end) = (request.address, request.address + request.length);
        for range in pages(address, end).map(|page| page_range(page, address, end)) {
            let mut shard = self.shard(range.page).write();
            let page =
                shard.entry(range.page).or_insert_with(|| vec![0; PAGE_BYTES as usize].into());
            request.fill(range.offset, &mut page[range.inside]);
        }
        Ok(Reply::Done)
    }

    /// Zeroes the range; pages that are covered entirely are freed unless `keep_space`.
    fn clear(&self, address: u64, end: u64, keep_space: bool) -> Result<Reply> {
        for range in
            self.resident(address, end).into_iter().map(|page| page_range(page, address, end))
        {
            let mut shard = self.shard(range.page).write();
            if range.covers_page() && !keep_space {
                shard.remove(&range.page);
            } else if let Some(page) = shard.get_mut(&range.page) {
                page[range.inside].fill(0);
            }
        }
        Ok(Reply::Done)
    }

    fn runs(&self, address: u64, end: u64) -> Result<Reply> {
        let mut runs: Vec<Allocation> = Vec::new();
        let mut add = |length: u64, data: bool| match runs.last_mut() {
            Some(last) if last.data == data => last.length += length,
            _ if length > 0 => runs.push(Allocation { length, data }),
            _ => (),
        };
        let mut covered = 0;
        for range in
            self.resident(address, end).into_iter().map(|page| page_range(page, address, end))
        {
            add(range.offset - covered, false);
            add(range.inside.len() as u64, true);
            covered = range.offset + range.inside.len() as u64;
        }
        add(end - address - covered, false);
        Ok(Reply::Allocation(runs))
    }

    /// The pages of the range that exist, in order. The time depends on the smaller of range and
    /// content, so a discard of an entire huge device is quick.
    fn resident(&self, address: u64, end: u64) -> Vec<u64> {
        let range = pages(address, end);
        if range.end - range.start <= SHARDS {
            return range.filter(|page| self.shard(*page).read().contains_key(page)).collect();
        }
        let mut pages = Vec::new();
        for shard in &self.shards {
            pages.extend(shard.read().keys().filter(|page| range.contains(page)));
        }
        pages.sort_unstable();
        pages
    }
}

impl BlockDevice for MemoryDevice {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn submit(&self, mut request: Request) {
        if let Err(error) = request.check(&self.geometry) {
            return request.fail(error);
        }
        let (address, length) = (request.address, request.length);
        let outcome = match request.operation {
            Operation::Read => self.read(&mut request),
            Operation::Write => self.write(&mut request),
            Operation::Flush | Operation::Prefetch => Ok(Reply::Done),
            Operation::Discard => self.clear(address, address + length, false),
            Operation::WriteZeroes => self.clear(address, address + length, request.flags.no_unmap),
            Operation::Allocation => self.runs(address, address + length),
        };
        request.complete(outcome);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::BlockDeviceExt;

    #[test]
    fn memory_is_used_for_written_pages_only_and_given_back_by_discard() {
        let device = MemoryDevice::new(u64::MAX);
        let far = u64::MAX - 3 * PAGE_BYTES + 100;
        device.write_at(far, b"far away").expect("in range");
        assert_eq!(device.resident_bytes(), PAGE_BYTES);
        assert_eq!(device.read_at(far - 1, 10).expect("in range"), b"\0far away\0");
        device.write_at(u64::MAX - 1, b"!").expect("the last byte");
        device.discard(0, u64::MAX).expect("the whole device");
        assert_eq!(device.read_at(far, 8).expect("in range"), [0; 8]);
        assert_eq!(device.read_at(u64::MAX - 1, 1).expect("in range"), [0]);
        assert!(device.resident_bytes() <= PAGE_BYTES, "at most the partial last page stays");
    }

    #[test]
    fn allocation_names_exactly_the_pages_with_data() {
        let device = MemoryDevice::new(1 << 30);
        device.write_at(5 * PAGE_BYTES + 7, &[1; 20]).expect("in range");
        device.write_at(6 * PAGE_BYTES, &[1; 20]).expect("in range");
        let run = |pages, data| Allocation { length: pages * PAGE_BYTES, data };
        let runs = device.allocation(0, 100 * PAGE_BYTES).expect("in range");
        assert_eq!(runs, [run(5, false), run(2, true), run(93, false)]);
        assert_eq!(
            device.allocation(5 * PAGE_BYTES, 2 * PAGE_BYTES).expect("in range"),
            [run(2, true)]
        );
        assert_eq!(
            device.allocation(9 * PAGE_BYTES, PAGE_BYTES).expect("in range"),
            [run(1, false)]
        );
    }
}
