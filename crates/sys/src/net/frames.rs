//! Raw Ethernet: frames of one EtherType on one interface (AF_PACKET), received in a ring that the
//! kernel writes and we read in place.
//!
//! The ring is TPACKET_V2, a slot per frame. V3 hands over blocks of frames, but only once a block
//! is full or a timer of a millisecond or more has run out: too late for a single waiting request.
//!
//! Invariants: a slot is ours from the moment the kernel sets USER until we set KERNEL; slots are
//! used in cyclic order; never promiscuous; frames that we sent, that are for others, or whose
//! sender is a group address are not passed on; nothing arrives at a socket whose ring was dropped,
//! and it can still send. Not here: what the payload is.

use std::ffi::c_int;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use libc::{iovec, mmsghdr, msghdr, sockaddr_ll, tpacket_req, tpacket2_hdr};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

use super::{Interface, counted, grow_buffers, set_number, set_option};
use crate::mapping::Mapping;

/// Destination, source, EtherType.
pub const ETHERNET_HEADER_BYTES: usize = 14;
/// The most frames in one send call.
pub const FRAMES_MAX: usize = 64;

pub(super) const SOL_PACKET: c_int = 263;
const TPACKET_V2: c_int = 1;
/// Where the sender's `sockaddr_ll` lies in a slot, by the kernel's TPACKET_ALIGN.
const SENDER_AT: usize = size_of::<tpacket2_hdr>().next_multiple_of(16);
/// The most that may lie before a frame in its slot: headers, the sender, the kernel's own
/// alignment.
const BEFORE_FRAME_BYTES_MAX: usize = 128;
/// Slots lie in blocks, which the kernel allocates as one piece each.
const BLOCK_BYTES: usize = 256 * 1024;

/// The sender of a frame, and what follows the header. `None`: the header is not whole, or the
/// sender is no station. Who answers a sender of that kind would answer all stations.
#[must_use]
pub fn split_frame(frame: &mut [u8]) -> Option<([u8; 6], &mut [u8])> {
    let (header, payload) = frame.split_first_chunk_mut::<ETHERNET_HEADER_BYTES>()?;
    let [_, _, _, _, _, _, from @ .., _, _] = *header;
    let is_group = from[0] & 1 != 0;
    (!is_group).then_some((from, payload))
}

/// A socket for frames of one EtherType on one interface.
pub struct FrameSocket {
    descriptor: OwnedFd,
    interface: Interface,
}

/// A received frame.
pub struct Frame<'a> {
    /// The sender's hardware address.
    pub from: [u8; 6],
    /// What follows the header, with padding.
    pub payload: &'a mut [u8],
    /// Whether the frame is complete: a ring is sized for the MTU that the interface had when the
    /// ring was made.
    pub is_whole: bool,
    /// When the kernel received it, by the wall clock, in nanoseconds since the epoch.
    pub arrived_ns: u64,
}

/// Where frames arrive.
pub struct FrameRing {
    socket: Arc<FrameSocket>,
    /// What takes the socket's place when the ring is dropped. It is opened early, because a drop
    /// cannot fail.
    sending_socket: OwnedFd,
    mapping: Mapping,
    slot_bytes: usize,
    slots_per_block: usize,
    slots: usize,
    /// The slot that the kernel fills next, or has filled.
    next: usize,
}

