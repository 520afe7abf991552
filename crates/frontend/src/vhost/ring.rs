//! A split virtqueue in the guest's memory: available requests, their parts, and the used entries.
//! Source: the virtio specification 1.2, section 2.7.
//!
//! Invariants: a descriptor is read once, and only its checked values are used. A walk ends after
//! as many steps as the table has entries. Nothing outside the guest's memory is touched. Not here:
//! which requests are in flight, and notifications.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use super::Violation;
use super::limits::INDIRECT_ENTRIES_MAX;
use super::memory::{DirtyLog, GuestRange, Memory};

const DESCRIPTOR_BYTES: u64 = 16;
const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
/// In the flags of the available ring: no call is wanted. In those of the used ring: no kick is.
const NO_NOTIFY: u16 = 1;

/// The place of a ring, and its features. Addresses are the guest's.
#[derive(Clone)]
pub(super) struct Ring {
    pub(super) memory: Arc<Memory>,
    /// The log of writes to the guest's memory during a migration.
    pub(super) log: Option<Arc<DirtyLog>>,
    pub(super) size: u16,
    pub(super) descriptors: u64,
    pub(super) available: u64,
    pub(super) used: u64,
    pub(super) has_event_idx: bool,
    pub(super) has_indirect: bool,
}

/// One request as the guest laid it out.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Chain {
    /// What the device may read, in order.
    pub(super) readable: Vec<GuestRange>,
    /// What the device may write, in order.
    pub(super) writable: Vec<GuestRange>,
}

/// Bytes in all of them.
pub(super) fn total(ranges: &[GuestRange]) -> u64 {
    ranges.iter().map(|range| u64::from(range.length)).sum()
}

struct Descriptor {
    address: u64,
    length: u32,
    flags: u16,
    next: u16,
}

impl Ring {
    /// Fails if any part of it is outside the guest's memory or not aligned correctly.
    pub(super) fn check(&self) -> Result<(), Violation> {
        let size = u64::from(self.size);
        let parts = [
            ("descriptor table", self.descriptors, DESCRIPTOR_BYTES * size, 16),
            ("available ring", self.available, 6 + 2 * size, 2),
            ("used ring", self.used, 6 + 8 * size, 4),
        ];
        for (what, address, length, alignment) in parts {
            if !address.is_multiple_of(alignment) || !self.memory.holds(address, length) {
                return Err(Violation::new(format!(
                    "the {what} at {address:#x} is not in the guest's memory"
                )));
            }
        }
        Ok(())
    }

    /// The number of requests that the guest ever made available, modulo 2^16.
    pub(super) fn available_index(&self) -> Result<u16, Violation> {
        self.memory.load(self.available + 2, Ordering::Acquire)
    }

    /// The number of requests that were ever used, modulo 2^16, as the guest sees it.
    pub(super) fn used_index(&self) -> Result<u16, Violation> {
        self.memory.load(self.used + 2, Ordering::Acquire)
    }

    /// The head of the available request number `index`.
    pub(super) fn head(&self, index: u16) -> Result<u16, Violation> {
        let entry = self.available + 4 + 2 * u64::from(index % self.size);
        let head = self.memory.load(entry, Ordering::Acquire)?;
        if head < self.size {
            Ok(head)
        } else {
            Err(Violation::new(format!("head {head} in a queue of {} entries", self.size)))
        }
    }

    fn descriptor(&self, table: u64, index: u16) -> Result<Descriptor, Violation> {
        // Copied once. The guest may change it at any moment, and what is checked must be what is
        // used.
        let mut bytes = [0; DESCRIPTOR_BYTES as usize];
        let address = table.checked_add(DESCRIPTOR_BYTES * u64::from(index));
        self.memory.read(address.unwrap_or(u64::MAX), &mut bytes)?;
        let [a, b, c, d, e, f, g, h, length @ .., i, j, k, l] = bytes;
        Ok(Descriptor {
            address: u64::from_le_bytes([a, b, c, d, e, f, g, h]),
            length: u32::from_le_bytes(length),
            flags: u16::from_le_bytes([i, j]),
            next: u16::from_le_bytes([k, l]),
        })
    }

