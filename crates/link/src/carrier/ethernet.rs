//! Raw Ethernet frames: no IP below, nothing to configure except the cable (WZBLK §2.1.1,
//! Multiedge).
//!
//! A packet is the payload of an Ethernet frame. The receiver reads in place what the kernel put
//! into a ring, and makes no system call while more is there, so a loaded link needs no wake-up for
//! each frame (WZBLK §2.2.5).
//!
//! Invariants: one interface, never promiscuous; the padding of a short frame is removed. Not here:
//! finding peers (only [`BROADCAST`] is provided for that); links over several interfaces;
//! permission to open it (CAP_NET_RAW).

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use sawmill_sys::Spin;
use sawmill_sys::net::{ETHERNET_HEADER_BYTES, FrameGroup, FrameRing, FrameSocket, Interface};

use super::pace::{FrameBurst, Pace};
use super::wait::{PacketWait, nap, send_in_pieces, wait_for_packets};
use super::{
    Burst, PACKET_BYTES_MAX, Peer, Receiver, Sender, WakeReasons, Waker, whole_packet, wrong_peer,
};

/// "Local Experimental EtherType 1" of IEEE 802: free to use inside one's own network.
pub const ETHERTYPE: u16 = 0x88B5;
/// All stations on the interface's network.
pub const BROADCAST: Peer = Peer::Ethernet([0xFF; 6]);

/// About 900 jumbo frames: two thirds of a millisecond at 100 Gb/s, seven milliseconds at 10.
const RING_BYTES: usize = 8 << 20;
const SEND_BUFFER_BYTES: usize = 4 << 20;
/// More frames than a ring holds: a slot takes 128 bytes at least.
const RING_FRAMES_MAX: usize = RING_BYTES / 128;
/// After this many frames the receiver returns, so that others get their turn.
const BURST_FRAMES_MAX: usize = 256;
/// Ethernet frames often come in bursts. So after a frame, the ring is polled for about 2 us (the
/// cost of a wake-up for both sides) before the kernel is asked to wake us. Over a veth pair, with
/// a core for each end, a third more frames pass, at a tenth more CPU time per frame. If both ends
/// share a core, it only delays the other.
const CHECKS_MAX: u32 = 100;

/// Bytes of a packet that say its link: the lowest one of the connection, which is random, and the
/// link's number.
const LINK_BYTES: [u32; 2] = [8, 23];

struct EthernetState {
    socket: Arc<FrameSocket>,
    waker: Arc<Waker>,
    refused: AtomicBool,
}

/// Sends Ethernet frames.
#[derive(Clone)]
pub struct EthernetSender {
    shared: Arc<EthernetState>,
}

/// Receives Ethernet frames.
pub struct EthernetReceiver {
    shared: Arc<EthernetState>,
    ring: FrameRing,
    /// Whether the last call found frames.
    is_busy: bool,
    pace: Pace,
    spin: Spin,
}

impl EthernetReceiver {
    fn has_frame(&self) -> bool {
        let checks = if self.is_busy { CHECKS_MAX } else { 0 };
        self.ring.has_frame()
            || (0..checks).any(|_| {
                std::hint::spin_loop();
                self.ring.has_frame()
            })
    }
}

/// Opens this interface. After ENETDOWN, reopen it when the interface is up again.
///
/// Errors: ENODEV (no such interface), EPERM (needs CAP_NET_RAW), EINVAL (not an Ethernet
/// interface), ENETDOWN.
pub fn open_ethernet(interface: &str) -> io::Result<(EthernetSender, EthernetReceiver)> {
    let (socket, ring) = FrameSocket::open(interface, ETHERTYPE, RING_BYTES, SEND_BUFFER_BYTES)?;
    let waker = Arc::new(Waker::new()?);
    let shared = Arc::new(EthernetState { socket, waker, refused: AtomicBool::new(false) });
    let (pace, spin) = (Pace::new(), Spin::new());
    let receiver = EthernetReceiver { shared: shared.clone(), ring, is_busy: false, pace, spin };
    Ok((EthernetSender { shared }, receiver))
}

