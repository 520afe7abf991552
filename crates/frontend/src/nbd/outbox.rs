//! Replies for one client, from any thread that completes a request.
//!
//! Replies are queued under a small lock. One thread at a time holds the [`Sender`], the right to
//! send; it sends without the lock and without blocking. While the connection's own thread works on
//! a burst of requests, no other thread sends, so a burst is answered with one system call. When
//! the socket is full, the connection's thread is woken and waits for room; a completing thread
//! never waits.
//!
//! Invariants: bytes leave in queue order. Whatever is queued will be looked at again (by the
//! holder of the sender, at the end of the burst, or by the connection's thread, woken or polling).
//! Not here: the content of replies.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use parking_lot::{Mutex, MutexGuard};
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags, Shutdown, send, sendmsg, shutdown};
use sawmill_sys::Waker;

use super::budget::BudgetBuffer;
use super::limits::{SEND_BYTES, SPARE_BYTES_MAX};
use super::metrics::Counters;

/// Bytes to send in one piece.
pub(super) enum OutputPiece {
    /// Small replies; more may be appended.
    Small(Vec<u8>),
    /// The head and data of one read. Only `bytes[..end]` is sent; the rest is kept so that the
    /// buffer need not be zeroed again.
    Read { bytes: BudgetBuffer, end: usize },
}

impl OutputPiece {
    fn bytes(&self) -> &[u8] {
        match self {
            OutputPiece::Small(bytes) => bytes,
            OutputPiece::Read { bytes, end } => &bytes[..*end],
        }
    }
}

/// An open buffer takes small replies up to this size.
const OPEN_BYTES_MAX: usize = 32 << 10;
/// The largest spare buffer for small replies.
const SPARE_SMALL_BYTES_MAX: usize = 4 * OPEN_BYTES_MAX;
/// Pieces in one system call.
const PIECES_MAX: usize = 64;
/// How often a completing thread checks for more to send before it leaves the work to the
/// connection's thread.
const ROUNDS_MAX: u32 = 4;

/// The right to send, with what is being sent.
#[derive(Default)]
struct Sender {
    /// Bounded by what the outbox held.
    queue: VecDeque<OutputPiece>,
    /// Sent bytes of the first in the queue.
    sent_bytes: usize,
    spent: Vec<OutputPiece>,
}

enum SendOutcome {
    All,
    SocketFull,
    Broken,
}

impl Sender {
    /// Sends until nothing is left or the socket accepts no more. Returns the number of bytes sent.
    fn send(&mut self, socket: &OwnedFd) -> (u64, SendOutcome) {
        let mut total = 0;
        while !self.queue.is_empty() {
            match self.send_once(socket) {
                Ok(length) => {
                    total += length as u64;
                    self.advance(length);
                }
                Err(Errno::INTR) => (),
                Err(Errno::AGAIN) => return (total, SendOutcome::SocketFull),
                Err(_) => return (total, SendOutcome::Broken),
            }
        }
        (total, SendOutcome::All)
    }

    fn send_once(&self, socket: &OwnedFd) -> Result<usize, Errno> {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let mut pieces = [IoSlice::new(&[]); PIECES_MAX];
        let mut count = 0;
        let mut sent_bytes = self.sent_bytes;
        for (piece, outgoing) in pieces.iter_mut().zip(&self.queue) {
            *piece = IoSlice::new(&outgoing.bytes()[sent_bytes..]);
            sent_bytes = 0;
            count += 1;
        }
        match &pieces[..count] {
            [only] => send(socket, only, flags),
            many => sendmsg(socket, many, &mut SendAncillaryBuffer::default(), flags),
        }
    }

    fn advance(&mut self, length: usize) {
        self.sent_bytes += length;
        while let Some(first) = self.queue.front() {
            let length = first.bytes().len();
            if self.sent_bytes < length {
                break;
            }
            self.sent_bytes -= length;
            self.spent.extend(self.queue.pop_front());
        }
    }
}