impl FrameSocket {
    /// Opens one, with a ring of at least `ring_bytes`.
    ///
    /// Errors: ENODEV; EPERM without CAP_NET_RAW; EINVAL if the interface is not Ethernet;
    /// ENETDOWN.
    pub fn open(
        interface: &str,
        ethertype: u16,
        ring_bytes: usize,
        send_buffer_bytes: usize,
    ) -> io::Result<(Arc<Self>, FrameRing)> {
        let interface = Interface::named(interface)?;
        if !interface.is_ethernet {
            return Err(rustix::io::Errno::INVAL.into());
        }
        if !interface.is_up {
            return Err(rustix::io::Errno::NETDOWN.into());
        }
        // Without a protocol, nothing arrives before the ring exists.
        let descriptor = open_silent()?;
        let sending_socket = open_silent()?;
        grow_buffers(&sending_socket, send_buffer_bytes)?;
        bind_to_type(&sending_socket, interface.index, 0)?;
        set_number(&descriptor, SOL_PACKET, libc::PACKET_VERSION, TPACKET_V2)?;
        set_number(&descriptor, SOL_PACKET, libc::PACKET_IGNORE_OUTGOING, 1)?;
        grow_buffers(&descriptor, send_buffer_bytes)?;
        let frame_bytes = ETHERNET_HEADER_BYTES + interface.mtu_bytes;
        let slot_bytes = (BEFORE_FRAME_BYTES_MAX + frame_bytes).next_multiple_of(16);
        let blocks = ring_bytes.div_ceil(BLOCK_BYTES).max(1);
        let slots_per_block = BLOCK_BYTES / slot_bytes;
        let slots = blocks * slots_per_block;
        let ring = [BLOCK_BYTES, blocks, slot_bytes, slots].map(|n| (n as u32).to_ne_bytes());
        const _: () = assert!(size_of::<tpacket_req>() == 16);
        set_option(&descriptor, SOL_PACKET, libc::PACKET_RX_RING, ring.as_flattened())?;
        let mapping = Mapping::plain(&descriptor, 0, blocks * BLOCK_BYTES)?;
        bind_to_type(&descriptor, interface.index, ethertype)?;
        let socket = Arc::new(FrameSocket { descriptor, interface });
        let ring = FrameRing {
            socket: socket.clone(),
            sending_socket,
            mapping,
            slot_bytes,
            slots_per_block,
            slots,
            next: 0,
        };
        Ok((socket, ring))
    }

    /// The interface as it was when this was opened.
    #[must_use]
    pub fn interface(&self) -> &Interface {
        &self.interface
    }

    /// Sends up to [`FRAMES_MAX`] payloads behind this header; returns the number sent.
    ///
    /// Errors: those of the first (a later one's appears when it is first): EAGAIN, ENOBUFS if
    /// there is no room; EMSGSIZE; ENETDOWN, ENXIO, ENODEV where the interface is down or gone.
    pub fn send<'a>(
        &self,
        header: &[u8; ETHERNET_HEADER_BYTES],
        payloads: impl Iterator<Item = &'a [u8]>,
    ) -> io::Result<usize> {
        let head = iovec { iov_base: header.as_ptr().cast_mut().cast(), iov_len: header.len() };
        let mut vectors = [const { MaybeUninit::<[iovec; 2]>::uninit() }; FRAMES_MAX];
        let mut messages = [const { MaybeUninit::<mmsghdr>::uninit() }; FRAMES_MAX];
        let mut count = 0;
        for payload in payloads.take(FRAMES_MAX) {
            let body =
                iovec { iov_base: payload.as_ptr().cast_mut().cast(), iov_len: payload.len() };
            let message = msghdr {
                msg_name: null_mut(),
                msg_namelen: 0,
                msg_iov: vectors[count].write([head, body]).as_mut_ptr(),
                msg_iovlen: 2,
                msg_control: null_mut(),
                msg_controllen: 0,
                msg_flags: 0,
            };
            messages[count].write(mmsghdr { msg_hdr: message, msg_len: 0 });
            count += 1;
        }
        let (descriptor, flags) = (self.descriptor.as_raw_fd(), libc::MSG_DONTWAIT);
        // SAFETY: the first `count` messages are initialized; what they point to (the vectors
        // above, the header, the payloads) lives through the call and is only read.
        counted(unsafe {
            libc::sendmmsg(descriptor, messages.as_mut_ptr().cast(), count as u32, flags)
        })
    }
}

impl AsFd for FrameSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

impl FrameRing {
    /// Whether a frame is there.
    #[must_use]
    pub fn has_frame(&self) -> bool {
        self.status(self.next).load(Ordering::Acquire) & libc::TP_STATUS_USER != 0
    }

