//! One by one: each request goes to the driver as a command of its own.
//!
//! Invariants: a request is answered when the driver has answered its command, with that answer.
//! The next driver first gets what the last one had not answered, in the same order and with the
//! user's bytes (memory that a former driver may still see is not reused). Exception: a durable
//! change that waited for its flush is repeated in place of that flush. The driver determines the
//! order of concurrent requests; a user who needs an order waits for an answer (D8).
//!
//! Not here: requests that are not whole blocks (`Align`); how long to wait for a driver (`host`).

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use parking_lot::{Condvar, Mutex};
use sawmill_device::{BlockDevice, Error, ErrorKind, Geometry, Operation, Request, Result};
use sawmill_sys::{Arena, ArenaPiece};

use crate::cores::{Cores, queue_of_thread};
use crate::options::DeviceOptions;
use crate::protocol::{Command, CommandKind};
use crate::request_holder::{
    CommandLanes, FetchState, HolderStatus, RequestHolder, State, StateCell,
};

/// A device in plain mode: each request is one command to the driver.
pub(crate) struct Plain {
    options: DeviceOptions,
    geometry: Geometry,
    queues: Box<[Queue]>,
    cores: Cores,
    state_cell: StateCell,
}

struct Queue {
    pending: Mutex<RequestTable>,
    wakeup: Condvar,
}

/// A request, and whether it is a change that was answered and waits for its flush.
struct QueuedRequest {
    request: Request,
    is_written: bool,
    again: bool,
}

struct IssuedRequest {
    request: QueuedRequest,
    piece: Option<ArenaPiece>,
    since: Instant,
}

struct RequestTable {
    memory: Arc<Arena>,
    /// Bounded by the requests that the doors admit.
    ready: VecDeque<QueuedRequest>,
    /// Requests that the driver has.
    /// Bounded by the requests that the doors admit.
    issued: BTreeMap<u64, IssuedRequest>,
    last_number: u64,
}

impl Plain {
    /// Makes a device that waits for a driver.
    ///
    /// # Errors
    /// `Full` if there is no memory for its queues.
    pub(crate) fn new(options: DeviceOptions) -> Result<Arc<Self>> {
        let queue = |_| -> Result<Queue> {
            let memory = arena(&options)?;
            let (ready, issued) = (VecDeque::new(), BTreeMap::new());
            let pending = Mutex::new(RequestTable { memory, ready, issued, last_number: 0 });
            Ok(Queue { pending, wakeup: Condvar::new() })
        };
        let queues = (0..options.batch.hw_queues).map(queue).collect::<Result<_>>()?;
        Ok(Arc::new(Plain {
            geometry: options.geometry(),
            queues,
            cores: Cores::new(),
            state_cell: StateCell::new(),
            options,
        }))
    }

    fn queue_here(&self) -> usize {
        match self.options.batch.tie_queues {
            true => self.cores.queue_here(self.queues.len()),
            false => queue_of_thread(self.queues.len()),
        }
    }

    /// Delivers a request to the driver, or lets it wait for one.
    fn hand(&self, queue: usize, request: Request) {
        let queue = &self.queues[queue];
        let mut pending = queue.pending.lock();
        // Under the lock: the thread that detects the end takes it afterward, so nothing is queued
        // later.
        if let Some(error) = self.state_cell.refusal() {
            drop(pending);
            return request.fail(error);
        }
        pending.ready.push_back(QueuedRequest { request, is_written: false, again: false });
        queue.wakeup.notify_one();
    }

    /// Whether a change that the driver has done must now be made durable by a flush.
    fn wants_flush(&self, queued_request: &QueuedRequest) -> bool {
        let request = &queued_request.request;
        let by_itself = request.operation == Operation::Write && self.options.can_fua;
        let wants_it = is_change(request) && request.flags.fua && !by_itself;
        wants_it && self.options.can_flush && !queued_request.is_written
    }

    /// Wakes all threads that wait for work.
    fn notify(&self) {
        for queue in &self.queues {
            // Under the lock, so that no thread is between checking and waiting.
            let pending = queue.pending.lock();
            queue.wakeup.notify_all();
            drop(pending);
        }
    }

    /// The next command of a queue, if there is one, and room for it.
    fn next_of(&self, pending: &mut RequestTable) -> Option<Command> {
        if pending.issued.len() >= self.options.batch.queue_depth as usize {
            return None;
        }
        let request = &pending.ready.front()?.request;
        let moves = matches!(request.operation, Operation::Read | Operation::Write);
        let mut piece = None;
        if moves && !pending.ready.front()?.is_written {
            // A request without room stays at the front: those behind it must not pass it forever.
            piece = Some(pending.memory.lend(request.length as usize)?);
        }
        let mut waiting = pending.ready.pop_front()?;
        pending.last_number += 1;
        let number = pending.last_number;
        let mut command = command(&waiting, number);
        let request = &mut waiting.request;
        if let Some(piece) = &mut piece {
            command.offset = piece.offset() as u64;
            if command.kind == CommandKind::Write {
                request.fill(0, piece);
                command.fua = request.flags.fua && self.options.can_fua;
            }
        }
        pending
            .issued
            .insert(number, IssuedRequest { request: waiting, piece, since: Instant::now() });
        Some(command)
    }

