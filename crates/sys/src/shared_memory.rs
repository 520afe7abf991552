//! Memory shared with another process, seen as atomics: either side may change it at any moment.
//!
//! Invariants: every access lies inside the mapping and is aligned; no reference to plain bytes is
//! ever given. A process that shrinks the file behind the mapping kills this one with `SIGBUS`:
//! files made here are sealed against that; a file from another process is as safe as that
//! process. Not here: what the bytes mean.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU64};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fstat, ftruncate, memfd_create};

use crate::mapping::Mapping;

/// A shared mapping of `length` bytes of a file.
pub struct SharedMemory {
    mapping: Mapping,
    length: usize,
    file: File,
}

impl SharedMemory {
    /// New zeroes in memory that belongs to no file system; its size is fixed. `name` is for
    /// `/proc` alone.
    pub fn create(name: &str, length: usize) -> io::Result<Self> {
        let memory = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&memory, length as u64)?;
        fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Self::open(memory, 0, length)
    }

    /// The bytes `[offset, offset + length)` of a received file. Errors: `InvalidInput` if the file
    /// ends before that, the length is zero, or the offset is not at a page.
    pub fn open(file: OwnedFd, offset: u64, length: usize) -> io::Result<Self> {
        let file_bytes = u64::try_from(fstat(&file)?.st_size).unwrap_or(0);
        if length == 0 || offset.checked_add(length as u64).is_none_or(|end| end > file_bytes) {
            let text =
                format!("{length} bytes at {offset} are not in a file of {file_bytes} bytes");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let file = File::from(file);
        Ok(SharedMemory { mapping: Mapping::plain(&file, offset, length)?, length, file })
    }

    /// Bytes that can be reached.
    #[must_use]
    pub fn len(&self) -> usize {
        self.length
    }

    /// Always false: there is at least one byte.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// The file behind it.
    #[must_use]
    pub fn file(&self) -> &File {
        &self.file
    }

    /// The byte at `offset`. `None` outside.
    #[must_use]
    pub fn byte(&self, offset: usize) -> Option<&AtomicU8> {
        let at = self.place(offset, 1)?;
        // SAFETY: `place` checked that the byte lies inside the mapping, which lives as long as
        // `self`; it is only ever accessed atomically here.
        Some(unsafe { AtomicU8::from_ptr(at) })
    }

    /// The 16 bits at `offset`, in the machine's order. `None` outside or unaligned.
    #[must_use]
    pub fn half(&self, offset: usize) -> Option<&AtomicU16> {
        let at = self.place(offset, 2)?;
        // SAFETY: `place` checked that the two bytes lie inside the mapping, which begins at a page
        // and lives as long as `self`, so they are aligned, too. All access is atomic.
        Some(unsafe { AtomicU16::from_ptr(at.cast()) })
    }

    /// The 64 bits at `offset`, in the machine's order. `None` outside or unaligned.
    #[must_use]
    pub fn word(&self, offset: usize) -> Option<&AtomicU64> {
        let at = self.place(offset, 8)?;
        // SAFETY: `place` checked that the eight bytes lie inside the mapping, which begins at a
        // page and lives as long as `self`, so they are aligned, too. All access is atomic.
        Some(unsafe { AtomicU64::from_ptr(at.cast()) })
    }

    fn place(&self, offset: usize, bytes: usize) -> Option<*mut u8> {
        let inside = offset.checked_add(bytes).is_some_and(|end| end <= self.length);
        (inside && offset.is_multiple_of(bytes)).then(|| self.mapping.at(offset))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering::Relaxed;

    use super::*;

    #[test]
    fn two_mappings_of_one_file_see_each_other() {
        let one = SharedMemory::create("test", 4096).expect("memory");
        let file = one.file().try_clone().expect("a descriptor");
        let two = SharedMemory::open(file.into(), 0, 4096).expect("the same");
        one.word(8).expect("inside").store(77, Relaxed);
        assert_eq!(two.word(8).expect("inside").load(Relaxed), 77);
        assert_eq!(two.byte(8).expect("inside").load(Relaxed), 77u64.to_ne_bytes()[0]);
    }

    #[test]
    fn nothing_outside_and_nothing_unaligned_is_reached() {
        let memory = SharedMemory::create("test", 100).expect("memory");
        assert!(
            memory.word(96).is_none()
                && memory.byte(100).is_none()
                && memory.byte(usize::MAX).is_none()
        );
        assert!(memory.word(4).is_none() && memory.half(1).is_none() && memory.half(98).is_some());
        let file = || memory.file().try_clone().expect("a descriptor").into();
        for (offset, length) in [(0, 101), (u64::MAX, 1), (4096, 1), (0, 0)] {
            assert!(
                SharedMemory::open(file(), offset, length).is_err(),
                "{length} bytes at {offset}"
            );
        }
    }
}
