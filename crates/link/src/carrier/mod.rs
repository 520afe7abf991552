//! How packets travel: UDP, TCP, raw Ethernet behind one [`Sender`] and one [`Receiver`].
//!
//! A packet is opaque here except for its length: [`PACKET_BYTES_MIN`] or more, with the whole
//! length as a little-endian `u32` in its bytes 4..8. So packets delimit themselves in a stream,
//! and Ethernet's padding can be removed.
//!
//! Modules: [`address`] (what users write), `open` (from addresses to carriers), `burst` (the input
//! of a sender), `udp`, `tcp`, `ethernet` (WZBLK §2.1.1, §2.2.5), `xdp` (Ethernet by AF_XDP),
//! `wait` and `pace` (how a receiver waits, and lets Ethernet frames accumulate). A new carrier is
//! another such module.
//!
//! Invariants: nothing is allocated after construction (WZBLK §2.2.7); sending never blocks; a
//! packet arrives whole or not at all. Not here: what packets mean; recovery from loss, duplicates
//! and reordering of datagrams; secrecy.

pub mod address;
mod burst;
mod ethernet;
mod low_mark;
mod open;
mod pace;
mod tcp;
mod udp;
mod wait;
mod xdp;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use sawmill_sys::Spin;

pub use address::LinkAddress;
pub use burst::Burst;
pub use ethernet::{
    BROADCAST, ETHERTYPE, EthernetReceiver, EthernetSender, open_ethernet, open_ethernet_in,
};
pub(crate) use open::SAID_NS;
pub use open::{Carrier, SharedAddress, TargetListener, reach};
pub use tcp::{AcceptedStream, StreamListener, StreamReceiver, StreamSender, connect};
pub use udp::{UdpOptions, UdpReceiver, UdpSender, open_udp};
pub use wait::Waker;
pub use xdp::{XdpReceiver, XdpSender, open_xdp};

/// The shortest packet.
pub const PACKET_BYTES_MIN: usize = 24;
/// The longest packet of any carrier.
pub const PACKET_BYTES_MAX: usize = 65536;

/// The other end of a packet.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Peer {
    /// An address of UDP.
    Udp(SocketAddr),
    /// A hardware address on the carrier's interface; [`BROADCAST`] for all stations there.
    Ethernet([u8; 6]),
    /// The other end of the stream.
    Stream,
}

/// Why [`Receiver::receive`] returned. If nothing is set, the time ran out, or it returned early.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct WakeReasons {
    /// The number of packets that were passed on.
    pub packets: usize,
    /// The number of packets dropped because of an invalid length.
    pub malformed: usize,
    /// There is room to send; reported only if requested.
    pub writable: bool,
    /// The waker was called.
    pub waker: bool,
}

impl WakeReasons {
    /// What a wait that ended like this says about the next one.
    fn tell(&self, spin: &mut Spin) {
        match self.packets {
            0 if self.waker => spin.called(),
            packets => spin.received(packets),
        }
    }
}

/// The half of a carrier that sends.
pub trait Sender: Send + Sync {
    /// The longest packet that fits on the way to `to`, as known now: the MTU less the carrier's
    /// own headers. May query the kernel's routes, so use it for the handshake and not for each
    /// packet.
    fn packet_bytes_max(&self, to: &Peer) -> usize;

    /// Sends packets `from..` of the burst to `to`. Returns how many were accepted. Never blocks: 0
    /// means that there is no room now; try again after [`WakeReasons::writable`].
    ///
    /// An error is about the next packet, and no packet was accepted: EMSGSIZE if it is too long; a
    /// peer that is unreachable now (no route, host down: the carrier may serve others); the end of
    /// the carrier (ENETDOWN, ENODEV, ENXIO: the interface; EPIPE, ECONNRESET: the stream).
    /// `InvalidInput` for a peer of another kind of carrier.
    fn send(&self, to: &Peer, burst: &Burst, from: usize) -> io::Result<usize>;
}

/// The half of a carrier that receives, used by one thread at a time.
pub trait Receiver: Send {
    /// Waits at most `wait` (`None`: without limit) for packets, the waker or, with `writable_too`,
    /// for room to send. Passes each packet with its peer to `each`, which may change it in place
    /// (it is opened there). Returns after a bounded number of packets, and may return early.
    ///
    /// Errors: the carrier is at its end: ENETDOWN and similar; `UnexpectedEof` if the peer closed
    /// the stream, `InvalidData` if a stream has an invalid length.
    fn receive(
        &mut self,
        wait: Option<Duration>,
        writable_too: bool,
        each: &mut dyn FnMut(&Peer, &mut [u8]),
    ) -> io::Result<WakeReasons>;

    /// Limits the time for which it looks for packets before it sleeps, if they come at short
    /// intervals. At first, and with zero, it always sleeps.
    fn set_spin_time_max(&mut self, spin_time_max: Duration);

    /// Ends a wait from another thread.
    fn waker(&self) -> Arc<Waker>;
}

/// The length that the packet at the start of `bytes` declares; none if there are too few bytes.
fn declared_bytes(bytes: &[u8]) -> Option<usize> {
    let field: [u8; 4] = bytes.get(4..8)?.try_into().ok()?;
    usize::try_from(u32::from_le_bytes(field)).ok()
}

/// The packet in a datagram or Ethernet frame, without what follows it; none if its length is
/// invalid.
pub(crate) fn whole_packet(bytes: &mut [u8]) -> Option<&mut [u8]> {
    let length = declared_bytes(bytes).filter(|&length| length >= PACKET_BYTES_MIN)?;
    bytes.get_mut(..length)
}

fn wrong_peer(carrier: &str, to: &Peer) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, format!("{carrier} cannot carry packets to {to:?}"))
}
