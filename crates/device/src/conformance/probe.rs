//! Tools for the clauses: an exchange that reports its outcome, and requests whose answer submits
//! another one or drops the device.
//!
//! Invariants: a [`Probe`] reports exactly once, at the latest when it is dropped. [`answer`]
//! panics instead of waiting forever, so a lost request fails the test.
//!
//! Not here: the clauses (`super`).

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};
use std::thread;
use std::time::Duration;

use super::Device;
use crate::{Error, ErrorKind, Exchange, Flags, Operation, Outcome, Request};

/// After this long without an answer, a request counts as lost. Only a broken device takes this
/// long.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(120);

/// The text that a probe reports when it is dropped unanswered. A closing device may answer with
/// the same kind, but not with this text.
const NEVER_ANSWERED: &str = "an exchange was dropped without an outcome";

/// An exchange that reports its outcome, or that it was dropped without one, once.
pub(super) struct Probe {
    pub(super) bytes: Vec<u8>,
    pub(super) sender: Option<Sender<Outcome>>,
}

impl Probe {
    fn report(&mut self, outcome: Outcome) {
        if let Some(sender) = self.sender.take() {
            // The receiver is gone if the test has failed already.
            let _ = sender.send(outcome);
        }
    }
}

impl Exchange for Probe {
    fn fill(&mut self, offset: u64, into: &mut [u8]) {
        into.copy_from_slice(&self.bytes[offset as usize..offset as usize + into.len()]);
    }

    fn buffer(&mut self) -> &mut [u8] {
        &mut self.bytes
    }

    fn complete(mut self: Box<Self>, outcome: Outcome) {
        self.report(outcome);
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        self.report(Err(Error::new(ErrorKind::Closed, NEVER_ANSWERED)));
    }
}

pub(super) fn probe(
    operation: Operation,
    address: u64,
    length: u64,
    buffer: usize,
    sender: &Sender<Outcome>,
) -> Request {
    let exchange = Probe { bytes: vec![1; buffer], sender: Some(sender.clone()) };
    Request::new(operation, address, length, Flags::default(), Box::new(exchange))
}

/// Waits for one answer of a [`Probe`].
pub(super) fn answer(receiver: &Receiver<Outcome>, clause: &str) -> Outcome {
    match receiver.recv_timeout(ANSWER_TIME_MAX) {
        Ok(Err(error)) if error.to_string() == NEVER_ANSWERED => panic!("{clause}: {error}"),
        Ok(outcome) => outcome,
        Err(_) => panic!("{clause}: a request was not answered"),
    }
}

/// Submits a read whose answer submits the next one, `remaining` times. The last outcome is sent to
/// `sender`.
pub(super) fn submit_chain(device: Device, remaining: u32, sender: Sender<Outcome>) {
    let next = Arc::clone(&device);
    let receiver = move |outcome: Outcome, _| {
        if outcome.is_ok() && remaining > 0 {
            submit_chain(next, remaining - 1, sender);
        } else {
            let _ = sender.send(outcome);
        }
    };
    device.submit(Request::with_bytes(
        Operation::Read,
        1000,
        Flags::default(),
        vec![0; 3000],
        receiver,
    ));
}

/// Submits a read whose answer drops its reference to the device. On another thread than the
/// caller's, the answer first waits until the caller, which drops its own reference at once, closes
/// `dropped`; so the answer drops the last reference.
pub(super) fn submit_last_holder(device: Device, dropped: Receiver<()>, sender: Sender<Outcome>) {
    let caller = thread::current().id();
    let held = Arc::clone(&device);
    let last = probe(Operation::Read, 1000, 3000, 3000, &sender).then(move |outcome, asker| {
        if thread::current().id() != caller {
            // The wait is limited, so that a device that breaks the contract fails the test and
            // does not hang it.
            let _ = dropped.recv_timeout(ANSWER_TIME_MAX);
        }
        drop(held);
        asker.complete(outcome);
    });
    device.submit(last);
}
