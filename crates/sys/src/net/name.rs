//! Socket addresses as the kernel lays them out.
//!
//! Invariant: an address survives the conversion both ways; IPv4 inside IPv6 comes out as IPv4. Not
//! here: names of hosts.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};

use libc::{AF_INET, AF_INET6, in_addr, in6_addr, sa_family_t, sockaddr_in, sockaddr_in6};
use rustix::net::AddressFamily;

/// Room for the address of either family.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) union Name {
    v4: sockaddr_in,
    v6: sockaddr_in6,
}

impl Name {
    /// For the kernel to fill. The IPv6 member is the longer one, so all bytes are zero.
    pub(super) const EMPTY: Name = Name {
        v6: sockaddr_in6 {
            sin6_family: 0,
            sin6_port: 0,
            sin6_flowinfo: 0,
            sin6_addr: in6_addr { s6_addr: [0; 16] },
            sin6_scope_id: 0,
        },
    };
    pub(super) const BYTES: u32 = size_of::<Name>() as u32;

    /// This address for a socket of this family, and its length; a socket of IPv6 takes both kinds.
    pub(super) fn of(address: &SocketAddr, family: AddressFamily) -> io::Result<(Self, u32)> {
        match (address, family == AddressFamily::INET6) {
            (SocketAddr::V4(v4), false) => Ok((Self::v4(v4), size_of::<sockaddr_in>() as u32)),
            (SocketAddr::V4(v4), true) => {
                let mapped = SocketAddrV6::new(v4.ip().to_ipv6_mapped(), v4.port(), 0, 0);
                Ok((Self::v6(&mapped), size_of::<sockaddr_in6>() as u32))
            }
            (SocketAddr::V6(v6), true) => Ok((Self::v6(v6), size_of::<sockaddr_in6>() as u32)),
            (SocketAddr::V6(_), false) => {
                let what =
                    format!("{address} cannot be reached from a socket of IPv4; open one of IPv6");
                Err(io::Error::new(io::ErrorKind::InvalidInput, what))
            }
        }
    }

    fn v4(address: &SocketAddrV4) -> Self {
        let mut name = Self::EMPTY;
        name.v4 = sockaddr_in {
            sin_family: AF_INET as sa_family_t,
            sin_port: address.port().to_be(),
            sin_addr: in_addr { s_addr: u32::from_ne_bytes(address.ip().octets()) },
            sin_zero: [0; 8],
        };
        name
    }

    fn v6(address: &SocketAddrV6) -> Self {
        Name {
            v6: sockaddr_in6 {
                sin6_family: AF_INET6 as sa_family_t,
                sin6_port: address.port().to_be(),
                sin6_flowinfo: address.flowinfo(),
                sin6_addr: in6_addr { s6_addr: address.ip().octets() },
                sin6_scope_id: address.scope_id(),
            },
        }
    }

    /// What the kernel filled in; `None` if it is of another family.
    pub(super) fn address(&self) -> Option<SocketAddr> {
        // SAFETY: both members are plain numbers, valid for any bytes, and all of the bytes are
        // initialized.
        let (v4, v6) = unsafe { (self.v4, self.v6) };
        match i32::from(v4.sin_family) {
            AF_INET => {
                let ip = Ipv4Addr::from(v4.sin_addr.s_addr.to_ne_bytes());
                Some(SocketAddrV4::new(ip, u16::from_be(v4.sin_port)).into())
            }
            AF_INET6 => {
                let (ip, port) = (Ipv6Addr::from(v6.sin6_addr.s6_addr), u16::from_be(v6.sin6_port));
                Some(match ip.to_ipv4_mapped() {
                    Some(ip) => SocketAddrV4::new(ip, port).into(),
                    None => SocketAddrV6::new(ip, port, v6.sin6_flowinfo, v6.sin6_scope_id).into(),
                })
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_comes_out_as_it_went_in_and_mapped_ones_as_ipv4() {
        for (text, family) in [
            ("10.1.2.3:9700", AddressFamily::INET),
            ("10.1.2.3:9700", AddressFamily::INET6),
            ("[fe80::1%3]:7", AddressFamily::INET6),
        ] {
            let address: SocketAddr = text.parse().expect("an address");
            let (name, _) = Name::of(&address, family).expect("it fits");
            assert_eq!(name.address(), Some(address));
        }
        assert_eq!(Name::EMPTY.address(), None);
    }

    #[test]
    fn a_socket_of_ipv4_refuses_an_address_of_ipv6() {
        let address = "[::1]:1".parse().expect("an address");
        let error = Name::of(&address, AddressFamily::INET).err().expect("refused");
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    }
}
