//! Memory shared with another process, lent out in pieces that never overlap.
//!
//! Invariants: an [`ArenaPiece`] is the only access that this process has to its range while it
//! lives; pieces lie inside the mapping and are disjoint, because one list of free ranges gives
//! them out. The file is sealed, so no process can shrink it. The other process sees all of it and
//! may write where it should not: that makes bytes wrong, and nothing worse. Not here: what the
//! bytes mean, when they are handed over.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

use crate::mapping::Mapping;
use crate::sync::Mutex;

/// Pieces begin and end at multiples of this: a page, which is what users of direct I/O want.
const UNIT_BYTES: usize = 4096;

/// Memory shared with another process that is lent out in pieces, each to one holder.
pub struct Arena {
    mapping: Mapping,
    file: File,
    length: usize,
    /// Free ranges: start and length; neighbors are merged.
    free: Mutex<BTreeMap<usize, usize>>,
}

/// A range of an arena, for this holder alone until it is dropped.
pub struct ArenaPiece {
    arena: Arc<Arena>,
    offset: usize,
    length: usize,
}

impl Arena {
    /// New zeroes that belong to no file system, `bytes` rounded up to whole pages. `name` is for
    /// `/proc`.
    pub fn create(name: &str, bytes: usize) -> io::Result<Arc<Self>> {
        let length = bytes.max(1).next_multiple_of(crate::BLOCK_BYTES as usize);
        let memory = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&memory, length as u64)?;
        fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let file = File::from(memory);
        let mapping = Mapping::plain(&file, 0, length)?;
        Ok(Arc::new(Arena {
            mapping,
            file,
            length,
            free: Mutex::new(BTreeMap::from([(0, length)])),
        }))
    }

    /// The file behind it, for the other process.
    #[must_use]
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Bytes in all.
    #[must_use]
    pub fn length_bytes(&self) -> usize {
        self.length
    }

    /// The first free range of `bytes`; `None` if there is none now. Its content is left over from
    /// earlier pieces.
    #[must_use]
    pub fn lend(self: &Arc<Self>, bytes: usize) -> Option<ArenaPiece> {
        let length = bytes.max(1).next_multiple_of(UNIT_BYTES);
        let mut free = self.free.lock();
        let (&offset, &room) = free.iter().find(|(_, room)| **room >= length)?;
        free.remove(&offset);
        if room > length {
            free.insert(offset + length, room - length);
        }
        drop(free);
        Some(ArenaPiece { arena: Arc::clone(self), offset, length: bytes })
    }

    fn give_back(&self, offset: usize, length: usize) {
        let mut free = self.free.lock();
        let (mut start, mut room) = (offset, length);
        if let Some((&before, &length)) = free.range(..offset).next_back()
            && before + length == offset
        {
            free.remove(&before);
            (start, room) = (before, length + room);
        }
        if let Some(after) = free.remove(&(offset + length)) {
            room += after;
        }
        free.insert(start, room);
    }
}

impl ArenaPiece {
    /// Where it lies in the arena's file.
    #[must_use]
    pub fn offset(&self) -> usize {
        self.offset
    }
}

impl Deref for ArenaPiece {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the range lies inside the mapping, which lives as long as the arena that `self`
        // keeps; no other piece of this process overlaps it. That another process may write there
        // meanwhile is accepted, see `mapping`.
        unsafe { std::slice::from_raw_parts(self.arena.mapping.at(self.offset), self.length) }
    }
}

impl DerefMut for ArenaPiece {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: the range lies inside the mapping, which lives as long as the arena that `self`
        // keeps; no other piece overlaps it, and `&mut self` excludes every other access of this
        // process. Another process: see `mapping`.
        unsafe { std::slice::from_raw_parts_mut(self.arena.mapping.at(self.offset), self.length) }
    }
}

impl Drop for ArenaPiece {
    fn drop(&mut self) {
        self.arena.give_back(self.offset, self.length.max(1).next_multiple_of(UNIT_BYTES));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_disjoint_and_merge_when_they_are_given_back() {
        let arena = Arena::create("test", 64 << 10).unwrap();
        let mut pieces: Vec<ArenaPiece> = (0..16).map(|_| arena.lend(1000).unwrap()).collect();
        assert!(arena.lend(1).is_none(), "all is lent");
        for (number, piece) in pieces.iter_mut().enumerate() {
            piece.fill(number as u8);
        }
        for (number, piece) in pieces.iter().enumerate() {
            assert_eq!(&piece[..], &vec![number as u8; 1000][..]);
        }
        // In an odd order, so that gaps close from both sides.
        for _ in 0..16 {
            pieces.swap_remove(pieces.len() / 2);
        }
        assert_eq!(arena.lend(64 << 10).unwrap().len(), 64 << 10);
    }

    #[test]
    fn another_mapping_of_the_file_sees_the_bytes() {
        let arena = Arena::create("test", 4096).unwrap();
        let mut piece = arena.lend(600).unwrap();
        piece.fill(7);
        let other =
            crate::SharedMemory::open(arena.file().try_clone().unwrap().into(), 0, 4096).unwrap();
        let byte = |at| other.byte(at).unwrap().load(std::sync::atomic::Ordering::Acquire);
        assert_eq!((byte(piece.offset()), byte(piece.offset() + 599)), (7, 7));
        assert!(
            rustix::fs::ftruncate(arena.file(), 0).is_err(),
            "no process can take the memory away"
        );
    }
}
