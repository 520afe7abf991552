//! Memory that another process made and shares with this one, or a driver in the kernel; ranges of
//! it are lent to one holder at a time.
//!
//! Invariants: while a [`MemoryPiece`] lives, it is the only access of this process to its range.
//! Lent ranges lie inside the mapping and are disjoint, whatever the other process requests. A file
//! that is not sealed against shrinking is refused, so the memory cannot be taken away. A stray
//! write of the other process corrupts bytes and has no other effect.
//!
//! Not here: memory that this process makes (`arena`), and shared memory seen as atomics
//! (`shared_memory`).

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::ops::{Deref, DerefMut};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::fs::{SealFlags, fcntl_get_seals, fstat};

use crate::mapping::Mapping;
use crate::sync::Mutex;

/// A mapping of another process's memory, with the ranges that are lent now.
pub struct AttachedMemory {
    mapping: Mapping,
    length: usize,
    /// The lent ranges: start and end.
    lent: Mutex<BTreeMap<usize, usize>>,
}

/// A range of attached memory, for this holder alone until it is dropped.
pub struct MemoryPiece {
    memory: Arc<AttachedMemory>,
    offset: usize,
    length: usize,
}

impl AttachedMemory {
    /// Maps the first `length` bytes of a file received from another process. Errors:
    /// `InvalidInput` when `length` is zero, or when the file is shorter or could become so.
    pub fn open(file: OwnedFd, length: usize) -> io::Result<Arc<Self>> {
        let invalid_input = |text: String| io::Error::new(io::ErrorKind::InvalidInput, text);
        let file_bytes = u64::try_from(fstat(&file)?.st_size).unwrap_or(0);
        if length == 0 || length as u64 > file_bytes {
            return Err(invalid_input(format!(
                "{length} bytes are not in shared memory of {file_bytes} bytes"
            )));
        }
        let seals = fcntl_get_seals(&file).unwrap_or(SealFlags::empty());
        if !seals.contains(SealFlags::SHRINK) {
            return Err(invalid_input("shared memory that can be taken away again".to_owned()));
        }
        Self::map(&File::from(file), length)
    }

    /// Maps the first `length` bytes of a character device whose driver never takes memory away
    /// that is mapped.
    pub(crate) fn of_device(device: &File, length: usize) -> io::Result<Arc<Self>> {
        Self::map(device, length)
    }

    fn map(file: &File, length: usize) -> io::Result<Arc<Self>> {
        let mapping = Mapping::plain(file, 0, length)?;
        Ok(Arc::new(AttachedMemory { mapping, length, lent: Mutex::new(BTreeMap::new()) }))
    }

    /// The length of the mapping in bytes.
    #[must_use]
    pub fn length_bytes(&self) -> usize {
        self.length
    }

    /// Lends the `length` bytes at `offset`. `None` when `length` is zero, or when some of the
    /// bytes lie outside or are already lent.
    #[must_use]
    pub fn lend(self: &Arc<Self>, offset: u64, length: u64) -> Option<MemoryPiece> {
        let (offset, length) = (usize::try_from(offset).ok()?, usize::try_from(length).ok()?);
        let end = offset.checked_add(length).filter(|end| *end <= self.length && length > 0)?;
        let mut lent = self.lent.lock();
        // Lent ranges are disjoint, so only the last one that begins before `end` can overlap.
        if lent.range(..end).next_back().is_some_and(|(_, other_end)| *other_end > offset) {
            return None;
        }
        lent.insert(offset, end);
        drop(lent);
        Some(MemoryPiece { memory: Arc::clone(self), offset, length })
    }
}

impl Deref for MemoryPiece {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the range lies inside the mapping, which lives as long as the memory that `self`
        // keeps; no other piece of this process overlaps it. That another process may write there
        // meanwhile is accepted, see `mapping`.
        unsafe { std::slice::from_raw_parts(self.memory.mapping.at(self.offset), self.length) }
    }
}

impl DerefMut for MemoryPiece {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: the range lies inside the mapping, which lives as long as the memory that `self`
        // keeps; no other piece overlaps it, and `&mut self` excludes every other access of this
        // process. Another process: see `mapping`.
        unsafe { std::slice::from_raw_parts_mut(self.memory.mapping.at(self.offset), self.length) }
    }
}

impl Drop for MemoryPiece {
    fn drop(&mut self) {
        self.memory.lent.lock().remove(&self.offset);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Arena;

    #[test]
    fn ranges_are_disjoint_and_inside() {
        let arena = Arena::create("test", 16384).unwrap();
        let memory = AttachedMemory::open(arena.file().try_clone().unwrap().into(), 16384).unwrap();
        let one = memory.lend(4096, 4096).unwrap();
        for (offset, length) in
            [(4096, 1), (8191, 1), (0, 4097), (0, 16384), (4000, 200), (8191, 100)]
        {
            assert!(memory.lend(offset, length).is_none(), "{length} bytes at {offset} are lent");
        }
        for (offset, length) in [(16384, 1), (0, 16385), (u64::MAX, 2), (1, u64::MAX), (0, 0)] {
            assert!(
                memory.lend(offset, length).is_none(),
                "{length} bytes at {offset} are not there"
            );
        }
        assert!(memory.lend(0, 4096).is_some() && memory.lend(8192, 8192).is_some());
        drop(one);
        assert_eq!(memory.lend(0, 16384).unwrap().len(), 16384, "all came back");
    }

    #[test]
    fn the_maker_sees_what_is_written() {
        let arena = Arena::create("test", 8192).unwrap();
        let piece = arena.lend(8192).unwrap();
        let memory = AttachedMemory::open(arena.file().try_clone().unwrap().into(), 8192).unwrap();
        memory.lend(4096, 10).unwrap().fill(7);
        assert_eq!((piece[4095], piece[4096], piece[4105], piece[4106]), (0, 7, 7, 0));
    }

    #[test]
    fn memory_that_could_be_taken_away_is_refused() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(8192).unwrap();
        assert!(AttachedMemory::open(file.into(), 8192).is_err());
        let arena = Arena::create("test", 8192).unwrap();
        assert!(AttachedMemory::open(arena.file().try_clone().unwrap().into(), 8193).is_err());
    }
}
