//! Raw Ethernet that bypasses the kernel's network layer (AF_XDP): frames of one EtherType, from
//! and to memory that we and the kernel, or the card itself, share.
//!
//! That memory consists of chunks of one page. A frame longer than a chunk lies in several (Linux
//! 6.6): it is reassembled before it is passed on. The kernel moves frames without copying if the
//! card's driver can, and copies them otherwise (a veth cannot). Sent frames bypass the interface's
//! queueing discipline.
//!
//! Invariants: a chunk is the kernel's or ours, never both's: some chunks only receive, the others
//! only send; nothing is allocated after `open`; no call waits. All frames must arrive by one
//! receive queue. Not here: what the payload is; several queues.

mod program;
mod ring;

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::null;
use std::sync::Arc;

use libc::{sockaddr_xdp, xdp_desc, xdp_mmap_offsets};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, recv, socket_with};

use super::{ETHERNET_HEADER_BYTES, Interface, counted, grow_buffers, set_option, split_frame};
use crate::mapping::Mapping;
use program::{Fragments, Program};
use ring::XdpRing;

const CHUNK_BYTES: usize = 4096;
/// Frames longer than this may lie in several chunks: drivers and kernel reserve a part of each
/// page.
const FRAGMENTS_FROM_BYTES: usize = 3072;
/// Chunks to receive into, and to send from: 900 and 450 jumbo frames.
const RECEIVE_CHUNKS: u32 = 2048;
const SEND_CHUNKS: u32 = 1024;
const UMEM_BYTES: usize = (RECEIVE_CHUNKS + SEND_CHUNKS) as usize * CHUNK_BYTES;
/// The kernel sends 32 chunks per call. After this many calls without progress there is no room.
const KICKS_MAX: u32 = 64;

/// What both halves share.
pub struct XdpSocket {
    descriptor: OwnedFd,
    interface: Interface,
    umem: Mapping,
    _program: Program,
}

/// The half that sends.
pub struct XdpOutbox {
    socket: Arc<XdpSocket>,
    sending: XdpRing<xdp_desc>,
    sent: XdpRing<u64>,
    /// The starts of the chunks that are ours.
    free: Vec<u64>,
}

/// The half that receives.
pub struct XdpInbox {
    socket: Arc<XdpSocket>,
    received: XdpRing<xdp_desc>,
    to_fill: XdpRing<u64>,
    /// A frame that lay in several chunks.
    whole: Box<[u8]>,
}

