//! An allocator that counts, for tests of "nothing is allocated here" and "nothing is kept".
//!
//! Invariant: it allocates as the system does. Not here: who may allocate.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
    static KEPT_BYTES: Cell<i64> = const { Cell::new(0) };
}

/// Bytes that all threads have asked for and not given back; it wraps, and its end is right.
static IN_USE_BYTES: AtomicU64 = AtomicU64::new(0);

/// The system's allocator, counting. For a test's `#[global_allocator]`.
pub struct CountingAllocator;

impl CountingAllocator {
    /// How often the calling thread has asked for memory so far; 0 where this is not the allocator
    /// in use.
    #[must_use]
    pub fn allocations_of_this_thread() -> u64 {
        ALLOCATIONS.with(Cell::get)
    }

    /// Bytes that the calling thread has asked for, less those it has given back: what it keeps,
    /// where it shares with no other thread.
    #[must_use]
    pub fn bytes_of_this_thread() -> i64 {
        KEPT_BYTES.with(Cell::get)
    }

    /// Bytes that the process has asked for and not given back; 0 where this is not the allocator
    /// in use.
    #[must_use]
    pub fn bytes_in_use() -> u64 {
        IN_USE_BYTES.load(Relaxed)
    }
}

fn count() {
    // A thread that is about to end has no counter any more, and nobody who reads it.
    let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
}

fn keep(more: usize, less: usize) {
    let more = (more as u64).wrapping_sub(less as u64);
    IN_USE_BYTES.fetch_add(more, Relaxed);
    let _ = KEPT_BYTES.try_with(|bytes| bytes.set(bytes.get().wrapping_add(more.cast_signed())));
}

// SAFETY: every call is the system allocator's, with the same arguments; counting touches constant-
// initialized numbers and allocates nothing.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        keep(layout.size(), 0);
        // SAFETY: the caller keeps GlobalAlloc's contract, which is the system's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count();
        keep(layout.size(), 0);
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        count();
        keep(bytes, layout.size());
        // SAFETY: as above.
        unsafe { System.realloc(pointer, layout, bytes) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        keep(0, layout.size());
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}
