//! One connection as one end sees it: it opens packets, hands their statements to places or handles
//! them as notes, and puts what is ready into packets of the least loaded link.
//!
//! Both ends use this; they differ in their [`ConnectionEnd`]: an initiator's places or a target's.
//! Any thread may call any method. A thread that finds the sending half of a link locked leaves the
//! work to the lock holder, who checks for work again before releasing it. So packets fill up by
//! themselves under load.
//!
//! Lock order: a link's sending half, its receiving half, a place, the ready queue. No lock is held
//! while a request is submitted or answered.
//!
//! Invariants: no allocation after `new`; every lost piece becomes ready again; a packet is opened
//! before anything in it is trusted.
//!
//! Not here: sockets and threads (`carrier`, `threads`), the handshake (`session`).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use sawmill_format::link::statement::{Body, Note, NoteKind, RUNS_MAX, Statement, Statements};
use sawmill_format::link::{
    HEADER_BYTES, PACKET_BYTES_MAX, PACKET_BYTES_MIN, Packet, PacketKind, TAIL_BYTES,
};

use crate::carrier::{Burst, Peer, Sender, Waker};
use crate::halves::{ReceiveHalf, RouteKind, SendHalf, SentPiece, SentPieces};
use crate::ready::ReadyQueue;
use crate::session::Seals;
use crate::violation::Violation;

/// The most packets and bytes of a burst for a carrier.
const BURST_PACKETS_MAX: usize = 64;
const BURST_BYTES: usize = 256 << 10;
/// With several links, the bytes that one link gets before the next one is considered.
const TURN_BYTES: usize = 64 << 10;

/// What a place put into a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PacketFill {
    /// Everything fitted.
    All,
    /// The packet is full, and there is more.
    More,
}

/// How an end handles the statements that are about places.
pub(crate) trait ConnectionEnd: Send + Sync {
    /// A command, data or a reply arrived.
    fn take(&self, statement: &Statement<'_>) -> Result<(), Violation>;
    /// Puts what `place` has to send into a packet.
    fn put(&self, place: u16, body: &mut Body<'_>, pieces: &mut SentPieces) -> PacketFill;
    /// A piece was lost. Returns whether it must be sent again.
    fn lost(&self, piece: &SentPiece) -> bool;
}

/// Where a link's packets go.
#[derive(Clone)]
pub(crate) struct Route {
    pub(crate) sender: Arc<dyn Sender>,
    pub(crate) peer: Peer,
    /// The longest packet that the carrier accepts on this route.
    pub(crate) packet_bytes_max: usize,
    /// Wakes the receiving thread there, because it must also wait for room to send.
    waker: Option<Arc<Waker>>,
}

impl Route {
    pub(crate) fn new(sender: Arc<dyn Sender>, peer: Peer, waker: Option<Arc<Waker>>) -> Self {
        let packet_bytes_max = sender.packet_bytes_max(&peer);
        let packet_bytes_max = packet_bytes_max.clamp(PACKET_BYTES_MIN, PACKET_BYTES_MAX);
        Route { sender, peer, packet_bytes_max, waker }
    }
}

/// The sending half of a link, with its route.
pub(crate) struct LinkOutput {
    pub(crate) send_half: SendHalf,
    pub(crate) route: Option<Route>,
    /// Whether the link is joined, so that requests may use it.
    pub(crate) open: bool,
    burst: Burst,
    /// The packets of the burst before this one have been sent.
    unsent_from: usize,
    ping: bool,
    /// Whether it was open and silent when last checked, and since when: for status, not for
    /// decisions.
    last_state: (bool, bool),
    pub(crate) state_since_ns: u64,
}

/// A link of the connection.
pub(crate) struct ConnectionLink {
    pub(crate) output: Mutex<LinkOutput>,
    pub(crate) receive_half: Mutex<ReceiveHalf>,
    /// Packets that failed to open, or arrived twice.
    pub(crate) refused: AtomicU64,
    pub(crate) doubled: AtomicU64,
    /// One more than the number of the newest join.
    join_end: AtomicU64,
}

/// The result of a received packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PacketOutcome {
    /// It belonged to the connection, and its statements were handled.
    Taken,
    /// It failed to open, or arrived twice.
    Dropped,
}

/// Statements that the connection itself does not handle: notes about links, and the end.
pub(crate) enum ControlStatement<'a> {
    /// A join, joined or leave.
    Note(Note),
    /// The peer ends the connection.
    Close(u8, &'a str),
}

/// A connection.
pub(crate) struct Connection<E> {
    /// The number of the connection at the peer.
    remote: u64,
    seals: Seals,
    pub(crate) links: Box<[ConnectionLink]>,
    pub(crate) ready: ReadyQueue,
    pub(crate) end: E,
    kicks: AtomicU64,
    /// When the last packet opened.
    last_received_at_ns: AtomicU64,
}

impl<E: ConnectionEnd> Connection<E> {
    /// `last_received_at_ns` counts as the time of the last packet until one opens.
    pub(crate) fn new(
        remote: u64,
        seals: Seals,
        links: usize,
        places: usize,
        end: E,
        last_received_at_ns: u64,
    ) -> Self {
        let link = |_| ConnectionLink {
            output: Mutex::new(LinkOutput {
                send_half: SendHalf::new(),
                route: None,
                open: false,
                burst: Burst::new(BURST_PACKETS_MAX, BURST_BYTES),
                unsent_from: 0,
                ping: false,
                last_state: (false, false),
                state_since_ns: last_received_at_ns,
            }),
            receive_half: Mutex::new(ReceiveHalf::new()),
            refused: AtomicU64::new(0),
            doubled: AtomicU64::new(0),
            join_end: AtomicU64::new(0),
        };
        Connection {
            remote,
            seals,
            links: (0..links).map(link).collect(),
            ready: ReadyQueue::new(places),
            end,
            kicks: AtomicU64::new(0),
            last_received_at_ns: AtomicU64::new(last_received_at_ns),
        }
    }

