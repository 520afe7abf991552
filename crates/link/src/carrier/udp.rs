//! UDP: for routed networks, or where raw Ethernet frames are not allowed.
//!
//! Adjacent packets of equal size in a burst leave as one message, which the kernel or the card
//! splits (GSO). Where that is refused, each leaves as its own message, many per system call.
//! Merged arrivals (GRO) are split by the size that the kernel reports.
//!
//! Invariants: a packet is a datagram, never fragmented; one socket serves all peers. Not here: the
//! addresses of a peer; which own address answers (bind to that one: a wildcard answers from the
//! address of the route).

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::io::Errno;
use sawmill_sys::Spin;
use sawmill_sys::net::{DatagramOptions, DatagramRun, DatagramSocket, Inbox, RUNS_MAX};

use super::wait::{PacketWait, is_readable, send_in_pieces, wait_for_packets};
use super::{
    Burst, PACKET_BYTES_MAX, Peer, Receiver, Sender, WakeReasons, Waker, whole_packet, wrong_peer,
};

/// The most packets that a kernel splits from one message (UDP_MAX_SEGMENTS of older kernels), and
/// the longest payload.
const RUN_PACKETS_MAX: usize = 64;
const RUN_BYTES_MAX: usize = 65507;
/// The size that every IPv6 path supports (RFC 8200 §5), less the headers; used if no route says
/// more.
const SAFE_PACKET_BYTES: usize = 1280 - 48;

/// How to open UDP.
#[derive(Clone, Debug)]
pub struct UdpOptions {
    /// The address to receive on; port 0 means any. The IPv6 wildcard includes IPv4.
    pub local: SocketAddr,
    /// The one interface to use.
    pub interface: Option<String>,
    /// Whether it joins the pairs that share the port ([`UdpSender::share_port`]), one for each
    /// receiving thread. The kernel distributes by address and port of the peer: all packets of one
    /// peer go to the same pair.
    pub shared_port: bool,
    /// The kernel buffers to request, for each direction.
    pub buffer_bytes: usize,
    /// Whether the kernel splits packets of equal size; turned off automatically where that is
    /// refused.
    pub segmentation: bool,
}

impl UdpOptions {
    /// Options for this address: any interface, a port of its own, 4 MiB of buffers, segmentation.
    #[must_use]
    pub fn on(local: SocketAddr) -> Self {
        UdpOptions {
            local,
            interface: None,
            shared_port: false,
            buffer_bytes: 4 << 20,
            segmentation: true,
        }
    }
}

struct UdpState {
    socket: DatagramSocket,
    waker: Arc<Waker>,
    refused: AtomicBool,
    segmentation: AtomicBool,
}

/// Sends datagrams.
#[derive(Clone)]
pub struct UdpSender {
    shared: Arc<UdpState>,
}

/// Receives datagrams.
pub struct UdpReceiver {
    shared: Arc<UdpState>,
    inbox: Inbox,
    /// The last call found something, so poll before waiting.
    is_busy: bool,
    spin: Spin,
}

/// Opens UDP.
///
/// Errors: EADDRINUSE, EADDRNOTAVAIL, ENODEV for an unknown interface.
pub fn open_udp(options: &UdpOptions) -> io::Result<(UdpSender, UdpReceiver)> {
    let socket = DatagramSocket::open(&DatagramOptions {
        local: options.local,
        interface: options.interface.as_deref(),
        shared_port: options.shared_port,
        buffer_bytes: options.buffer_bytes,
    })?;
    let shared = Arc::new(UdpState {
        socket,
        waker: Arc::new(Waker::new()?),
        refused: AtomicBool::new(false),
        segmentation: AtomicBool::new(options.segmentation),
    });
    let (inbox, spin) = (Inbox::new(), Spin::new());
    let receiver = UdpReceiver { shared: shared.clone(), inbox, is_busy: false, spin };
    Ok((UdpSender { shared }, receiver))
}

impl UdpSender {
    /// The address on which the pair receives.
    pub fn local(&self) -> io::Result<SocketAddr> {
        self.shared.socket.local()
    }

    /// Lets pairs that are opened from now on with `shared_port` join this one.
    pub fn share_port(&self) -> io::Result<()> {
        self.shared.socket.share_port()
    }

    /// Whether packets of equal size leave as one message.
    #[must_use]
    pub fn has_segmentation(&self) -> bool {
        self.shared.segmentation.load(Ordering::Relaxed)
    }

    /// Makes one send call, with runs of at most this many packets. Returns how many packets were
    /// sent.
    fn send_once(
        &self,
        to: &SocketAddr,
        burst: &Burst,
        from: usize,
        run_packets: usize,
    ) -> io::Result<usize> {
        let mut at = from;
        let runs = std::iter::from_fn(|| {
            let start = (at < burst.len()).then_some(at)?;
            at = burst.run_end(start, run_packets, RUN_BYTES_MAX);
            Some(DatagramRun {
                bytes: burst.span(start, at),
                datagram_bytes: burst.packet(start).len(),
            })
        });
        let sent_runs = self.shared.socket.send(to, runs)?;
        let mut end = from;
        for _ in 0..sent_runs {
            end = burst.run_end(end, run_packets, RUN_BYTES_MAX);
        }
        Ok(end - from)
    }