    /// Follows the chain of a request from its head.
    pub(super) fn chain(&self, head: u16) -> Result<Chain, Violation> {
        let refuse = |text: String| Err(Violation::new(format!("request {head}: {text}")));
        let mut chain = Chain::default();
        let (mut table, mut entries, mut is_indirect) =
            (self.descriptors, u32::from(self.size), false);
        let (mut index, mut steps) = (head, 0);
        loop {
            if u32::from(index) >= entries {
                return refuse(format!("descriptor {index} of a table of {entries}"));
            }
            steps += 1;
            if steps > entries {
                return refuse("its descriptors form a loop".into());
            }
            let descriptor = self.descriptor(table, index)?;
            let Descriptor { address, length, flags, next } = descriptor;
            if flags & INDIRECT != 0 {
                // virtio allows no table inside a table, and none with descriptors after it.
                // Without this, a chain could be longer than any limit.
                if is_indirect || !self.has_indirect || flags & NEXT != 0 {
                    return refuse("an indirect table where none is allowed".into());
                }
                entries = length / DESCRIPTOR_BYTES as u32;
                let is_whole = length.is_multiple_of(DESCRIPTOR_BYTES as u32);
                if !is_whole || entries == 0 || entries > INDIRECT_ENTRIES_MAX {
                    return refuse(format!("an indirect table of {length} bytes"));
                }
                (table, is_indirect, index, steps) = (address, true, 0, 0);
                continue;
            }
            // Checked here for the whole life of the request: the threads that copy later cannot
            // refuse it any more.
            if length == 0 || !self.memory.holds(address, length.into()) {
                return refuse(format!(
                    "{length} bytes at {address:#x} are not in the guest's memory"
                ));
            }
            let range = GuestRange { address, length };
            if flags & WRITE != 0 {
                chain.writable.push(range);
            } else if chain.writable.is_empty() {
                chain.readable.push(range);
            } else {
                return refuse("a readable descriptor follows a writable one".into());
            }
            if flags & NEXT == 0 {
                return Ok(chain);
            }
            index = next;
        }
    }

    /// Writes entry number `index` of the used ring. The guest sees it after [`Ring::publish`].
    pub(super) fn put_used(
        &self,
        index: u16,
        head: u16,
        written_bytes: u32,
    ) -> Result<(), Violation> {
        let entry = self.used + 4 + 8 * u64::from(index % self.size);
        let mut bytes = [0; 8];
        bytes[..4].copy_from_slice(&u32::from(head).to_le_bytes());
        bytes[4..].copy_from_slice(&written_bytes.to_le_bytes());
        self.memory.write(entry, &bytes)?;
        self.note_dirty(entry, 8);
        Ok(())
    }

    /// Publishes all entries before number `index` to the guest.
    pub(super) fn publish(&self, index: u16) -> Result<(), Violation> {
        self.memory.store(self.used + 2, index, Ordering::Release)?;
        self.note_dirty(self.used, 4);
        Ok(())
    }

    /// Whether the guest wants to be notified of entries `[from, to)` of the used ring.
    pub(super) fn wants_call(&self, from: u16, to: u16) -> Result<bool, Violation> {
        // The guest writes its setting and then reads the index; we wrote the index and now read
        // the setting.
        fence(Ordering::SeqCst);
        if self.has_event_idx {
            let wish = self
                .memory
                .load(self.available + 4 + 2 * u64::from(self.size), Ordering::Relaxed)?;
            return Ok(to.wrapping_sub(wish).wrapping_sub(1) < to.wrapping_sub(from));
        }
        Ok(self.memory.load(self.available, Ordering::Relaxed)? & NO_NOTIFY == 0)
    }

    /// Requests a kick for request number `next`. Returns whether it is there already.
    pub(super) fn request_kick(&self, next: u16) -> Result<bool, Violation> {
        if self.has_event_idx {
            self.store_used_event(next)?;
        } else {
            self.memory.store(self.used, 0, Ordering::Relaxed)?;
            self.note_dirty(self.used, 2);
        }
        fence(Ordering::SeqCst);
        Ok(self.available_index()? != next)
    }

    /// Requests no kicks while requests are being taken. With event indices, that is automatic.
    pub(super) fn suppress_kicks(&self) -> Result<(), Violation> {
        if !self.has_event_idx {
            self.memory.store(self.used, NO_NOTIFY, Ordering::Relaxed)?;
            self.note_dirty(self.used, 2);
        }
        Ok(())
    }

    fn store_used_event(&self, next: u16) -> Result<(), Violation> {
        let place = self.used + 4 + 8 * u64::from(self.size);
        self.memory.store(place, next, Ordering::Relaxed)?;
        self.note_dirty(place, 2);
        Ok(())
    }

    /// Copies into the guest's memory, and records that in the dirty log.
    pub(super) fn scatter(
        &self,
        ranges: &[GuestRange],
        offset: u64,
        from: &[u8],
    ) -> Result<(), Violation> {
        self.memory.scatter(ranges, offset, from)?;
        if self.log.is_some() {
            for piece in super::memory::pieces(ranges, offset, from.len()) {
                self.note_dirty(piece.address, piece.length.into());
            }
        }
        Ok(())
    }

    fn note_dirty(&self, address: u64, length: u64) {
        if let Some(log) = &self.log {
            log.note_dirty(address, length);
        }
    }
}
