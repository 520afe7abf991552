//! One queue of a device, on the thread that serves it.
//!
//! Invariants: every request that the kernel delivers is submitted to the device once, or refused,
//! or held back while the queue is quiet. A held request was not executed, so another server can
//! get it. Not here: the loop around it.

use std::sync::Arc;

use rustix::io::Errno;
use sawmill_device::{BlockDevice, Operation, Request};
use sawmill_sys::ublk::{Descriptors, QueueRing};

use super::channel::{Body, Completion, CopyMode, NewQueue, QueueChannel};
use super::limits::SPARE_BYTES_MAX;
use super::protocol::{BlockRequest, Refusal};
use super::ticket::Ticket;

/// The result of all commands of a stopped device.
const ENODEV: i32 = Errno::NODEV.raw_os_error();

/// One queue.
pub(super) struct Queue {
    pub(super) channel: Arc<QueueChannel>,
    device: Arc<dyn BlockDevice>,
    descriptors: Descriptors,
    tags: u16,
    bytes_max: u32,
    pub(super) state: QueueState,
}

/// What a queue knows of its requests. Only the thread that serves the queue has it, so it needs no
/// lock.
#[derive(Default)]
pub(super) struct QueueState {
    /// Requests submitted to the device and not answered.
    in_flight: u32,
    /// Requests that arrived while the queue was quiet.
    held: Vec<(u16, Vec<u8>)>,
    /// Whether it accepts nothing.
    is_quiet: bool,
    /// The door waits, in this round, until nothing is in flight.
    quiet_round: Option<u64>,
    /// Tags whose command the kernel has returned for good.
    returned_tags: u16,
    pub(super) is_released: bool,
}

impl Queue {
    /// A queue that has not requested anything from the kernel yet.
    pub(super) fn new(new: NewQueue) -> Self {
        let NewQueue { channel, device, descriptors, tags, bytes_max } = new;
        Queue { channel, device, descriptors, tags, bytes_max, state: QueueState::default() }
    }

    /// Requests the first request of every tag.
    pub(super) fn fetch_all(&self, ring: &mut QueueRing) -> std::io::Result<()> {
        let buffer = || {
            (self.channel.copy_mode == CopyMode::Kernel).then(|| vec![0; self.bytes_max as usize])
        };
        (0..self.tags)
            .try_for_each(|tag| ring.fetch(self.channel.slot(), self.channel.queue, tag, buffer()))
    }

    /// A request has arrived, with its buffer (empty with user copy).
    pub(super) fn take(&mut self, tag: u16, buffer: Vec<u8>, spares: &mut Spares) {
        if self.state.is_quiet {
            // The kernel has handed it out already. If the device goes to the next server, the
            // kernel gives it to that one again.
            self.state.held.push((tag, buffer));
            return;
        }
        // Before the request is judged: a refusal also goes through the inbox, and `answer`
        // subtracts it.
        self.state.in_flight += 1;
        let geometry = self.device.geometry();
        let block_request = match self.descriptors.get(tag) {
            Some(descriptor) => {
                BlockRequest::from_descriptor(&descriptor, &geometry, self.bytes_max)
            }
            None => Err(Refusal::unknown_tag(tag)),
        };
        let block_request = match block_request {
            Ok(block_request) => block_request,
            Err(Refusal { errno, reason }) => {
                let queue = self.channel.queue;
                tracing::warn!(queue, tag, reason = &*reason, "ublk: refused a request");
                self.channel.counters.refused();
                return self.channel.answer(tag, -errno, Body::Empty, buffer);
            }
        };
        self.channel.counters.taken(block_request.operation, block_request.length);
        let body = match block_request.operation {
            // Lengths of reads and writes were checked against `bytes_max`.
            Operation::Read => Body::Read(block_request.length as u32),
            Operation::Write => Body::Write(block_request.length as u32),
            _ => Body::Empty,
        };
        // With user copy, the device itself fetches the bytes of a write, straight into their place
        // (decision 0018): only a read needs a buffer.
        let needs_buffer =
            self.channel.copy_mode == CopyMode::User && block_request.operation == Operation::Read;
        let buffer = if needs_buffer { spares.take(block_request.length as usize) } else { buffer };
        let ticket = Ticket { channel: self.channel.clone(), tag, body, buffer };
        let BlockRequest { operation, address, length, flags } = block_request;
        self.device.submit(Request::new(operation, address, length, flags, Box::new(ticket)));
    }