    /// Answers a request with the driver's result.
    fn complete(issued_request: IssuedRequest, outcome: Result<()>) {
        let IssuedRequest { request: mut waiting, piece, .. } = issued_request;
        if let Err(error) = outcome {
            drop(piece);
            return waiting.request.fail(error);
        }
        let request = &mut waiting.request;
        if let Some(piece) = piece.filter(|_| request.operation == Operation::Read) {
            request.buffer().copy_from_slice(&piece);
        }
        waiting.request.done();
    }
}

fn arena(options: &DeviceOptions) -> Result<Arc<Arena>> {
    let bytes = options.memory_bytes();
    Arena::create("sawmill-queue", bytes as usize).map_err(|error| {
        Error::caused(
            ErrorKind::Full,
            format!("no shared memory of {bytes} bytes for a queue"),
            error,
        )
    })
}

fn is_change(request: &Request) -> bool {
    matches!(request.operation, Operation::Write | Operation::Discard | Operation::WriteZeroes)
}

fn command(queued_request: &QueuedRequest, number: u64) -> Command {
    let request = &queued_request.request;
    let kind = match request.operation {
        Operation::Read => CommandKind::Read,
        Operation::Write if !queued_request.is_written => CommandKind::Write,
        Operation::Discard if !queued_request.is_written => CommandKind::Discard,
        Operation::WriteZeroes if !queued_request.is_written => CommandKind::WriteZeroes,
        // A flush, or the second half of a durable change; no others are delivered.
        _ => {
            return Command {
                again: queued_request.again,
                ..Command::new(CommandKind::Flush, number)
            };
        }
    };
    Command {
        again: queued_request.again,
        no_unmap: kind == CommandKind::WriteZeroes && request.flags.no_unmap,
        address: request.address,
        length: request.length,
        ..Command::new(kind, number)
    }
}

impl BlockDevice for Plain {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn submit(&self, request: Request) {
        let unit =
            if self.options.byte_granular { 1 } else { u64::from(self.options.batch.blocksize) };
        let refused =
            request.check(&self.geometry).and_then(|()| crate::check_blocks(&request, unit)).err();
        if let Some(error) = refused.or_else(|| self.state_cell.refusal()) {
            return request.fail(error);
        }
        match request.operation {
            Operation::Prefetch => request.done(),
            Operation::Flush if !self.options.can_flush => request.done(),
            Operation::Allocation => {
                request.fail(Error::new(
                    ErrorKind::Invalid,
                    "drivers do not report which bytes hold data",
                ));
            }
            _ => self.hand(self.queue_here(), request),
        }
    }
}

impl CommandLanes for Plain {
    fn lanes_per_queue(&self) -> usize {
        1
    }

    fn pin_thread(&self, queue: usize) {
        if self.options.batch.tie_queues {
            self.cores.pin_thread(queue);
        }
    }

    fn memory(&self, lane: usize) -> Arc<Arena> {
        Arc::clone(&self.queues[lane].pending.lock().memory)
    }

    fn fetch(&self, lane: usize, commands: &mut Vec<Command>, most: usize) -> FetchState {
        let queue = &self.queues[lane];
        let mut pending = queue.pending.lock();
        loop {
            if self.state_cell.is_paused() {
                return FetchState::Paused;
            }
            while commands.len() < most {
                let Some(command) = self.next_of(&mut pending) else { break };
                commands.push(command);
            }
            if !commands.is_empty() {
                return FetchState::Commands;
            }
            if self.state_cell.state() != State::Running
                && pending.ready.is_empty()
                && pending.issued.is_empty()
            {
                return FetchState::Ended;
            }
            queue.wakeup.wait(&mut pending);
        }
    }

    fn answer(&self, lane: usize, number: u64, outcome: Result<()>) -> Result<()> {
        let mut pending = self.queues[lane].pending.lock();
        let Some(issued_request) = pending.issued.remove(&number) else {
            let text = format!("queue {lane}: the driver has no command {number}");
            return Err(Error::new(ErrorKind::Invalid, text));
        };
        let done = if outcome.is_ok() && self.wants_flush(&issued_request.request) {
            // Under the same lock: a thread that checks for the end of the lane finds one half or
            // the other.
            pending.ready.push_back(QueuedRequest { is_written: true, ..issued_request.request });
            None
        } else {
            Some(issued_request)
        };
        // Woken also at the end: the thread that fetches must see that nothing is left.
        let has_room_now = !pending.ready.is_empty() || self.state_cell.state() != State::Running;
        drop(pending);
        if let Some(issued_request) = done {
            Self::complete(issued_request, outcome);
        }
        if has_room_now {
            self.queues[lane].wakeup.notify_one();
        }
        Ok(())
    }

