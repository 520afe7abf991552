//! A request: the operation and its range, the source or destination of the bytes, and the receiver
//! of the outcome.
//!
//! Invariant: every request is answered exactly once. A request that is dropped unanswered answers
//! itself with an error, so no layer can lose one.
//!
//! Not here: the kinds of exchange (`exchange`), the contract (`contract`), blocking calls
//! (`blocking`).

use crate::exchange::{BufferExchange, RelayExchange};
use crate::{Error, ErrorKind, Exchange, Flags, Geometry, Operation, Outcome, Reply, Result};

/// A request in flight. Address and length are in bytes.
pub struct Request {
    /// The operation.
    pub operation: Operation,
    /// First byte of the range.
    pub address: u64,
    /// Bytes in the range.
    pub length: u64,
    /// Modifiers.
    pub flags: Flags,
    exchange: Option<Box<dyn Exchange>>,
}

impl Request {
    /// A request for `[address, address + length)`.
    #[must_use]
    pub fn new(
        operation: Operation,
        address: u64,
        length: u64,
        flags: Flags,
        exchange: Box<dyn Exchange>,
    ) -> Self {
        Request { operation, address, length, flags, exchange: Some(exchange) }
    }

    /// A read into these bytes, or a write of them, at `[address, address + bytes.len())`.
    /// `on_outcome` gets them back with the outcome.
    #[must_use]
    pub fn with_bytes(
        operation: Operation,
        address: u64,
        flags: Flags,
        bytes: Vec<u8>,
        on_outcome: impl FnOnce(Outcome, Vec<u8>) + Send + 'static,
    ) -> Self {
        let length = bytes.len() as u64;
        Request::new(
            operation,
            address,
            length,
            flags,
            Box::new(BufferExchange { bytes, on_outcome }),
        )
    }

    /// A request that moves no payload.
    #[must_use]
    pub fn bare(
        operation: Operation,
        address: u64,
        length: u64,
        flags: Flags,
        on_outcome: impl FnOnce(Outcome) + Send + 'static,
    ) -> Self {
        let on_outcome = move |outcome, _| on_outcome(outcome);
        Request::new(
            operation,
            address,
            length,
            flags,
            Box::new(BufferExchange { bytes: Vec::new(), on_outcome }),
        )
    }

    /// The same request; `on_outcome` gets the outcome before the submitter, whose exchange is
    /// `asker`, and passes an outcome on to `asker.complete`.
    #[must_use]
    pub fn then(
        self,
        on_outcome: impl FnOnce(Outcome, Box<dyn Exchange>) + Send + 'static,
    ) -> Self {
        self.wrap(|asker| Box::new(RelayExchange { asker, on_outcome }))
    }

    /// The end of the range, or `None` when it overflows.
    #[must_use]
    pub fn end(&self) -> Option<u64> {
        self.address.checked_add(self.length)
    }

    /// Copies payload bytes of a write, see [`Exchange::fill`].
    pub fn fill(&mut self, offset: u64, into: &mut [u8]) {
        if let Some(exchange) = &mut self.exchange {
            exchange.fill(offset, into);
        }
    }

    /// The buffer for a read's bytes, see [`Exchange::buffer`].
    pub fn buffer(&mut self) -> &mut [u8] {
        match &mut self.exchange {
            Some(exchange) => exchange.buffer(),
            None => &mut [],
        }
    }

    /// Answers the request.
    pub fn complete(mut self, outcome: Outcome) {
        if let Some(exchange) = self.exchange.take() {
            exchange.complete(outcome);
        }
    }

    /// Answers the request with [`Reply::Done`].
    pub fn done(self) {
        self.complete(Ok(Reply::Done));
    }

    /// Answers the request with an error.
    pub fn fail(self, error: Error) {
        self.complete(Err(error));
    }

    /// The same request with another exchange around the old one, by which a layer receives the
    /// outcome.
    #[must_use]
    pub fn wrap(mut self, with: impl FnOnce(Box<dyn Exchange>) -> Box<dyn Exchange>) -> Self {
        self.exchange = self.exchange.take().map(with);
        self
    }

    /// Checks the request against a geometry (D6, D7). Every device calls this first.
    pub fn check(&self, geometry: &Geometry) -> Result<()> {
        let invalid = |text: String| Err(Error::new(ErrorKind::Invalid, text));
        let supported = match self.operation {
            Operation::Read | Operation::Write | Operation::Flush | Operation::Prefetch => true,
            Operation::Discard => geometry.operations.discard,
            Operation::WriteZeroes => geometry.operations.write_zeroes,
            Operation::Allocation => geometry.operations.allocation,
        };
        if !supported {
            return invalid(format!("{:?} is not supported by this device", self.operation));
        }
        if self.operation == Operation::Flush {
            return Ok(());
        }
        if self.length == 0 {
            return invalid(format!("{:?} of length zero", self.operation));
        }
        if self.end().is_none_or(|end| end > geometry.size_bytes) {
            return invalid(format!(
                "{:?} of {} bytes at {} reaches past the end of the device at {}",
                self.operation, self.length, self.address, geometry.size_bytes
            ));
        }
        let moves_payload = matches!(self.operation, Operation::Read | Operation::Write);
        if moves_payload && self.length > u64::from(geometry.request_bytes_max) {
            return invalid(format!(
                "{:?} of {} bytes is longer than the limit of {}",
                self.operation, self.length, geometry.request_bytes_max
            ));
        }
        let changes = matches!(
            self.operation,
            Operation::Write | Operation::Discard | Operation::WriteZeroes
        );
        if changes && geometry.read_only {
            return Err(Error::new(
                ErrorKind::ReadOnly,
                format!("{:?} refused: the device is read-only", self.operation),
            ));
        }
        Ok(())
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        if let Some(exchange) = self.exchange.take() {
            exchange.complete(Err(Error::new(
                ErrorKind::Internal,
                format!("{:?} at {} was dropped unanswered", self.operation, self.address),
            )));
        }
    }
}