#[derive(Default)]
struct Outbox {
    /// Bounded by the replies to the requests that the budget admitted (`budget`).
    queue: VecDeque<OutputPiece>,
    /// Bytes queued here and at the sender.
    queued_bytes: u64,
    /// `None` while a thread is sending.
    sender: Option<Sender>,
    /// The connection's thread is in a burst and sends at its end.
    is_in_burst: bool,
    /// The socket accepts no more; the connection's thread waits for room.
    is_socket_full: bool,
    /// Nothing can be sent any more.
    is_closed: bool,
    /// The connection's thread wants to be woken by the next reply.
    should_wake: bool,
    completed: u64,
    completed_bytes: u64,
    /// Allocated for small replies, queued and spare.
    small_bytes: u64,
    spare_small: Vec<Vec<u8>>,
    spare_reads: Vec<BudgetBuffer>,
    spare_read_bytes: usize,
}

impl Outbox {
    fn append_small(&mut self, push: impl FnOnce(&mut Vec<u8>)) {
        let has_room = |piece: &OutputPiece| match piece {
            OutputPiece::Small(last) => last.len() < OPEN_BYTES_MAX,
            OutputPiece::Read { .. } => false,
        };
        if !self.queue.back().is_some_and(has_room) {
            let bytes = self.spare_small.pop().unwrap_or_default();
            self.queue.push_back(OutputPiece::Small(bytes));
        }
        if let Some(OutputPiece::Small(last)) = self.queue.back_mut() {
            let (length, capacity) = (last.len(), last.capacity());
            push(last);
            self.queued_bytes += (last.len() - length) as u64;
            self.small_bytes += (last.capacity() - capacity) as u64;
        }
    }

    /// Keeps the buffers of sent replies for later ones.
    fn recycle(&mut self, spent: &mut Vec<OutputPiece>) {
        for outgoing in spent.drain(..) {
            match outgoing {
                OutputPiece::Read { bytes, .. } => self.keep_read_buffer(bytes),
                OutputPiece::Small(mut bytes)
                    if self.spare_small.is_empty() && bytes.capacity() <= SPARE_SMALL_BYTES_MAX =>
                {
                    bytes.clear();
                    self.spare_small.push(bytes);
                }
                // One spare is enough: small replies are appended to one buffer. The others are
                // freed, because the budget counts their capacity.
                OutputPiece::Small(bytes) => self.small_bytes -= bytes.capacity() as u64,
            }
        }
    }

    fn keep_read_buffer(&mut self, bytes: BudgetBuffer) {
        if self.spare_read_bytes + bytes.len() <= SPARE_BYTES_MAX {
            self.spare_read_bytes += bytes.len();
            self.spare_reads.push(bytes);
        }
    }
}

/// What the connection's thread knows of its socket, and whether it is about to sleep.
#[derive(Clone, Copy)]
pub(super) struct SocketNews {
    /// The socket has room again.
    pub(super) has_room: bool,
    /// The next reply wakes the thread, and so does the end of a send by another thread.
    pub(super) should_wake: bool,
}

/// The state after the connection's thread has sent what it could.
pub(super) struct OutboxState {
    /// Nothing is in flight and nothing is queued: no other thread will act on this connection.
    pub(super) is_idle: bool,
    /// Nothing is in flight and no thread is sending: no other thread will act, though the client
    /// may have to read replies.
    pub(super) is_still: bool,
    pub(super) in_flight: u64,
    /// Payload bytes in flight and bytes queued.
    pub(super) held_bytes: u64,
    pub(super) queued_bytes: u64,
    /// Allocated for small replies.
    pub(super) small_bytes: u64,
    /// Wait until the socket accepts more.
    pub(super) is_socket_full: bool,
    pub(super) is_closed: bool,
}

/// One connection, as seen by the server and by the threads that complete its requests.
pub(super) struct ClientChannel {
    pub(super) socket: OwnedFd,
    /// Readable when the connection's thread should check again.
    pub(super) waker: Waker,
    pub(super) counters: Counters,
    outbox: Mutex<Outbox>,
    is_stopping: AtomicBool,
    /// The socket belongs to another process now.
    is_released: AtomicBool,
}

impl ClientChannel {
    pub(super) fn new(socket: OwnedFd) -> std::io::Result<Self> {
        let waker = Waker::new()?;
        let outbox = Mutex::new(Outbox { sender: Some(Sender::default()), ..Outbox::default() });
        let (is_stopping, is_released) = (AtomicBool::new(false), AtomicBool::new(false));
        Ok(ClientChannel {
            socket,
            waker,
            counters: Counters::default(),
            outbox,
            is_stopping,
            is_released,
        })
    }