    fn has_commands(&self, lane: usize) -> bool {
        !self.queues[lane].pending.lock().issued.is_empty()
    }
}

impl RequestHolder for Plain {
    fn start(&self) -> Result<()> {
        self.state_cell.start()?;
        self.notify();
        Ok(())
    }

    fn pause(&self) {
        self.state_cell.pause();
        self.notify();
    }

    fn recover(&self) -> Result<()> {
        self.state_cell.pause();
        for queue in &self.queues {
            // New memory for each driver: a former one may still have the old memory mapped, and
            // write to it.
            let memory = arena(&self.options)?;
            let mut pending = queue.pending.lock();
            pending.memory = memory;
            for issued_request in std::mem::take(&mut pending.issued).into_values().rev() {
                pending.ready.push_front(QueuedRequest { again: true, ..issued_request.request });
            }
            // The same driver must execute a durable change and its flush: the next driver may not
            // know of the first half.
            for waiting in pending.ready.iter_mut().filter(|waiting| waiting.is_written) {
                (waiting.is_written, waiting.again) = (false, true);
            }
        }
        Ok(())
    }

    fn begin_end(&self) {
        self.state_cell.end();
        self.notify();
    }

    fn fail_waiting(&self, error: &Error) {
        for queue in &self.queues {
            let mut pending = queue.pending.lock();
            let mut failed: Vec<Request> = std::mem::take(&mut pending.issued)
                .into_values()
                .map(|issued_request| issued_request.request.request)
                .collect();
            failed.extend(
                std::mem::take(&mut pending.ready).into_iter().map(|waiting| waiting.request),
            );
            drop(pending);
            // The answers may submit new requests on this thread, which need this lock.
            for request in failed {
                request.fail(error.clone());
            }
        }
    }

    fn end_now(&self, error: &Error) {
        self.state_cell.set_ended();
        self.fail_waiting(error);
        self.notify();
    }

    fn status(&self) -> HolderStatus {
        let state = self.state_cell.state();
        let (mut is_drained, mut oldest_fetched_at) = (true, None);
        for queue in &self.queues {
            let pending = queue.pending.lock();
            is_drained &= pending.ready.is_empty() && pending.issued.is_empty();
            let fetched_at = pending.issued.values().map(|issued_request| issued_request.since);
            oldest_fetched_at = fetched_at.chain(oldest_fetched_at).min();
        }
        HolderStatus { state, is_drained, oldest_fetched_at }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::sync::mpsc::{Receiver, Sender, channel};

    use sawmill_device::{Exchange, Flags, Outcome};

    use super::*;

    struct OutcomeSender(Sender<Outcome>);

    impl Exchange for OutcomeSender {
        fn fill(&mut self, _: u64, into: &mut [u8]) {
            into.fill(1);
        }

        fn buffer(&mut self) -> &mut [u8] {
            &mut []
        }

        fn complete(self: Box<Self>, outcome: Outcome) {
            // If the receiver is gone, it has what it wanted.
            let _ = self.0.send(outcome);
        }
    }

    fn write(fua: bool) -> (Request, Receiver<Outcome>) {
        let (sender, receiver) = channel();
        let flags = Flags { fua, no_unmap: false };
        (Request::new(Operation::Write, 0, 512, flags, Box::new(OutcomeSender(sender))), receiver)
    }

    fn small() -> Arc<Plain> {
        let mut options = DeviceOptions { request_bytes_max: 4096, ..DeviceOptions::default() };
        options.batch.queue_depth = 4;
        Plain::new(options).unwrap()
    }

    #[test]
    fn a_request_that_comes_while_the_device_fails_is_answered() {
        for _ in 0..10_000 {
            let (plain, barrier) = (small(), Barrier::new(2));
            let (request, receiver) = write(false);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    barrier.wait();
                    plain.submit(request);
                });
                barrier.wait();
                plain.end_now(&Error::new(ErrorKind::Closed, "over"));
            });
            assert!(receiver.try_recv().is_ok(), "no thread will look at it again");
        }
    }

    #[test]
    fn a_durable_write_at_the_end_is_flushed_before_a_lane_ends() {
        for _ in 0..10_000 {
            let plain = small();
            plain.start().unwrap();
            let (request, receiver) = write(true);
            plain.submit(request);
            let mut commands = Vec::new();
            plain.fetch(0, &mut commands, 64);
            plain.begin_end();
            std::thread::scope(|scope| {
                scope.spawn(|| plain.answer(0, commands[0].number, Ok(())).unwrap());
                let mut last = Vec::new();
                while plain.fetch(0, &mut last, 64) == FetchState::Commands {
                    last.drain(..)
                        .for_each(|command| plain.answer(0, command.number, Ok(())).unwrap());
                }
            });
            assert!(receiver.try_recv().is_ok(), "the lane has ended before the flush");
        }
    }
}
