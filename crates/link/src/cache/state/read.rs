//! A read: from the pages, and what is missing from below, in sub-blocks (BASS §3.3).
//!
//! Invariants: if a page has fetches in flight, they cover all of its holes, so a read of that page
//! just waits. Fetched bytes never replace known ones. What a read wants of each page is fixed
//! under the lock, by a reference to bytes that were known when or after the read was submitted
//! (D3). A read that waits keeps such references; what they hold beyond the cache is no more than
//! what the doors admit.
//!
//! Not here: which page is evicted for a new one (`table`), waiting for a change (`change`).

use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;

use sawmill_device::{Error, ErrorKind, Flags, Operation, Reply, Request, Result};

use super::{CacheState, Work};
use crate::cache::PAGE_BYTES;
use crate::cache::buffers::{self, PageBytes};
use crate::cache::table::{page_slice, page_slices};
use crate::cache::task::{Task, filled};

/// A read that waits for pages.
pub(super) struct PageRead {
    task: Task,
    pages_left: usize,
}

impl CacheState {
    /// Returns the read if it is done.
    pub(super) fn read(&mut self, mut task: Task) -> Option<Task> {
        let (id, mut pages_left) = (self.next_id(), 0);
        let mut holes = std::mem::take(&mut self.holes);
        let slices = page_slices(task.request.address, task.request.length);
        for slice in slices {
            if let Some(page) = self.table.get_mut(slice.page)
                && page.known.covers(&slice.inside)
            {
                page.used = true;
                if task.is_short() {
                    let start = slice.offset as usize;
                    let range = start..start + slice.inside.len();
                    task.request.buffer()[range].copy_from_slice(&page.bytes[slice.inside]);
                } else {
                    task.buffers.push(PageBytes::clone(&page.bytes));
                }
                continue;
            }
            let length = self.table.page_length(slice.page);
            let page = self.table.page(slice.page);
            page.used = true;
            page.readers.push(id);
            if !task.is_short() {
                task.buffers.push(PageBytes::default());
            }
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
            return Some(task);
        }
        self.wait_lists.reads.insert(id, PageRead { task, pages_left });
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
            let on_outcome = move |outcome: Result<Reply>, bytes: Vec<u8>| {
                let Some(me) = me.upgrade() else { return };
                let mut pages = filled(address, length, |offset, into| {
                    let start = offset as usize;
                    into.copy_from_slice(&bytes[start..start + into.len()]);
                });
                drop(bytes);
                me.notify(&mut |state| state.fetched(address, length, &mut pages, &outcome));
                buffers::give_back(pages);
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

    /// A fetch has completed or failed. `pages` has its bytes, and keeps the buffers that are not
    /// used any more.
    fn fetched(
        &mut self,
        address: u64,
        length: u64,
        pages: &mut [PageBytes],
        outcome: &Result<Reply>,
    ) {
        for (slice, bytes) in page_slices(address, length).zip(pages) {
            let Some(page) = self.table.get_mut(slice.page) else { continue };
            match outcome {
                Ok(_) => page.merge(slice.inside, bytes),
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

    /// Fixes what a waiting read wants of a page.
    fn serve(&mut self, reader: u64, number: u64, error: Option<&Error>) {
        // It may have failed because of another page.
        let (Some(reading), Some(page)) =
            (self.wait_lists.reads.get_mut(&reader), self.table.get(number))
        else {
            return;
        };
        let (address, length) = (reading.task.request.address, reading.task.request.length);
        let slice = page_slice(number, address, length);
        let is_known = page.known.covers(&slice.inside);
        if is_known {
            if reading.task.is_short() {
                let start = slice.offset as usize;
                let range = start..start + slice.inside.len();
                reading.task.request.buffer()[range].copy_from_slice(&page.bytes[slice.inside]);
            } else {
                let index = (number - address / PAGE_BYTES as u64) as usize;
                reading.task.buffers[index] = PageBytes::clone(&page.bytes);
            }
            reading.pages_left -= 1;
            if reading.pages_left > 0 {
                return;
            }
        }
        let Some(PageRead { task, .. }) = self.wait_lists.reads.remove(&reader) else { return };
        let hole_error = || Error::new(ErrorKind::Internal, "cache: a fetched page has holes");
        let outcome =
            if is_known { Ok(Reply::Done) } else { Err(error.cloned().unwrap_or_else(hole_error)) };
        self.answer(task, outcome);
    }
}

/// Appends a range to an ordered list; merges it with the last one if they overlap or touch.
fn add(list: &mut Vec<Range<u64>>, range: Range<u64>) {
    match list.last_mut() {
        Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
        _ => list.push(range),
    }
}
