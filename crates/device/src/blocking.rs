//! Convenience for callers that may wait: blocking reads, writes and flushes on any device. Not
//! here: anything for doors, which must not wait and submit a `Request` of their own.

use std::sync::mpsc::sync_channel;

use crate::{Allocation, BlockDevice, Error, ErrorKind, Flags, Operation, Reply, Request, Result};

/// Blocking calls on any block device.
pub trait BlockDeviceExt: BlockDevice {
    /// Submits one request with an owned buffer, waits, and returns the reply and the buffer.
    fn call(
        &self,
        operation: Operation,
        address: u64,
        length: u64,
        flags: Flags,
        bytes: Vec<u8>,
    ) -> Result<(Reply, Vec<u8>)> {
        let (sender, receiver) = sync_channel(1);
        let mut request =
            Request::with_bytes(operation, address, flags, bytes, move |outcome, bytes| {
                // The waiter is gone only if its thread died; then there is no receiver left.
                let _ = sender.send((outcome, bytes));
            });
        request.length = length;
        self.submit(request);
        let (outcome, bytes) = receiver.recv().map_err(|_| {
            Error::new(ErrorKind::Internal, "the device dropped a request without an answer")
        })?;
        outcome.map(|reply| (reply, bytes))
    }

    /// Reads `length` bytes at `address`.
    fn read_at(&self, address: u64, length: usize) -> Result<Vec<u8>> {
        self.call(Operation::Read, address, length as u64, Flags::default(), vec![0; length])
            .map(|(_, b)| b)
    }

    /// Writes `bytes` at `address`.
    fn write_at(&self, address: u64, bytes: &[u8]) -> Result<()> {
        self.call(Operation::Write, address, bytes.len() as u64, Flags::default(), bytes.to_vec())
            .map(drop)
    }

    /// Flushes.
    fn flush(&self) -> Result<()> {
        self.call(Operation::Flush, 0, 0, Flags::default(), Vec::new()).map(drop)
    }

    /// Discards a range.
    fn discard(&self, address: u64, length: u64) -> Result<()> {
        self.call(Operation::Discard, address, length, Flags::default(), Vec::new()).map(drop)
    }

    /// Writes zeroes to a range.
    fn write_zeroes(&self, address: u64, length: u64) -> Result<()> {
        self.call(Operation::WriteZeroes, address, length, Flags::default(), Vec::new()).map(drop)
    }

    /// Asks which parts of a range hold data.
    fn allocation(&self, address: u64, length: u64) -> Result<Vec<Allocation>> {
        match self.call(Operation::Allocation, address, length, Flags::default(), Vec::new())?.0 {
            Reply::Allocation(runs) => Ok(runs),
            Reply::Done => Err(Error::new(
                ErrorKind::Internal,
                "the device answered an allocation query without runs",
            )),
        }
    }
}

impl<D: BlockDevice + ?Sized> BlockDeviceExt for D {}
