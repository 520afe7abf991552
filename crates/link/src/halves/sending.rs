//! What was sent on a link and is not acknowledged, how fast to send more, and what counts as lost.
//!
//! Loss is detected by later packets that arrived (by number or by time), or by silence (a probe
//! timeout). What a lost packet carried goes back to its place and is sent in a new packet, perhaps
//! on another link. The window uses additive increase and gentle decrease, because links of a LAN
//! are few and near. It stops growing when packets have queued for a while, and never exceeds the
//! peer's buffers: data that waits there has left the caches when it is read, and everything else
//! waits behind it.
//!
//! Invariants: no allocation after `new`; a number is settled once (acknowledged or lost), and then
//! its bytes leave the window; an acknowledgement of a packet that was never sent is a violation.
//!
//! Not here: what was received (`receiving`), which link a packet takes (`connection`), sending
//! lost pieces again (`unsent_pieces`).

use crate::clock::{MS, US};
use crate::violation::Violation;
use sawmill_format::link::statement::Ack;

/// The most packets in flight on one link.
const FLIGHTS_MAX: usize = 2048;
/// Of these, the number reserved for packets without pieces that must arrive: acknowledgements,
/// pings, notes.
const FLIGHTS_SPARE: u64 = 256;
/// The most pieces in one packet.
const PIECES_MAX: usize = 12;
/// How many later packets must have arrived before an earlier one counts as lost.
const REORDERED_MAX: u64 = 32;
/// The smallest window, in packets, and the first window, in bytes.
const WINDOW_PACKETS_MIN: usize = 4;
const WINDOW_BYTES_FIRST: usize = 512 << 10;
/// The largest window: the buffer size that carriers request, so that a single peer cannot overflow
/// a buffer. A stream's buffers do not overflow.
const WINDOW_BYTES_MAX: usize = 4 << 20;
/// A queueing delay above this, and above the route's own delay, means that the window is large
/// enough.
const QUEUED_NS_MAX: u64 = MS;
/// The shortest round trip is that of the last one to two rounds of this length.
const ROUND_NS: u64 = 10_000 * MS;
/// The round trip time before the first measurement, and the smallest timeout: the peer's thread
/// may not be running for a while.
const RTT_NS_FIRST: u64 = 20 * MS;
const PROBE_NS_MIN: u64 = 20 * MS;
/// The longest timeout, unless the round trip takes as long.
const PROBE_NS_MAX: u64 = 250 * MS;
/// After this many timeouts in a row the link is silent, and its packets use other links.
const PROBES_SILENT_MAX: u32 = 3;

/// What a piece is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PieceKind {
    /// A command or a reply, with bytes of the payload from 0 on.
    Head,
    /// Bytes of the payload.
    Body,
}

/// What must arrive of a packet: a command or a reply with its inline bytes, or data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SentPiece {
    pub(crate) kind: PieceKind,
    pub(crate) place: u16,
    pub(crate) use_number: u64,
    pub(crate) offset: u32,
    pub(crate) bytes: u32,
}

const NO_PIECE: SentPiece =
    SentPiece { kind: PieceKind::Head, place: 0, use_number: 0, offset: 0, bytes: 0 };

/// The pieces of one packet.
#[derive(Clone, Copy)]
pub(crate) struct SentPieces {
    pieces: [SentPiece; PIECES_MAX],
    count: u8,
}

impl SentPieces {
    pub(crate) const fn new() -> Self {
        SentPieces { pieces: [NO_PIECE; PIECES_MAX], count: 0 }
    }

    pub(crate) fn is_full(&self) -> bool {
        usize::from(self.count) == PIECES_MAX
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Adds a piece. The caller has checked `is_full`.
    pub(crate) fn push(&mut self, piece: SentPiece) {
        self.pieces[usize::from(self.count)] = piece;
        self.count += 1;
    }

    fn iter(&self) -> impl Iterator<Item = &SentPiece> {
        self.pieces[..usize::from(self.count)].iter()
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    Settled,
    Out,
}

#[derive(Clone, Copy)]
struct Flight {
    sent_at_ns: u64,
    bytes: u32,
    fate: Fate,
    pieces: SentPieces,
}

/// How a route carries packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RouteKind {
    /// Each on its own: it may lose and reorder them.
    Datagrams,
    /// In a stream, which neither loses nor reorders.
    Stream,
}

/// Counters of a link's sending half.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SendingCounts {
    /// Packets sent, and their bytes.
    pub packets: u64,
    /// Bytes of all packets.
    pub bytes: u64,
    /// Packets that counted as lost.
    pub lost: u64,
    /// Pieces of lost packets that had to be sent again, by this link or another.
    pub pieces_resent: u64,
    /// Times that nothing was received for a probe timeout.
    pub timeouts: u64,
}

