//! The memory of the guest: the regions of a frontend, and the log of writes to them.
//!
//! Invariants: every address is checked on each access. No reference to the bytes is ever made;
//! they are copied, because the guest may change them at any moment. A region stays mapped as long
//! as a request uses it. Not here: the meaning of the bytes. The owner of the files can shrink them
//! and thereby kill this process: the frontend is trusted that far, its guest is not.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, Ordering};

use sawmill_sys::SharedMemory;
use vm_memory::{
    Bytes, FileOffset, GuestAddress, GuestMemory, GuestMemoryBackend, GuestMemoryMmap,
    GuestMemoryRegion, GuestRegionMmap, Permissions,
};

use super::Violation;
use super::message::Region;

/// The page size of the dirty log, whatever the host's pages are.
const LOG_PAGE_BYTES: u64 = 4096;

/// A region as it was given: its addresses for the guest and for the frontend, and its file.
#[derive(Clone)]
pub(super) struct RegisteredRegion {
    pub(super) region: Region,
    pub(super) file: Arc<File>,
}

/// Bytes of guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct GuestRange {
    pub(super) address: u64,
    pub(super) length: u32,
}

/// The regions, mapped. Cloned cheaply by its owner's `Arc`.
#[derive(Default)]
pub(super) struct Memory {
    mapped: GuestMemoryMmap<()>,
    regions: Vec<RegisteredRegion>,
}

impl Memory {
    /// Maps the regions. Fails if they overlap, or a file is shorter than its mapped part.
    pub(super) fn map(mut regions: Vec<RegisteredRegion>) -> Result<Self, Violation> {
        // The map demands regions in the order of their addresses; a frontend may send them in any.
        regions.sort_by_key(|registered_region| registered_region.region.guest);
        let map = |registered_region: &RegisteredRegion| {
            let Region { guest, size_bytes, file_offset, .. } = registered_region.region;
            let what = || format!("memory of {size_bytes} bytes at {guest:#x}");
            let size =
                usize::try_from(size_bytes).map_err(|error| Violation::caused(what(), error))?;
            let file = FileOffset::from_arc(registered_region.file.clone(), file_offset);
            GuestRegionMmap::from_range(GuestAddress(guest), size, Some(file))
                .map_err(|error| Violation::caused(what(), error))
        };
        let mapped = regions.iter().map(map).collect::<Result<Vec<_>, _>>()?;
        let mapped = GuestMemoryMmap::from_regions(mapped)
            .map_err(|error| Violation::caused("refused the memory table", error))?;
        Ok(Memory { mapped, regions })
    }

    pub(super) fn regions(&self) -> &[RegisteredRegion] {
        &self.regions
    }

    /// The guest's address for the frontend's address `user`.
    pub(super) fn guest_address(&self, user: u64) -> Result<u64, Violation> {
        // By offset, because the end of a region may be the end of the address space.
        let inside = |registered_region: &&RegisteredRegion| {
            user.checked_sub(registered_region.region.user)
                .is_some_and(|offset| offset < registered_region.region.size_bytes)
        };
        let region =
            self.regions.iter().find(inside).map(|registered_region| registered_region.region);
        let region = region
            .ok_or_else(|| Violation::new(format!("address {user:#x} is in no memory region")))?;
        Ok(region.guest + (user - region.user))
    }

    /// Whether the whole range is memory.
    pub(super) fn holds(&self, address: u64, length: u64) -> bool {
        usize::try_from(length).is_ok_and(|length| {
            GuestMemory::check_range(
                &self.mapped,
                GuestAddress(address),
                length,
                Permissions::ReadWrite,
            )
        })
    }

    pub(super) fn read(&self, address: u64, into: &mut [u8]) -> Result<(), Violation> {
        self.mapped
            .read_slice(into, GuestAddress(address))
            .map_err(|_| outside(address, into.len()))
    }

    pub(super) fn write(&self, address: u64, from: &[u8]) -> Result<(), Violation> {
        self.mapped
            .write_slice(from, GuestAddress(address))
            .map_err(|_| outside(address, from.len()))
    }

