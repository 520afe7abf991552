//! A stamped load: overlapping writes of many sizes, zeroes, trims and flushes, many in flight over
//! several connections or on a device, all noted in a log, and cut off at any time.
//!
//! Invariant: a request is in the log before it is sent, and its end is stamped where the answer
//! arrives. A stamp taken when the load polls would hide from the judge an order that the client
//! knew. Not here: the log and the judge (`stamp`), who cuts (`run`, `crash`).

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use sawmill_device::{BlockDevice, ErrorKind, Flags, Operation, Outcome, Request};

use crate::ANSWER_TIME_MAX;
use crate::nbd::{Client, Command, Failure};
use crate::stamp::{Kind, Log, SECTOR_BYTES};
use sawmill_testkit::Dice;

/// Receives how a request ended.
type Listener = Box<dyn FnOnce(Result<(), Failure>) + Send>;

/// What a load works on: a connection to a server, or a device.
pub trait LoadTarget {
    /// Starts a command without waiting for its end; `listener` gets the outcome.
    fn submit_then(&self, command: Command, listener: Listener);
}

impl LoadTarget for Client {
    fn submit_then(&self, command: Command, listener: Listener) {
        Client::submit_then(self, &command, move |outcome| listener(outcome.map(drop)));
    }
}

impl LoadTarget for Arc<dyn BlockDevice> {
    fn submit_then(&self, command: Command, listener: Listener) {
        let mut flags = Flags::default();
        let (operation, address, length, bytes) = match command {
            Command::Write { offset, bytes, fua } => {
                flags.fua = fua;
                (Operation::Write, offset, bytes.len() as u64, bytes)
            }
            Command::Read { offset, length } => {
                (Operation::Read, offset, length.into(), vec![0; length as usize])
            }
            Command::Flush => (Operation::Flush, 0, 0, Vec::new()),
            Command::Trim { offset, length, fua } => {
                flags.fua = fua;
                (Operation::Discard, offset, length, Vec::new())
            }
            Command::WriteZeroes { offset, length, fua, no_hole } => {
                flags = Flags { fua, no_unmap: no_hole };
                (Operation::WriteZeroes, offset, length, Vec::new())
            }
            Command::BlockStatus { offset, length } => {
                (Operation::Allocation, offset, length, Vec::new())
            }
        };
        let receiver = |outcome: Outcome| {
            listener(outcome.map(drop).map_err(|error| match error.kind() {
                ErrorKind::Closed => Failure::Gone,
                kind => Failure::Errno(kind.errno().unsigned_abs()),
            }));
        };
        self.submit(match bytes.is_empty() {
            true => Request::bare(operation, address, length, flags, receiver),
            false => Request::with_bytes(operation, address, flags, bytes, |outcome, _| {
                receiver(outcome)
            }),
        });
    }
}

/// How a load behaves.
#[derive(Clone, Copy, Debug)]
pub struct Mix {
    /// Requests in flight at once, over all connections.
    pub depth: usize,
    /// The longest write in sectors.
    pub sectors_max: u64,
    /// Every address and length is a multiple of so many sectors.
    pub sectors_step: u64,
    /// One request in this many is a flush.
    pub flush_once_in: u64,
    /// One write in this many has FUA.
    pub fua_once_in: u64,
    /// One write in this many is zeroes.
    pub zero_once_in: u64,
    /// Half of the zeroes are asked for by a trim: only for devices on which trimmed sectors are
    /// zeroes.
    pub trim: bool,
}

impl Default for Mix {
    fn default() -> Self {
        Mix {
            depth: 32,
            sectors_max: 64,
            sectors_step: 1,
            flush_once_in: 40,
            fua_once_in: 60,
            zero_once_in: 12,
            trim: true,
        }
    }
}

enum Entry {
    Write(usize),
    Flush(usize),
}

struct LoadCompletion {
    entry: Entry,
    at: u64,
    outcome: Result<(), Failure>,
}

/// How a part of a load ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoadCounts {
    /// Requests that were answered without an error.
    pub completed: u64,
    /// Requests that the server answered with an error.
    pub refused: u64,
    /// The last error number.
    pub last_errno: Option<u32>,
    /// Requests that were never answered.
    pub unanswered: u64,
}

/// A load on a volume, and its log.
pub struct Load {
    /// What was done since the volume was last inspected.
    pub log: Log,
    /// The source of all random choices.
    pub dice: Dice,
    /// How it behaves from now on.
    pub mix: Mix,
    sectors: u64,
    sender: Sender<LoadCompletion>,
    receiver: Receiver<LoadCompletion>,
    in_flight: usize,
}

