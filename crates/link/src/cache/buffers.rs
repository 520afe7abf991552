//! Buffers of pages, and what a request moves between them and its far side.
//!
//! Bytes are copied without the cache's lock, unless they are so few that a copy costs less than to
//! avoid it. A write fills buffers of its own before the lock is taken, and under it they change
//! places with those of its pages. A read takes references to the buffers of its pages under the
//! lock, and copies from them afterwards.
//!
//! Invariants: a buffer with a second reference never changes (the compiler proves it), so no read
//! is torn, and no eviction, write or discard disturbs a copy under way. A spare buffer has one
//! reference; what it holds is never read before it is written. A thread keeps few of them.
//!
//! Not here: which bytes of a page are known (`page`), requests that wait (`state`).

use std::cell::Cell;
use std::sync::Arc;

use sawmill_device::{Operation, Outcome, Request};

use super::PAGE_BYTES;
use super::table::page_slices;

/// The bytes of a page; empty if none of them was ever known.
pub(super) type PageBytes = Arc<[u8]>;

/// Requests up to this length are copied under the lock: a read because a reference costs as much,
/// a write because at most half a page would be copied there a second time.
const SHORT_READ_BYTES_MAX: u64 = 1024;
const SHORT_WRITE_BYTES_MAX: u64 = PAGE_BYTES as u64 / 2;

/// The most spare buffers of a thread: those of a write of 64 KiB.
const SPARE_PAGES_MAX: usize = 16;
/// The longest list that a thread keeps: that of a read of 1 MiB.
const LIST_PAGES_MAX: usize = 256;

thread_local! {
    /// Buffers that nobody uses: what this thread's last write replaced.
    static SPARE: Cell<Vec<PageBytes>> = const { Cell::new(Vec::new()) };
    /// The empty list of this thread's last read.
    static LIST: Cell<Vec<PageBytes>> = const { Cell::new(Vec::new()) };
}

/// Takes this many buffers of any content.
fn take(count: usize) -> Vec<PageBytes> {
    let mut spare = SPARE.try_with(Cell::take).unwrap_or_default();
    if spare.len() > count {
        let taken = spare.split_off(spare.len() - count);
        let _ = SPARE.try_with(|cell| cell.set(spare));
        return taken;
    }
    spare.resize_with(count, new_buffer);
    spare
}

/// A buffer of zeroes.
pub(super) fn new_buffer() -> PageBytes {
    std::iter::repeat_n(0, PAGE_BYTES).collect()
}

/// Takes buffers that nobody needs, or that others still use.
pub(super) fn give_back(mut buffers: Vec<PageBytes>) {
    // Who drops the last reference keeps the buffer; nobody can make a new one meanwhile.
    buffers.retain_mut(|bytes| bytes.len() == PAGE_BYTES && is_own(bytes));
    let mut spare = SPARE.try_with(Cell::take).unwrap_or_default();
    if spare.is_empty() {
        std::mem::swap(&mut spare, &mut buffers);
    } else {
        spare.append(&mut buffers);
    }
    spare.truncate(SPARE_PAGES_MAX);
    spare.shrink_to(LIST_PAGES_MAX);
    let _ = SPARE.try_with(|cell| cell.set(spare));
}

/// A buffer for each page of a range. `fill` gets the offset in the range, and the place.
pub(super) fn filled(
    address: u64,
    length: u64,
    mut fill: impl FnMut(u64, &mut [u8]),
) -> Vec<PageBytes> {
    let slices = page_slices(address, length);
    let mut buffers = take(page_slices(address, length).count());
    for (bytes, slice) in buffers.iter_mut().zip(slices) {
        // Nobody else has it, so this copies nothing.
        fill(slice.offset, &mut Arc::make_mut(bytes)[slice.inside]);
    }
    buffers
}

/// Whether there is no other reference.
pub(super) fn is_own(bytes: &mut PageBytes) -> bool {
    Arc::strong_count(bytes) == 1 && Arc::get_mut(bytes).is_some()
}

/// A request, and a buffer for each of its pages: what a write brings, and the buffers that it
/// replaced; or what a read takes its bytes from. Short and other requests have none.
pub(super) struct Task {
    pub(super) request: Request,
    pub(super) buffers: Vec<PageBytes>,
}

impl Task {
    /// Prepares a request for the lock. `is_cached`: a write goes into the cache.
    pub(super) fn new(mut request: Request, is_cached: bool) -> Self {
        let (address, length) = (request.address, request.length);
        let is_short = is_short(&request);
        let buffers = match request.operation {
            Operation::Write if is_cached && !is_short => {
                filled(address, length, |offset, into| request.fill(offset, into))
            }
            Operation::Read if !is_short => {
                let mut list = LIST.try_with(Cell::take).unwrap_or_default();
                list.reserve(page_slices(address, length).count());
                list
            }
            _ => Vec::new(),
        };
        Task { request, buffers }
    }

    /// Whether its bytes are copied under the lock.
    pub(super) fn is_short(&self) -> bool {
        is_short(&self.request)
    }

    /// Answers the request, without the lock. A read that succeeded gets its bytes first.
    pub(super) fn complete(self, outcome: Outcome) {
        let is_short = self.is_short();
        let Task { mut request, mut buffers } = self;
        if request.operation != Operation::Read {
            if !buffers.is_empty() {
                give_back(buffers);
            }
        } else if !is_short {
            if outcome.is_ok() {
                let slices = page_slices(request.address, request.length);
                let into = request.buffer();
                for (bytes, slice) in buffers.iter().zip(slices) {
                    let start = slice.offset as usize;
                    into[start..start + slice.inside.len()].copy_from_slice(&bytes[slice.inside]);
                }
            }
            buffers.clear();
            if buffers.capacity() <= LIST_PAGES_MAX {
                let _ = LIST.try_with(|cell| cell.set(buffers));
            }
        }
        request.complete(outcome);
    }
}

fn is_short(request: &Request) -> bool {
    match request.operation {
        Operation::Read => request.length <= SHORT_READ_BYTES_MAX,
        _ => request.length <= SHORT_WRITE_BYTES_MAX,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spare_pages() -> usize {
        let spare = SPARE.take();
        let pages = spare.len();
        SPARE.set(spare);
        pages
    }

    #[test]
    fn a_buffer_that_somebody_reads_is_not_used_again() {
        let buffers = filled(0, PAGE_BYTES as u64, |_, into| into.fill(1));
        let reader = Arc::clone(&buffers[0]);
        give_back(buffers);
        let other = filled(0, PAGE_BYTES as u64, |_, into| into.fill(2));
        assert!(reader.iter().all(|byte| *byte == 1), "the reader's bytes have changed");
        drop(reader);
        give_back(other);
        assert_eq!(spare_pages(), 1);
    }

    #[test]
    fn a_thread_keeps_few_spare_buffers_and_no_empty_ones() {
        give_back(filled(100, 1000 * PAGE_BYTES as u64, |_, into| into.fill(1)));
        assert_eq!(spare_pages(), SPARE_PAGES_MAX);
        give_back(take(3));
        give_back(vec![PageBytes::default(); 9]);
        assert_eq!(spare_pages(), SPARE_PAGES_MAX);
        assert!(SPARE.take().capacity() <= LIST_PAGES_MAX);
        give_back(vec![PageBytes::default(); 9]);
        assert_eq!(spare_pages(), 0);
        assert_eq!(take(9).len(), 9);
    }
}
