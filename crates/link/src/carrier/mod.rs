//! How packets travel: UDP, TCP, raw Ethernet behind one [`Sender`] and one [`Receiver`].
//!
//! A packet is opaque here but for its length: [`PACKET_BYTES_MIN`] or more, the whole of it as a
//! little-endian `u32` in its bytes 4..8. So packets delimit themselves in a stream, and Ethernet's padding
//! is cut off.
//!
//! Modules: [`address`] (what people write), `open` (from that to carriers), `batch` (what a sender takes),
//! `udp`, `tcp`, `ethernet` (WZBLK §2.1.1, §2.2.5), `xdp` (Ethernet by AF_XDP), `wait` and `pace` (how a
//! receiver waits, and lets frames gather). Another carrier is one more of these.
//!
//! Invariants: nothing is allocated after construction (WZBLK §2.2.7); sending never waits; a packet arrives
//! whole or not at all.
//! Not here: what packets mean; loss, doubling and order, which datagrams do not mend; secrets.

pub mod address;
mod batch;
mod ethernet;
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

pub use address::LinkAddress;
pub use batch::Batch;
pub use ethernet::{BROADCAST, ETHERTYPE, EthernetReceiver, EthernetSender, open_ethernet};
pub use open::{Carrier, Listening, listen, reach};
pub use tcp::{Accepted, Listener, StreamReceiver, StreamSender, connect};
pub use udp::{UdpOptions, UdpReceiver, UdpSender, open_udp};
pub use wait::Waker;
pub use xdp::{ExpressReceiver, ExpressSender, open_express};

/// No packet is shorter.
pub const PACKET_BYTES_MIN: usize = 24;
/// No packet is longer, whatever carries it.
pub const PACKET_BYTES_MAX: usize = 65536;

/// Where packets of a link go to or come from.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Peer {
    /// An address of UDP.
    Udp(SocketAddr),
    /// A hardware address on the carrier's interface; [`BROADCAST`] for all that are there.
    Ethernet([u8; 6]),
    /// The other end of the stream.
    Stream,
}

/// Why [`Receiver::receive`] came back. None of it: the time was over, or for nothing.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Woken {
    /// So many packets were handed over.
    pub packets: usize,
    /// So many were dropped, as their lengths cannot be.
    pub malformed: usize,
    /// There is room to send; only where it was asked for.
    pub writable: bool,
    /// The waker was called.
    pub waker: bool,
}

/// The half of a carrier that sends.
pub trait Sender: Send + Sync {
    /// The longest packet that fits on the way to `to`, as known now: the MTU less the carrier's own headers.
    /// May ask the kernel for the route: for the hand-shake, not for each packet.
    fn packet_bytes_max(&self, to: &Peer) -> usize;

    /// Sends packets `from..` of the batch to `to`; answers how many were taken. Never waits: 0 is "no room
    /// now", to be tried again once [`Woken::writable`].
    ///
    /// Errors are those of the next packet, none of which was taken: EMSGSIZE where it is too long; a peer
    /// that cannot be reached now (no route, host down: the carrier may serve others); the carrier's own end
    /// (ENETDOWN, ENODEV, ENXIO: the interface; EPIPE, ECONNRESET: the stream). `InvalidInput` for a peer of
    /// another kind of carrier.
    fn send(&self, to: &Peer, batch: &Batch, from: usize) -> io::Result<usize>;
}

/// The half of a carrier that receives. One thread's at a time.
pub trait Receiver: Send {
    /// Waits at most `wait` (`None`: for ever) for packets, the waker or, if `writable_too`, for room to
    /// send. Hands each packet, with its peer, to `each`, which may change it in place (it is opened there);
    /// comes back after a bounded number of them. May come back early for nothing.
    ///
    /// Errors: the carrier is at its end: ENETDOWN and the like; `UnexpectedEof` where the peer closed the
    /// stream, `InvalidData` where a stream carried a length that cannot be.
    fn receive(
        &mut self,
        wait: Option<Duration>,
        writable_too: bool,
        each: &mut dyn FnMut(&Peer, &mut [u8]),
    ) -> io::Result<Woken>;

    /// What ends a wait from another thread.
    fn waker(&self) -> Arc<Waker>;
}

/// The length that the packet at the start of `bytes` says it has; none where too few bytes are there to
/// say.
fn said_bytes(bytes: &[u8]) -> Option<usize> {
    let field: [u8; 4] = bytes.get(4..8)?.try_into().ok()?;
    usize::try_from(u32::from_le_bytes(field)).ok()
}

/// The packet that a datagram or frame holds, without what follows it; none where its length cannot be.
fn whole_packet(bytes: &mut [u8]) -> Option<&mut [u8]> {
    let length = said_bytes(bytes).filter(|&length| length >= PACKET_BYTES_MIN)?;
    bytes.get_mut(..length)
}

fn wrong_peer(carrier: &str, to: &Peer) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, format!("{carrier} cannot carry packets to {to:?}"))
}
