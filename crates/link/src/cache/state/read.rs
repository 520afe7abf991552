//! A read: from the pages, and what is missing from below, in sub-blocks (BASS §3.3).
//!
//! Invariants: if a page has fetches in flight, they cover all of its holes, so a read of that page
//! just waits. Fetched bytes never replace known ones. What a read wants of each page is copied
//! under the lock, from bytes that were known when or after the read was submitted (D3).
//!
//! Not here: which page is evicted for a new one (`table`), waiting for a change (`change`).

use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;

use sawmill_device::{Error, ErrorKind, Flags, Operation, Reply, Request, Result};

use super::{CacheState, Work};
use crate::cache::PAGE_BYTES;
use crate::cache::table::{page_slice, page_slices};

/// A read that waits for pages.
pub(super) struct PageRead {
    request: Request,
    pages_left: usize,
}

impl CacheState {
    /// Returns the read if it is done.
    pub(super) fn read(&mut self, mut request: Request) -> Option<Request> {
        let (id, mut pages_left) = (self.next_id(), 0);
        let mut holes = std::mem::take(&mut self.holes);
        for slice in page_slices(request.address, request.length) {
            if let Some(page) = self.table.get_mut(slice.page)
                && page.known.covers(&slice.inside)
            {
                page.used = true;
                let start = slice.offset as usize;
                let range = start..start + slice.inside.len();
                request.buffer()[range].copy_from_slice(&page.bytes[slice.inside]);
                continue;
            }
            let length = self.table.page_length(slice.page);
            let page = self.table.page(slice.page);
            page.used = true;
            page.readers.push(id);
            pages_left += 1;
            if page.fetches == 0 {
                let base = slice.page * PAGE_BYTES as u64;
                let partly = u64::from(!page.known.is_empty());
                for hole in page.holes(length) {
                    add(&mut holes, base + hole.start as u64..base + hole.end as u64);
                }
                self.counters.hole_fetches.fetch_add(partly, Relaxed);
            }
        }
        holes.drain(..).for_each(|hole| self.fetch(&hole));
        self.holes = holes;
        if pages_left == 0 {
            return Some(request);
        }
        self.wait_lists.reads.insert(id, PageRead { request, pages_left });
        None
    }

    /// Reads a range below, in as many requests as the device needs.
    fn fetch(&mut self, hole: &Range<u64>) {
        let mut address = hole.start;
        while address < hole.end {
            let length = (hole.end - address).min(self.setup.below_bytes_max);
            for slice in page_slices(address, length) {
                self.table.page(slice.page).fetches += 1;
            }
            let me = self.me.clone();
            let on_outcome = move |outcome, bytes: Vec<u8>| {
                if let Some(me) = me.upgrade() {
                    me.notify(&mut |state| state.fetched(address, &bytes, &outcome));
                }
            };
            let (operation, flags, bytes) =
                (Operation::Read, Flags::default(), vec![0; length as usize]);
            self.work.push(Work::Below(Request::with_bytes(
                operation, address, flags, bytes, on_outcome,
            )));
            self.counters.fetches.fetch_add(1, Relaxed);
            self.counters.fetched_bytes.fetch_add(length, Relaxed);
            address += length;
        }
    }

    /// A fetch has completed or failed.
    pub(super) fn fetched(&mut self, address: u64, bytes: &[u8], outcome: &Result<Reply>) {
        for slice in page_slices(address, bytes.len() as u64) {
            let Some(page) = self.table.get_mut(slice.page) else { continue };
            let range = slice.offset as usize..slice.offset as usize + slice.inside.len();
            match outcome {
                Ok(_) => page.merge(slice.inside, &bytes[range]),
                Err(error) => page.fetch_error = Some(error.clone()),
            }
            page.fetches -= 1;
            if page.fetches > 0 {
                continue;
            }
            let (readers, error) = (std::mem::take(&mut page.readers), page.fetch_error.take());
            let is_quiet = page.is_quiet();
            readers.into_iter().for_each(|reader| self.serve(reader, slice.page, error.as_ref()));
            if let Some(page) = self.table.get_mut(slice.page).filter(|page| page.is_doubted) {
                page.doubt();
            }
            if is_quiet {
                self.quieted(slice.page);
            }
        }
        self.table.trim();
    }

    /// Copies what a waiting read wants of a page.
    fn serve(&mut self, reader: u64, number: u64, error: Option<&Error>) {
        // It may have failed because of another page.
        let (Some(reading), Some(page)) =
            (self.wait_lists.reads.get_mut(&reader), self.table.get(number))
        else {
            return;
        };
        let slice = page_slice(number, reading.request.address, reading.request.length);
        let is_known = page.known.covers(&slice.inside);
        if is_known {
            let start = slice.offset as usize;
            let range = start..start + slice.inside.len();
            reading.request.buffer()[range].copy_from_slice(&page.bytes[slice.inside]);
            reading.pages_left -= 1;
            if reading.pages_left > 0 {
                return;
            }
        }
        let Some(PageRead { request, .. }) = self.wait_lists.reads.remove(&reader) else { return };
        let hole_error = || Error::new(ErrorKind::Internal, "cache: a fetched page has holes");
        let outcome =
            if is_known { Ok(Reply::Done) } else { Err(error.cloned().unwrap_or_else(hole_error)) };
        self.answer(request, outcome);
    }
}

/// Appends a range to an ordered list; merges it with the last one if they overlap or touch.
fn add(list: &mut Vec<Range<u64>>, range: Range<u64>) {
    match list.last_mut() {
        Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
        _ => list.push(range),
    }
}
