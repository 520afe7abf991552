//! A socket on which orders come, with the memory that they speak of.
//!
//! Invariants: an order is taken by one thread and answered once; its memory is nobody's when the answer
//! leaves. On a lane of chunks a flush is begun when everything before it on the lane is done. One thread at
//! a time listens to the host; whoever takes an order sees to it that another one goes on. Not here: what an
//! order means to a driver (`work`).

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use sawmill_device::{Error, ErrorKind, Result};
use sawmill_sys::{Attached, Lent};

use crate::protocol::{ANSWER_BYTES, Answer, Order, OrderKind, PACKET_BYTES_MAX, PacketSocket};

/// Answers leave together, but do not wait longer than this for each other.
const ANSWER_WAITS: Duration = Duration::from_micros(200);
const ANSWERS_MAX: usize = 64;

pub(super) struct Lane {
    /// The queue it belongs to.
    pub(super) queue: usize,
    pub(super) socket: PacketSocket,
    memory: Arc<Attached>,
    takes_chunks: bool,
    incoming: Mutex<Incoming>,
    more: Condvar,
    has_ended: AtomicBool,
    /// Orders that were taken and are not done, by when they came.
    open: Mutex<BTreeSet<u64>>,
    bell: Condvar,
}

#[derive(Default)]
struct Incoming {
    /// Of who listens.
    buffer: Vec<u8>,
    pending: VecDeque<Order>,
    taken: u64,
    /// A thread waits for the host.
    is_listening: bool,
    /// Threads that wait for `more`.
    idle: usize,
}

/// An order in work.
pub(super) struct Task {
    pub(super) order: Order,
    pub(super) memory: Option<Lent>,
    ticket: u64,
}

/// Answers of one thread that have not left yet.
#[derive(Default)]
pub(super) struct Answers {
    bytes: Vec<u8>,
    since: Option<Instant>,
}

impl Lane {
    pub(super) fn new(queue: usize, socket: PacketSocket, memory: Arc<Attached>, takes_chunks: bool) -> Self {
        let incoming = Incoming { buffer: vec![0; PACKET_BYTES_MAX], ..Incoming::default() };
        Lane {
            queue,
            socket,
            memory,
            takes_chunks,
            incoming: Mutex::new(incoming),
            more: Condvar::new(),
            has_ended: AtomicBool::new(false),
            open: Mutex::default(),
            bell: Condvar::new(),
        }
    }

    /// Whether the last order was taken.
    pub(super) fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::Acquire)
    }

    /// Whether an order can be taken without waiting for the host.
    pub(super) fn has_pending(&self) -> bool {
        !self.incoming.lock().pending.is_empty()
    }

    /// The next order; `None` when there are no more. Answers leave before anybody waits.
    pub(super) fn take(&self, answers: &mut Answers) -> Result<Option<Task>> {
        let mut incoming = self.incoming.lock();
        let order = loop {
            if self.has_ended() {
                return Ok(None);
            }
            if let Some(order) = incoming.pending.pop_front() {
                break order;
            }
            if !answers.are_sent() {
                drop(incoming);
                answers.send(self)?;
                incoming = self.incoming.lock();
            } else if incoming.is_listening {
                incoming.idle += 1;
                self.more.wait(&mut incoming);
                incoming.idle -= 1;
            } else {
                incoming = self.listen(incoming)?;
            }
        };
        if order.kind == OrderKind::End {
            self.has_ended.store(true, Ordering::Release);
            self.more.notify_all();
            return Ok(None);
        }
        incoming.taken += 1;
        let ticket = incoming.taken;
        // Under the lock, so that tickets are in `open` in their order.
        self.open.lock().insert(ticket);
        // One thread more, for what is left or for what comes; it calls the next one. A driver that is quick
        // has done everything by then, and the others sleep on.
        if incoming.idle > 0 && !(incoming.pending.is_empty() && incoming.is_listening) {
            self.more.notify_one();
        }
        drop(incoming);
        let memory = self.memory_of(&order).inspect_err(|_| self.close_ticket(ticket))?;
        if self.takes_chunks && order.kind == OrderKind::Flush {
            self.wait_for_those_before(ticket);
        }
        Ok(Some(Task { order, memory, ticket }))
    }

    /// Waits for the host's next orders, as the only thread that does.
    fn listen<'a>(&'a self, mut incoming: MutexGuard<'a, Incoming>) -> Result<MutexGuard<'a, Incoming>> {
        incoming.is_listening = true;
        let mut buffer = std::mem::take(&mut incoming.buffer);
        drop(incoming);
        let gone = || Error::new(ErrorKind::Closed, "the host is gone");
        let received = self.socket.receive(&mut buffer).and_then(|packet| {
            let packet = packet.ok_or_else(gone)?;
            Order::decode_all(packet.bytes)
        });
        let mut incoming = self.incoming.lock();
        incoming.is_listening = false;
        incoming.buffer = buffer;
        match received {
            Ok(orders) => incoming.pending.extend(orders),
            Err(error) => {
                // Each of the others is to find out.
                self.more.notify_all();
                return Err(error);
            }
        }
        Ok(incoming)
    }

    fn memory_of(&self, order: &Order) -> Result<Option<Lent>> {
        if !matches!(order.kind, OrderKind::Read | OrderKind::Write | OrderKind::Chunk) {
            return Ok(None);
        }
        let lent = self.memory.lend(order.offset, order.length).ok_or_else(|| {
            let text = format!(
                "the host ordered a {:?} with {} bytes at {} of a memory of {}, or bytes that are in use",
                order.kind,
                order.length,
                order.offset,
                self.memory.length_bytes()
            );
            Error::new(ErrorKind::Invalid, text)
        })?;
        Ok(Some(lent))
    }

    fn wait_for_those_before(&self, ticket: u64) {
        let mut open = self.open.lock();
        while open.first().is_some_and(|first| *first < ticket) {
            self.bell.wait(&mut open);
        }
    }

    fn close_ticket(&self, ticket: u64) {
        self.open.lock().remove(&ticket);
        self.bell.notify_all();
    }

    /// Answers an order: soon, with others.
    pub(super) fn answer(&self, task: Task, errno: i32, answers: &mut Answers) -> Result<()> {
        let Task { order, memory, ticket } = task;
        drop(memory);
        self.close_ticket(ticket);
        answers.bytes.extend_from_slice(&Answer { number: order.number, errno }.encode());
        let since = *answers.since.get_or_insert_with(Instant::now);
        let is_time = answers.bytes.len() >= ANSWERS_MAX * ANSWER_BYTES || since.elapsed() >= ANSWER_WAITS;
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