    /// As [`UdpSender::send_once`], with segmentation until it is refused.
    fn send_some(&self, to: &SocketAddr, burst: &Burst, from: usize) -> io::Result<usize> {
        if !self.has_segmentation() {
            return self.send_once(to, burst, from, 1);
        }
        match self.send_once(to, burst, from, RUN_PACKETS_MAX) {
            Err(error) if may_be_refusal(&error) => {
                // If the same packet is sent without it, the segmentation was the cause, not the
                // packet or the peer.
                let sent = self.send_once(to, burst, from, 1)?;
                self.shared.segmentation.store(false, Ordering::Relaxed);
                Ok(sent)
            }
            result => result,
        }
    }
}

fn may_be_refusal(error: &io::Error) -> bool {
    let refusals = [Errno::IO, Errno::INVAL, Errno::OPNOTSUPP, Errno::NOPROTOOPT];
    Errno::from_io_error(error).is_some_and(|errno| refusals.contains(&errno))
}

impl Sender for UdpSender {
    fn packet_bytes_max(&self, to: &Peer) -> usize {
        let Peer::Udp(to) = to else { return 0 };
        let fits = self.shared.socket.datagram_bytes_max(to).unwrap_or(SAFE_PACKET_BYTES);
        fits.min(PACKET_BYTES_MAX)
    }

    fn send(&self, to: &Peer, burst: &Burst, from: usize) -> io::Result<usize> {
        let Peer::Udp(to) = to else { return Err(wrong_peer("UDP", to)) };
        send_in_pieces(from..burst.len(), &self.shared.refused, |at| self.send_some(to, burst, at))
    }
}

impl Receiver for UdpReceiver {
    fn receive(
        &mut self,
        wait: Option<Duration>,
        writable_too: bool,
        each: &mut dyn FnMut(&Peer, &mut [u8]),
    ) -> io::Result<WakeReasons> {
        let UdpState { socket, waker, refused, .. } = &*self.shared;
        let is_there = self.is_busy
            || (!writable_too
                && self.spin.look(wait, || waker.is_called(), || is_readable(socket.as_fd())));
        let until = PacketWait { is_there, wait, writable_too };
        let ready = wait_for_packets(socket.as_fd(), waker, refused, until)?;
        let mut woken =
            WakeReasons { writable: ready.writable, waker: ready.waker, ..WakeReasons::default() };
        if !ready.readable {
            woken.tell(&mut self.spin);
            return Ok(woken);
        }
        let messages = socket.receive(&mut self.inbox, &mut |from, glued_bytes, bytes| {
            let peer = Peer::Udp(from);
            // An empty datagram is not ours either.
            woken.malformed += usize::from(bytes.is_empty());
            for datagram in bytes.chunks_mut(glued_bytes.max(1)) {
                match whole_packet(datagram) {
                    Some(packet) => {
                        woken.packets += 1;
                        each(&peer, packet);
                    }
                    None => woken.malformed += 1,
                }
            }
        })?;
        self.is_busy = messages > 1;
        woken.tell(&mut self.spin);
        Ok(woken)
    }

    fn set_spin_time_max(&mut self, spin_time_max: Duration) {
        self.spin.set_limit(spin_time_max);
    }

    fn waker(&self) -> Arc<Waker> {
        self.shared.waker.clone()
    }
}

const _: () = assert!(RUNS_MAX <= RUN_PACKETS_MAX);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_segmentation_is_refused_the_packets_go_without_and_it_is_not_tried_again() {
        let local = UdpOptions::on("127.0.0.1:0".parse().expect("an address"));
        let (sender, _own) = open_udp(&local).expect("UDP");
        let (receiving_end, mut receiver) = open_udp(&local).expect("UDP");
        sender.shared.socket.omit_checksum().expect("set");
        let to = Peer::Udp(receiving_end.local().expect("bound"));
        let mut burst = Burst::new(100, 100 * 24);
        for _ in 0..100 {
            let mut packet = [7; 24];
            packet[4..8].copy_from_slice(&24u32.to_le_bytes());
            assert!(burst.push(&packet));
        }
        assert_eq!(sender.send(&to, &burst, 0).expect("sent"), 100);
        assert!(!sender.has_segmentation());
        let mut packet_count = 0;
        while packet_count < 100 {
            let woken = receiver.receive(Some(Duration::from_secs(20)), false, &mut |_, _| ());
            let packets = woken.expect("it lives").packets;
            assert!(packets > 0, "{packet_count} of 100 came");
            packet_count += packets;
        }
    }
}
