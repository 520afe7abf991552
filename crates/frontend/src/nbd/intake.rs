//! Bytes of a client that were not parsed yet, in buffers that requests share.
//!
//! The payload of a write stays where it was received: its request holds the buffer and a range. A
//! buffer is reused only when no request holds it, which `Arc::get_mut` proves.
//!
//! Invariant: `start <= end <= current.len()`. Not here: sockets, the meaning of the bytes.

use std::ops::Range;
use std::sync::Arc;

use super::budget::{BudgetBuffer, ConnectionBudget};
use super::limits::{RECEIVE_BYTES_MAX, SPARE_BYTES_MAX};

type Buffer = Arc<BudgetBuffer>;

/// The payload of a write, where it was received.
pub(super) struct Payload {
    buffer: Buffer,
    range: Range<usize>,
}

impl Payload {
    pub(super) fn bytes(&self) -> &[u8] {
        &self.buffer[self.range.clone()]
    }
}

/// Buffers that may be free again, because no request holds them any more.
struct Spares {
    connection_budget: Arc<ConnectionBudget>,
    buffers: Vec<Buffer>,
    bytes: usize,
}

impl Spares {
    /// A buffer of at least `length` bytes with no other holder, reused if possible.
    fn take(&mut self, length: usize) -> Buffer {
        match self.find(length) {
            Some(index) => {
                let buffer = self.buffers.remove(index);
                self.bytes -= buffer.len();
                buffer
            }
            None => Arc::new(BudgetBuffer::zeroed(
                &self.connection_budget,
                length.next_multiple_of(RECEIVE_BYTES_MAX),
            )),
        }
    }

    fn find(&mut self, length: usize) -> Option<usize> {
        let fits = |buffer: &mut Buffer| buffer.len() >= length && Arc::get_mut(buffer).is_some();
        self.buffers.iter_mut().position(fits)
    }

    fn put(&mut self, buffer: Buffer) {
        if self.bytes + buffer.len() <= SPARE_BYTES_MAX {
            self.bytes += buffer.len();
            self.buffers.push(buffer);
        }
    }
}

/// A payload that is too long for the receive buffer, being received into a buffer of its own.
struct LongPayload {
    buffer: Buffer,
    filled: usize,
    length: usize,
}

/// Received bytes.
pub(super) struct Intake {
    current: Buffer,
    start: usize,
    end: usize,
    payload: Option<LongPayload>,
    spares: Spares,
}

impl Intake {
    /// Starts with bytes that arrived before; usually none.
    pub(super) fn with(received: &[u8], connection_budget: &Arc<ConnectionBudget>) -> Self {
        let mut spares =
            Spares { connection_budget: connection_budget.clone(), buffers: Vec::new(), bytes: 0 };
        let mut current = spares.take(received.len().max(RECEIVE_BYTES_MAX));
        if let Some(into) = Arc::get_mut(&mut current) {
            into[..received.len()].copy_from_slice(received);
        }
        Intake { current, start: 0, end: received.len(), payload: None, spares }
    }

    /// The received part of the payload that is being filled.
    pub(super) fn filled(&self) -> &[u8] {
        self.payload.as_ref().map_or(&[], |filling| &filling.buffer[..filling.filled])
    }