/// Opens an interface for frames of this EtherType.
///
/// Errors: ENODEV; EPERM without CAP_NET_RAW, CAP_NET_ADMIN and CAP_BPF; EBUSY where the interface
/// has an XDP program, or another socket, already; EINVAL if it is not Ethernet; EOPNOTSUPP for
/// frames of its MTU on this kernel; E2BIG where it has several receive queues; ENETDOWN;
/// EAFNOSUPPORT, ENOSYS on a kernel without AF_XDP or bpf(2).
pub fn open_xdp(
    interface: &str,
    ethertype: u16,
) -> io::Result<(Arc<XdpSocket>, XdpOutbox, XdpInbox)> {
    let interface = Interface::named(interface)?;
    if !interface.is_ethernet {
        return Err(Errno::INVAL.into());
    }
    if !interface.is_up {
        return Err(Errno::NETDOWN.into());
    }
    if interface.receive_queues()? > 1 {
        return Err(Errno::TOOBIG.into());
    }
    let umem = Mapping::anonymous(UMEM_BYTES)?;
    let descriptor = socket_with(AddressFamily::XDP, SocketType::RAW, SocketFlags::CLOEXEC, None)?;
    register(&descriptor, &umem)?;
    // Frames that the kernel copies to send them count against this.
    grow_buffers(&descriptor, UMEM_BYTES)?;
    let rings = [
        (libc::XDP_UMEM_FILL_RING, RECEIVE_CHUNKS),
        (libc::XDP_UMEM_COMPLETION_RING, SEND_CHUNKS),
        (libc::XDP_RX_RING, RECEIVE_CHUNKS),
        (libc::XDP_TX_RING, SEND_CHUNKS),
    ];
    rings
        .iter()
        .try_for_each(|&(option, entries)| ring::request_ring(&descriptor, option, entries))?;
    let at = offsets(&descriptor)?;
    let sent = XdpRing::map(&descriptor, libc::XDP_UMEM_PGOFF_COMPLETION_RING, at.cr, SEND_CHUNKS)?;
    let sending = XdpRing::map(&descriptor, libc::XDP_PGOFF_TX_RING as u64, at.tx, SEND_CHUNKS)?;
    let received =
        XdpRing::map(&descriptor, libc::XDP_PGOFF_RX_RING as u64, at.rx, RECEIVE_CHUNKS)?;
    let mut to_fill =
        XdpRing::map(&descriptor, libc::XDP_UMEM_PGOFF_FILL_RING, at.fr, RECEIVE_CHUNKS)?;
    for chunk in 0..RECEIVE_CHUNKS {
        to_fill.put(chunk, u64::from(chunk) * CHUNK_BYTES as u64);
    }
    to_fill.hand_over(RECEIVE_CHUNKS);
    let frame_bytes = ETHERNET_HEADER_BYTES + interface.mtu_bytes;
    let fragments =
        if frame_bytes > FRAGMENTS_FROM_BYTES { Fragments::Accepted } else { Fragments::None };
    let program = Program::attach(&interface, ethertype, fragments);
    let program = program.map_err(|error| without_fragments(error, fragments))?;
    bind(&descriptor, &interface, fragments)
        .map_err(|error| without_fragments(error, fragments))?;
    program.redirect_to(&descriptor)?;
    let socket = Arc::new(XdpSocket { descriptor, interface, umem, _program: program });
    let free = RECEIVE_CHUNKS..RECEIVE_CHUNKS + SEND_CHUNKS;
    let free = free.map(|chunk| u64::from(chunk) * CHUNK_BYTES as u64).collect();
    let whole = vec![0; frame_bytes].into_boxed_slice();
    let outbox = XdpOutbox { socket: socket.clone(), sending, sent, free };
    let inbox = XdpInbox { socket: socket.clone(), received, to_fill, whole };
    Ok((socket, outbox, inbox))
}

impl XdpSocket {
    /// The interface as it was when this was opened.
    #[must_use]
    pub fn interface(&self) -> &Interface {
        &self.interface
    }

    /// Makes the kernel process the frames to be sent. EAGAIN: it did not process all of them.
    fn kick(&self) -> io::Result<()> {
        let (descriptor, flags) = (self.descriptor.as_raw_fd(), libc::MSG_DONTWAIT);
        // SAFETY: nothing is sent but by the rings: no bytes, no address.
        counted(unsafe { libc::sendto(descriptor, null(), 0, flags, null(), 0) as libc::c_int })
            .map(|_| ())
    }
}

impl AsFd for XdpSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