    /// A request has completed: passes the result to the kernel, and requests the next one with
    /// this tag.
    pub(super) fn answer(
        &mut self,
        done: Completion,
        ring: &mut QueueRing,
        spares: &mut Spares,
    ) -> std::io::Result<()> {
        self.state.in_flight = self.state.in_flight.saturating_sub(1);
        let Completion { slot, tag, result, body, buffer } = done;
        let read_bytes = if matches!(body, Body::Read(_)) { result.max(0) as u64 } else { 0 };
        self.channel.counters.answered(result, read_bytes);
        let lent_buffer = if self.channel.copy_mode == CopyMode::User {
            spares.keep(buffer);
            None
        } else {
            Some(buffer)
        };
        ring.commit_and_fetch(slot, self.channel.queue, tag, result, lent_buffer)
    }

    /// The kernel accepts no more commands with this tag.
    pub(super) fn lose(&mut self, tag: u16, errno: i32) {
        // Counted also after an error: the queue could otherwise never be released.
        self.state.returned_tags += 1;
        if errno != ENODEV {
            let (queue, slot) = (self.channel.queue, self.channel.slot());
            tracing::error!(
                queue,
                slot,
                tag,
                errno,
                "ublk: the kernel refused a command; its tag is lost"
            );
        }
    }

    /// Whether nothing more arrives, and nothing is in flight.
    pub(super) fn is_gone(&self) -> bool {
        self.state.returned_tags >= self.tags && self.state.in_flight == 0
    }

    /// Holds back requests from now on, and notifies the door when nothing is in flight.
    pub(super) fn quiesce(&mut self, round: u64) {
        self.state.is_quiet = true;
        self.state.quiet_round = Some(round);
    }

    /// Accepts the held requests, and new ones.
    pub(super) fn resume(&mut self, spares: &mut Spares) {
        self.state.is_quiet = false;
        self.state.quiet_round = None;
        for (tag, buffer) in std::mem::take(&mut self.state.held) {
            self.take(tag, buffer, spares);
        }
    }

    /// Whether the door waits until nothing is in flight.
    pub(super) fn is_quieting(&self) -> bool {
        self.state.quiet_round.is_some()
    }

    /// Call this when the kernel has all answers so far.
    pub(super) fn notify_progress(&mut self) {
        if self.state.in_flight == 0
            && let Some(round) = self.state.quiet_round.take()
        {
            self.channel.progress.quiet(round);
        }
    }
}

/// Idle read buffers of one thread.
#[derive(Default)]
pub(super) struct Spares {
    buffers: Vec<Vec<u8>>,
    bytes: usize,
}

impl Spares {
    /// A buffer of at least this length. Its content is from an earlier read, but no reader sees
    /// it: a successful read has filled its part.
    fn take(&mut self, length: usize) -> Vec<u8> {
        match self.buffers.pop() {
            Some(buffer) if buffer.len() >= length => {
                self.bytes -= buffer.len();
                buffer
            }
            Some(small) => {
                self.bytes -= small.len();
                vec![0; length]
            }
            None => vec![0; length],
        }
    }

    pub(super) fn keep(&mut self, buffer: Vec<u8>) {
        if !buffer.is_empty() && self.bytes + buffer.len() <= SPARE_BYTES_MAX {
            self.bytes += buffer.len();
            self.buffers.push(buffer);
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.buffers.is_empty()
    }

    pub(super) fn give_back(&mut self) {
        *self = Spares::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_buffers_are_bounded_and_given_back() {
        let mut spares = Spares::default();
        for _ in 0..20 {
            spares.keep(vec![0; 1 << 20]);
        }
        assert_eq!(spares.bytes, SPARE_BYTES_MAX);
        assert_eq!(spares.take(4096).len(), 1 << 20);
        assert_eq!(spares.take(2 << 20).len(), 2 << 20);
        assert_eq!(spares.bytes, SPARE_BYTES_MAX - (2 << 20));
        spares.give_back();
        assert!(spares.is_empty());
        assert_eq!(spares.take(100), vec![0; 100]);
    }
}
