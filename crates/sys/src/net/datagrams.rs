//! UDP, many datagrams per system call: those of equal size leave as one buffer that the kernel (or
//! the card) splits (UDP_SEGMENT), and arrive coalesced again (UDP_GRO).
//!
//! Invariants: a datagram is never fragmented (the path's MTU is an error, not a cost); no call
//! waits; the arrays of a call live on its stack. Not here: what to do where segmentation is
//! refused.

use std::io;
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::null_mut;

use libc::{cmsghdr, iovec, mmsghdr, msghdr};
use rustix::net::sockopt::{self, Ipv4PathMtuDiscovery, Ipv6PathMtuDiscovery};
use rustix::net::{
    AddressFamily, SocketFlags, SocketType, bind, connect, getsockname, socket_with,
};

use super::name::Name;
use super::{bind_to_interface, counted, grow_buffers, set_number};

/// The most runs in one send call.
pub const RUNS_MAX: usize = 64;
/// The most messages in one receive call.
const MESSAGES_MAX: usize = 32;
/// The longest datagram, or series of coalesced datagrams.
const MESSAGE_BYTES_MAX: usize = 65536;

/// How to open a [`DatagramSocket`].
#[derive(Clone, Debug)]
pub struct DatagramOptions<'a> {
    /// Where it receives. The wildcard of IPv6 takes IPv4, too.
    pub local: SocketAddr,
    /// The one interface to use.
    pub interface: Option<&'a str>,
    /// Whether it joins sockets of the same user that share the port (see
    /// [`DatagramSocket::share_port`]), or begins to share it, if it is free.
    pub shared_port: bool,
    /// The kernel buffer to request, for each direction.
    pub buffer_bytes: usize,
}

/// Bytes that leave as datagrams of equal size; the last may be shorter.
#[derive(Clone, Copy, Debug)]
pub struct DatagramRun<'a> {
    /// All of them, back to back.
    pub bytes: &'a [u8],
    /// The size of each.
    pub datagram_bytes: usize,
}

/// Where datagrams arrive: room for one call's worth.
pub struct Inbox {
    bytes: Box<[u8]>,
}

impl Inbox {
    /// An empty one, of 2 MiB; pages that are never used cost no memory.
    #[must_use]
    pub fn new() -> Self {
        Inbox { bytes: vec![0; MESSAGES_MAX * MESSAGE_BYTES_MAX].into_boxed_slice() }
    }
}

impl Default for Inbox {
    fn default() -> Self {
        Self::new()
    }
}

/// A UDP socket that belongs to no single peer.
pub struct DatagramSocket {
    descriptor: OwnedFd,
    family: AddressFamily,
    interface: Option<String>,
}

/// The control message beside a message: room for one number.
#[repr(C)]
#[derive(Clone, Copy)]
struct Control {
    header: cmsghdr,
    value: [u8; 8],
}

impl DatagramSocket {
    /// Opens one.
    ///
    /// Errors: EADDRINUSE, EADDRNOTAVAIL, ENODEV if there is no such interface.
    pub fn open(options: &DatagramOptions<'_>) -> io::Result<Self> {
        let family = family_of(&options.local);
        let descriptor = open_plain(family)?;
        if let Some(name) = options.interface {
            bind_to_interface(&descriptor, name)?;
        }
        sockopt::set_socket_reuseport(&descriptor, options.shared_port)?;
        grow_buffers(&descriptor, options.buffer_bytes)?;
        sockopt::set_ip_mtu_discover(&descriptor, Ipv4PathMtuDiscovery::DO)?;
        if family == AddressFamily::INET6 {
            sockopt::set_ipv6_mtu_discover(&descriptor, Ipv6PathMtuDiscovery::DO)?;
        }
        // An old kernel does not know this option: then each datagram arrives alone.
        let _ = set_number(&descriptor, libc::SOL_UDP, libc::UDP_GRO, 1);
        bind(&descriptor, &options.local)?;
        Ok(DatagramSocket { descriptor, family, interface: options.interface.map(str::to_owned) })
    }