/// The sending half of a link.
pub(crate) struct SendHalf {
    next: u64,
    /// All numbers below this are settled.
    oldest: u64,
    flights: Box<[Flight]>,
    in_flight_bytes: usize,
    window_bytes: usize,
    slow_start: bool,
    /// Losses of packets below this number have already reduced the window.
    cut_until: u64,
    largest: Option<u64>,
    smoothed_ns: u64,
    variation_ns: u64,
    /// The shortest round trip of this round and of the one before, and when this round started.
    round_trip_min_ns: [u64; 2],
    round_start_at_ns: u64,
    /// When the oldest unanswered question was sent, or the last answer arrived.
    waiting_since_ns: u64,
    timeouts: u32,
    silent: bool,
    /// When a silent link is probed again.
    probe_at_ns: u64,
    route_kind: RouteKind,
    pub(crate) packet_bytes: usize,
    pub(crate) counts: SendingCounts,
}

impl SendHalf {
    pub(crate) fn new() -> Self {
        let flight =
            Flight { sent_at_ns: 0, bytes: 0, fate: Fate::Settled, pieces: SentPieces::new() };
        SendHalf {
            next: 0,
            oldest: 0,
            flights: vec![flight; FLIGHTS_MAX].into(),
            in_flight_bytes: 0,
            window_bytes: WINDOW_BYTES_FIRST,
            slow_start: true,
            cut_until: 0,
            largest: None,
            smoothed_ns: RTT_NS_FIRST,
            variation_ns: RTT_NS_FIRST / 2,
            round_trip_min_ns: [u64::MAX; 2],
            round_start_at_ns: 0,
            waiting_since_ns: 0,
            timeouts: 0,
            silent: false,
            probe_at_ns: 0,
            route_kind: RouteKind::Datagrams,
            packet_bytes: sawmill_format::link::PACKET_BYTES_MIN,
            counts: SendingCounts::default(),
        }
    }

    /// Starts on a new route: measurements of the old one do not apply to it.
    pub(crate) fn renew(&mut self, packet_bytes: usize, route_kind: RouteKind) {
        (self.packet_bytes, self.route_kind) = (packet_bytes, route_kind);
        (self.window_bytes, self.slow_start) = (WINDOW_BYTES_FIRST, true);
        (self.smoothed_ns, self.variation_ns) = (RTT_NS_FIRST, RTT_NS_FIRST / 2);
        self.round_trip_min_ns = [u64::MAX; 2];
        self.answered();
    }

    fn flight_index(number: u64) -> usize {
        (number % FLIGHTS_MAX as u64) as usize
    }

    /// Whether another packet may be sent.
    pub(crate) fn has_room(&self) -> bool {
        let has_flight = self.next - self.oldest < FLIGHTS_MAX as u64 - FLIGHTS_SPARE;
        !self.silent && has_flight && self.in_flight_bytes < self.window_bytes
    }

    /// Whether nothing was received for several timeouts.
    pub(crate) fn is_silent(&self) -> bool {
        self.silent
    }

    /// Smoothed round trip time, in nanoseconds.
    pub(crate) fn rtt_ns(&self) -> u64 {
        self.smoothed_ns
    }

    /// Whether the round trip time was measured on this route.
    pub(crate) fn is_measured(&self) -> bool {
        self.round_trip_min_ns[0] != u64::MAX
    }

    pub(crate) fn window_bytes(&self) -> usize {
        self.window_bytes
    }

    /// Roughly how long a packet sent now would queue, in nanoseconds.
    pub(crate) fn backlog_ns(&self) -> u64 {
        let share = self.in_flight_bytes as u64 * 1024 / self.window_bytes.max(1) as u64;
        self.smoothed_ns / 1024 * share
    }

    /// The number of the next packet, for use with [`SendHalf::sent`]. Here and below, `lost`
    /// returns whether a piece must be sent again. If the flight of the oldest packet is needed,
    /// that packet counts as lost: thousands of later packets have not settled it.
    pub(crate) fn number(&mut self, mut lost: impl FnMut(&SentPiece) -> bool) -> u64 {
        if self.next - self.oldest >= FLIGHTS_MAX as u64 {
            self.lose(self.oldest, &mut lost);
            self.advance();
        }
        self.next
    }

    /// Notes a packet that is sent under the number of [`SendHalf::number`], and that requests an
    /// acknowledgement.
    pub(crate) fn sent(&mut self, now: u64, bytes: usize, pieces: &SentPieces) {
        let index = self.count_sent(bytes);
        if self.in_flight_bytes == 0 {
            self.waiting_since_ns = now;
        }
        self.flights[index] =
            Flight { sent_at_ns: now, bytes: bytes as u32, fate: Fate::Out, pieces: *pieces };
        self.in_flight_bytes += bytes;
    }