impl Load {
    /// A load on an empty volume of `size_bytes`.
    #[must_use]
    pub fn new(size_bytes: u64, mut dice: Dice, mix: Mix) -> Self {
        let sectors = size_bytes / SECTOR_BYTES as u64;
        // Bounded by what is in flight.
        let (sender, receiver) = channel();
        Load {
            log: Log::new(dice.word(), sectors),
            dice,
            mix,
            sectors,
            sender,
            receiver,
            in_flight: 0,
        }
    }

    /// Drives the load until `completions` more requests are answered, then calls `cut` with
    /// requests still in flight, and waits until each of them has its answer or its connection is
    /// gone. If no answer comes for [`ANSWER_TIME_MAX`], all requests in flight count as
    /// unanswered.
    pub fn drive<W: LoadTarget>(
        &mut self,
        worked: &[W],
        completions: u64,
        cut: impl FnOnce(),
    ) -> LoadCounts {
        let mut counts = LoadCounts::default();
        // A connection that is gone answers no later request either.
        while counts.completed + counts.refused < completions && counts.unanswered == 0 {
            while self.in_flight < self.mix.depth {
                let one = &worked[self.dice.below(worked.len() as u64) as usize];
                self.submit(one);
            }
            self.note_one(&mut counts);
        }
        cut();
        while self.in_flight > 0 {
            self.note_one(&mut counts);
        }
        counts
    }

    fn submit(&mut self, target: &impl LoadTarget) {
        self.in_flight += 1;
        let (entry, command) = if self.dice.one_in(self.mix.flush_once_in) {
            (Entry::Flush(self.log.submit_flush()), Command::Flush)
        } else {
            self.choose_write()
        };
        let (sender, clock) = (self.sender.clone(), self.log.clock.clone());
        let listener = move |outcome| {
            let ended = LoadCompletion { entry, at: clock.tick(), outcome };
            // The load may be over and gone.
            let _ = sender.send(ended);
        };
        target.submit_then(command, Box::new(listener));
    }

    fn choose_write(&mut self) -> (Entry, Command) {
        let step = self.mix.sectors_step;
        let (steps, steps_max) = (self.sectors / step, self.mix.sectors_max / step);
        let count = 1 + self.dice.below(steps_max.min(steps));
        // Half of the writes meet in a small part of the volume, where they overlap in flight.
        let room = steps - count + 1;
        let reach = if self.dice.one_in(2) { room.min(4 * steps_max) } else { room };
        let (sector, count) = (step * self.dice.below(reach), step * count);
        let (offset, length) = (sector * SECTOR_BYTES as u64, count * SECTOR_BYTES as u64);
        if self.dice.one_in(self.mix.zero_once_in) {
            let place = self.log.submit(Kind::Zero, sector, count as u32);
            let command = if self.dice.one_in(2) && self.mix.trim {
                Command::Trim { offset, length, fua: false }
            } else {
                Command::WriteZeroes { offset, length, fua: false, no_hole: false }
            };
            return (Entry::Write(place), command);
        }
        let fua = self.dice.one_in(self.mix.fua_once_in);
        let submit = if fua { Log::submit_fua } else { Log::submit };
        let place = submit(&mut self.log, Kind::Data, sector, count as u32);
        (Entry::Write(place), Command::Write { offset, bytes: self.log.bytes_of(place), fua })
    }

    fn note_one(&mut self, counts: &mut LoadCounts) {
        let Ok(ended) = self.receiver.recv_timeout(ANSWER_TIME_MAX) else {
            counts.unanswered += self.in_flight as u64;
            self.in_flight = 0;
            return;
        };
        let LoadCompletion { entry, at, outcome } = ended;
        // Saturating, because an answer may come after its part of the load has given up waiting.
        self.in_flight = self.in_flight.saturating_sub(1);
        match outcome {
            Ok(()) => {
                counts.completed += 1;
                match entry {
                    Entry::Write(place) => self.log.writes[place].completed = Some(at),
                    Entry::Flush(place) => self.log.flushes[place].completed = Some(at),
                }
            }
            Err(Failure::Errno(number)) => {
                counts.refused += 1;
                counts.last_errno = Some(number);
            }
            // Neither done nor not done: the write stays in the log without a completion, and the
            // judge allows both.
            Err(Failure::Gone) => counts.unanswered += 1,
        }
    }
}
