//! Raw Ethernet past the kernel's network layer (AF_XDP): the same Ethernet frames on the wire as
//! [`super::ethernet`], so either end may use either.
//!
//! For cards whose driver moves frames without copying. Elsewhere the kernel copies more often than
//! with AF_PACKET (docs/decisions/0024).
//!
//! Invariants: as in [`super::ethernet`]; frames that a send accepted and the kernel had no room
//! for are pushed again by the receiver, within a millisecond. Sent frames bypass the interface's
//! queueing discipline. Not here: more than one receive queue; programs (`sawmill-sys`).

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use sawmill_sys::Spin;
use sawmill_sys::net::{self, Interface, XdpInbox, XdpOutbox, XdpSocket};

use super::ethernet::{ETHERTYPE, header};
use super::wait::{PacketWait, wait_for_packets};
use super::{
    Burst, PACKET_BYTES_MAX, Peer, Receiver, Sender, WakeReasons, Waker, whole_packet, wrong_peer,
};

/// After this many frames the receiver returns, so that others get their turn.
const BURST_FRAMES_MAX: usize = 256;
/// The kernel does not report when it has room for frames that it refused.
const PUSH_DELAY: Duration = Duration::from_millis(1);

struct XdpState {
    socket: Arc<XdpSocket>,
    outbox: Mutex<XdpOutbox>,
    /// Set while the outbox has frames that the kernel has not sent.
    pending: AtomicBool,
    waker: Arc<Waker>,
    refused: AtomicBool,
}

impl XdpState {
    /// Makes the kernel send what is left. Returns whether something is left still.
    fn push(&self) -> io::Result<bool> {
        if !self.pending.load(Ordering::Acquire) {
            return Ok(false);
        }
        let mut outbox = self.outbox.lock();
        let pushed = outbox.push();
        self.pending.store(outbox.is_pending(), Ordering::Release);
        pushed.map(|()| outbox.is_pending())
    }
}

/// Sends Ethernet frames.
#[derive(Clone)]
pub struct XdpSender {
    shared: Arc<XdpState>,
}

/// Receives Ethernet frames.
pub struct XdpReceiver {
    shared: Arc<XdpState>,
    inbox: XdpInbox,
    spin: Spin,
}

/// Opens this interface, which must have one receive queue and no XDP program.
///
/// Errors: those of [`net::open_xdp`].
pub fn open_xdp(interface: &str) -> io::Result<(XdpSender, XdpReceiver)> {
    let (socket, outbox, inbox) = net::open_xdp(interface, ETHERTYPE)?;
    let shared = Arc::new(XdpState {
        socket,
        outbox: Mutex::new(outbox),
        pending: AtomicBool::new(false),
        waker: Arc::new(Waker::new()?),
        refused: AtomicBool::new(false),
    });
    Ok((XdpSender { shared: shared.clone() }, XdpReceiver { shared, inbox, spin: Spin::new() }))
}

impl XdpSender {
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

impl Sender for XdpSender {
    fn packet_bytes_max(&self, _: &Peer) -> usize {
        self.interface().mtu_bytes.min(PACKET_BYTES_MAX)
    }

    fn send(&self, to: &Peer, burst: &Burst, from: usize) -> io::Result<usize> {
        let Peer::Ethernet(to) = to else { return Err(wrong_peer("Ethernet", to)) };
        let header = header(to, &self.interface().mac);
        let mut outbox = self.shared.outbox.lock();
        let outcome = outbox.send(&header, (from..burst.len()).map(|index| burst.packet(index)));
        let was_pending = self.shared.pending.swap(outbox.is_pending(), Ordering::AcqRel);
        if outbox.is_pending() && !was_pending {
            self.shared.waker.wake();
        }
        if matches!(outcome, Ok(0)) {
            self.shared.refused.store(true, Ordering::Release);
        }
        outcome
    }
}

impl Receiver for XdpReceiver {
    fn receive(
        &mut self,
        wait: Option<Duration>,
        writable_too: bool,
        each: &mut dyn FnMut(&Peer, &mut [u8]),
    ) -> io::Result<WakeReasons> {
        let XdpState { socket, waker, refused, .. } = &*self.shared;
        let wait = match self.shared.push()? {
            true => Some(wait.map_or(PUSH_DELAY, |wait| wait.min(PUSH_DELAY))),
            false => wait,
        };
        let is_there = self.inbox.has_frame()
            || (!writable_too
                && self.spin.look(wait, || waker.is_called(), || self.inbox.has_frame()));
        let until = PacketWait { is_there, wait, writable_too };
        let ready = wait_for_packets(socket.as_fd(), waker, refused, until)?;
        let mut woken =
            WakeReasons { writable: ready.writable, waker: ready.waker, ..WakeReasons::default() };
        let handed = self.inbox.receive(BURST_FRAMES_MAX, &mut |from, payload| match whole_packet(
            payload,
        ) {
            Some(packet) => {
                woken.packets += 1;
                each(&Peer::Ethernet(from), packet);
            }
            None => woken.malformed += 1,
        });
        woken.tell(&mut self.spin);
        if handed == 0 && !woken.waker {
            // An interface that disappeared ends no wait.
            rustix::net::sockopt::socket_error(socket.as_fd())??;
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
