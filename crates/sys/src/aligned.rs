//! Heap memory whose address is a multiple of the direct I/O block.
//!
//! Not here: whether a length suits direct I/O (`direct_file`), memory that goes back to the kernel
//! (`pages`).

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use crate::BLOCK_BYTES;

/// An owned, zeroed, block-aligned byte buffer of fixed length.
pub struct AlignedBytes {
    start: NonNull<u8>,
    layout: Layout,
}

impl AlignedBytes {
    /// `length` zero bytes. A length of zero is made one, so that there is always an allocation.
    #[must_use]
    pub fn zeroed(length: usize) -> Self {
        let layout = match Layout::from_size_align(length.max(1), BLOCK_BYTES as usize) {
            Ok(layout) => layout,
            Err(_) => panic!("a buffer of {length} bytes cannot exist"),
        };
        // SAFETY: alloc_zeroed demands a layout of non-zero size; the size is at least 1.
        let start = unsafe { alloc_zeroed(layout) };
        match NonNull::new(start) {
            Some(start) => AlignedBytes { start, layout },
            None => handle_alloc_error(layout),
        }
    }
}

impl Deref for AlignedBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `start` points at `layout.size()` initialized bytes that live as long as `self`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.layout.size()) }
    }
}

impl DerefMut for AlignedBytes {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: `start` points at `layout.size()` initialized bytes that live as long as `self`,
        // and `&mut self` makes the borrow exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.layout.size()) }
    }
}

impl AsRef<[u8]> for AlignedBytes {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl Drop for AlignedBytes {
    fn drop(&mut self) {
        // SAFETY: `start` came from alloc_zeroed with this very layout and is freed once.
        unsafe { dealloc(self.start.as_ptr(), self.layout) }
    }
}

// SAFETY: the buffer is plain owned memory; moving or sharing it between threads is as for Vec<u8>.
unsafe impl Send for AlignedBytes {}
// SAFETY: shared access is read-only.
unsafe impl Sync for AlignedBytes {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_block_aligned_and_zero() {
        for length in [1, 4096, 12345] {
            let bytes = AlignedBytes::zeroed(length);
            assert_eq!(bytes.as_ptr() as usize % BLOCK_BYTES as usize, 0);
            assert_eq!(bytes.len(), length);
            assert!(bytes.iter().all(|b| *b == 0));
        }
    }
}
