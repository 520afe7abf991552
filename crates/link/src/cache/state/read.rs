//! A read: from the pages, and what is missing from below, in sub-blocks (BASS §3.3).
//!
//! Invariants: if a page has fetches in flight, they cover all of its holes, so a read of that page
//! just waits. Fetched bytes never replace known ones. The part of a read in each page is copied
//! under the lock, from bytes that were known when or after the read was submitted (D3).
//!
//! Not here: which page is evicted for a new one (`table`), waiting for a change (`change`).

use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;

use sawmill_device::{Error, ErrorKind, Flags, Operation, Reply, Request, Result};

use super::{State, Work};
use crate::cache::PAGE_BYTES;
use crate::cache::table::{piece_of, pieces_of};

/// A read that waits for pages.
pub(super) struct PageRead {
    request: Request,
    pages_left: usize,
}

impl State {
    /// Returns the read if it is done.
    pub(super) fn read(&mut self, mut request: Request) -> Option<Request> {
        let (id, mut pages_left) = (self.next_id(), 0);
        let mut holes = std::mem::take(&mut self.holes);
        for piece in pieces_of(request.address, request.length) {
            if let Some(page) = self.table.get_mut(piece.page)
                && page.known.covers(&piece.inside)
            {
                page.used = true;
                let start = piece.offset as usize;
                let place = start..start + piece.inside.len();
                request.buffer()[place].copy_from_slice(&page.bytes[piece.inside]);
                continue;
            }
            let length = self.table.page_length(piece.page);
            let page = self.table.page(piece.page);
            page.used = true;
            page.readers.push(id);
            pages_left += 1;
            if page.fetches == 0 {
                let base = piece.page * PAGE_BYTES as u64;
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

    /// Reads a range below, in pieces that the device supports.
    fn fetch(&mut self, hole: &Range<u64>) {
        let mut address = hole.start;
        while address < hole.end {
            let length = (hole.end - address).min(self.setup.below_bytes_max);
            for piece in pieces_of(address, length) {
                self.table.page(piece.page).fetches += 1;
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
        for piece in pieces_of(address, bytes.len() as u64) {
            let Some(page) = self.table.get_mut(piece.page) else { continue };
            let place = piece.offset as usize..piece.offset as usize + piece.inside.len();
            match outcome {
                Ok(_) => page.merge(piece.inside, &bytes[place]),
                Err(error) => page.fetch_error = Some(error.clone()),
            }
            page.fetches -= 1;
            if page.fetches > 0 {
                continue;
            }
            let (readers, error) = (std::mem::take(&mut page.readers), page.fetch_error.take());
            let is_quiet = page.is_quiet();
            readers.into_iter().for_each(|reader| self.serve(reader, piece.page, error.as_ref()));
            if let Some(page) = self.table.get_mut(piece.page).filter(|page| page.is_doubted) {
                page.doubt();
            }
            if is_quiet {
                self.quieted(piece.page);
            }
        }
        self.table.trim();
    }

    /// Copies its part of a page to a waiting read.
    fn serve(&mut self, reader: u64, number: u64, error: Option<&Error>) {
        // It may have failed because of another page.
        let (Some(reading), Some(page)) =
            (self.wait_lists.reads.get_mut(&reader), self.table.get(number))
        else {
            return;
        };
        let piece = piece_of(number, reading.request.address, reading.request.length);
        let is_known = page.known.covers(&piece.inside);
        if is_known {
            let start = piece.offset as usize;
            let place = start..start + piece.inside.len();
            reading.request.buffer()[place].copy_from_slice(&page.bytes[piece.inside]);
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
