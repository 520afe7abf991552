//! Opens carriers for the addresses that users write: an initiator connects, a target listens.
//!
//! Invariants: an error says which address, what is wrong, and what to do. Receivers share an
//! address with others of the same target alone. Not here: several links at a time.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::io::Errno;
use sawmill_device::{Error, ErrorKind};
use sawmill_sys::net::FrameGroup;

use super::address::HostPort;
use crate::clock::SECOND;

use super::{
    BROADCAST, LinkAddress, Peer, Receiver, Sender, StreamListener, UdpOptions, connect,
    open_ethernet, open_ethernet_in, open_udp, open_xdp,
};

/// Both halves of a carrier.
pub struct Carrier {
    /// The half that sends, usable by any number of threads.
    pub sender: Arc<dyn Sender>,
    /// The half that receives, for one thread.
    pub receiver: Box<dyn Receiver>,
}

/// How a target listens.
pub enum TargetListener {
    /// Packets of all peers arrive here; several receivers share them.
    Packets(Vec<Carrier>),
    /// Each peer gets a stream.
    Streams(StreamListener),
}

impl Carrier {
    fn of(sender: impl Sender + 'static, receiver: impl Receiver + 'static) -> Self {
        Carrier { sender: Arc::new(sender), receiver: Box::new(receiver) }
    }

    fn udp(options: &UdpOptions) -> io::Result<Self> {
        let (sender, receiver) = open_udp(options)?;
        Ok(Carrier::of(sender, receiver))
    }

    fn ethernet(name: &str) -> io::Result<Self> {
        let (sender, receiver) = open_ethernet(name)?;
        Ok(Carrier::of(sender, receiver))
    }

    fn xdp(name: &str) -> io::Result<Self> {
        let (sender, receiver) = open_xdp(name)?;
        Ok(Carrier::of(sender, receiver))
    }
}

/// Opens an initiator's carrier to this address, a stream within `wait`. Also returns the first
/// peer to send to: with Ethernet, that is the broadcast address.
///
/// Errors: those of the carrier, with a helpful text; the kind is kept.
pub fn reach(address: &LinkAddress, wait: Duration) -> io::Result<(Carrier, Peer)> {
    try_reach(address, wait).map_err(|error| explained(address, error))
}

fn try_reach(address: &LinkAddress, wait: Duration) -> io::Result<(Carrier, Peer)> {
    Ok(match address {
        LinkAddress::Udp(host_port) => {
            let to = host_port.resolve()?;
            let any = match to.is_ipv6() {
                true => Ipv6Addr::UNSPECIFIED.into(),
                false => Ipv4Addr::UNSPECIFIED.into(),
            };
            let options = udp_options(SocketAddr::new(any, 0), host_port);
            (Carrier::udp(&options)?, Peer::Udp(to))
        }
        LinkAddress::Tcp(host_port) => {
            let interface = host_port.interface.as_deref();
            let (sender, receiver) = connect(host_port.resolve()?, interface, wait)?;
            (Carrier::of(sender, receiver), Peer::Stream)
        }
        LinkAddress::Ethernet(name) => (Carrier::ethernet(name)?, BROADCAST),
        LinkAddress::Xdp(name) => (Carrier::xdp(name)?, BROADCAST),
    })
}

/// An address of a target, and what its receivers share.
pub struct SharedAddress {
    address: LinkAddress,
    receivers: usize,
    /// The receivers of an Ethernet interface.
    group: FrameGroup,
    /// What was said about carriers that failed, and when one last had reason to. Bounded by
    /// SAID_MAX.
    said: Mutex<Vec<(String, u64)>>,
}

/// The most messages that are remembered because they were said.
const SAID_MAX: usize = 16;
/// What nobody had reason to say for this long is news again. Carriers that fail are tried more
/// often than that.
pub(crate) const SAID_NS: u64 = 60 * SECOND;