    /// Passes up to `frames_max` received frames to `each`, and gives their slots back to the
    /// kernel. Returns how many were for us.
    pub fn receive(&mut self, frames_max: usize, each: &mut dyn FnMut(Frame<'_>)) -> usize {
        let mut handed = 0;
        for _ in 0..frames_max {
            if !self.has_frame() {
                break;
            }
            let slot = self.next;
            self.next = (slot + 1) % self.slots;
            // The slot goes back to the kernel even if `each` unwinds.
            let _back = GiveBack(self.status(slot));
            if let Some(frame) = self.frame(slot) {
                each(frame);
                handed += 1;
            }
        }
        handed
    }

    fn at(&self, slot: usize) -> *mut u8 {
        let (block, inside) = (slot / self.slots_per_block, slot % self.slots_per_block);
        self.mapping.at(block * BLOCK_BYTES + inside * self.slot_bytes)
    }

    fn status(&self, slot: usize) -> &AtomicU32 {
        // SAFETY: every slot begins with its status, a 32-bit number on 16 bytes' alignment, inside
        // of the mapping, which lives as long as `self`; kernel and process change it only
        // atomically.
        unsafe { AtomicU32::from_ptr(self.at(slot).cast()) }
    }

    /// The frame in a slot that is ours; `None` if it is for another receiver.
    fn frame(&self, slot: usize) -> Option<Frame<'_>> {
        let start = self.at(slot);
        // SAFETY: the slot is ours, so the kernel has filled in its header and the sender's address
        // behind that, both inside the slot and aligned, and does not touch them now.
        let (header, sender) = unsafe {
            (start.cast::<tpacket2_hdr>().read(), start.add(SENDER_AT).cast::<sockaddr_ll>().read())
        };
        let is_ours = [libc::PACKET_HOST, libc::PACKET_BROADCAST].contains(&sender.sll_pkttype);
        let (at, length) = (usize::from(header.tp_mac), header.tp_snaplen as usize);
        if !is_ours || at + length > self.slot_bytes {
            return None;
        }
        // SAFETY: `[at, at + length)` lies inside the slot, which is ours until its status is given
        // back; the caller lets go of the frame before that, and takes no slot twice.
        let bytes = unsafe { std::slice::from_raw_parts_mut(start.add(at), length) };
        let (from, payload) = split_frame(bytes)?;
        let arrived_ns = u64::from(header.tp_sec) * 1_000_000_000 + u64::from(header.tp_nsec);
        Some(Frame { from, payload, is_whole: header.tp_snaplen == header.tp_len, arrived_ns })
    }
}

impl AsFd for FrameRing {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for FrameRing {
    /// Others may send by the socket for a long time. If it could receive, it would take frames
    /// that nobody reads from the group it belongs to.
    fn drop(&mut self) {
        let (from, to) = (self.sending_socket.as_raw_fd(), self.socket.descriptor.as_raw_fd());
        // SAFETY: `self` owns the one descriptor and shares the other, so both are open, and the
        // second stays so: only what it stands for changes. The receiving socket goes away with its
        // mapping, right after this. The call fails only if the limit on
        // descriptors was lowered below this number since.
        let _ = unsafe { libc::dup3(from, to, libc::O_CLOEXEC) };
    }
}

struct GiveBack<'a>(&'a AtomicU32);

impl Drop for GiveBack<'_> {
    fn drop(&mut self) {
        self.0.store(libc::TP_STATUS_KERNEL, Ordering::Release);
    }
}

/// A socket that receives nothing until it is bound to a type.
fn open_silent() -> io::Result<OwnedFd> {
    Ok(socket_with(AddressFamily::PACKET, SocketType::RAW, SocketFlags::CLOEXEC, None)?)
}

/// Type 0: nothing arrives.
fn bind_to_type(descriptor: &OwnedFd, index: u32, ethertype: u16) -> io::Result<()> {
    let address = sockaddr_ll {
        sll_family: libc::AF_PACKET as u16,
        sll_protocol: ethertype.to_be(),
        sll_ifindex: index.cast_signed(),
        sll_hatype: 0,
        sll_pkttype: 0,
        sll_halen: 0,
        sll_addr: [0; 8],
    };
    let (pointer, length) = ((&raw const address).cast(), size_of::<sockaddr_ll>() as u32);
    // SAFETY: the kernel reads one `struct sockaddr_ll`, which `address` is, and keeps nothing of
    // it.
    counted(unsafe { libc::bind(descriptor.as_raw_fd(), pointer, length) }).map(|_| ())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_comes_from_one_station_or_is_none_of_ours() {
        let mut frame: Vec<u8> = (0..20).collect();
        let (from, payload) = split_frame(&mut frame).expect("a frame");
        assert_eq!((from, &*payload), ([6, 7, 8, 9, 10, 11], &[14, 15, 16, 17, 18, 19][..]));
        assert!(split_frame(&mut frame[..13]).is_none(), "the header is cut short");
        for first in [0xFF, 0x01, 0x33] {
            frame[6] = first;
            assert!(split_frame(&mut frame).is_none(), "an answer would go to many");
        }
    }
}
