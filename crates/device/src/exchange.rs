//! The far side of a request, and the two kinds that most callers and layers need.
//!
//! Not here: far sides whose bytes lie elsewhere, in a socket's buffer or in a guest's memory.
//! Their owners implement [`Exchange`].

use crate::Outcome;

/// The far side of a request, which owns it: it gives a write's bytes, takes a read's bytes, and
/// receives the answer.
///
/// `fill` and `buffer` are called by the device at the moment that suits it, so that a payload
/// moves once. None of the methods may block: the bytes of a write are in memory before the request
/// is made.
pub trait Exchange: Send {
    /// Copies the payload bytes `[offset, offset + into.len())` of a write into `into`.
    /// May be called several times, for any part.
    fn fill(&mut self, offset: u64, into: &mut [u8]);

    /// The place for a read's bytes: exactly the length of the request. Not called for other
    /// operations.
    fn buffer(&mut self) -> &mut [u8];

    /// Receives the outcome, exactly once.
    fn complete(self: Box<Self>, outcome: Outcome);
}

/// Owned bytes, and a function that gets them back with the outcome.
pub(crate) struct BufferExchange<F> {
    pub(crate) bytes: Vec<u8>,
    pub(crate) on_outcome: F,
}

impl<F: FnOnce(Outcome, Vec<u8>) + Send> Exchange for BufferExchange<F> {
    fn fill(&mut self, offset: u64, into: &mut [u8]) {
        let start = offset as usize;
        into.copy_from_slice(&self.bytes[start..start + into.len()]);
    }

    fn buffer(&mut self) -> &mut [u8] {
        &mut self.bytes
    }

    fn complete(self: Box<Self>, outcome: Outcome) {
        let BufferExchange { bytes, on_outcome } = *self;
        on_outcome(outcome, bytes);
    }
}

/// Another exchange, and a function that gets the outcome before that exchange does.
pub(crate) struct RelayExchange<F> {
    pub(crate) asker: Box<dyn Exchange>,
    pub(crate) on_outcome: F,
}

impl<F: FnOnce(Outcome, Box<dyn Exchange>) + Send> Exchange for RelayExchange<F> {
    fn fill(&mut self, offset: u64, into: &mut [u8]) {
        self.asker.fill(offset, into);
    }

    fn buffer(&mut self) -> &mut [u8] {
        self.asker.buffer()
    }

    fn complete(self: Box<Self>, outcome: Outcome) {
        let RelayExchange { asker, on_outcome } = *self;
        on_outcome(outcome, asker);
    }
}
