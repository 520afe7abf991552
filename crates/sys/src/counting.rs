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

/// Bytes that all threads have allocated and not freed; may wrap in between, and still ends right.
static IN_USE_BYTES: AtomicU64 = AtomicU64::new(0);

/// The system's allocator, counting. For a test's `#[global_allocator]`.
pub struct CountingAllocator;

impl CountingAllocator {
    /// The number of allocations of the calling thread so far; 0 if this is not the allocator in
    /// use.
    #[must_use]
    pub fn allocations_of_this_thread() -> u64 {
        ALLOCATIONS.with(Cell::get)
    }

    /// Bytes that the calling thread has allocated, minus those it has freed: what it keeps, if it
    /// shares memory with no other thread.
    #[must_use]
    pub fn bytes_of_this_thread() -> i64 {
        KEPT_BYTES.with(Cell::get)
    }

    /// Bytes that the process has allocated and not freed; 0 if this is not the allocator in use.
    #[must_use]
    pub fn bytes_in_use() -> u64 {
        IN_USE_BYTES.load(Relaxed)
    }
}

fn count() {
    // A thread that is about to end no longer has a counter, and needs none.
    let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
}

fn keep(added_bytes: usize, removed_bytes: usize) {
    let change_bytes = (added_bytes as u64).wrapping_sub(removed_bytes as u64);
    IN_USE_BYTES.fetch_add(change_bytes, Relaxed);
    let _ = KEPT_BYTES
        .try_with(|bytes| bytes.set(bytes.get().wrapping_add(change_bytes.cast_signed())));
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
        // SAFETY: the caller keeps GlobalAlloc's contract for this layout, which is the system's.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        count();
        keep(bytes, layout.size());
        // SAFETY: the pointer came from the system's allocator with this layout, as the caller
        // promises, because every allocation here is the system's.
        unsafe { System.realloc(pointer, layout, bytes) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        keep(0, layout.size());
        // SAFETY: the pointer came from the system's allocator with this layout, as the caller
        // promises, because every allocation here is the system's.
        unsafe { System.dealloc(pointer, layout) }
    }
}