    /// Queues replies that another process left unsent, before everything else.
    pub(super) fn queue_unsent(&self, bytes: BudgetBuffer) {
        let mut outbox = self.outbox.lock();
        let end = bytes.len();
        if end > 0 {
            outbox.queued_bytes += end as u64;
            outbox.queue.push_front(OutputPiece::Read { bytes, end });
        }
    }

    /// A copy of the replies that the client has not read; the connection must be still.
    pub(super) fn unsent(&self) -> Vec<u8> {
        let outbox = self.outbox.lock();
        let mut bytes = Vec::with_capacity(outbox.queued_bytes as usize);
        if let Some(sender) = &outbox.sender {
            sender.queue.iter().for_each(|outgoing| bytes.extend_from_slice(outgoing.bytes()));
            bytes.drain(..sender.sent_bytes);
        }
        outbox.queue.iter().for_each(|outgoing| bytes.extend_from_slice(outgoing.bytes()));
        bytes
    }

    /// Queues a reply without read data and counts its request, of `charged_bytes`, as completed.
    pub(super) fn answer(&self, charged_bytes: u64, push: impl FnOnce(&mut Vec<u8>)) {
        let mut outbox = self.outbox.lock();
        if !outbox.is_closed {
            outbox.append_small(push);
        }
        self.completed(outbox, charged_bytes);
    }

    /// Queues the reply of a read and counts its request as completed.
    pub(super) fn answer_read(&self, charged_bytes: u64, piece: OutputPiece) {
        let mut outbox = self.outbox.lock();
        // The charge for a read is the length of its data.
        self.counters.read(charged_bytes);
        if !outbox.is_closed {
            outbox.queued_bytes += piece.bytes().len() as u64;
            outbox.queue.push_back(piece);
        }
        self.completed(outbox, charged_bytes);
    }

    fn completed(&self, mut outbox: MutexGuard<'_, Outbox>, charged_bytes: u64) {
        outbox.completed += 1;
        outbox.completed_bytes += charged_bytes;
        let send_now = !outbox.is_in_burst || outbox.queued_bytes >= SEND_BYTES as u64;
        // A completing thread belongs to the device: after a few rounds, or at a full socket, it
        // leaves the rest to the connection's thread and never waits for a client.
        let has_unsent =
            send_now && !outbox.is_socket_full && self.send_some(&mut outbox, ROUNDS_MAX);
        // After sending: a thread that started to wait during it waits for its end.
        let should_wake = std::mem::take(&mut outbox.should_wake);
        drop(outbox);
        if should_wake || has_unsent {
            self.waker.wake();
        }
    }

    /// Sends what is queued if no other thread is sending. Returns whether the connection's thread
    /// must continue.
    fn send_some(&self, outbox: &mut MutexGuard<'_, Outbox>, rounds_max: u32) -> bool {
        let Some(mut sender) = outbox.sender.take() else { return false };
        let mut rounds = 0;
        let mut has_unsent = false;
        while !outbox.is_closed {
            sender.queue.append(&mut outbox.queue);
            if sender.queue.is_empty() {
                break;
            }
            if rounds == rounds_max {
                has_unsent = true;
                break;
            }
            rounds += 1;
            // The lock is free during the system call: other replies are queued meanwhile. The
            // sender is not in the outbox, so no second thread sends and no reply overtakes
            // another.
            let (length, outcome) = MutexGuard::unlocked(outbox, || sender.send(&self.socket));
            self.counters.bytes_out.fetch_add(length, Relaxed);
            // `abandon` may have set the count to zero during the system call.
            outbox.queued_bytes -= length.min(outbox.queued_bytes);
            outbox.recycle(&mut sender.spent);
            match outcome {
                SendOutcome::All if outbox.is_in_burst => break,
                SendOutcome::All => (),
                SendOutcome::SocketFull => {
                    outbox.is_socket_full = true;
                    has_unsent = true;
                    break;
                }
                SendOutcome::Broken => {
                    self.abandon(outbox);
                    has_unsent = true;
                }
            }
        }
        if outbox.is_closed {
            // `abandon` on another thread does not reach a sender that was taken out.
            sender.queue.clear();
        }
        outbox.sender = Some(sender);
        has_unsent
    }

