//! The far side of a request, and the two kinds that most callers and layers need.
//!
//! Not here: far sides whose bytes lie elsewhere (in a socket's buffer, in a guest's memory); who has those
//! implements [`Exchange`].

use crate::{Flags, Operation, Outcome, Request};

/// The far side of a request, owned by it: source of a write's bytes, place for a read's bytes, and listener.
///
/// `fill` and `buffer` are called by the device at the moment that suits it, so that a payload moves once.
/// None of the methods may block: the bytes of a write are in memory before the request is made.
pub trait Exchange: Send {
    /// Copies the payload bytes `[offset, offset + into.len())` of a write into `into`.
    /// May be called several times, for any part.
    fn fill(&mut self, offset: u64, into: &mut [u8]);

    /// The place for a read's bytes: exactly the length of the request. Not called for other operations.
    fn buffer(&mut self) -> &mut [u8];

    /// Hears the outcome, exactly once.
    fn complete(self: Box<Self>, outcome: Outcome);
}

/// Bytes of its own, and a function that gets them back with the outcome.
struct Owned<F> {
    bytes: Vec<u8>,
    hear: F,
}

impl<F: FnOnce(Outcome, Vec<u8>) + Send> Exchange for Owned<F> {
    fn fill(&mut self, offset: u64, into: &mut [u8]) {
        let start = offset as usize;
        into.copy_from_slice(&self.bytes[start..start + into.len()]);
    }

    fn buffer(&mut self) -> &mut [u8] {
        &mut self.bytes
    }

    fn complete(self: Box<Self>, outcome: Outcome) {
        let Owned { bytes, hear } = *self;
        hear(outcome, bytes);
    }
}

/// The bytes of another exchange, and a function between the outcome and it.
struct Between<F> {
    asker: Box<dyn Exchange>,
    hear: F,
}

impl<F: FnOnce(Outcome, Box<dyn Exchange>) + Send> Exchange for Between<F> {
    fn fill(&mut self, offset: u64, into: &mut [u8]) {
        self.asker.fill(offset, into);
    }

    fn buffer(&mut self) -> &mut [u8] {
        self.asker.buffer()
    }

    fn complete(self: Box<Self>, outcome: Outcome) {
        let Between { asker, hear } = *self;
        hear(outcome, asker);
    }
}

impl Request {
    /// A read or write of `[address, address + bytes.len())`: of these bytes, or into them. `hear` gets them
    /// back with the outcome.
    #[must_use]
    pub fn with_bytes(
        operation: Operation,
        address: u64,
        flags: Flags,
        bytes: Vec<u8>,
        hear: impl FnOnce(Outcome, Vec<u8>) + Send + 'static,
    ) -> Self {
        let length = bytes.len() as u64;
        Request::new(operation, address, length, flags, Box::new(Owned { bytes, hear }))
    }

    /// A request that moves no payload.
    #[must_use]
    pub fn bare(
        operation: Operation,
        address: u64,
        length: u64,
        flags: Flags,
        hear: impl FnOnce(Outcome) + Send + 'static,
    ) -> Self {
        let hear = move |outcome, _| hear(outcome);
        Request::new(operation, address, length, flags, Box::new(Owned { bytes: Vec::new(), hear }))
    }

    /// The same request; `hear` gets the outcome before who asked, and passes one on to `asker.complete`.
    #[must_use]
    pub fn then(self, hear: impl FnOnce(Outcome, Box<dyn Exchange>) + Send + 'static) -> Self {
        self.wrap(|asker| Box::new(Between { asker, hear }))
    }
}