    /// When the last packet of this connection arrived.
    pub(crate) fn last_received_at_ns(&self) -> u64 {
        self.last_received_at_ns.load(Ordering::Relaxed)
    }

    /// Handles a packet of kind *sealed*. Calls `control_statement` for statements that are not
    /// handled here, after the packet was authenticated.
    pub(crate) fn receive(
        &self,
        header: &Packet,
        packet: &mut [u8],
        now: u64,
        control_statement: &mut dyn FnMut(ControlStatement<'_>),
    ) -> Result<PacketOutcome, Violation> {
        let Some(link) = self.links.get(usize::from(header.link)) else {
            return Ok(PacketOutcome::Dropped);
        };
        let Ok(body) = self.seals.open(packet) else {
            link.refused.fetch_add(1, Ordering::Relaxed);
            return Ok(PacketOutcome::Dropped);
        };
        self.last_received_at_ns.fetch_max(now, Ordering::Relaxed);
        if !link.receive_half.lock().take(header.number, header.length) {
            link.doubled.fetch_add(1, Ordering::Relaxed);
            return Ok(PacketOutcome::Dropped);
        }
        let mut asks = false;
        for statement in Statements::new(body) {
            match statement.map_err(Violation::Undecodable)? {
                Statement::Ack(ack) => self.acknowledged(&ack, now)?,
                Statement::Note(Note { kind: NoteKind::Ping, .. }) => asks = true,
                Statement::Note(note) => control_statement(ControlStatement::Note(note)),
                Statement::Close(status, text) => {
                    control_statement(ControlStatement::Close(status, text))
                }
                statement
                @ (Statement::Command(..) | Statement::Data(_) | Statement::Reply(..)) => {
                    self.end.take(&statement)?;
                    asks = true;
                }
            }
        }
        if asks {
            link.receive_half.lock().owe(now);
        }
        link.output.lock().send_half.packet_received(now);
        Ok(PacketOutcome::Taken)
    }

    fn acknowledged(
        &self,
        ack: &sawmill_format::link::statement::Ack<'_>,
        now: u64,
    ) -> Result<(), Violation> {
        let link = self
            .links
            .get(usize::from(ack.link))
            .ok_or(Violation::Rule("it names a link that does not exist"))?;
        link.output.lock().send_half.acknowledge(now, ack, |piece| self.again(piece))
    }

    /// Whether a lost piece must be sent again; if so, it is ready now.
    fn again(&self, piece: &SentPiece) -> bool {
        let must_resend = self.end.lost(piece);
        if must_resend {
            self.ready.push(piece.place);
        }
        must_resend
    }

    /// Sends what is ready, as far as the links have room. Call this after anything that may have
    /// made something ready, or made room.
    pub(crate) fn pump(&self, now: u64) {
        self.kicks.fetch_add(1, Ordering::SeqCst);
        loop {
            let kicks = self.kicks.load(Ordering::SeqCst);
            let mut was_sent = false;
            let (order, count) = self.by_load();
            for index in &order[..count] {
                let Some(mut output) = self.links[*index].output.try_lock() else { continue };
                was_sent |= self.send_some(*index, &mut output, now, false);
                if was_sent && count > 1 {
                    // Another link may be less loaded now.
                    break;
                }
            }
            if !was_sent && self.kicks.load(Ordering::SeqCst) == kicks {
                return;
            }
        }
    }

    /// The open links, the least loaded first. A link with a locked sending half counts as fully
    /// loaded.
    fn by_load(&self) -> ([usize; 8], usize) {
        let (mut order, mut loads, mut count) = ([0; 8], [0u64; 8], 0);
        for (index, link) in self.links.iter().enumerate() {
            let load = match link.output.try_lock() {
                Some(output) if output.open && output.send_half.has_room() => {
                    output.send_half.backlog_ns()
                }
                Some(output) if output.has_unsent() => u64::MAX - 1,
                Some(_) => continue,
                None => u64::MAX,
            };
            let mut rank = count;
            while rank > 0 && loads[rank - 1] > load {
                (order[rank], loads[rank]) = (order[rank - 1], loads[rank - 1]);
                rank -= 1;
            }
            (order[rank], loads[rank]) = (index, load);
            count += 1;
        }
        (order, count)
    }

    /// Sends one burst on link `index`. Returns whether something was sent, so that there may be
    /// more.
    fn send_some(&self, index: usize, output: &mut LinkOutput, now: u64, ack: bool) -> bool {
        if output.flush() == FlushOutcome::Blocked {
            return false;
        }
        output.burst.clear();
        output.unsent_from = 0;
        let turn_bytes = if self.links.len() > 1 { TURN_BYTES } else { BURST_BYTES };
        let mut bytes = 0;
        while bytes < turn_bytes {
            match self.build(index, output, now, ack && bytes == 0) {
                0 => break,
                built => bytes += built,
            }
        }
        if output.burst.is_empty() {
            return false;
        }
        output.flush() == FlushOutcome::All
    }

    /// Builds the next packet of link `index` in its burst and returns its length; 0: there is
    /// nothing to send, or no room.
    fn build(&self, index: usize, output: &mut LinkOutput, now: u64, ack: bool) -> usize {
        let carries = output.open && output.send_half.has_room();
        let is_needed = (carries && !self.ready.is_empty()) || output.ping || ack;
        let packet_bytes = output.send_half.packet_bytes;
        if !is_needed || output.route.is_none() || output.burst.space().len() < packet_bytes {
            return 0;
        }
        let ping = std::mem::take(&mut output.ping);
        let packet = &mut output.burst.space()[..packet_bytes];
        let mut body = Body::new(&mut packet[HEADER_BYTES..packet_bytes - TAIL_BYTES]);
        self.put_acks(index, &mut body, now);
        if ping {
            body.note(&Note { kind: NoteKind::Ping, link: index as u8, packet_bytes: 0, token: 0 });
        }
        let mut pieces = SentPieces::new();
        while carries && !pieces.is_full() {
            let Some(place) = self.ready.pop() else { break };
            if self.end.put(place, &mut body, &mut pieces) == PacketFill::More {
                self.ready.push_front(place);
                break;
            }
        }
        let used_bytes = body.used();
        if used_bytes == 0 {
            return 0;
        }
        let length = HEADER_BYTES + used_bytes + TAIL_BYTES;
        let number = output.send_half.number(|piece| self.again(piece));
        self.seal(&mut packet[..length], index, number);
        output.burst.commit(length);
        if ping || !pieces.is_empty() {
            output.send_half.sent(now, length, &pieces);
        } else {
            output.send_half.sent_unacknowledged(length);
        }
        length
    }

    fn seal(&self, packet: &mut [u8], index: usize, number: u64) {
        let header = Packet {
            kind: PacketKind::Sealed,
            length: packet.len() as u32,
            connection: self.remote,
            link: index as u8,
            number,
        };
        header.encode(packet);
        if let Err(error) = self.seals.seal(packet) {
            // This happens only when the numbers of this link are used up, after years. The peer
            // then receives nothing more on it.
            tracing::error!("link {index}: cannot seal a packet: {error}");
            // Never send it in clear.
            packet[HEADER_BYTES..].fill(0);
        }
    }

    /// Acknowledgements for any link go with any packet, those for the link itself first.
    fn put_acks(&self, index: usize, body: &mut Body<'_>, now: u64) {
        let mut runs = [(0, 0); RUNS_MAX];
        let others = (0..self.links.len()).filter(|other| *other != index);
        for of in std::iter::once(index).chain(others) {
            let Some(mut receiving) = self.links[of].receive_half.try_lock() else { continue };
            if receiving.owes() && body.left() >= 64 {
                let (count, delay_us) = receiving.acknowledge(now, &mut runs);
                body.ack(of as u8, delay_us, &runs[..count]);
            }
        }
    }

    /// Sends a packet with one note, padded to `packet_bytes`, on a route that is not joined yet.
    pub(crate) fn send_note(&self, index: usize, route: &Route, note: &Note, packet_bytes: usize) {
        let mut output = self.links[index].output.lock();
        let number = output.send_half.number(|piece| self.again(piece));
        let mut burst = Burst::new(1, packet_bytes);
        let packet = &mut burst.space()[..packet_bytes];
        let mut body = Body::new(&mut packet[HEADER_BYTES..packet_bytes - TAIL_BYTES]);
        body.note(note);
        body.pad();
        self.seal(packet, index, number);
        burst.commit(packet_bytes);
        output.send_half.sent_unacknowledged(packet_bytes);
        // If a note is lost, the side that waits for its answer sends it again.
        let _ = route.sender.send(&route.peer, &burst, 0);
    }

    /// Tells the peer, on every link, that the connection ends.
    pub(crate) fn send_close(&self, status: u8, text: &str) {
        for (index, link) in self.links.iter().enumerate() {
            let mut output = link.output.lock();
            let Some(route) = output.route.clone() else { continue };
            let packet_bytes = output.send_half.packet_bytes;
            let mut burst = Burst::new(1, packet_bytes);
            let packet = &mut burst.space()[..packet_bytes];
            let mut body = Body::new(&mut packet[HEADER_BYTES..packet_bytes - TAIL_BYTES]);
            body.close(status, text);
            let length = HEADER_BYTES + body.used() + TAIL_BYTES;
            let number = output.send_half.number(|piece| self.again(piece));
            self.seal(&mut packet[..length], index, number);
            burst.commit(length);
            output.send_half.sent_unacknowledged(length);
            let _ = route.sender.send(&route.peer, &burst, 0);
        }
    }

    /// Handles the timers, or the end of a burst of packets: overdue packets count as lost, due
    /// acknowledgements and everything ready is sent.
    pub(crate) fn tick(&self, now: u64) {
        for link in &self.links {
            let mut output = link.output.lock();
            let asks = output.send_half.tick(now, |piece| self.again(piece));
            output.ping |= asks && output.open;
            output.update_time(now);
        }
        self.pump(now);
        let is_due = |link: &ConnectionLink| {
            link.receive_half.lock().due_at_ns().is_some_and(|due| due <= now)
        };
        for (index, link) in self.links.iter().enumerate() {
            let owes_ack = is_due(link);
            let mut output = link.output.lock();
            if owes_ack || output.ping {
                self.send_some(index, &mut output, now, owes_ack);
            }
        }
        // Acknowledgements for a link without a way back use another link.
        if self.links.iter().any(is_due) {
            for (index, link) in self.links.iter().enumerate() {
                let mut output = link.output.lock();
                if output.route.is_some() && self.send_some(index, &mut output, now, true) {
                    return;
                }
            }
        }
    }

    /// Whether packet `number` of link `index` may be the newest join. An outdated join has a
    /// length that did not get through, or an old address of the other end.
    pub(crate) fn is_newest_join(&self, index: usize, number: u64) -> bool {
        self.links[index].join_end.fetch_max(number + 1, Ordering::SeqCst) <= number
    }

    /// Whether, since `kicks`, a thread that wanted to send left its work to the holder of a link's
    /// lock, and that holder only checked the link.
    fn was_left_work(&self, kicks: u64) -> bool {
        self.kicks.load(Ordering::SeqCst) != kicks && !self.ready.is_empty()
    }

    /// When [`Connection::tick`] must be called next.
    pub(crate) fn deadline_ns(&self) -> Option<u64> {
        let kicks = self.kicks.load(Ordering::SeqCst);
        let sending =
            self.links.iter().filter_map(|link| link.output.lock().send_half.deadline_ns());
        // Without a route there is nothing to wait for; a new route triggers another check.
        let reached = self.links.iter().any(|link| link.output.lock().route.is_some());
        let owed = self
            .links
            .iter()
            .filter_map(|link| link.receive_half.lock().due_at_ns())
            .filter(|_| reached);
        let next = sending.chain(owed).min();
        if self.was_left_work(kicks) { Some(0) } else { next }
    }

    /// Whether link `index` waits for its carrier to have room.
    pub(crate) fn is_blocked(&self, index: usize) -> bool {
        let kicks = self.kicks.load(Ordering::SeqCst);
        let is_blocked =
            self.links[index].output.try_lock().is_some_and(|output| output.has_unsent());
        is_blocked || self.was_left_work(kicks)
    }

    /// Whether a link waits for the carrier of `sender` to have room.
    pub(crate) fn is_blocked_at(&self, sender: &Arc<dyn Sender>) -> bool {
        let kicks = self.kicks.load(Ordering::SeqCst);
        let is_blocked =
            self.links.iter().filter_map(|link| link.output.try_lock()).any(|output| {
                let is_at_sender =
                    output.route.as_ref().is_some_and(|route| Arc::ptr_eq(&route.sender, sender));
                is_at_sender && output.has_unsent()
            });
        is_blocked || self.was_left_work(kicks)
    }

    /// Asks on link `index` whether the peer is there.
    pub(crate) fn ping(&self, index: usize) {
        self.links[index].output.lock().ping = true;
    }

    /// The bytes that the connection's keys have sealed and opened, on all links together.
    pub(crate) fn carried_bytes(&self) -> u64 {
        let of = |link: &ConnectionLink| {
            let received = link.receive_half.lock().counts.bytes;
            received + link.output.lock().send_half.counts.bytes
        };
        self.links.iter().map(of).sum()
    }

    /// Link `index` uses this route from now on, in packets of this many bytes.
    pub(crate) fn open_link(&self, index: usize, route: Route, packet_bytes: usize) {
        let mut output = self.links[index].output.lock();
        let kind =
            if route.peer == Peer::Stream { RouteKind::Stream } else { RouteKind::Datagrams };
        output.lose_all(|piece| self.again(piece));
        output.send_half.renew(packet_bytes, kind);
        output.route = Some(route);
        output.open = true;
    }

    /// Link `index` carries nothing until it is reopened; what was in flight there uses other
    /// links.
    pub(crate) fn close_link(&self, index: usize) {
        let mut output = self.links[index].output.lock();
        output.lose_all(|piece| self.again(piece));
        output.open = false;
        output.route = None;
    }

    /// Closes all links, as if they had been lost, so that this connection keeps no carrier alive.
    pub(crate) fn close_links(&self) {
        (0..self.links.len()).for_each(|index| self.close_link(index));
    }
}

#[derive(PartialEq, Eq)]
enum FlushOutcome {
    All,
    Blocked,
}

impl LinkOutput {
    fn has_unsent(&self) -> bool {
        self.unsent_from < self.burst.len()
    }

    /// Hands the rest of the burst to the carrier. A carrier that fails drops it: its content
    /// eventually counts as lost, and the owner of the carrier learns of the failure.
    fn flush(&mut self) -> FlushOutcome {
        while self.has_unsent() {
            let Some(route) = &self.route else { break };
            match route.sender.send(&route.peer, &self.burst, self.unsent_from) {
                Ok(0) => {
                    route.waker.iter().for_each(|waker| waker.wake());
                    return FlushOutcome::Blocked;
                }
                Ok(count) => self.unsent_from += count,
                Err(_) => break,
            }
        }
        self.unsent_from = self.burst.len();
        FlushOutcome::All
    }

    fn update_time(&mut self, now: u64) {
        let state = (self.open, self.send_half.is_silent());
        if state != self.last_state {
            (self.last_state, self.state_since_ns) = (state, now);
        }
    }

    fn lose_all(&mut self, lost: impl FnMut(&SentPiece) -> bool) {
        self.burst.clear();
        self.unsent_from = 0;
        self.send_half.silence(lost);
    }
}
