//! The client of one attachment: submits requests, receives the results, and checks each with the
//! oracle.
//!
//! Invariants checked: no request is answered twice; an error has an excuse; where a flush means
//! stored, a replaced writer's flush succeeds only for writes that its successor found. Not here:
//! what a read may return (`oracle`), when the answers come (`run`).

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;
use sawmill_device::{BlockDevice, Flags, Outcome, Request};
use sawmill_device::{ErrorKind, Operation};
use sawmill_volume::{FlushMode, Volume};

use crate::oracle::{Effect, Oracle, ReadWatch, payload};
use crate::trace::Trace;

struct ClientCompletion {
    number: u64,
    outcome: Outcome,
    buffer: Vec<u8>,
}

type Answers = Arc<Mutex<Vec<ClientCompletion>>>;

/// A request in flight.
enum ClientRequest {
    /// The operation's number in the oracle, and whether it has FUA.
    Change(usize, bool),
    /// The number of operations it covers.
    Flush(usize),
    Read(ReadWatch),
    /// A write of a replaced writer's client.
    StrayWrite,
    /// Its flush, and whether that covers a stray write.
    StrayFlush(bool),
}

/// A client of one attachment, with its unanswered requests.
#[derive(Default)]
pub struct Client {
    answers: Answers,
    pending: BTreeMap<u64, ClientRequest>,
    next: u64,
    /// Writes a replaced writer has accepted.
    strays: u64,
}

/// The excuses for an error.
#[derive(Clone, Copy, Debug, Default)]
pub struct Excuses {
    /// Anything may fail: the journal's disk fails, or the volume is being closed.
    pub any: bool,
    /// Reads may meet damage.
    pub corrupt: bool,
}

/// A change of the disk: operation, address and length, the stamp of a write, and FUA.
#[derive(Clone, Copy)]
pub struct Change {
    /// Write, discard or write-zeroes.
    pub operation: Operation,
    /// Address and length in bytes.
    pub range: (u64, u64),
    /// The stamp of a write's data.
    pub stamp: u64,
    /// Durable when it is answered.
    pub fua: bool,
}