    /// Lets sockets join this one that are opened from now on with `shared_port`, by the same user:
    /// the kernel distributes peers among them. A socket that was opened without `shared_port`
    /// found nobody's address in the way, and from here on shares its port without having joined
    /// anybody.
    pub fn share_port(&self) -> io::Result<()> {
        Ok(sockopt::set_socket_reuseport(&self.descriptor, true)?)
    }

    /// Where it receives.
    pub fn local(&self) -> io::Result<SocketAddr> {
        Ok(SocketAddr::try_from(getsockname(&self.descriptor)?)?)
    }

    /// Leaves out UDP's checksum from now on, which makes the kernel refuse segmentation: for tests
    /// of that.
    pub fn omit_checksum(&self) -> io::Result<()> {
        set_number(&self.descriptor, libc::SOL_SOCKET, libc::SO_NO_CHECK, 1)
    }

    /// The longest datagram that the route to `peer` is known to carry.
    ///
    /// Errors: no route.
    pub fn datagram_bytes_max(&self, peer: &SocketAddr) -> io::Result<usize> {
        let probe = open_plain(family_of(peer))?;
        if let Some(name) = &self.interface {
            bind_to_interface(&probe, name)?;
        }
        connect(&probe, peer)?;
        let (mtu, headers) = if peer.is_ipv6() {
            (sockopt::ipv6_mtu(&probe)?, 40 + 8)
        } else {
            (sockopt::ip_mtu(&probe)?, 20 + 8)
        };
        // The total length of an IPv4 packet has 16 bits, and the loopback's MTU exceeds that.
        Ok((mtu as usize).min(65535).saturating_sub(headers))
    }

    /// Sends up to [`RUNS_MAX`] of the runs; returns the number sent. A run of more than one
    /// datagram needs segmentation.
    ///
    /// Errors: those of the first run (a later one's appears when it is first): EAGAIN if there is
    /// no room; EIO, EINVAL, EOPNOTSUPP if segmentation is refused; EMSGSIZE; no route.
    pub fn send<'a>(
        &self,
        to: &SocketAddr,
        runs: impl Iterator<Item = DatagramRun<'a>>,
    ) -> io::Result<usize> {
        let (mut name, name_bytes) = Name::of(to, self.family)?;
        let mut vectors = [const { MaybeUninit::<iovec>::uninit() }; RUNS_MAX];
        let mut controls = [const { MaybeUninit::<Control>::uninit() }; RUNS_MAX];
        let mut messages = [const { MaybeUninit::<mmsghdr>::uninit() }; RUNS_MAX];
        let mut count = 0;
        for run in runs.take(RUNS_MAX) {
            let (base, len) = (run.bytes.as_ptr().cast_mut().cast(), run.bytes.len());
            let vector = vectors[count].write(iovec { iov_base: base, iov_len: len });
            let mut message = message_of(&raw mut name, name_bytes, vector);
            if run.bytes.len() > run.datagram_bytes {
                let size =
                    u16::try_from(run.datagram_bytes).map_err(|_| io::Error::from(TOO_LONG))?;
                let control = controls[count].write(segment(size));
                message.msg_control = (control as *mut Control).cast();
                message.msg_controllen = size_of::<Control>();
            }
            messages[count].write(mmsghdr { msg_hdr: message, msg_len: 0 });
            count += 1;
        }
        let (descriptor, flags) =
            (self.descriptor.as_raw_fd(), libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL);
        // SAFETY: the first `count` messages are initialized; what they point to (the name, the
        // vectors and controls above, the bytes of the runs) lives through the call and is only
        // read.
        counted(unsafe {
            libc::sendmmsg(descriptor, messages.as_mut_ptr().cast(), count as u32, flags)
        })
    }

    /// Receives what has arrived, with one call; passes each message to `each` with its sender and
    /// the size of the datagrams in it. Returns the number of messages, 0 if there are none.
    ///
    /// Errors: the socket's.
    pub fn receive(
        &self,
        inbox: &mut Inbox,
        each: &mut dyn FnMut(SocketAddr, usize, &mut [u8]),
    ) -> io::Result<usize> {
        let mut names = [Name::EMPTY; MESSAGES_MAX];
        let mut controls = [segment(0); MESSAGES_MAX];
        let mut vectors = [const { MaybeUninit::<iovec>::uninit() }; MESSAGES_MAX];
        let mut messages = [const { MaybeUninit::<mmsghdr>::uninit() }; MESSAGES_MAX];
        let rooms = inbox.bytes.chunks_exact_mut(MESSAGE_BYTES_MAX);
        for (i, room) in rooms.enumerate() {
            let vector = iovec { iov_base: room.as_mut_ptr().cast(), iov_len: room.len() };
            let mut message = message_of(&raw mut names[i], Name::BYTES, vectors[i].write(vector));
            message.msg_control = (&raw mut controls[i]).cast();
            message.msg_controllen = size_of::<Control>();
            messages[i].write(mmsghdr { msg_hdr: message, msg_len: 0 });
        }
        let (descriptor, flags) = (self.descriptor.as_raw_fd(), libc::MSG_DONTWAIT);
        // SAFETY: all the messages are initialized; what they point to (names, controls, vectors,
        // the inbox's rooms) lives through the call, is of the lengths they say, and nobody else
        // uses it.
        let result = counted(unsafe {
            let first = messages.as_mut_ptr().cast();
            libc::recvmmsg(descriptor, first, MESSAGES_MAX as u32, flags, null_mut())
        });
        let count = match result {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(0),
            result => result?,
        };
        let rooms = inbox.bytes.chunks_exact_mut(MESSAGE_BYTES_MAX);
        for (i, room) in rooms.enumerate().take(count) {
            // SAFETY: the loop above initialized all MESSAGES_MAX of them, and the kernel changed
            // numbers alone.
            let message = unsafe { messages[i].assume_init_ref() };
            let Some(from) = names[i].address() else { continue };
            let length = (message.msg_len as usize).min(MESSAGE_BYTES_MAX);
            let glued = glued_bytes(&controls[i], message.msg_hdr.msg_controllen).unwrap_or(length);
            each(from, glued, &mut room[..length]);
        }
        Ok(count)
    }
}