/// As [`open_ethernet`], as one of several receivers that share the frames of the interface: all
/// packets of one link of a connection arrive at the same one.
///
/// Errors: also those of [`FrameGroup::add`].
pub fn open_ethernet_in(
    group: &FrameGroup,
    interface: &str,
) -> io::Result<(EthernetSender, EthernetReceiver)> {
    let (sender, mut receiver) = open_ethernet(interface)?;
    group.add(&sender.shared.socket, &LINK_BYTES)?;
    // What came before it joined came to the others, too. What the group has dealt to it since is
    // lost with that, and sent again by the link.
    receiver.ring.receive(RING_FRAMES_MAX, &mut |_| ());
    Ok((sender, receiver))
}

/// The first bytes of an Ethernet frame from one station to another.
pub(super) fn header(to: &[u8; 6], from: &[u8; 6]) -> [u8; ETHERNET_HEADER_BYTES] {
    let mut header = [0; ETHERNET_HEADER_BYTES];
    header[..6].copy_from_slice(to);
    header[6..12].copy_from_slice(from);
    header[12..].copy_from_slice(&ETHERTYPE.to_be_bytes());
    header
}

impl EthernetSender {
    /// The interface, its MTU and hardware address, as of when it was opened.
    #[must_use]
    pub fn interface(&self) -> &Interface {
        self.shared.socket.interface()
    }

    /// The address that others send to.
    #[must_use]
    pub fn own(&self) -> Peer {
        Peer::Ethernet(self.interface().mac)
    }
}

impl Sender for EthernetSender {
    fn packet_bytes_max(&self, _: &Peer) -> usize {
        self.interface().mtu_bytes.min(PACKET_BYTES_MAX)
    }

    fn send(&self, to: &Peer, burst: &Burst, from: usize) -> io::Result<usize> {
        let Peer::Ethernet(to) = to else { return Err(wrong_peer("Ethernet", to)) };
        let header = header(to, &self.interface().mac);
        send_in_pieces(from..burst.len(), &self.shared.refused, |at| {
            let payloads = (at..burst.len()).map(|index| burst.packet(index));
            self.shared.socket.send(&header, payloads)
        })
    }
}

impl Receiver for EthernetReceiver {
    fn receive(
        &mut self,
        wait: Option<Duration>,
        writable_too: bool,
        each: &mut dyn FnMut(&Peer, &mut [u8]),
    ) -> io::Result<WakeReasons> {
        let EthernetState { socket, waker, refused } = &*self.shared;
        let mut slept = None;
        if !self.ring.has_frame()
            && !writable_too
            && let Some(gather) = self.pace.nap()
        {
            let began_at_ns = time_of_day_ns();
            nap(waker, wait.map_or(gather, |wait| wait.min(gather)))?;
            slept = Some((began_at_ns, time_of_day_ns()));
        }
        let is_there = self.has_frame()
            || (!writable_too
                && slept.is_none()
                && self.spin.look(wait, || waker.is_called(), || self.ring.has_frame()));
        let until = PacketWait { is_there, wait, writable_too };
        let ready = wait_for_packets(socket.as_fd(), waker, refused, until)?;
        let mut woken =
            WakeReasons { writable: ready.writable, waker: ready.waker, ..WakeReasons::default() };
        let mut burst = FrameBurst::default();
        let handed = self.ring.receive(BURST_FRAMES_MAX, &mut |frame| {
            burst.add(frame.arrived_ns);
            let packet = if frame.is_whole { whole_packet(frame.payload) } else { None };
            match packet {
                Some(packet) => {
                    woken.packets += 1;
                    each(&Peer::Ethernet(frame.from), packet);
                }
                None => woken.malformed += 1,
            }
        });
        self.is_busy = handed > 0;
        woken.tell(&mut self.spin);
        self.pace.took(&burst);
        if let Some((began_at_ns, ended_at_ns)) = slept {
            self.pace.napped(began_at_ns, ended_at_ns, &burst);
        }
        Ok(woken)
    }

    fn set_spin_time_max(&mut self, spin_time_max: Duration) {
        self.spin.set_limit(spin_time_max);
    }

    fn waker(&self) -> Arc<Waker> {
        self.shared.waker.clone()
    }
}

/// The clock that stamps frames. If it is adjusted, one nap is misjudged.
fn time_of_day_ns() -> u64 {
    let now = clock_gettime(ClockId::Realtime);
    now.tv_sec.cast_unsigned() * 1_000_000_000 + now.tv_nsec.cast_unsigned()
}
