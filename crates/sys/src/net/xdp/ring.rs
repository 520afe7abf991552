//! The rings of an AF_XDP socket: one side puts, the other takes; one side is the kernel.
//!
//! Invariants: an index moves only after what it hands over is written or read; our own index is
//! kept here, and the kernel's is believed only as far as the ring is long. Not here: what the
//! entries mean.

use std::io;
use std::marker::PhantomData;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, Ordering};

use libc::xdp_ring_offset;

use super::super::set_option;
use crate::mapping::Mapping;

/// A ring of entries `T`, as the side that we are: of fill and transmit rings we put, of the others
/// we take.
pub(super) struct Ring<T> {
    mapping: Mapping,
    offsets: xdp_ring_offset,
    entries: u32,
    /// Our index, which counts on for ever; an entry's place is its remainder.
    own: u32,
    of: PhantomData<T>,
}

/// How long each ring is: a power of two.
pub(super) fn ask_for(socket: &OwnedFd, option: libc::c_int, entries: u32) -> io::Result<()> {
    set_option(socket, libc::SOL_XDP, option, &entries.to_ne_bytes())
}

impl<T: Copy> Ring<T> {
    /// Maps a ring that was asked for.
    pub(super) fn map(
        socket: &OwnedFd,
        at: u64,
        offsets: xdp_ring_offset,
        entries: u32,
    ) -> io::Result<Self> {
        let bytes = offsets.desc as usize + entries as usize * size_of::<T>();
        let mapping = Mapping::plain(socket, at, bytes)?;
        Ok(Ring { mapping, offsets, entries, own: 0, of: PhantomData })
    }

    fn number(&self, offset: u64) -> &AtomicU32 {
        // SAFETY: the kernel says where in the ring's mapping its 32-bit indices and flags lie,
        // aligned; both sides change them only atomically, and the mapping lives as long as `self`.
        unsafe { AtomicU32::from_ptr(self.mapping.at(offset as usize).cast()) }
    }

    fn entry(&self, index: u32) -> *mut T {
        let place = (index & (self.entries - 1)) as usize;
        self.mapping.at(self.offsets.desc as usize + place * size_of::<T>()).cast()
    }

    /// Whether the kernel wants to be told of what was put.
    pub(super) fn wants_wake_up(&self) -> bool {
        self.number(self.offsets.flags).load(Ordering::Acquire) & libc::XDP_RING_NEED_WAKEUP != 0
    }

    /// How many entries we put that the kernel has not taken.
    pub(super) fn untaken(&self) -> u32 {
        let taken = self.number(self.offsets.consumer).load(Ordering::Acquire);
        self.own.wrapping_sub(taken).min(self.entries)
    }

    /// Room to put.
    pub(super) fn room(&self) -> u32 {
        self.entries - self.untaken()
    }

    /// Puts entry `ahead` of those to be handed over next; there is room.
    pub(super) fn put(&mut self, ahead: u32, entry: T) {
        // SAFETY: the place lies inside the mapping; the kernel does not look at it before the
        // index moves, and nobody else has `self`.
        unsafe { self.entry(self.own.wrapping_add(ahead)).write(entry) };
    }

    /// Hands over so many entries that were put.
    pub(super) fn hand_over(&mut self, count: u32) {
        self.own = self.own.wrapping_add(count);
        self.number(self.offsets.producer).store(self.own, Ordering::Release);
    }

    /// How many entries there are to take.
    pub(super) fn available(&self) -> u32 {
        let put = self.number(self.offsets.producer).load(Ordering::Acquire);
        put.wrapping_sub(self.own).min(self.entries)
    }

    /// Entry `ahead` of those to be taken, which is available.
    pub(super) fn look(&self, ahead: u32) -> T {
        // SAFETY: the place lies inside the mapping; the kernel wrote it before it moved its index,
        // and does not touch it before we move ours. Any bytes are a valid `T`: numbers alone.
        unsafe { self.entry(self.own.wrapping_add(ahead)).read() }
    }

    /// Gives so many entries back that were looked at.
    pub(super) fn take(&mut self, count: u32) {
        self.own = self.own.wrapping_add(count);
        self.number(self.offsets.consumer).store(self.own, Ordering::Release);
    }
}