    fn abandon(&self, outbox: &mut Outbox) {
        outbox.is_closed = true;
        outbox.queue.clear();
        outbox.sender.iter_mut().for_each(|sender| sender.queue.clear());
        outbox.queued_bytes = 0;
        // It would also end the connection for the process that owns it now.
        if !self.is_released.load(Relaxed) {
            let _ = shutdown(&self.socket, Shutdown::Both);
        }
    }

    /// The connection's thread starts to submit requests.
    pub(super) fn begin_burst(&self) {
        self.outbox.lock().is_in_burst = true;
    }

    /// The connection's thread sends what is queued, and gets the state. `submitted` and
    /// `submitted_bytes` are the totals that it ever gave to the device.
    pub(super) fn settle(
        &self,
        submitted: u64,
        submitted_bytes: u64,
        news: SocketNews,
    ) -> OutboxState {
        let mut outbox = self.outbox.lock();
        outbox.is_in_burst = false;
        outbox.is_socket_full &= !news.has_room;
        // Before sending: a reply that comes while the lock is free for the system call must wake
        // the thread, too.
        outbox.should_wake = news.should_wake;
        if !outbox.is_socket_full {
            self.send_some(&mut outbox, u32::MAX);
        }
        let in_flight = submitted - outbox.completed;
        let is_still = in_flight == 0 && outbox.sender.is_some();
        OutboxState {
            is_idle: is_still && outbox.queued_bytes == 0,
            is_still,
            in_flight,
            held_bytes: submitted_bytes - outbox.completed_bytes + outbox.queued_bytes,
            queued_bytes: outbox.queued_bytes,
            small_bytes: outbox.small_bytes,
            is_socket_full: outbox.is_socket_full,
            is_closed: outbox.is_closed,
        }
    }

    /// Moves used read buffers to the connection's own list.
    pub(super) fn take_spare_reads(&self, into: &mut Vec<BudgetBuffer>) {
        let mut outbox = self.outbox.lock();
        outbox.spare_read_bytes = 0;
        into.append(&mut outbox.spare_reads);
    }

    /// Frees the buffers that are kept for later replies.
    pub(super) fn drop_spares(&self) {
        let mut outbox = self.outbox.lock();
        outbox.spare_read_bytes = 0;
        outbox.spare_reads.clear();
        let small: usize = outbox.spare_small.drain(..).map(|bytes| bytes.capacity()).sum();
        outbox.small_bytes -= small as u64;
    }

    /// Returns the buffer of a failed read.
    pub(super) fn keep_read_buffer(&self, bytes: BudgetBuffer) {
        self.outbox.lock().keep_read_buffer(bytes);
    }

    /// Requests submitted and not answered yet.
    pub(super) fn in_flight(&self) -> u64 {
        let completed = self.outbox.lock().completed;
        self.counters.submitted.load(Relaxed).saturating_sub(completed)
    }

    /// Accepts no more requests; those in flight are answered, then the connection ends.
    pub(super) fn stop(&self) {
        self.is_stopping.store(true, Relaxed);
        // The receiving side only: replies to what is in flight still go out. It also ends a `recv`
        // in which the connection's thread waits, which the waker cannot.
        let _ = shutdown(&self.socket, Shutdown::Read);
        self.waker.wake();
    }

    /// Ends the connection immediately; requests in flight continue in the device, without a reply.
    pub(super) fn close(&self) {
        self.is_stopping.store(true, Relaxed);
        self.abandon(&mut self.outbox.lock());
        self.waker.wake();
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.is_stopping.load(Relaxed)
    }

    /// Leaves the socket to another process: nothing is sent or received here, and closing it ends
    /// nothing.
    pub(super) fn release(&self) {
        self.is_released.store(true, Relaxed);
        self.is_stopping.store(true, Relaxed);
        self.waker.wake();
    }

    pub(super) fn is_released(&self) -> bool {
        self.is_released.load(Relaxed)
    }
}
