//! The changes of one chunk, applied to a device in their order.
//!
//! Invariants: a change is submitted only when all changes of the chunk that overlap it are done,
//! since a device may choose the order of two in flight (D8). The memory of the chunk is back when
//! this returns. Not here: which chunk, and its acknowledgement.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};
use sawmill_device::{BlockDevice, Error, ErrorKind, Exchange, Flags, Outcome, Request};
use sawmill_sys::MemoryPiece;

use super::protocol::Change;

/// The changes of a chunk that are in flight, and the first error.
#[derive(Default)]
struct Flight {
    state: Mutex<FlightState>,
    landed: Condvar,
}

#[derive(Default)]
struct FlightState {
    in_flight: usize,
    error: Option<Error>,
}

impl Flight {
    fn begin(&self) {
        self.state.lock().in_flight += 1;
    }

    fn end(&self, outcome: Outcome) {
        let mut state = self.state.lock();
        state.in_flight -= 1;
        if let Err(error) = outcome {
            keep_worst(&mut state.error, error);
        }
        if state.in_flight == 0 {
            self.landed.notify_all();
        }
    }

    fn is_empty(&self) -> bool {
        self.state.lock().in_flight == 0
    }

    fn wait(&self) {
        let mut state = self.state.lock();
        while state.in_flight > 0 {
            self.landed.wait(&mut state);
        }
    }
}

/// Keeps the first error, but for one of a closed device: that one decides what becomes of it all.
pub(super) fn keep_worst(kept: &mut Option<Error>, error: Error) {
    let is_closed = |error: &Error| error.kind() == ErrorKind::Closed;
    if kept.as_ref().is_none_or(|kept| is_closed(&error) && !is_closed(kept)) {
        *kept = Some(error);
    }
}

/// A change in flight.
struct ChangeExchange {
    chunk: Arc<MemoryPiece>,
    data_at: usize,
    flight: Arc<Flight>,
}

impl Exchange for ChangeExchange {
    fn fill(&mut self, offset: u64, into: &mut [u8]) {
        let start = self.data_at + offset as usize;
        into.copy_from_slice(&self.chunk[start..start + into.len()]);
    }

    fn buffer(&mut self) -> &mut [u8] {
        &mut []
    }

    fn complete(self: Box<Self>, outcome: Outcome) {
        let ChangeExchange { chunk, flight, .. } = *self;
        // First: whoever waits for the flight gives the memory back to the kernel.
        drop(chunk);
        flight.end(outcome);
    }
}

/// The ranges of changes that may be in flight: start and end. They are disjoint.
#[derive(Default)]
struct Ranges(BTreeMap<u64, u64>);

impl Ranges {
    fn overlap(&self, start: u64, end: u64) -> bool {
        self.0.range(..end).next_back().is_some_and(|(_, other_end)| *other_end > start)
    }
}

/// Applies the changes of a chunk, and waits until they are done. Returns the error that counts;
/// the other changes are applied in any case.
pub(super) fn apply(
    device: &Arc<dyn BlockDevice>,
    chunk: MemoryPiece,
    changes: &[Change],
) -> Option<Error> {
    let (chunk, flight) = (Arc::new(chunk), Arc::new(Flight::default()));
    let mut ranges = Ranges::default();
    for change in changes {
        let end = change.address + change.length;
        if flight.is_empty() {
            ranges.0.clear();
        } else if ranges.overlap(change.address, end) {
            flight.wait();
            ranges.0.clear();
        }
        ranges.0.insert(change.address, end);
        flight.begin();
        let exchange = Box::new(ChangeExchange {
            chunk: Arc::clone(&chunk),
            data_at: change.data_at,
            flight: Arc::clone(&flight),
        });
        let Change { operation, address, length, .. } = *change;
        device.submit(Request::new(operation, address, length, Flags::default(), exchange));
    }
    drop(chunk);
    flight.wait();
    flight.state.lock().error.take()
}
