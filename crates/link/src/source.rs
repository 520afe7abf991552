//! The source of a packet for quotas: a source that makes many requests gets less than others.
//!
//! Not here: the quotas.

use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;

use crate::carrier::{Peer, Sender};

/// What counts as one source: an IPv4 address, a 64-bit IPv6 network, a network card, a stream.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum PacketSource {
    /// By IP: an IPv4 address in its IPv6 form, or the network of an IPv6 address.
    Ip(Ipv6Addr),
    /// By its hardware address.
    Ethernet([u8; 6]),
    /// By the address of its carrier in memory.
    Stream(usize),
}

impl PacketSource {
    /// The source of an address.
    pub(crate) fn of_ip(ip: IpAddr) -> Self {
        let ip = match ip {
            IpAddr::V4(ip) => return PacketSource::Ip(ip.to_ipv6_mapped()),
            IpAddr::V6(ip) => ip,
        };
        let is_one_machine = ip.to_ipv4_mapped().is_some() || ip.is_unicast_link_local();
        PacketSource::Ip(if is_one_machine {
            ip
        } else {
            Ipv6Addr::from(u128::from(ip) >> 64 << 64)
        })
    }

    /// The source of `peer`, with the carrier of `sender`.
    pub(crate) fn of_peer(peer: &Peer, sender: &Arc<dyn Sender>) -> Self {
        match peer {
            Peer::Udp(address) => Self::of_ip(address.ip()),
            Peer::Ethernet(address) => PacketSource::Ethernet(*address),
            Peer::Stream => PacketSource::Stream(Arc::as_ptr(sender).cast::<()>() as usize),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_of_ipv6_is_one_and_its_neighbors_on_the_wire_are_not() {
        let of = |text: &str| PacketSource::of_ip(text.parse().expect(text));
        assert_eq!(of("2001:db8::1"), of("2001:db8::ffff:0:0:2"));
        assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
        assert_ne!(of("fe80::1"), of("fe80::2"));
        assert_eq!(of("10.0.0.1"), of("::ffff:10.0.0.1"));
        assert_ne!(of("10.0.0.1"), of("10.0.0.2"));
    }
}
