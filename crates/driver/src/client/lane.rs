//! A socket that carries commands, with the memory that they refer to.
//!
//! Invariants: one thread takes a command, and answers it once; its memory is free when the answer
//! is sent. On a lane of chunks, a flush starts when everything before it on the lane is done. One
//! thread at a time waits for the host; a thread that takes a command makes sure that another one
//! continues. Not here: what a command means to a driver (`work`).

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use sawmill_device::{Error, ErrorKind, Result};
use sawmill_sys::{AttachedMemory, MemoryPiece};

use crate::protocol::{ANSWER_BYTES, Answer, Command, CommandKind, PACKET_BYTES_MAX, PacketSocket};

/// Answers are sent together, but none waits longer than this for others.
const ANSWER_DELAY_MAX: Duration = Duration::from_micros(200);
const ANSWERS_MAX: usize = 64;

pub(super) struct Lane {
    /// The queue of the lane.
    pub(super) queue: usize,
    pub(super) socket: PacketSocket,
    memory: Arc<AttachedMemory>,
    takes_chunks: bool,
    inbox: Mutex<CommandInbox>,
    more: Condvar,
    has_ended: AtomicBool,
    /// Commands that were taken and are not done, by arrival.
    open: Mutex<BTreeSet<u64>>,
    wakeup: Condvar,
}

#[derive(Default)]
struct CommandInbox {
    /// The buffer of the thread that waits.
    buffer: Vec<u8>,
    /// Bounded by the requests that the host has sent and that are not answered (`queue_depth`).
    pending: VecDeque<Command>,
    taken: u64,
    /// Whether a thread waits for the host.
    is_listening: bool,
    /// The number of threads that wait for `more`.
    idle: usize,
}

/// A command that is being executed.
pub(super) struct Task {
    pub(super) command: Command,
    pub(super) memory: Option<MemoryPiece>,
    ticket: u64,
}

/// Answers of one thread that have not been sent.
#[derive(Default)]
pub(super) struct Answers {
    bytes: Vec<u8>,
    since: Option<Instant>,
}

impl Lane {
    pub(super) fn new(queue: usize, socket: PacketSocket, memory: Arc<AttachedMemory>) -> Self {
        let incoming =
            CommandInbox { buffer: vec![0; PACKET_BYTES_MAX], ..CommandInbox::default() };
        Lane {
            queue,
            socket,
            memory,
            takes_chunks: false,
            inbox: Mutex::new(incoming),
            more: Condvar::new(),
            has_ended: AtomicBool::new(false),
            open: Mutex::default(),
            wakeup: Condvar::new(),
        }
    }

    /// The same lane, for chunks.
    pub(super) fn taking_chunks(self) -> Self {
        Lane { takes_chunks: true, ..self }
    }