impl Client {
    /// Requests without an answer.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.pending.len()
    }

    /// Whether a change has no answer: it may happen or not.
    pub(crate) fn has_unanswered_changes(&self) -> bool {
        self.pending.values().any(|request| matches!(request, ClientRequest::Change(..)))
    }

    fn submit(
        &mut self,
        volume: &Volume,
        operation: (Operation, Flags),
        range: (u64, u64),
        buffer: Vec<u8>,
        client_request: ClientRequest,
    ) {
        self.next += 1;
        let number = self.next;
        self.pending.insert(number, client_request);
        let (operation, flags) = operation;
        let mut request =
            Request::with_bytes(operation, range.0, flags, buffer, self.listener(number));
        request.length = range.1;
        volume.submit(request);
    }

    /// Submits a write, discard or write-zeroes.
    pub fn change(&mut self, volume: &Volume, oracle: &mut Oracle, change: Change) {
        let Change { operation, range, stamp, fua } = change;
        let effect =
            if operation == Operation::Write { Effect::Stamp(stamp) } else { Effect::Zero };
        let number = oracle.submit(range.0, range.1, effect);
        let buffer = if operation == Operation::Write {
            payload(stamp, range.0, range.1)
        } else {
            Vec::new()
        };
        let flags = Flags { fua, ..Flags::default() };
        self.submit(volume, (operation, flags), range, buffer, ClientRequest::Change(number, fua));
    }

    /// Submits a flush.
    pub fn flush(&mut self, volume: &Volume, oracle: &Oracle) {
        let client_request = ClientRequest::Flush(oracle.flush_covers());
        self.submit(
            volume,
            (Operation::Flush, Flags::default()),
            (0, 0),
            Vec::new(),
            client_request,
        );
    }

    /// Submits a read.
    pub fn read(&mut self, volume: &Volume, oracle: &Oracle, range: (u64, u64)) {
        let client_request = ClientRequest::Read(oracle.watch_read(range.0, range.1));
        let buffer = vec![0xee; range.1 as usize];
        self.submit(volume, (Operation::Read, Flags::default()), range, buffer, client_request);
    }

    /// Submits an unchecked read of the whole disk; see [`whole_answer`](Self::whole_answer).
    pub fn read_whole(&mut self, volume: &Volume) {
        let length = volume.geometry().size_bytes;
        let buffer = vec![0xee; length as usize];
        let on_outcome = self.listener(0);
        volume.submit(Request::with_bytes(
            Operation::Read,
            0,
            Flags::default(),
            buffer,
            on_outcome,
        ));
    }

    fn listener(&self, number: u64) -> impl FnOnce(Outcome, Vec<u8>) + Send + 'static {
        let answers = self.answers.clone();
        move |outcome, buffer| answers.lock().push(ClientCompletion { number, outcome, buffer })
    }

    /// The result of that read, once it has completed: all bytes of the disk.
    pub fn whole_answer(&mut self) -> Option<Result<Vec<u8>, String>> {
        let completion = self.answers.lock().pop()?;
        Some(completion.outcome.map(|_| completion.buffer).map_err(|error| error.to_string()))
    }

    /// As [`whole_answer`](Self::whole_answer), with zeroes up to the largest size of the disk.
    pub fn padded_answer(&mut self, size_bytes: u64) -> Option<Result<Vec<u8>, String>> {
        let pad = |mut bytes: Vec<u8>| {
            bytes.resize(size_bytes as usize, 0);
            bytes
        };
        self.whole_answer().map(|bytes| bytes.map(pad))
    }

    /// Submits a write of these bytes, whose result is not checked.
    pub fn write_blindly(&mut self, volume: &Volume, address: u64, bytes: Vec<u8>) {
        let range = (address, bytes.len() as u64);
        self.submit(
            volume,
            (Operation::Write, Flags::default()),
            range,
            bytes,
            ClientRequest::StrayWrite,
        );
    }

    /// Submits a write or flush to a writer that has been replaced.
    pub fn stray(&mut self, volume: &Volume, operation: Operation, range: (u64, u64), stamp: u64) {
        let buffer = if operation == Operation::Write {
            payload(stamp, range.0, range.1)
        } else {
            Vec::new()
        };
        let client_request = match operation {
            Operation::Flush => ClientRequest::StrayFlush(self.strays > 0),
            _ => ClientRequest::StrayWrite,
        };
        self.submit(volume, (operation, Flags::default()), range, buffer, client_request);
    }

    /// Receives the new answers and checks them. `replaced_at`: the operations that the writer's
    /// successor found, if it has one.
    pub fn receive_answers(
        &mut self,
        oracle: &mut Oracle,
        excuses: Excuses,
        replaced_at: Option<usize>,
        mode: FlushMode,
        trace: &Trace,
    ) -> Result<(), String> {
        let flush_is_stored = mode == FlushMode::Stored;
        let answers = std::mem::take(&mut *self.answers.lock());
        for ClientCompletion { number, outcome, buffer } in answers {
            let Some(client_request) = self.pending.remove(&number) else {
                return Err(format!("request {number} was answered twice"));
            };
            trace.note("answer", [number, u64::from(outcome.is_ok())], || match &outcome {
                Ok(_) => format!("  request {number} is answered"),
                Err(error) => format!("  request {number} fails: {error}"),
            });
            if let Err(error) = &outcome {
                let read_damage = matches!(client_request, ClientRequest::Read(_))
                    && error.kind() == ErrorKind::Corrupt;
                let excused =
                    excuses.any || replaced_at.is_some() || (excuses.corrupt && read_damage);
                if !excused {
                    return Err(format!("request {number} failed without a reason: {error}"));
                }
                continue;
            }
            match (client_request, replaced_at) {
                (ClientRequest::Change(op, true), None) => oracle.complete_fua(op),
                (ClientRequest::Change(op, false), None) => oracle.complete(op),
                (ClientRequest::Flush(count), None) => oracle.flushed(count),
                (ClientRequest::Read(watch), None) => oracle.check_read(&watch, &buffer)?,
                (ClientRequest::Flush(count), Some(found)) if flush_is_stored && count > found => {
                    return Err(format!(
                        "a fenced writer's flush of {count} operations succeeded; its successor \
                        found {found}"
                    ));
                }
                (ClientRequest::StrayWrite, _) => self.strays += 1,
                (ClientRequest::StrayFlush(true), Some(_)) if flush_is_stored => {
                    return Err("a fenced writer's flush of new writes succeeded".into());
                }
                _ => {}
            }
        }
        Ok(())
    }
}
