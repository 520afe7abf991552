//! Copies the bytes of a request to and from the pages of the cache.
//!
//! Bytes are copied without the cache's lock, unless they are so few that a copy costs less than
//! avoiding it. A write fills buffers of its own before the lock is taken, and under it they are
//! swapped with those of its pages. A read takes references to the buffers of its pages under the
//! lock, and copies from them afterwards.
//!
//! Not here: the buffers (`buffers`), requests that wait (`state`).

use std::cell::Cell;
use std::sync::Arc;

use sawmill_device::{Operation, Outcome, Request};

use super::PAGE_BYTES;
use super::buffers::{PageBytes, give_back, take};
use super::options::Policy;
use super::table::page_slices;

/// Requests up to this length are copied under the lock: a read because a reference costs as much,
/// a write because at most half a page would be copied there a second time.
const SHORT_READ_BYTES_MAX: u64 = 1024;
const SHORT_WRITE_BYTES_MAX: u64 = PAGE_BYTES as u64 / 2;

/// The longest list that a thread keeps: that of a read of 1 MiB.
const LIST_PAGES_MAX: usize = 256;

thread_local! {
    /// The empty list of this thread's last read.
    static LIST: Cell<Vec<PageBytes>> = const { Cell::new(Vec::new()) };
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

/// A request, and a buffer for each of its pages: what a write brings, and the buffers that it
/// replaced; or what a read takes its bytes from. Short and other requests have none.
pub(super) struct Task {
    pub(super) request: Request,
    pub(super) buffers: Vec<PageBytes>,
}

impl Task {
    /// Prepares a request for the lock.
    pub(super) fn new(mut request: Request, policy: Policy) -> Self {
        let (address, length) = (request.address, request.length);
        let is_short = is_short(&request);
        let buffers = match request.operation {
            Operation::Write if policy != Policy::WriteAround && !is_short => {
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
