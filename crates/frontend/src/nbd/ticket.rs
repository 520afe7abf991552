//! One request in flight: the exchange that a device fills, empties and completes.
//!
//! Invariant: completing a ticket queues exactly one reply and never blocks. Not here: sending it.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use sawmill_device::{Error, ErrorKind, Exchange, Outcome, Reply};

use super::budget::BudgetBuffer;
use super::intake::Payload;
use super::outbox::{ClientChannel, OutputPiece};
use super::protocol::{NbdErrno, RequestIdentity};

/// The bytes of a request.
pub(super) enum Body {
    /// Neither payload nor data.
    Empty,
    /// What a write stores.
    Write(Payload),
    /// The buffer for the data of a read: `bytes[head_bytes..end]`, with room for the reply's head
    /// before it.
    Read { bytes: BudgetBuffer, head_bytes: usize, end: usize },
    /// A block status query for at most `runs_max` runs. `room` counts the memory of the answer.
    Status { runs_max: usize, room: BudgetBuffer },
}

/// One request in flight.
pub(super) struct Ticket {
    pub(super) channel: Arc<ClientChannel>,
    pub(super) identity: RequestIdentity,
    /// What the request counts against the connection's limit.
    pub(super) charged_bytes: u64,
    pub(super) body: Body,
}

impl Ticket {
    fn answer_error(
        channel: &ClientChannel,
        identity: RequestIdentity,
        charged_bytes: u64,
        error: &Error,
    ) {
        channel.counters.errors.fetch_add(1, Relaxed);
        let text = error.to_string();
        channel.answer(charged_bytes, |out| {
            identity.push_error(out, NbdErrno::from(error.kind()), &text)
        });
    }
}

impl Exchange for Ticket {
    #[inline]
    fn fill(&mut self, offset: u64, into: &mut [u8]) {
        match &self.body {
            Body::Write(payload) => {
                let start = offset as usize;
                into.copy_from_slice(&payload.bytes()[start..start + into.len()]);
            }
            Body::Empty | Body::Read { .. } | Body::Status { .. } => (),
        }
    }

    #[inline]
    fn buffer(&mut self) -> &mut [u8] {
        match &mut self.body {
            Body::Read { bytes, head_bytes, end } => &mut bytes[*head_bytes..*end],
            Body::Empty | Body::Write(_) | Body::Status { .. } => &mut [],
        }
    }

    fn complete(self: Box<Self>, outcome: Outcome) {
        let Ticket { channel, identity, charged_bytes, body } = *self;
        match (outcome, body) {
            (Ok(Reply::Done), Body::Read { mut bytes, head_bytes, end }) => {
                identity.write_read_head(&mut bytes[..head_bytes], (end - head_bytes) as u32);
                channel.answer_read(charged_bytes, OutputPiece::Read { bytes, end });
            }
            // The protocol demands at least one run. Without one, a client would ask for the same
            // range forever, so an empty answer is an error of the device.
            (Ok(Reply::Allocation(runs)), Body::Status { runs_max, room }) if !runs.is_empty() => {
                channel
                    .answer(charged_bytes, |out| identity.push_block_status(out, &runs, runs_max));
                drop(room);
            }
            (Ok(Reply::Done), body @ (Body::Empty | Body::Write(_))) => {
                // Drop the payload first: the receive buffer may be free before the reply is sent.
                drop(body);
                channel.answer(charged_bytes, |out| identity.push_done(out));
            }
            (Ok(_), _) => {
                let text = "the device answered with the wrong kind of reply";
                Self::answer_error(
                    &channel,
                    identity,
                    charged_bytes,
                    &Error::new(ErrorKind::Internal, text),
                );
            }
            (Err(error), body) => {
                // Under a failing device, reads would otherwise allocate and zero a buffer for each
                // error.
                if let Body::Read { bytes, .. } = body {
                    channel.keep_read_buffer(bytes);
                }
                Self::answer_error(&channel, identity, charged_bytes, &error);
            }
        }
    }
}