    /// What was received and not consumed, without the payload that is being filled.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.current[self.start..self.end]
    }

    /// Drops `length` bytes from the front.
    pub(super) fn consume(&mut self, length: usize) {
        self.start += length;
        debug_assert!(self.start <= self.end);
    }

    /// Takes `length` bytes from the front as a payload; they must be there.
    pub(super) fn take_payload(&mut self, length: usize) -> Payload {
        let range = self.start..self.start + length;
        self.consume(length);
        Payload { buffer: self.current.clone(), range }
    }

    /// Gives the payload of `length` bytes at the front a buffer of its own.
    pub(super) fn fill_apart(&mut self, length: usize) {
        let mut buffer = self.spares.take(length);
        // The rest of the receive buffer is the beginning of this payload, and behind it perhaps of
        // the next request, which stays.
        let copied_bytes = (self.end - self.start).min(length);
        if let Some(into) = Arc::get_mut(&mut buffer) {
            into[..copied_bytes]
                .copy_from_slice(&self.current[self.start..self.start + copied_bytes]);
        }
        self.consume(copied_bytes);
        self.payload = Some(LongPayload { buffer, filled: copied_bytes, length });
    }

    /// The payload started by `fill_apart`, once it is complete.
    pub(super) fn take_filled(&mut self) -> Option<Payload> {
        let LongPayload { buffer, length, .. } =
            self.payload.take_if(|filling| filling.filled == filling.length)?;
        // The list keeps the buffer while the request holds it, and finds it free later.
        self.spares.put(buffer.clone());
        Some(Payload { buffer, range: 0..length })
    }

    /// Whether a request or payload has arrived in part.
    pub(super) fn is_partial(&self) -> bool {
        self.start < self.end || self.payload.is_some()
    }

    /// Where to receive next: the payload that is being filled, or the receive buffer with room for
    /// a request whose header and payload have `wanted_bytes` (at most [`RECEIVE_BYTES_MAX`]).
    /// Never empty.
    pub(super) fn space(&mut self, wanted_bytes: usize) -> &mut [u8] {
        if self.payload.is_some() {
            return self.filling_space();
        }
        if self.is_worn() {
            // The old buffer cannot be written to while requests hold it: a device may read a
            // payload from it at any moment.
            let mut fresh = self.spares.take(RECEIVE_BYTES_MAX);
            let partial = self.start..self.end;
            if let Some(into) = Arc::get_mut(&mut fresh) {
                into[..partial.len()].copy_from_slice(&self.current[partial.clone()]);
            }
            (self.start, self.end) = (0, partial.len());
            let old_buffer = std::mem::replace(&mut self.current, fresh);
            self.spares.put(old_buffer);
        }
        let (start, end) = (self.start, self.end);
        let Some(buffer) = Arc::get_mut(&mut self.current) else { return &mut [] };
        if start == end {
            (self.start, self.end) = (0, 0);
        } else if end == buffer.len() || buffer.len() - start < wanted_bytes {
            // Only a partial request is ever moved: whole ones were submitted where they lie.
            buffer.copy_within(start..end, 0);
            (self.start, self.end) = (0, end - start);
        }
        &mut buffer[self.end..]
    }

    /// Whether the receive buffer must be replaced: requests hold it, it was released, or it is
    /// larger than usual because it holds what another process received.
    fn is_worn(&mut self) -> bool {
        let is_outgrown = self.start == self.end && self.current.len() > RECEIVE_BYTES_MAX;
        is_outgrown || self.current.is_empty() || Arc::get_mut(&mut self.current).is_none()
    }

    /// Bytes that the next [`Self::space`] allocates.
    pub(super) fn space_bytes(&mut self) -> usize {
        let needs_buffer = self.payload.is_none()
            && self.is_worn()
            && self.spares.find(RECEIVE_BYTES_MAX).is_none();
        if needs_buffer { RECEIVE_BYTES_MAX } else { 0 }
    }

    /// Bytes that [`Self::fill_apart`] allocates.
    pub(super) fn apart_bytes(&mut self, length: usize) -> usize {
        if self.spares.find(length).is_some() {
            0
        } else {
            length.next_multiple_of(RECEIVE_BYTES_MAX)
        }
    }

    /// Frees the buffers that are kept for later requests.
    pub(super) fn drop_spares(&mut self) {
        self.spares.buffers.clear();
        self.spares.bytes = 0;
    }

    /// Also frees the receive buffer if it is empty.
    pub(super) fn rest(&mut self) {
        self.drop_spares();
        if !self.is_partial() {
            (self.start, self.end) = (0, 0);
            self.current = Arc::new(BudgetBuffer::zeroed(&self.spares.connection_budget, 0));
        }
    }

    fn filling_space(&mut self) -> &mut [u8] {
        match &mut self.payload {
            Some(LongPayload { buffer, filled, length }) => match Arc::get_mut(buffer) {
                Some(bytes) => &mut bytes[*filled..*length],
                None => &mut [],
            },
            None => &mut [],
        }
    }

    /// `length` bytes were received into the last `space`.
    pub(super) fn received(&mut self, length: usize) {
        match &mut self.payload {
            Some(filling) => filling.filled += length,
            None => self.end += length,
        }
    }
}