impl XdpOutbox {
    /// Accepts as many of these payloads as have room, each behind this header, and sends them;
    /// returns their number. What the kernel has no room for is left to [`XdpOutbox::push`].
    ///
    /// Errors: EMSGSIZE for the first; ENETDOWN, ENXIO where the interface is down or gone.
    pub fn send<'a>(
        &mut self,
        header: &[u8; ETHERNET_HEADER_BYTES],
        payloads: impl Iterator<Item = &'a [u8]>,
    ) -> io::Result<usize> {
        self.reclaim();
        let (mut sent_count, mut chunks) = (0, 0);
        for payload in payloads {
            if payload.len() > self.socket.interface.mtu_bytes {
                if sent_count == 0 {
                    return Err(Errno::MSGSIZE.into());
                }
                break;
            }
            let needed = (header.len() + payload.len()).div_ceil(CHUNK_BYTES);
            if needed > self.free.len() || chunks as usize + needed > self.sending.room() as usize {
                break;
            }
            chunks += self.lay(chunks, header, payload);
            sent_count += 1;
        }
        self.sending.hand_over(chunks);
        self.push()?;
        Ok(sent_count)
    }

    /// Whether an accepted frame has not been sent yet.
    #[must_use]
    pub fn is_pending(&self) -> bool {
        self.sending.untaken() > 0
    }

    /// Makes the kernel send the accepted frames, as far as it has room.
    ///
    /// Errors: as [`XdpOutbox::send`]: accepted frames may be lost.
    pub fn push(&mut self) -> io::Result<()> {
        for _ in 0..KICKS_MAX {
            let before = self.sending.untaken();
            if before == 0 || !self.sending.wants_wake_up() {
                break;
            }
            let result = self.socket.kick();
            if self.sending.untaken() == before {
                return match result.as_ref().err().and_then(Errno::from_io_error) {
                    // No room, for now.
                    None | Some(Errno::AGAIN | Errno::NOBUFS | Errno::BUSY | Errno::NOMEM) => {
                        Ok(())
                    }
                    Some(_) => result,
                };
            }
        }
        Ok(())
    }

    /// Copies a frame into free chunks, which must exist, `ahead` entries after those handed over.
    fn lay(&mut self, ahead: u32, header: &[u8; ETHERNET_HEADER_BYTES], payload: &[u8]) -> u32 {
        let frame_bytes = header.len() + payload.len();
        let (first, rest) = payload.split_at(payload.len().min(CHUNK_BYTES - header.len()));
        let mut count = 0;
        let mut left_bytes = frame_bytes;
        for piece in std::iter::once(first).chain(rest.chunks(CHUNK_BYTES)) {
            let Some(start) = self.free.pop() else { break };
            let head: &[u8] = if count == 0 { header } else { &[] };
            let into = self.socket.umem.at(start as usize);
            // SAFETY: the chunk lies in the shared memory and is ours: it was free, and the kernel
            // does not look before it is handed over. Head and piece together are no longer than
            // it.
            unsafe {
                into.copy_from_nonoverlapping(head.as_ptr(), head.len());
                into.add(head.len()).copy_from_nonoverlapping(piece.as_ptr(), piece.len());
            }
            let bytes = head.len() + piece.len();
            left_bytes -= bytes;
            let options = if left_bytes > 0 { libc::XDP_PKT_CONTD } else { 0 };
            self.sending.put(ahead + count, xdp_desc { addr: start, len: bytes as u32, options });
            count += 1;
        }
        count
    }

    fn reclaim(&mut self) {
        let count = self.sent.available();
        for ahead in 0..count {
            // The kernel gives back only chunks that it got, so there are never more than exist.
            if self.free.len() < self.free.capacity() {
                self.free.push(self.sent.peek(ahead));
            }
        }
        self.sent.take(count);
    }
}

impl XdpInbox {
    /// Whether a frame is there.
    #[must_use]
    pub fn has_frame(&self) -> bool {
        self.received.available() > 0
    }

    /// Passes up to `frames_max` received frames to `each`: the sender's hardware address, and what
    /// follows the header, with padding. Returns how many were for us.
    pub fn receive(
        &mut self,
        frames_max: usize,
        each: &mut dyn FnMut([u8; 6], &mut [u8]),
    ) -> usize {
        let mut handed = 0;
        for _ in 0..frames_max {
            let Some(chunks) = self.frame_chunks() else { break };
            handed += usize::from(self.hand_on(chunks, each));
            self.give_back(chunks);
        }
        if handed > 0 && self.to_fill.wants_wake_up() {
            // The card waits for chunks. Where this fails there is nothing to receive either.
            let _ = recv(&self.socket.descriptor, &mut [0u8; 0][..], RecvFlags::DONTWAIT);
        }
        handed
    }

    /// The number of chunks of the next frame, if it has arrived completely.
    fn frame_chunks(&self) -> Option<u32> {
        let is_last = |&ahead: &u32| self.received.peek(ahead).options & libc::XDP_PKT_CONTD == 0;
        (0..self.received.available()).find(is_last).map(|last| last + 1)
    }

    /// Passes the next frame, which has this many chunks, to `each`. Returns false if it is
    /// addressed to another machine.
    fn hand_on(&mut self, chunks: u32, each: &mut dyn FnMut([u8; 6], &mut [u8])) -> bool {
        let umem = &self.socket.umem;
        let frame = if chunks == 1 {
            // SAFETY: the bytes lie in a chunk of the shared memory that is ours from the moment
            // the kernel put its entry until it is given back; this inbox alone looks at it, and
            // lets go before that.
            unsafe { &mut *piece(umem, &self.received.peek(0)) }
        } else {
            let mut frame_bytes = 0;
            for ahead in 0..chunks {
                // SAFETY: the bytes lie in another chunk that the kernel put and that has not been
                // given back; they are copied before that.
                let piece = unsafe { &*piece(umem, &self.received.peek(ahead)) };
                let Some(into) = self.whole.get_mut(frame_bytes..frame_bytes + piece.len()) else {
                    return false;
                };
                into.copy_from_slice(piece);
                frame_bytes += piece.len();
            }
            &mut self.whole[..frame_bytes]
        };
        let own = self.socket.interface.mac;
        let is_ours = frame.get(..6).is_some_and(|to| to == own || to == [0xFF; 6]);
        let Some((from, payload)) = split_frame(frame).filter(|_| is_ours) else { return false };
        each(from, payload);
        true
    }