    /// 16 bits of a ring, little-endian.
    pub(super) fn load(&self, address: u64, order: Ordering) -> Result<u16, Violation> {
        let value: Result<u16, _> = self.mapped.load(GuestAddress(address), order);
        value.map(u16::from_le).map_err(|_| outside(address, 2))
    }

    pub(super) fn store(&self, address: u64, value: u16, order: Ordering) -> Result<(), Violation> {
        let (value, address_there) = (value.to_le(), GuestAddress(address));
        self.mapped.store(value, address_there, order).map_err(|_| outside(address, 2))
    }

    /// Copies `into.len()` bytes out of the ranges, from `offset` on, as if they were contiguous.
    pub(super) fn gather(
        &self,
        ranges: &[GuestRange],
        offset: u64,
        into: &mut [u8],
    ) -> Result<(), Violation> {
        let mut done = 0;
        for piece in pieces(ranges, offset, into.len()) {
            let end = done + piece.length as usize;
            self.read(piece.address, &mut into[done..end])?;
            done = end;
        }
        // The ranges may be shorter than the guest's header says. Bytes that were not copied must
        // never count as data.
        if done == into.len() { Ok(()) } else { Err(outside(offset, into.len())) }
    }

    /// Copies `from` into the ranges, from `offset` on, as if they were contiguous.
    pub(super) fn scatter(
        &self,
        ranges: &[GuestRange],
        offset: u64,
        from: &[u8],
    ) -> Result<(), Violation> {
        let mut done = 0;
        for piece in pieces(ranges, offset, from.len()) {
            let end = done + piece.length as usize;
            self.write(piece.address, &from[done..end])?;
            done = end;
        }
        if done == from.len() { Ok(()) } else { Err(outside(offset, from.len())) }
    }

    /// Bytes in all regions.
    pub(super) fn size_bytes(&self) -> u64 {
        self.mapped.iter().map(|region| region.len()).sum()
    }
}

fn outside(address: u64, length: usize) -> Violation {
    Violation::new(format!("{length} bytes at {address:#x} are not in the guest's memory"))
}

/// The parts of the ranges that hold `[offset, offset + length)` of their bytes.
pub(super) fn pieces(
    ranges: &[GuestRange],
    offset: u64,
    length: usize,
) -> impl Iterator<Item = GuestRange> + '_ {
    let (mut skip, mut remaining_bytes) = (offset, length as u64);
    ranges.iter().filter_map(move |range| {
        let range_bytes = u64::from(range.length);
        let skipped_bytes = skip.min(range_bytes);
        skip -= skipped_bytes;
        let length = (range_bytes - skipped_bytes).min(remaining_bytes);
        remaining_bytes -= length;
        // A part of a range is not longer than the range.
        (length > 0).then(|| GuestRange {
            address: range.address.wrapping_add(skipped_bytes),
            length: length as u32,
        })
    })
}

/// The pages written since the frontend last checked, for a migration: one bit each.
pub(super) struct DirtyLog {
    shared: SharedMemory,
}

impl DirtyLog {
    pub(super) fn open(file: OwnedFd, offset: u64, size_bytes: u64) -> Result<Self, Violation> {
        let what = "cannot map the dirty log";
        let length = usize::try_from(size_bytes).map_err(|error| Violation::caused(what, error))?;
        let shared = SharedMemory::open(file, offset, length)
            .map_err(|error| Violation::caused(what, error))?;
        Ok(DirtyLog { shared })
    }

    /// Records that these bytes were written. Call this after the write itself.
    pub(super) fn note_dirty(&self, address: u64, length: u64) {
        let last = address.saturating_add(length.saturating_sub(1)) / LOG_PAGE_BYTES;
        for page in address / LOG_PAGE_BYTES..=last {
            let Some(byte) = usize::try_from(page / 8).ok().and_then(|at| self.shared.byte(at))
            else {
                return;
            };
            byte.fetch_or(1 << (page % 8), Ordering::SeqCst);
        }
    }

    pub(super) fn file(&self) -> &File {
        self.shared.file()
    }
}

// The crate's atomics of guest memory are these.
const _: () = assert!(size_of::<AtomicU16>() == 2 && size_of::<AtomicU8>() == 1);