    /// Whether the last command was taken.
    pub(super) fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::Acquire)
    }

    /// Whether a command can be taken without waiting for the host.
    pub(super) fn has_pending(&self) -> bool {
        !self.inbox.lock().pending.is_empty()
    }

    /// The next command; `None` if there are no more. Sends answers before it waits.
    pub(super) fn take(&self, answers: &mut Answers) -> Result<Option<Task>> {
        let mut incoming = self.inbox.lock();
        let command = loop {
            if self.has_ended() {
                return Ok(None);
            }
            if let Some(command) = incoming.pending.pop_front() {
                break command;
            }
            // The host may wait for just these answers before it sends more commands.
            if !answers.are_sent() {
                drop(incoming);
                answers.send(self)?;
                incoming = self.inbox.lock();
            } else if incoming.is_listening {
                incoming.idle += 1;
                self.more.wait(&mut incoming);
                incoming.idle -= 1;
            } else {
                incoming = self.listen(incoming)?;
            }
        };
        if command.kind == CommandKind::End {
            self.has_ended.store(true, Ordering::Release);
            self.more.notify_all();
            return Ok(None);
        }
        incoming.taken += 1;
        let ticket = incoming.taken;
        // Under the lock, so that `open` gets the tickets in order.
        self.open.lock().insert(ticket);
        // Wakes one more thread, for what is left or for what comes; that thread wakes the next
        // one. A fast driver has done everything by then, and the others stay asleep.
        if incoming.idle > 0 && !(incoming.pending.is_empty() && incoming.is_listening) {
            self.more.notify_one();
        }
        drop(incoming);
        let memory = self.memory_of(&command).inspect_err(|_| self.close_ticket(ticket))?;
        if self.takes_chunks && command.kind == CommandKind::Flush {
            self.wait_for_those_before(ticket);
        }
        Ok(Some(Task { command, memory, ticket }))
    }

    /// Waits for the host's next commands, as the only thread.
    fn listen<'a>(
        &'a self,
        mut incoming: MutexGuard<'a, CommandInbox>,
    ) -> Result<MutexGuard<'a, CommandInbox>> {
        incoming.is_listening = true;
        // Taken out, so that the lock is free during the wait and other threads take what is
        // pending.
        let mut buffer = std::mem::take(&mut incoming.buffer);
        drop(incoming);
        let gone = || Error::new(ErrorKind::Closed, "the host is gone");
        let received = self.socket.receive(&mut buffer).and_then(|packet| {
            let packet = packet.ok_or_else(gone)?;
            Command::decode_all(packet.bytes)
        });
        let mut incoming = self.inbox.lock();
        incoming.is_listening = false;
        incoming.buffer = buffer;
        match received {
            Ok(commands) => incoming.pending.extend(commands),
            Err(error) => {
                // Each of the other threads must notice.
                self.more.notify_all();
                return Err(error);
            }
        }
        Ok(incoming)
    }

    fn memory_of(&self, command: &Command) -> Result<Option<MemoryPiece>> {
        if !matches!(command.kind, CommandKind::Read | CommandKind::Write | CommandKind::Chunk) {
            return Ok(None);
        }
        let lent = self.memory.lend(command.offset, command.length).ok_or_else(|| {
            let text = format!(
                "the host sent a {:?} with {} bytes at {} of its memory of {}: they reach past \
                 the end, or another command still uses some of them",
                command.kind,
                command.length,
                command.offset,
                self.memory.length_bytes()
            );
            Error::new(ErrorKind::Invalid, text)
        })?;
        Ok(Some(lent))
    }

    fn wait_for_those_before(&self, ticket: u64) {
        let mut open = self.open.lock();
        // Other threads may still be writing chunks that were taken before the flush, and it must
        // cover them.
        while open.first().is_some_and(|first| *first < ticket) {
            self.wakeup.wait(&mut open);
        }
    }

    fn close_ticket(&self, ticket: u64) {
        self.open.lock().remove(&ticket);
        self.wakeup.notify_all();
    }

    /// Answers a command: soon, together with others.
    pub(super) fn answer(&self, task: Task, errno: i32, answers: &mut Answers) -> Result<()> {
        let Task { command, memory, ticket } = task;
        // The host uses the bytes again as soon as it has the answer.
        drop(memory);
        self.close_ticket(ticket);
        answers.bytes.extend_from_slice(&Answer { number: command.number, errno }.encode());
        let since = *answers.since.get_or_insert_with(Instant::now);
        let is_time = answers.bytes.len() >= ANSWERS_MAX * ANSWER_BYTES
            || since.elapsed() >= ANSWER_DELAY_MAX;
        if is_time { answers.send(self) } else { Ok(()) }
    }
}

impl Answers {
    fn are_sent(&self) -> bool {
        self.since.is_none()
    }

    pub(super) fn send(&mut self, lane: &Lane) -> Result<()> {
        if self.since.take().is_some() {
            lane.socket.send(&self.bytes, &[])?;
            self.bytes.clear();
        }
        Ok(())
    }
}
