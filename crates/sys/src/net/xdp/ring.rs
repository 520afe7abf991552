//! The rings of an AF_XDP socket: one side puts, the other takes; one side is the kernel.
//!
//! Invariants: an index moves only after the entries it hands over are written or read; our own
//! index is kept here, and the kernel's is trusted only within the length of the ring. Not here:
//! what the entries mean.

use std::io;
use std::marker::PhantomData;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, Ordering};

use libc::xdp_ring_offset;

use super::super::set_option;
use crate::mapping::Mapping;

/// A ring of entries `T`, from our side: we put into fill and transmit rings, and take from the
/// others.
pub(super) struct XdpRing<T> {
    mapping: Mapping,
    offsets: xdp_ring_offset,
    entries: u32,
    /// Our index, which counts on forever; an entry's place is its remainder.
    own: u32,
    of: PhantomData<T>,
}

/// Requests a ring of this many entries, a power of two.
pub(super) fn request_ring(socket: &OwnedFd, option: libc::c_int, entries: u32) -> io::Result<()> {
    set_option(socket, libc::SOL_XDP, option, &entries.to_ne_bytes())
}

impl<T: Copy> XdpRing<T> {
    /// Maps a ring that was asked for.
    pub(super) fn map(
        socket: &OwnedFd,
        at: u64,
        offsets: xdp_ring_offset,
        entries: u32,
    ) -> io::Result<Self> {
        let bytes = offsets.desc as usize + entries as usize * size_of::<T>();
        let mapping = Mapping::plain(socket, at, bytes)?;
        Ok(XdpRing { mapping, offsets, entries, own: 0, of: PhantomData })
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

    /// Whether the kernel must be woken for new entries.
    pub(super) fn wants_wake_up(&self) -> bool {
        self.number(self.offsets.flags).load(Ordering::Acquire) & libc::XDP_RING_NEED_WAKEUP != 0
    }

    /// The number of entries that we put and the kernel has not taken.
    pub(super) fn untaken(&self) -> u32 {
        let consumer = self.number(self.offsets.consumer).load(Ordering::Acquire);
        self.own.wrapping_sub(consumer).min(self.entries)
    }

    /// The number of free entries.
    pub(super) fn room(&self) -> u32 {
        self.entries - self.untaken()
    }

    /// Puts entry `ahead` of those to be handed over next; there must be room.
    pub(super) fn put(&mut self, ahead: u32, entry: T) {
        // SAFETY: the place lies inside the mapping; the kernel does not look at it before the
        // index moves, and nobody else has `self`.
        unsafe { self.entry(self.own.wrapping_add(ahead)).write(entry) };
    }

    /// Hands over this many entries that were put.
    pub(super) fn hand_over(&mut self, count: u32) {
        self.own = self.own.wrapping_add(count);
        self.number(self.offsets.producer).store(self.own, Ordering::Release);
    }

    /// The number of entries to take.
    pub(super) fn available(&self) -> u32 {
        let producer = self.number(self.offsets.producer).load(Ordering::Acquire);
        producer.wrapping_sub(self.own).min(self.entries)
    }

    /// Entry `ahead` of those to be taken; it must be available.
    pub(super) fn peek(&self, ahead: u32) -> T {
        // SAFETY: the place lies inside the mapping; the kernel wrote it before it moved its index,
        // and does not touch it before we move ours. Any bytes are a valid `T`: numbers alone.
        unsafe { self.entry(self.own.wrapping_add(ahead)).read() }
    }

    /// Gives this many inspected entries back.
    pub(super) fn take(&mut self, count: u32) {
        self.own = self.own.wrapping_add(count);
        self.number(self.offsets.consumer).store(self.own, Ordering::Release);
    }
}
