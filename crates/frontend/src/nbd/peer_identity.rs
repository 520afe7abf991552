//! The peer behind a connection: a user of this machine, or a machine. Places are shared among
//! peers, not among connections.
//!
//! A Unix socket reports the user of its peer. For a TCP connection of this machine, the kernel is
//! asked for the user of the other end (`sock_diag`); if that fails, the whole loopback counts as
//! one peer.
//!
//! Invariant: at most one question to the kernel for each connection, without waiting for an
//! answer. Not here: a peer's share (`admission`).

use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;

use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, getpeername, getsockname,
    netlink, recv, send, socket_with, sockopt,
};

/// A peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PeerIdentity {
    /// A user of this machine.
    User(u32),
    /// A machine, or for IPv6 a network of 64 bits, in which one host can easily have many
    /// addresses.
    Address(IpAddr),
    /// Unknown.
    Unknown,
}

impl PeerIdentity {
    /// The peer of this socket.
    pub(super) fn of(socket: &OwnedFd) -> Self {
        let address = |name: rustix::io::Result<rustix::net::SocketAddrAny>| {
            name.ok().and_then(|name| SocketAddr::try_from(name).ok())
        };
        let peer =
            getpeername(socket).ok().flatten().and_then(|name| SocketAddr::try_from(name).ok());
        // A Unix socket has no address, but the kernel knows who has connected.
        let Some(peer) = peer else {
            return sockopt::socket_peercred(socket)
                .map_or(PeerIdentity::Unknown, |peer| PeerIdentity::User(peer.uid.as_raw()));
        };
        // All users of this machine have the loopback address. As one peer, they would take each
        // other's connections (decision 0035).
        if peer.ip().to_canonical().is_loopback()
            && let Some(own) = address(getsockname(socket))
            && let Some(uid) = user_of(canonical(peer), canonical(own))
        {
            return PeerIdentity::User(uid);
        }
        PeerIdentity::Address(network(peer.ip()))
    }
}

/// Converts an IPv4 address in IPv6 form to IPv4.
fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

fn network(ip: IpAddr) -> IpAddr {
    match ip.to_canonical() {
        IpAddr::V6(ip) if !ip.is_loopback() => {
            let mut octets = ip.octets();
            octets[8..].fill(0);
            IpAddr::V6(octets.into())
        }
        other => other,
    }
}

/// `SOCK_DIAG_BY_FAMILY`, the type of the question and of its answer.
const BY_FAMILY: u16 = 20;
const REQUEST: u16 = 1;
const TCP: u8 = 6;
/// Length of a message's head, and of the answer up to the user id.
const HEAD_BYTES: usize = 16;
const ANSWER_UID_AT: usize = HEAD_BYTES + 64;

/// The user of the TCP socket of this machine that is connected from `peer` to `own`.
fn user_of(peer: SocketAddr, own: SocketAddr) -> Option<u32> {
    let kernel = socket_with(
        AddressFamily::NETLINK,
        SocketType::DGRAM,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        Some(netlink::SOCK_DIAG),
    )
    .ok()?;
    send(&kernel, &question(peer, own), SendFlags::empty()).ok()?;
    let mut answer = [0; 512];
    // The answer is there when sending the question returns.
    let (_, length) = recv(&kernel, &mut answer, RecvFlags::DONTWAIT).ok()?;
    let kind = u16::from_ne_bytes(answer.get(4..6)?.try_into().ok()?);
    let uid =
        answer.get(ANSWER_UID_AT..ANSWER_UID_AT + 4).filter(|_| length >= ANSWER_UID_AT + 4)?;
    (kind == BY_FAMILY).then(|| u32::from_ne_bytes([uid[0], uid[1], uid[2], uid[3]]))
}

/// `struct nlmsghdr` and `struct inet_diag_req_v2` for one socket.
fn question(peer: SocketAddr, own: SocketAddr) -> Vec<u8> {
    let family = if peer.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let mut body = vec![family.as_raw() as u8, TCP, 0, 0];
    // Every state of a connection.
    body.extend(u32::MAX.to_ne_bytes());
    body.extend(peer.port().to_be_bytes());
    body.extend(own.port().to_be_bytes());
    for ip in [peer.ip(), own.ip()] {
        let mut address = [0; 16];
        match ip {
            IpAddr::V4(ip) => address[..4].copy_from_slice(&ip.octets()),
            IpAddr::V6(ip) => address = ip.octets(),
        }
        body.extend(address);
    }
    // Any interface, any cookie.
    body.extend(0u32.to_ne_bytes());
    body.extend([0xff; 8]);
    let mut message = ((HEAD_BYTES + body.len()) as u32).to_ne_bytes().to_vec();
    message.extend(BY_FAMILY.to_ne_bytes());
    message.extend(REQUEST.to_ne_bytes());
    message.extend([0; 8]);
    message.extend(body);
    message
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_peer_of_this_machine_is_its_user() {
        let own = PeerIdentity::User(rustix::process::geteuid().as_raw());
        let (one, _other) = UnixStream::pair().expect("two ends");
        assert_eq!(PeerIdentity::of(&one.into()), own);
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(listener) = TcpListener::bind(address) else { continue };
            let _client =
                TcpStream::connect(listener.local_addr().expect("bound")).expect("it listens");
            let (accepted, peer) = listener.accept().expect("a client connects");
            let found = PeerIdentity::of(&accepted.into());
            // A kernel without `sock_diag` does not report the user.
            assert!(found == own || found == PeerIdentity::Address(peer.ip()), "{found:?}");
        }
    }

    #[test]
    fn addresses_that_one_machine_has_many_of_are_one_peer() {
        let of = |text: &str| network(text.parse().expect("an address"));
        assert_eq!(of("2001:db8::1"), of("2001:db8::2:3:4:5"));
        assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
        assert_eq!(of("::ffff:192.0.2.1"), of("192.0.2.1"));
        assert_ne!(of("192.0.2.1"), of("192.0.2.2"));
    }
}