impl SharedAddress {
    /// `receivers` carriers share a UDP or Ethernet address; AF_XDP has one, TCP one per stream.
    #[must_use]
    pub fn new(address: LinkAddress, receivers: usize) -> Self {
        SharedAddress {
            address,
            receivers: receivers.max(1),
            group: FrameGroup::default(),
            said: Mutex::default(),
        }
    }

    /// Whether a carrier that reported an error is to be dropped and opened again. A UDP socket
    /// is not at its end then, and another one could not take its place while links send by it.
    #[must_use]
    pub fn reopens(&self) -> bool {
        !matches!(self.address, LinkAddress::Udp(_))
    }

    /// Whether none of the receivers had reason to say this lately, or one of them was opened again
    /// since.
    #[must_use]
    pub fn is_news(&self, message: &str, now_ns: u64) -> bool {
        let mut said = self.said.lock();
        // A UDP socket is not opened again, so nobody else tells when it receives again.
        said.retain(|(_, seen_at_ns)| now_ns.saturating_sub(*seen_at_ns) < SAID_NS);
        if let Some((_, seen_at_ns)) = said.iter_mut().find(|(other, _)| other == message) {
            *seen_at_ns = now_ns;
            return false;
        }
        let is_news = said.len() < SAID_MAX;
        if is_news {
            said.push((message.to_owned(), now_ns));
        }
        is_news
    }

    /// A carrier was opened again: what fails from now on is news.
    pub fn recovered(&self) {
        self.said.lock().clear();
    }

    /// Listens.
    ///
    /// Errors: as [`reach`].
    pub fn listen(&self) -> io::Result<TargetListener> {
        self.try_listen().map_err(|error| explained(&self.address, error))
    }

    /// Opens one carrier again; the others may still be open. `None` for UDP and TCP, of which
    /// none has to be.
    ///
    /// Errors: as [`reach`].
    pub fn listen_again(&self) -> io::Result<Option<Carrier>> {
        let carrier = match &self.address {
            LinkAddress::Udp(_) | LinkAddress::Tcp(_) => return Ok(None),
            LinkAddress::Ethernet(name) => self.ethernet(name),
            LinkAddress::Xdp(name) => Carrier::xdp(name),
        };
        carrier.map(Some).map_err(|error| explained(&self.address, error))
    }

    fn try_listen(&self) -> io::Result<TargetListener> {
        Ok(TargetListener::Packets(match &self.address {
            LinkAddress::Tcp(host_port) => {
                let interface = host_port.interface.as_deref();
                let listener = StreamListener::open(host_port.resolve()?, interface)?;
                return Ok(TargetListener::Streams(listener));
            }
            LinkAddress::Udp(host_port) => self.udp(host_port)?,
            LinkAddress::Ethernet(name) => {
                (0..self.receivers).map(|_| self.ethernet(name)).collect::<io::Result<_>>()?
            }
            LinkAddress::Xdp(name) => vec![Carrier::xdp(name)?],
        }))
    }

    /// A socket that is bound to share its port joins others that do, also where their address only
    /// overlaps its own: a wildcard, one of the other family, one that is tied to no interface. So
    /// two targets could take each other's links. Therefore the first socket is bound for itself:
    /// the kernel refuses that while any socket of this network namespace has an address that
    /// overlaps, and refuses another target's first socket from then on. Only after that does it
    /// share its port. Who shares it from the start can join, if it belongs to the same user: our
    /// own others, and programs that know no such care. (Linux without the fix of CVE-2026-31503,
    /// of March 2026, binds a wildcard beside more than ten sockets at other addresses.)
    fn udp(&self, host_port: &HostPort) -> io::Result<Vec<Carrier>> {
        // A name may have several addresses, so it is looked up once.
        let first = udp_options(host_port.resolve()?, host_port);
        let (sender, receiver) = open_udp(&first)?;
        let also = UdpOptions { local: sender.local()?, shared_port: true, ..first };
        if self.receivers > 1 {
            sender.share_port()?;
        }
        let mut carriers = vec![Carrier::of(sender, receiver)];
        for _ in 1..self.receivers {
            carriers.push(Carrier::udp(&also)?);
        }
        Ok(carriers)
    }