    /// As [`SendHalf::sent`], for a packet that the peer never acknowledges: it is settled
    /// immediately, so that it does not hold up later ones.
    pub(crate) fn sent_unacknowledged(&mut self, bytes: usize) {
        let index = self.count_sent(bytes);
        self.flights[index].fate = Fate::Settled;
        self.advance();
    }

    /// Counts a packet, and returns the index of its flight.
    fn count_sent(&mut self, bytes: usize) -> usize {
        let index = Self::flight_index(self.next);
        self.counts.packets += 1;
        self.counts.bytes += bytes as u64;
        self.next += 1;
        index
    }

    fn advance(&mut self) {
        while self.oldest < self.next
            && self.flights[Self::flight_index(self.oldest)].fate == Fate::Settled
        {
            self.oldest += 1;
        }
    }

    /// An answer arrived: the link works.
    pub(crate) fn answered(&mut self) {
        (self.timeouts, self.silent) = (0, false);
    }

    /// Settles what an acknowledgement names, and what it shows to be lost.
    pub(crate) fn acknowledge(
        &mut self,
        now: u64,
        ack: &Ack<'_>,
        mut lost: impl FnMut(&SentPiece) -> bool,
    ) -> Result<(), Violation> {
        if ack.largest >= self.next {
            return Err(Violation::Rule("it acknowledges a packet that was never sent"));
        }
        let (mut newly, mut newest_sent) = (0, None);
        for (first, last) in ack.runs() {
            if last < self.oldest {
                break;
            }
            for number in first.max(self.oldest)..=last {
                let flight = &mut self.flights[Self::flight_index(number)];
                if flight.fate != Fate::Out {
                    continue;
                }
                flight.fate = Fate::Settled;
                newly += flight.bytes as usize;
                if number == ack.largest {
                    newest_sent = Some(flight.sent_at_ns);
                }
            }
        }
        if let Some(sent_at_ns) = newest_sent {
            let delay_ns = u64::from(ack.delay_us) * US;
            self.measure(now, now.saturating_sub(sent_at_ns).saturating_sub(delay_ns));
        }
        if newly > 0 {
            self.in_flight_bytes -= newly;
            self.waiting_since_ns = now;
            self.answered();
            self.grow(newly);
        }
        self.largest = self.largest.max(Some(ack.largest));
        self.find_lost(now, &mut lost);
        self.advance();
        Ok(())
    }

    fn measure(&mut self, now: u64, sample_ns: u64) {
        if now.saturating_sub(self.round_start_at_ns) >= ROUND_NS {
            (self.round_trip_min_ns, self.round_start_at_ns) =
                ([sample_ns, self.round_trip_min_ns[0]], now);
        }
        self.round_trip_min_ns[0] = self.round_trip_min_ns[0].min(sample_ns);
        if self.largest.is_none() {
            (self.smoothed_ns, self.variation_ns) = (sample_ns, sample_ns / 2);
            return;
        }
        let off = self.smoothed_ns.abs_diff(sample_ns);
        self.variation_ns = (3 * self.variation_ns + off) / 4;
        self.smoothed_ns = (7 * self.smoothed_ns + sample_ns) / 8;
    }

    fn grow(&mut self, newly: usize) {
        let round_trip_min_ns = self.round_trip_min_ns[0].min(self.round_trip_min_ns[1]);
        if self.smoothed_ns > round_trip_min_ns.saturating_mul(2).saturating_add(QUEUED_NS_MAX) {
            self.slow_start = false;
            return;
        }
        let most = match self.route_kind {
            RouteKind::Stream => usize::MAX,
            RouteKind::Datagrams => WINDOW_BYTES_MAX,
        };
        let most = most.min(FLIGHTS_MAX * self.packet_bytes);
        // An unused window shows nothing about the route.
        if self.in_flight_bytes + newly < self.window_bytes / 2 {
            return;
        }
        let growth_bytes = if self.slow_start {
            newly
        } else {
            self.packet_bytes * newly / self.window_bytes.max(1)
        };
        self.window_bytes = (self.window_bytes + growth_bytes).min(most);
    }

    fn cut(&mut self) {
        let least = WINDOW_PACKETS_MIN * self.packet_bytes;
        self.window_bytes = (self.window_bytes / 10 * 8).max(least);
        self.slow_start = false;
        self.cut_until = self.next;
    }

    fn lost_after_ns(&self) -> u64 {
        (self.smoothed_ns + self.smoothed_ns / 4).max(self.smoothed_ns + 2 * MS)
    }