impl AsFd for DatagramSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

const TOO_LONG: rustix::io::Errno = rustix::io::Errno::MSGSIZE;

fn family_of(address: &SocketAddr) -> AddressFamily {
    if address.is_ipv6() { AddressFamily::INET6 } else { AddressFamily::INET }
}

fn open_plain(family: AddressFamily) -> io::Result<OwnedFd> {
    let descriptor = socket_with(family, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    if family == AddressFamily::INET6 {
        sockopt::set_ipv6_v6only(&descriptor, false)?;
    }
    Ok(descriptor)
}

fn message_of(name: *mut Name, name_bytes: u32, vector: &mut iovec) -> msghdr {
    msghdr {
        msg_name: name.cast(),
        msg_namelen: name_bytes,
        msg_iov: vector,
        msg_iovlen: 1,
        msg_control: null_mut(),
        msg_controllen: 0,
        msg_flags: 0,
    }
}

/// Tells the kernel the size to split into.
fn segment(datagram_bytes: u16) -> Control {
    let mut value = [0; 8];
    value[..2].copy_from_slice(&datagram_bytes.to_ne_bytes());
    let header = cmsghdr {
        cmsg_len: size_of::<cmsghdr>() + size_of::<u16>(),
        cmsg_level: libc::SOL_UDP,
        cmsg_type: libc::UDP_SEGMENT,
    };
    Control { header, value }
}

/// The size of the datagrams that the kernel coalesced, if it reports one.
fn glued_bytes(control: &Control, control_bytes: usize) -> Option<usize> {
    let header = &control.header;
    if control_bytes < size_of::<cmsghdr>() + 4
        || (header.cmsg_level, header.cmsg_type) != (libc::SOL_UDP, libc::UDP_GRO)
    {
        return None;
    }
    let [a, b, c, d, ..] = control.value;
    usize::try_from(i32::from_ne_bytes([a, b, c, d])).ok().filter(|&bytes| bytes > 0)
}
