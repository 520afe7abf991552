//! Memory straight from the kernel, which gets it back on drop, whatever else the heap holds.
//!
//! Invariants: zeroes at first; one owner. Not here: memory that others see (`mapping`, `shared`).

use std::io;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

/// Memory straight from the kernel, which gets it back on drop.
pub struct Pages {
    start: NonNull<u8>,
    length: usize,
}

// SAFETY: it owns its memory, as a boxed slice does.
unsafe impl Send for Pages {}
// SAFETY: shared access is reading alone, as with a boxed slice.
unsafe impl Sync for Pages {}

impl Pages {
    /// `length` zeroes. A page takes memory once it is touched.
    ///
    /// # Errors
    /// `InvalidInput` for a length of zero; the kernel's error if it has no room.
    pub fn zeroed(length: usize) -> io::Result<Self> {
        // SAFETY: a new mapping at an address that the kernel chooses touches no other memory.
        let start = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                length,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )
        }?;
        let start = NonNull::new(start.cast())
            .ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
        Ok(Pages { start, length })
    }
}

impl Deref for Pages {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the mapping has `length` readable bytes, lives as long as `self`, and is written
        // through `&mut self` alone.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.length) }
    }
}

impl DerefMut for Pages {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: the mapping has `length` writable bytes and lives as long as `self`; `&mut self`
        // is the only access.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.length) }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and nobody has a reference into it any more. A failure would
        // leave it mapped, which is harmless.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.length) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_zero_and_keep_what_is_written() {
        let mut pages = Pages::zeroed(300_000).unwrap();
        assert!(pages.len() == 300_000 && pages.iter().all(|byte| *byte == 0));
        pages[299_999] = 7;
        assert_eq!(pages[299_998..], [0, 7]);
        assert!(Pages::zeroed(0).is_err());
    }
}
