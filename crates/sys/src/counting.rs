//! An allocator that counts, for tests of "nothing is allocated here".
//!
//! Invariant: it allocates as the system does. Not here: who may allocate.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

/// The system's allocator, counting. For a test's `#[global_allocator]`.
pub struct CountingAllocator;

impl CountingAllocator {
    /// How often the calling thread has asked for memory so far; 0 where this is not the allocator in use.
    #[must_use]
    pub fn allocations_of_this_thread() -> u64 {
        ALLOCATIONS.with(Cell::get)
    }
}

fn count() {
    // A thread that is about to end has no counter any more, and nobody who reads it.
    let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
}

// SAFETY: every call is the system allocator's, with the same arguments; counting touches a constant-
// initialised thread-local number and allocates nothing.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller keeps GlobalAlloc's contract, which is the system's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        count();
        // SAFETY: as above.
        unsafe { System.realloc(pointer, layout, bytes) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}