    /// Gives the chunks of the next frame back to the kernel, which receives into them again.
    fn give_back(&mut self, chunks: u32) {
        for ahead in 0..chunks {
            let start = self.received.peek(ahead).addr / CHUNK_BYTES as u64 * CHUNK_BYTES as u64;
            // As many fit as there are chunks to receive into.
            self.to_fill.put(ahead, start);
        }
        self.to_fill.hand_over(chunks);
        self.received.take(chunks);
    }
}

impl AsFd for XdpInbox {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// The bytes that a received entry names; empty if they are not inside one receive chunk.
fn piece(umem: &Mapping, entry: &xdp_desc) -> *mut [u8] {
    let (start, bytes) = (entry.addr as usize, entry.len as usize);
    let chunk_end = start / CHUNK_BYTES * CHUNK_BYTES + CHUNK_BYTES;
    let is_right = chunk_end <= RECEIVE_CHUNKS as usize * CHUNK_BYTES && start + bytes <= chunk_end;
    std::ptr::slice_from_raw_parts_mut(
        umem.at(if is_right { start } else { 0 }),
        if is_right { bytes } else { 0 },
    )
}

fn register(descriptor: &OwnedFd, umem: &Mapping) -> io::Result<()> {
    // `struct xdp_umem_reg` in its first version: address, length, bytes of a chunk, headroom.
    let mut region = [0; 24];
    region[..8].copy_from_slice(&(umem.at(0) as u64).to_ne_bytes());
    region[8..16].copy_from_slice(&(UMEM_BYTES as u64).to_ne_bytes());
    region[16..20].copy_from_slice(&(CHUNK_BYTES as u32).to_ne_bytes());
    set_option(descriptor, libc::SOL_XDP, libc::XDP_UMEM_REG, &region)
}

/// Where in each ring's mapping its parts lie.
fn offsets(descriptor: &OwnedFd) -> io::Result<xdp_mmap_offsets> {
    let mut offsets = MaybeUninit::<xdp_mmap_offsets>::zeroed();
    let mut length = size_of::<xdp_mmap_offsets>() as libc::socklen_t;
    let (socket, into) = (descriptor.as_raw_fd(), offsets.as_mut_ptr().cast());
    // SAFETY: the kernel writes at most `length` bytes, which is the size of what `into` points to.
    counted(unsafe {
        libc::getsockopt(socket, libc::SOL_XDP, libc::XDP_MMAP_OFFSETS, into, &raw mut length)
    })?;
    // Shorter: a kernel before 5.4, whose rings have no flags.
    if length as usize != size_of::<xdp_mmap_offsets>() {
        return Err(Errno::OPNOTSUPP.into());
    }
    // SAFETY: any bytes are valid in it, and all of them were written.
    Ok(unsafe { offsets.assume_init() })
}

fn bind(descriptor: &OwnedFd, interface: &Interface, fragments: Fragments) -> io::Result<()> {
    let segments = if fragments == Fragments::Accepted { libc::XDP_USE_SG } else { 0 };
    let address = sockaddr_xdp {
        sxdp_family: libc::AF_XDP as u16,
        sxdp_flags: libc::XDP_USE_NEED_WAKEUP | segments,
        sxdp_ifindex: interface.index,
        sxdp_queue_id: 0,
        sxdp_shared_umem_fd: 0,
    };
    let (pointer, length) = ((&raw const address).cast(), size_of::<sockaddr_xdp>() as u32);
    // SAFETY: the kernel reads one `struct sockaddr_xdp`, which `address` is, and keeps nothing of
    // it.
    counted(unsafe { libc::bind(descriptor.as_raw_fd(), pointer, length) }).map(|_| ())
}

/// A kernel without support for frames in several chunks reports them as invalid.
fn without_fragments(error: io::Error, fragments: Fragments) -> io::Error {
    let is_invalid = Errno::from_io_error(&error) == Some(Errno::INVAL);
    if is_invalid && fragments == Fragments::Accepted { Errno::OPNOTSUPP.into() } else { error }
}
