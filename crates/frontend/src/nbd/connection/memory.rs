//! The memory of one connection: what it may allocate, when it waits for memory, what it returns.
//!
//! Invariants: every buffer is requested before it is allocated. A connection that waits for memory
//! takes nothing more from its client. A client that keeps memory for which others wait, and moves
//! next to nothing, is disconnected. Not here: the order of waiting connections (`budget`).

use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use sawmill_device::Operation;

use super::super::budget::BudgetBuffer;
use super::super::limits::RECEIVE_BYTES_MAX;
use super::super::outbox::OutboxState;
use super::super::ticket::Body;
use super::{Connection, STATUS_BYTES_MAX};

/// The bytes that a client must read, or send, within `linger_time_max` while others wait for the
/// memory it keeps.
const PROGRESS_BYTES_MIN: u64 = 1 << 20;

/// How far the client of a connection had come at a time.
#[derive(Clone, Copy)]
pub(super) struct ClientProgress {
    at: Instant,
    received_bytes: u64,
    sent_bytes: u64,
}

impl Connection {
    /// Whether the missing memory is available now.
    pub(super) fn may_go_on(&mut self) -> bool {
        match self.short_of {
            Some(bytes) => self.ensure(bytes),
            None => self.may_submit(),
        }
    }

    /// Whether there is memory to receive into.
    pub(super) fn may_receive(&mut self) -> bool {
        let bytes = self.intake.space_bytes();
        self.ensure(bytes as u64)
    }

    /// Whether this much memory may be allocated; otherwise this connection must wait. Cached
    /// buffers are freed first.
    fn ensure(&mut self, bytes: u64) -> bool {
        if bytes == 0 {
            self.account.withdraw();
            self.short_of = None;
            return true;
        }
        // Spare buffers go only when memory is short: they save allocating and zeroing one for each
        // request.
        let mut has = self.account.ensure(bytes);
        if !has {
            self.intake.drop_spares();
            self.drop_read_spares();
            has = self.account.ensure(bytes);
        }
        self.short_of = (!has).then_some(bytes);
        has
    }

    fn drop_read_spares(&mut self) {
        self.spare_reads.clear();
        self.channel.drop_spares();
    }

    /// Nothing is in flight and nothing arrived for a while: an idle client holds no memory.
    pub(super) fn rest_memory(&mut self) {
        self.intake.rest();
        self.drop_read_spares();
        self.account.withdraw();
        self.account.rest();
    }

    /// Whether the client has kept memory for which others wait, and has read next to nothing (or
    /// sent next to nothing of a payload) for as long as allowed.
    pub(super) fn is_stalled(&mut self, state: &OutboxState) -> bool {
        // Where the client has nothing to read or to send, the device is slow, and no connection is
        // closed for that.
        let is_up_to_client = state.is_socket_full || self.filling.is_some();
        if !is_up_to_client || !self.account.holds_pool() || !self.account.is_wanted() {
            self.wanted_since = None;
            return false;
        }
        let counters = &self.channel.counters;
        let now = ClientProgress {
            at: Instant::now(),
            received_bytes: counters.bytes_in.load(Relaxed),
            sent_bytes: counters.bytes_out.load(Relaxed),
        };
        let since = *self.wanted_since.get_or_insert(now);
        if since.at.elapsed() < self.shared.options.linger_time_max {
            return false;
        }
        let moved_bytes = if state.is_socket_full {
            now.sent_bytes - since.sent_bytes
        } else {
            now.received_bytes - since.received_bytes
        };
        // Each period is judged by itself: a client that read a gigabyte before it stopped
        // gains nothing by that.
        self.wanted_since = Some(now);
        moved_bytes < PROGRESS_BYTES_MIN
    }

    /// Whether there is memory for what the request makes us allocate.
    pub(super) fn has_memory(&mut self, operation: Operation, length: u64) -> bool {
        let style = self.session.style;
        let bytes = match operation {
            Operation::Read => self.read_bytes(style.read_head_bytes() + length as usize),
            Operation::Write if style.request_bytes() + length as usize > RECEIVE_BYTES_MAX => {
                self.intake.apart_bytes(length as usize)
            }
            Operation::Allocation => STATUS_BYTES_MAX as usize,
            _ => 0,
        };
        self.ensure(bytes as u64)
    }

    /// Bytes to allocate for the reply to a read of this length: none if a spare buffer is long
    /// enough.
    fn read_bytes(&mut self, length: usize) -> usize {
        if self.spare_reads.is_empty() {
            self.channel.take_spare_reads(&mut self.spare_reads);
        }
        if self.spare_reads.last().is_some_and(|spare| spare.len() >= length) {
            return 0;
        }
        // A buffer that is too short goes. If it stayed, each later read would try it first and
        // miss the longer ones below it.
        self.spare_reads.pop();
        length
    }

    /// A buffer for the reply to a read, reused if possible. The caller has checked
    /// [`Self::has_memory`].
    pub(super) fn read_body(&mut self, length: usize) -> Body {
        let head_bytes = self.session.style.read_head_bytes();
        let end = head_bytes + length;
        let spare = match self.read_bytes(end) {
            0 => self.spare_reads.pop(),
            _ => None,
        };
        let bytes = spare.unwrap_or_else(|| {
            BudgetBuffer::headed(self.account.connection_budget(), head_bytes, end)
        });
        Body::Read { bytes, head_bytes, end }
    }
}