    fn ethernet(&self, name: &str) -> io::Result<Carrier> {
        if self.receivers == 1 {
            return Carrier::ethernet(name);
        }
        let (sender, receiver) = open_ethernet_in(&self.group, name)?;
        Ok(Carrier::of(sender, receiver))
    }
}

fn udp_options(local: SocketAddr, host_port: &HostPort) -> UdpOptions {
    UdpOptions { interface: host_port.interface.clone(), ..UdpOptions::on(local) }
}

fn explained(address: &LinkAddress, error: io::Error) -> io::Error {
    let is_xdp = matches!(address, LinkAddress::Xdp(_));
    let hint = match Errno::from_io_error(&error) {
        Some(Errno::PERM | Errno::ACCESS) if is_xdp => {
            "; it needs CAP_NET_RAW, CAP_NET_ADMIN and CAP_BPF: run it as root, or grant it these \
             capabilities"
        }
        Some(Errno::BUSY) if is_xdp => {
            "; the interface has an XDP program already (`ip link` shows it): use eth:, which \
            shares it"
        }
        Some(Errno::TOOBIG) if is_xdp => {
            "; the interface has several receive queues: `ethtool -L NAME combined 1`, or use eth:"
        }
        Some(Errno::AFNOSUPPORT | Errno::NOSYS) if is_xdp => "; the kernel has no AF_XDP: use eth:",
        Some(Errno::OPNOTSUPP | Errno::RANGE) if is_xdp => {
            "; frames of more than 3072 bytes need Linux 6.6 and a driver for them: set a smaller \
             MTU at both ends, or use eth:"
        }
        Some(Errno::OPNOTSUPP) if matches!(address, LinkAddress::Ethernet(_)) => {
            "; the kernel is older than 4.12 and cannot share an interface among receivers: use \
             one (--receivers 1)"
        }
        Some(Errno::PERM | Errno::ACCESS) => {
            "; it needs CAP_NET_RAW: run it as root, or grant it this capability"
        }
        Some(Errno::NODEV) => "; no interface has that name: `ip link` shows them",
        Some(Errno::NETDOWN) => "; the interface is down: `ip link set NAME up`",
        Some(Errno::INVAL) if is_xdp || matches!(address, LinkAddress::Ethernet(_)) => {
            "; the interface carries no Ethernet frames"
        }
        Some(Errno::ADDRINUSE) => {
            "; another socket has this port there, or at an address that overlaps (`ss -lntup` \
             shows both): stop its process, or use another port"
        }
        Some(Errno::ADDRNOTAVAIL) => {
            "; this machine has no such address: `ip addr` shows those it has"
        }
        Some(Errno::CONNREFUSED) => "; no process listens there",
        _ => "",
    };
    let text = format!("link {address}: {error}{hint}");
    let kind = error.kind();
    io::Error::new(kind, Error::new(ErrorKind::Unavailable, text).with_source(error))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listen(address: &LinkAddress, receivers: usize) -> io::Result<TargetListener> {
        SharedAddress::new(address.clone(), receivers).listen()
    }

    const ANSWER_TIME_MAX: Duration = Duration::from_secs(20);

    fn free_port() -> u16 {
        // The kernel chose this port, and does not assign it again so soon after its release.
        let free =
            StreamListener::open(SocketAddr::from(([127, 0, 0, 1], 0)), None).expect("a listener");
        free.local().expect("bound").port()
    }

    fn packet() -> crate::carrier::Burst {
        let mut burst = crate::carrier::Burst::new(1, 24);
        assert!(
            burst.push(&[0, 0, 0, 0, 24, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0])
        );
        burst
    }

    #[test]
    fn what_listens_is_reached_by_the_same_address() {
        for kind in ["udp", "tcp"] {
            let address: LinkAddress =
                format!("{kind}:127.0.0.1:{}", free_port()).parse().expect("one");
            let listening = listen(&address, 1).expect("listens");
            let (carrier, peer) = reach(&address, ANSWER_TIME_MAX).expect("reached");
            assert_eq!(carrier.sender.send(&peer, &packet(), 0).expect("sent"), 1);
            let mut receiver = match listening {
                TargetListener::Packets(mut carriers) => carriers.remove(0).receiver,
                TargetListener::Streams(listener) => {
                    let (_, receiver, _) =
                        listener.accept(Some(ANSWER_TIME_MAX)).expect("lives").expect("a stream");
                    Box::new(receiver)
                }
            };
            let woken =
                receiver.receive(Some(ANSWER_TIME_MAX), false, &mut |_, _| ()).expect("lives");
            assert_eq!(woken.packets, 1);
        }
    }

    #[test]
    fn several_receivers_share_an_address_and_one_alone_keeps_it() {
        let address: LinkAddress = format!("udp:127.0.0.1:{}", free_port()).parse().expect("one");
        let TargetListener::Packets(carriers) = listen(&address, 3).expect("listens") else {
            panic!("UDP")
        };
        assert_eq!(carriers.len(), 3);
        let error = listen(&address, 3).err().expect("taken").to_string();
        assert!(error.contains("another port"), "another target joins none: {error}");
        drop(carriers);
        let _alone = listen(&address, 1).expect("listens");
        let error = listen(&address, 1).err().expect("taken").to_string();
        assert!(error.contains(&address.to_string()) && error.contains("another port"), "{error}");
    }

    #[test]
    fn receivers_say_once_that_their_interface_is_down_and_again_after_it_was_up() {
        let free_address = format!("udp:127.0.0.1:{}", free_port()).parse().expect("one");
        let address = SharedAddress::new(free_address, 2);
        assert!(address.is_news("down", 0) && !address.is_news("down", 0));
        assert!(address.is_news("gone", 0));
        address.recovered();
        assert!(address.is_news("down", 0));
        let long = (0..1000).filter(|number| address.is_news(&number.to_string(), 0)).count();
        assert!(long < SAID_MAX, "{long} are remembered");
    }

    #[test]
    fn what_fails_again_after_a_minute_is_said_again_and_what_fails_on_is_not() {
        let address = SharedAddress::new("udp:127.0.0.1:9".parse().expect("one"), 2);
        let mut now_ns = 7;
        assert!(address.is_news("aborted", now_ns));
        for _ in 0..100 {
            now_ns += SAID_NS - 1;
            assert!(!address.is_news("aborted", now_ns), "it fails on");
        }
        now_ns += SAID_NS;
        assert!(address.is_news("aborted", now_ns), "it has received since");
        let many = (0..1000).filter(|number| address.is_news(&number.to_string(), now_ns)).count();
        assert!(many < SAID_MAX && !address.is_news("refused", now_ns));
        assert!(address.is_news("refused", now_ns + SAID_NS), "however many failed before");
    }

    #[test]
    fn an_address_that_cannot_be_opened_is_an_error_with_a_remedy() {
        for (text, hint) in [
            ("eth:nosuch0", "`ip link` shows them"),
            ("udp:192.0.2.1:9", "no such address"),
            ("tcp:127.0.0.1:9@nosuch0", "`ip link` shows them"),
        ] {
            let address: LinkAddress = text.parse().expect("one");
            let error = listen(&address, 1).err().expect("refused").to_string();
            assert!(
                error.starts_with(&format!("link {address}: ")) && error.contains(hint),
                "{error}"
            );
        }
        let nobody: LinkAddress = format!("tcp:127.0.0.1:{}", free_port()).parse().expect("one");
        let error = reach(&nobody, ANSWER_TIME_MAX).err().expect("refused");
        assert!(error.kind() == io::ErrorKind::ConnectionRefused, "{error}");
        assert!(error.to_string().ends_with("no process listens there"), "{error}");
    }
}
