//! What the kernel knows of a network interface.
//!
//! Invariant: a snapshot; an interface may go away right after. Not here: changing one.

use std::io;

use rustix::ioctl::{Opcode, Updater, ioctl};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

// From linux/sockios.h and linux/if.h, linux/if_arp.h.
const SIOCGIFFLAGS: Opcode = 0x8913;
const SIOCGIFMTU: Opcode = 0x8921;
const SIOCGIFHWADDR: Opcode = 0x8927;
const SIOCGIFINDEX: Opcode = 0x8933;
const SIOCETHTOOL: Opcode = 0x8946;
// From linux/ethtool.h.
const ETHTOOL_GET_CHANNELS: u32 = 0x3C;
const UP: u16 = 1;
const LOOPBACK: u16 = 8;
const ETHERNET: u16 = 1;

/// `struct ifreq`.
#[repr(C)]
struct Request {
    name: [u8; 16],
    value: [u8; 24],
}
const _: () = assert!(size_of::<Request>() == size_of::<libc::ifreq>());

/// A network interface of the calling thread's network namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    /// Its name.
    pub name: String,
    /// Its number.
    pub index: u32,
    /// The longest payload of a frame.
    pub mtu_bytes: usize,
    /// Its hardware address; zeroes where it has no Ethernet one.
    pub mac: [u8; 6],
    /// Whether it carries Ethernet frames to others (the loopback does not).
    pub is_ethernet: bool,
    /// Whether it was brought up.
    pub is_up: bool,
}

impl Interface {
    /// Looks one up.
    ///
    /// Errors: ENODEV where there is none of that name.
    pub fn named(name: &str) -> io::Result<Self> {
        let socket =
            socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
        let mut request = Request { name: [0; 16], value: [0; 24] };
        if name.len() >= request.name.len() || name.is_empty() || name.contains('\0') {
            return Err(rustix::io::Errno::NODEV.into());
        }
        request.name[..name.len()].copy_from_slice(name.as_bytes());
        let half = |v: &[u8; 24]| u16::from_ne_bytes([v[0], v[1]]);
        let number = |v: &[u8; 24]| u32::from_ne_bytes([v[0], v[1], v[2], v[3]]);
        let index = number(request_ioctl::<SIOCGIFINDEX>(&socket, &mut request)?);
        let mtu_bytes = number(request_ioctl::<SIOCGIFMTU>(&socket, &mut request)?) as usize;
        let flags = half(request_ioctl::<SIOCGIFFLAGS>(&socket, &mut request)?);
        // A `struct sockaddr`: the kind of hardware, then the address.
        let hardware = request_ioctl::<SIOCGIFHWADDR>(&socket, &mut request)?;
        let is_ethernet = half(hardware) == ETHERNET && flags & LOOPBACK == 0;
        let mut mac = [0; 6];
        if is_ethernet {
            mac.copy_from_slice(&hardware[2..8]);
        }
        Ok(Interface {
            name: name.to_owned(),
            index,
            mtu_bytes,
            mac,
            is_ethernet,
            is_up: flags & UP != 0,
        })
    }

    /// The current number of receive queues; a driver that does not report it has one.
    ///
    /// Errors: ENODEV where it is gone.
    pub(super) fn receive_queues(&self) -> io::Result<u32> {
        let socket =
            socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
        // `struct ethtool_channels`: the command, four maxima, then the current counts: receive,
        // transmit, other, combined.
        let mut channels = [0u32; 9];
        channels[0] = ETHTOOL_GET_CHANNELS;
        let mut request = Request { name: [0; 16], value: [0; 24] };
        request.name[..self.name.len()].copy_from_slice(self.name.as_bytes());
        request.value[..8].copy_from_slice(&((&raw mut channels) as u64).to_ne_bytes());
        // SAFETY: the kernel reads the name and the pointer of one `struct ifreq`, and writes the
        // one `struct ethtool_channels` that the pointer leads to, which lives through the call.
        match unsafe { ioctl(&socket, Updater::<SIOCETHTOOL, Request>::new(&mut request)) } {
            Ok(()) => Ok((channels[5] + channels[8]).max(1)),
            Err(rustix::io::Errno::OPNOTSUPP) => Ok(1),
            Err(error) => Err(error.into()),
        }
    }
}

fn request_ioctl<'a, const OPCODE: Opcode>(
    socket: &std::os::fd::OwnedFd,
    request: &'a mut Request,
) -> io::Result<&'a [u8; 24]> {
    request.value = [0; 24];
    // SAFETY: each of these ioctls reads the name of one `struct ifreq` and fills in its value; any
    // bytes are valid in it.
    unsafe { ioctl(socket, Updater::<OPCODE, Request>::new(request)) }?;
    Ok(&request.value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loopback_is_known_and_no_ethernet() {
        let lo = Interface::named("lo").expect("every machine has it");
        assert!(!lo.is_ethernet && lo.mtu_bytes >= 1280, "{lo:?}");
    }

    #[test]
    fn a_name_that_is_none_is_refused_as_no_device() {
        for name in ["nosuch0", "", "a-name-longer-than-any"] {
            let error = Interface::named(name).expect_err("none");
            assert_eq!(error.raw_os_error(), Some(libc::ENODEV), "{name:?}");
        }
    }
}
