//! Shared mappings: of a file, plain, or the same bytes twice in a row so that a ring has no seam;
//! and memory that is shared with the kernel.
//!
//! Invariant: a mapping is neither moved nor resized while it lives, so an address from `at` stays
//! valid as long as the mapping. Not here: a file that shrinks, after which an access ends the
//! process (`SIGBUS`); `arena`, `attached` and `shared` say what they do about it.
//!
//! Another process may write to shared bytes while `arena` or `attached` lends them as a slice.
//! Rust does not define that. It is accepted, because a copy of every payload would be the price:
//! the bytes are data of a disk, they are copied or given to the kernel, and safe code checks every
//! index and length that it takes from them. A stray write makes data wrong, as it would on a disk.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::ptr::NonNull;

use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

/// A writable mapping. Only raw access is offered; the callers in this crate synchronize it.
pub(crate) struct Mapping {
    start: NonNull<u8>,
    mapped_bytes: usize,
}

impl Mapping {
    /// Maps `[offset, offset + length)` of a file, or of a socket's ring.
    pub(crate) fn plain(file: impl AsFd, offset: u64, length: usize) -> io::Result<Self> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a null hint lets the kernel choose an unused range; nothing existing is replaced.
        let start =
            unsafe { mmap(std::ptr::null_mut(), length, prot, MapFlags::SHARED, file, offset)? };
        Self::own(start, length)
    }

    /// Maps memory without a file, all zeroes.
    pub(crate) fn anonymous(length: usize) -> io::Result<Self> {
        let (null, prot) = (std::ptr::null_mut(), ProtFlags::READ | ProtFlags::WRITE);
        // SAFETY: a null hint lets the kernel choose an unused range; nothing existing is replaced.
        let start = unsafe { mmap_anonymous(null, length, prot, MapFlags::PRIVATE)? };
        Self::own(start, length)
    }

    /// Maps `[offset, offset + length)` of `file` twice, back to back. `length` is a multiple of
    /// the page size.
    pub(crate) fn doubled(file: &File, offset: u64, length: usize) -> io::Result<Self> {
        let null = std::ptr::null_mut();
        // SAFETY: a null hint lets the kernel choose an unused range of twice the length.
        let start =
            unsafe { mmap_anonymous(null, 2 * length, ProtFlags::empty(), MapFlags::PRIVATE)? };
        let mapping = Self::own(start, 2 * length)?;
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        for half in 0..2 {
            let at = start.wrapping_byte_add(half * length);
            // SAFETY: FIXED replaces exactly one half of the range reserved above, which nothing
            // else uses yet.
            unsafe { mmap(at, length, prot, MapFlags::SHARED | MapFlags::FIXED, file, offset)? };
        }
        Ok(mapping)
    }

    fn own(start: *mut std::ffi::c_void, mapped_bytes: usize) -> io::Result<Self> {
        let start = NonNull::new(start.cast::<u8>())
            .ok_or_else(|| io::Error::other("the kernel mapped a file at address zero"))?;
        Ok(Mapping { start, mapped_bytes })
    }

    /// The address of byte `offset`, which must lie inside.
    pub(crate) fn at(&self, offset: usize) -> *mut u8 {
        assert!(offset < self.mapped_bytes, "offset {offset} lies outside the mapping");
        self.start.as_ptr().wrapping_add(offset)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by us and no reference into it outlives its owner. A failure
        // would only leak address space.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.mapped_bytes) };
    }
}

// SAFETY: the mapping is only an address range, valid on every thread until it is dropped; the
// owner alone drops it.
unsafe impl Send for Mapping {}
// SAFETY: `at` gives an address and touches nothing. Those that use addresses synchronize:
// `staging` by its locks (invariants 2 to 4 there), `arena` and `attached` by ranges that are
// disjoint, `shared` by atomics, `xdp` and `frames` by one owner of each ring.
unsafe impl Sync for Mapping {}
