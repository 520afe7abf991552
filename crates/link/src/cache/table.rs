//! The pages of the cache by number, and which of them may be evicted.
//!
//! Invariant: a page leaves the table only by [`PageTable::evict`], and only when it is quiet.
//!
//! Not here: the bytes of a page, and when it is quiet (`page`).

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use super::PAGE_BYTES;
use super::counters::CacheCounters;
use super::options::CacheSetup;
use super::page::Page;

/// The bytes of a range that lie in one page.
pub(super) struct PageSlice {
    pub(super) page: u64,
    pub(super) inside: Range<usize>,
    /// Bytes of the range before these.
    pub(super) offset: u64,
}

/// The pages that a range touches. The range is not empty, and ends before the largest number.
pub(super) fn pages_of(address: u64, length: u64) -> Range<u64> {
    address / PAGE_BYTES as u64..(address + length - 1) / PAGE_BYTES as u64 + 1
}

/// The bytes of a range in a page that it touches.
pub(super) fn page_slice(page: u64, address: u64, length: u64) -> PageSlice {
    let first = page * PAGE_BYTES as u64;
    let start = address.max(first);
    let stop = (address + length - first).min(PAGE_BYTES as u64) as usize;
    PageSlice { page, inside: (start - first) as usize..stop, offset: start - address }
}

pub(super) fn page_slices(address: u64, length: u64) -> impl Iterator<Item = PageSlice> {
    pages_of(address, length).map(move |page| page_slice(page, address, length))
}

pub(super) fn overlap(one: &Range<u64>, other: &Range<u64>) -> bool {
    one.start < other.end && other.start < one.end
}

/// The pages of a cache, by number, with those that may be evicted in order.
pub(super) struct PageTable {
    pages: HashMap<u64, Box<Page>, BuildHasherDefault<PageHasher>>,
    /// The eviction queue, the oldest page first. Pages were quiet when they joined it.
    /// Bounded by the pages of the table.
    eviction_queue: VecDeque<u64>,
    pages_max: usize,
    /// The size of the device.
    size_bytes: u64,
    counters: Arc<CacheCounters>,
}

impl PageTable {
    pub(super) fn new(setup: &CacheSetup, counters: Arc<CacheCounters>) -> Self {
        let (pages_max, size_bytes) = (setup.pages_max, setup.geometry.size_bytes);
        PageTable {
            pages: HashMap::default(),
            eviction_queue: VecDeque::new(),
            pages_max,
            size_bytes,
            counters,
        }
    }

    pub(super) fn get(&self, number: u64) -> Option<&Page> {
        self.pages.get(&number).map(|page| &**page)
    }

    pub(super) fn get_mut(&mut self, number: u64) -> Option<&mut Page> {
        self.pages.get_mut(&number).map(|page| &mut **page)
    }

    pub(super) fn values_mut(&mut self) -> impl Iterator<Item = &mut Page> {
        self.pages.values_mut().map(|page| &mut **page)
    }

    /// The length of a page on the device: only the last page may be shorter.
    pub(super) fn page_length(&self, page: u64) -> usize {
        (self.size_bytes - page * PAGE_BYTES as u64).min(PAGE_BYTES as u64) as usize
    }

    /// The existing pages of a range, in no order.
    pub(super) fn present(&self, range: &Range<u64>) -> Vec<u64> {
        if range.end - range.start <= self.pages.len() as u64 {
            return range.clone().filter(|page| self.pages.contains_key(page)).collect();
        }
        self.pages.keys().copied().filter(|page| range.contains(page)).collect()
    }

    /// Returns the page, and creates it if necessary, in place of an evicted one if the table is
    /// full.
    pub(super) fn page(&mut self, number: u64) -> &mut Page {
        let new = (!self.pages.contains_key(&number)).then(|| {
            let full = self.pages.len() >= self.pages_max;
            let evicted = if full { self.evict() } else { None };
            self.count_pages(self.pages.len() + 1);
            evicted.unwrap_or_default()
        });
        self.pages.entry(number).or_insert_with(|| new.unwrap_or_default())
    }

    fn count_pages(&self, pages: usize) {
        let (pages, peak) = (pages as u64, &self.counters.pages_peak);
        self.counters.pages.store(pages, Relaxed);
        // Under the lock, so nothing else counts.
        if pages > peak.load(Relaxed) {
            peak.store(pages, Relaxed);
        }
    }

    /// Evicts a quiet page that was not used lately.
    fn evict(&mut self) -> Option<Box<Page>> {
        while let Some(number) = self.eviction_queue.pop_front() {
            let Some(page) = self.pages.get_mut(&number) else { continue };
            if !page.is_quiet() {
                page.is_queued = false;
            } else if page.used {
                page.used = false;
                self.eviction_queue.push_back(number);
            } else if let Some(mut page) = self.pages.remove(&number) {
                page.reset();
                self.counters.evictions.fetch_add(1, Relaxed);
                return Some(page);
            }
        }
        None
    }

    /// A page has become quiet: it may be evicted.
    pub(super) fn quieted(&mut self, number: u64) {
        if let Some(page) = self.pages.get_mut(&number)
            && !page.is_queued
        {
            page.is_queued = true;
            self.eviction_queue.push_back(number);
        }
    }

    /// Pages became quiet: evicts those above the limit.
    pub(super) fn trim(&mut self) {
        while self.pages.len() > self.pages_max && self.evict().is_some() {}
        self.count_pages(self.pages.len());
    }
}

/// A fast hash of page numbers, which are addresses of the user's own disk.
#[derive(Default)]
struct PageHasher(u64);

impl Hasher for PageHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(self.0 ^ u64::from(*byte)));
    }

    fn write_u64(&mut self, number: u64) {
        let mixed = number.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        self.0 = mixed ^ (mixed >> 32);
    }
}
