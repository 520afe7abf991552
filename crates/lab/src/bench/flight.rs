//! Requests in flight to an NBD export. Their number is bounded, none overlaps a write in flight,
//! each is timed, and each read is verified when its bytes arrive.
//!
//! Invariant: one thread sends. Between `wait_for` and `send`, a second one could send a request
//! that overlaps.
//!
//! Not here: the bytes of a write, and what a read must find (`content`).

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use sawmill_nbd_client::{Client, Command, Failure as Unanswered, Reply};

use super::content::{StretchWrite, mismatch};
use crate::trace::Operation;
use sawmill_console::exit::{Exit, Failure, Result};

/// The operations, in the order of [`CompletionCounts::times_ns`].
pub(super) const OPERATIONS: [Operation; 5] =
    [Operation::Read, Operation::Write, Operation::Flush, Operation::Discard, Operation::Zero];

/// The results of completed requests.
#[derive(Default)]
pub(super) struct CompletionCounts {
    /// The time each request took, by operation.
    pub(super) times_ns: [Vec<u64>; OPERATIONS.len()],
    pub(super) bytes: [u64; OPERATIONS.len()],
    pub(super) verified_bytes: u64,
    pub(super) unknown_bytes: u64,
    /// Requests that waited for a request that they overlap.
    pub(super) overlaps: u64,
    failure: Option<Failure>,
}

/// One request in flight.
struct RequestInFlight {
    id: u64,
    address: u64,
    end: u64,
    writes: bool,
}

#[derive(Default)]
struct State {
    flights: Vec<RequestInFlight>,
    done: CompletionCounts,
    next_id: u64,
}

#[derive(Default)]
struct FlightState {
    state: Mutex<State>,
    landed: Condvar,
}

/// The requests in flight on one connection, bounded in number and never in conflict with each
/// other.
pub(super) struct Flights<'a> {
    client: &'a Client,
    depth: usize,
    seed: u64,
    shared: Arc<FlightState>,
}

/// A request of a line, from before it is submitted until its answer is judged.
pub(super) struct Flight {
    pub(super) operation: Operation,
    pub(super) address: u64,
    pub(super) length: u64,
    /// The bytes of a write.
    pub(super) bytes: Vec<u8>,
    /// What a read must find.
    pub(super) writes: Vec<StretchWrite>,
}

impl<'a> Flights<'a> {
    pub(super) fn new(client: &'a Client, depth: usize, seed: u64) -> Self {
        Flights { client, depth, seed, shared: Arc::default() }
    }

    /// Waits until a request may be sent: there is room, and it conflicts with nothing in flight.
    /// Fails if an earlier request has failed.
    pub(super) fn wait_for(&self, operation: Operation, address: u64, length: u64) -> Result<()> {
        let (end, reads) = (address + length, operation == Operation::Read);
        let mut state = lock(&self.shared);
        let overlaps = |state: &State| {
            let meets = |one: &RequestInFlight| {
                one.address < end && address < one.end && (one.writes || !reads)
            };
            state.flights.iter().any(meets)
        };
        if overlaps(&state) {
            state.done.overlaps += 1;
        }
        while state.done.failure.is_none()
            && (state.flights.len() >= self.depth || overlaps(&state))
        {
            state = self.shared.landed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.done.failure.take().map_or(Ok(()), Err)
    }

    /// Sends a request for which [`wait_for`](Self::wait_for) has returned.
    pub(super) fn send(&self, flight: Flight) {
        let Flight { operation, address, length, bytes, writes: known_writes } = flight;
        let command = match operation {
            Operation::Read => Command::Read { offset: address, length: length as u32 },
            Operation::Write => Command::Write { offset: address, bytes, fua: false },
            Operation::Flush => Command::Flush,
            Operation::Discard => Command::Trim { offset: address, length, fua: false },
            Operation::Zero => {
                Command::WriteZeroes { offset: address, length, fua: false, no_hole: false }
            }
        };
        // Listed before it is sent, because the answer may come before the call returns.
        let id = {
            let mut state = lock(&self.shared);
            state.next_id += 1;
            let writes = operation != Operation::Read;
            let flying =
                RequestInFlight { id: state.next_id, address, end: address + length, writes };
            state.flights.push(flying);
            state.next_id
        };
        let (shared, seed, began) = (Arc::clone(&self.shared), self.seed, Instant::now());
        self.client.submit_then(&command, move |outcome| {
            let took_ns = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
            // Before the lock: comparing takes time, and the thread that sends needs the lock.
            let judged = judge(seed, operation, address, &known_writes, outcome);
            let mut state = lock(&shared);
            state.flights.retain(|flying| flying.id != id);
            let done = &mut state.done;
            let index = OPERATIONS.iter().position(|known| *known == operation).unwrap_or_default();
            done.times_ns[index].push(took_ns);
            done.bytes[index] += length;
            if operation == Operation::Read {
                let known: u64 = known_writes.iter().map(|stretch| stretch.length).sum();
                done.verified_bytes += known;
                done.unknown_bytes += length - known;
            }
            if let Err(failure) = judged {
                done.failure.get_or_insert(failure);
            }
            drop(state);
            shared.landed.notify_all();
        });
    }

    /// Waits for everything in flight, and returns what has completed since the last call.
    pub(super) fn land(&self) -> Result<CompletionCounts> {
        let mut state = lock(&self.shared);
        while !state.flights.is_empty() {
            state = self.shared.landed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let mut done = std::mem::take(&mut state.done);
        done.failure.take().map_or(Ok(done), Err)
    }
}

fn lock(shared: &FlightState) -> MutexGuard<'_, State> {
    shared.state.lock().unwrap_or_else(PoisonError::into_inner)
}

fn judge(
    seed: u64,
    operation: Operation,
    address: u64,
    writes: &[StretchWrite],
    outcome: std::result::Result<Reply, Unanswered>,
) -> Result<()> {
    let reply = outcome.map_err(|unanswered| {
        let exit = if unanswered == Unanswered::Errno(28) { Exit::Full } else { Exit::Unavailable };
        Failure::new(exit, format!("{operation:?} at byte {address} failed: {unanswered}"))
            .caused_by(unanswered)
    })?;
    match mismatch(seed, writes, address, &reply.bytes) {
        None => Ok(()),
        Some((at, write)) => {
            let text = format!(
                "byte {at} does not hold what this replay wrote there (its write number {write}; 0 \
                 means zeroes): the disk has lost or mixed up data"
            );
            Err(Failure::new(Exit::Corrupt, text))
        }
    }
}
