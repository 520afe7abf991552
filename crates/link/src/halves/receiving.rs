//! What was received on a link: it refuses duplicates, and remembers what must be acknowledged.
//!
//! Invariant: a number is accepted once (replay window); an acknowledgement names only accepted
//! numbers.

use crate::clock::MS;
use crate::session::ReplayWindow;

/// How long an acknowledgement waits for a packet that can carry it.
pub(crate) const ACK_DELAY_NS: u64 = MS;

/// Counters of a link's receiving half: packets that opened and were new.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReceivingCounts {
    /// Packets.
    pub packets: u64,
    /// Bytes of all packets.
    pub bytes: u64,
}

/// The receiving half of a link.
pub(crate) struct ReceiveHalf {
    window: ReplayWindow,
    /// Packets since the last acknowledgement that request one, and the arrival times of the first
    /// and the newest of them.
    owed: u32,
    owed_since_ns: u64,
    newest_at_ns: u64,
    pub(crate) counts: ReceivingCounts,
}

impl ReceiveHalf {
    pub(crate) fn new() -> Self {
        let counts = ReceivingCounts::default();
        ReceiveHalf {
            window: ReplayWindow::new(),
            owed: 0,
            owed_since_ns: 0,
            newest_at_ns: 0,
            counts,
        }
    }

    /// Accepts the number of a packet. Returns false if it was accepted before, or is too old to
    /// tell.
    pub(crate) fn take(&mut self, number: u64, bytes: u32) -> bool {
        let first = self.window.take(number);
        self.counts.packets += u64::from(first);
        self.counts.bytes += if first { bytes.into() } else { 0 };
        first
    }

    /// A packet that requests an acknowledgement arrived.
    pub(crate) fn owe(&mut self, now: u64) {
        if self.owed == 0 {
            self.owed_since_ns = now;
        }
        self.owed += 1;
        self.newest_at_ns = now;
    }

    /// Whether an acknowledgement is owed.
    pub(crate) fn owes(&self) -> bool {
        self.owed > 0
    }

    /// When an acknowledgement must be sent on its own: immediately if several packets wait for it.
    pub(crate) fn due_at_ns(&self) -> Option<u64> {
        match self.owed {
            0 => None,
            1 => Some(self.owed_since_ns + ACK_DELAY_NS),
            _ => Some(self.owed_since_ns),
        }
    }

    /// The runs to acknowledge, newest first, and the delay in microseconds. After this, nothing is
    /// owed.
    pub(crate) fn acknowledge(&mut self, now: u64, runs: &mut [(u64, u64)]) -> (usize, u32) {
        self.owed = 0;
        let delay_us = (now.saturating_sub(self.newest_at_ns) / 1000).min(u32::MAX.into()) as u32;
        (self.window.ranges(runs), delay_us)
    }
}