    /// Finds packets that later ones have overtaken by too many numbers, or by too much time.
    fn find_lost(&mut self, now: u64, lost: &mut impl FnMut(&SentPiece) -> bool) {
        let Some(largest) = self.largest else { return };
        let lost_after_ns = self.lost_after_ns();
        for number in self.oldest..largest {
            let flight = self.flights[Self::flight_index(number)];
            let late = largest - number >= REORDERED_MAX
                || now.saturating_sub(flight.sent_at_ns) >= lost_after_ns;
            if flight.fate == Fate::Out && late {
                self.lose(number, lost);
                if number >= self.cut_until {
                    self.cut();
                }
            }
        }
    }

    fn lose(&mut self, number: u64, lost: &mut impl FnMut(&SentPiece) -> bool) {
        let flight = &mut self.flights[Self::flight_index(number)];
        flight.fate = Fate::Settled;
        self.in_flight_bytes -= flight.bytes as usize;
        self.counts.lost += 1;
        let pieces = flight.pieces;
        self.counts.pieces_resent += pieces.iter().filter(|piece| lost(piece)).count() as u64;
    }

    fn timeout_ns(&self) -> u64 {
        let base = (self.smoothed_ns + 4 * self.variation_ns + 2 * super::receiving::ACK_DELAY_NS)
            .max(PROBE_NS_MIN);
        (base << self.timeouts.min(6)).min(PROBE_NS_MAX.max(2 * base))
    }

    /// When [`SendHalf::tick`] has something to do.
    pub(crate) fn deadline_ns(&self) -> Option<u64> {
        if self.in_flight_bytes == 0 {
            return self.silent.then_some(self.probe_at_ns);
        }
        let timeout = self.waiting_since_ns + self.timeout_ns();
        let oldest = self.flights[Self::flight_index(self.oldest)];
        let is_overtaken =
            oldest.fate == Fate::Out && self.largest.is_some_and(|largest| self.oldest < largest);
        Some(if is_overtaken {
            timeout.min(oldest.sent_at_ns + self.lost_after_ns())
        } else {
            timeout
        })
    }

    /// Handles the timers: overdue packets count as lost. Returns true after a timeout, when the
    /// caller must probe.
    pub(crate) fn tick(&mut self, now: u64, mut lost: impl FnMut(&SentPiece) -> bool) -> bool {
        self.find_lost(now, &mut lost);
        let is_overdue =
            self.in_flight_bytes > 0 && now >= self.waiting_since_ns + self.timeout_ns();
        if is_overdue {
            self.timeouts += 1;
            self.counts.timeouts += 1;
            self.waiting_since_ns = now;
            if self.timeouts >= PROBES_SILENT_MAX && !self.silent {
                (self.silent, self.probe_at_ns) = (true, now);
            }
            self.lose_all(&mut lost);
            self.cut();
        }
        self.advance();
        let is_probe_due = self.silent && now >= self.probe_at_ns;
        if is_probe_due {
            self.probe_at_ns = now + self.timeout_ns();
            self.timeouts += 1;
        }
        is_overdue || is_probe_due
    }

    /// The peer was heard on a silent link: probe immediately whether it receives from us too.
    pub(crate) fn packet_received(&mut self, now: u64) {
        if self.silent {
            (self.probe_at_ns, self.timeouts) = (now, PROBES_SILENT_MAX);
        }
    }

    /// Everything in flight counts as lost: the route is gone, or silent.
    pub(crate) fn lose_all(&mut self, mut lost: impl FnMut(&SentPiece) -> bool) {
        for number in self.oldest..self.next {
            if self.flights[Self::flight_index(number)].fate == Fate::Out {
                self.lose(number, &mut lost);
            }
        }
        self.advance();
    }

    /// The route is gone: nothing is sent there until [`SendHalf::renew`].
    pub(crate) fn silence(&mut self, lost: impl FnMut(&SentPiece) -> bool) {
        self.silent = true;
        self.lose_all(lost);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_packet_whose_flight_is_needed_for_others_counts_as_lost() {
        let mut sending = SendHalf::new();
        sending.renew(1200, RouteKind::Stream);
        let mut pieces = SentPieces::new();
        pieces.push(SentPiece { place: 7, ..NO_PIECE });
        assert_eq!(sending.number(|_| panic!("nothing is lost yet")), 0);
        sending.sent(1, 1200, &pieces);
        let mut lost = Vec::new();
        for _ in 0..3 * FLIGHTS_MAX {
            sending.number(|piece| {
                lost.push(piece.place);
                true
            });
            sending.sent_unacknowledged(100);
        }
        assert_eq!((lost, sending.in_flight_bytes, sending.deadline_ns()), (vec![7], 0, None));
        assert_eq!((sending.counts.lost, sending.counts.pieces_resent), (1, 1));
    }
}
