//! The threads of a device: one fetches chunks and flushes, one fetches reads.
//!
//! Invariants: the next packet of the write port is fetched when the chunk before it is done and
//! acknowledged. Memory goes back before its packet is acknowledged, because the kernel may use it
//! at once. Not here: making the device (`server`).

use std::io;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::thread::JoinHandle;

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use sawmill_device::{BlockDevice, Error, ErrorKind, Exchange, Flags, Operation, Outcome, Request};
use sawmill_sys::{BusePort, MemoryPiece, Waker};

use super::chunk::{apply, keep_worst};
use super::gate::Gate;
use super::options::BuseOptions;
use super::protocol::{
    Change, ChunkLayout, READ_PACKET_BYTES, ReadPacket, WRITE_PACKET_BYTES, WritePacket,
    acknowledgement,
};
use crate::ublk::errno;

/// Writes that follow each other are one up to this length.
const WRITE_BYTES_MAX: u64 = 1 << 20;

/// A device may call functions of a program on such a thread, which count on what a main thread
/// has. Memory that they do not use costs nothing.
const STACK_BYTES: usize = 8 << 20;

const EINVAL: i32 = Errno::INVAL.raw_os_error();
const EIO: i32 = Errno::IO.raw_os_error();

/// A device while it is served.
pub(super) struct Service {
    pub(super) id: u32,
    pub(super) device: Arc<dyn BlockDevice>,
    pub(super) layout: ChunkLayout,
    pub(super) gate: Gate,
    writes: BusePort,
    reads: BusePort,
    /// The kernel keeps what is not acknowledged for the next server.
    is_recoverable: bool,
    /// They wake the threads.
    wakers: [Waker; 2],
}

/// Whether a thread goes on.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Next {
    Fetch,
    End,
}

impl Service {
    pub(super) fn new(
        options: &BuseOptions,
        id: u32,
        device: Arc<dyn BlockDevice>,
        [writes, reads]: [BusePort; 2],
        layout: ChunkLayout,
    ) -> io::Result<Self> {
        Ok(Service {
            id,
            device,
            layout,
            gate: Gate::default(),
            writes,
            reads,
            is_recoverable: options.recoverable,
            wakers: [Waker::new()?, Waker::new()?],
        })
    }

    /// Starts the threads.
    pub(super) fn start(self: &Arc<Self>) -> io::Result<Vec<JoinHandle<()>>> {
        let (writer, reader) = (Arc::clone(self), Arc::clone(self));
        let writer = spawn("buse-writes", move || writer.serve_writes())?;
        match spawn("buse-reads", move || reader.serve_reads()) {
            Ok(reader) => Ok(vec![writer, reader]),
            Err(error) => {
                self.leave();
                let _ = writer.join();
                Err(error)
            }
        }
    }

    pub(super) fn rest(&self) {
        self.gate.rest();
        self.wakers.iter().for_each(Waker::wake);
    }

    /// The threads end when their packets are answered.
    pub(super) fn leave(&self) {
        self.gate.leave();
        self.wakers.iter().for_each(Waker::wake);
    }

    fn serve_writes(self: &Arc<Self>) {
        let mut packet = [0; WRITE_PACKET_BYTES];
        self.serve(&self.writes, &self.wakers[0], |port| {
            if !port.fetch(&mut packet)? {
                return Ok(None);
            }
            match WritePacket::parse(&packet) {
                WritePacket::End => return Ok(Some(Next::End)),
                WritePacket::Flush(token) => self.flush(token),
                WritePacket::Chunk { offset, records } => self.write_chunk(offset, records),
            }
            Ok(Some(Next::Fetch))
        });
    }

    fn serve_reads(self: &Arc<Self>) {
        let mut packet = [0; READ_PACKET_BYTES];
        self.serve(&self.reads, &self.wakers[1], |port| {
            if !port.fetch(&mut packet)? {
                return Ok(None);
            }
            match ReadPacket::parse(&packet) {
                ReadPacket::End => return Ok(Some(Next::End)),
                ReadPacket::Read { address, length, offset } => {
                    self.read(address, length, offset);
                }
            }
            Ok(Some(Next::Fetch))
        });
    }

    /// Fetches from a port until it ends or fails, or the device is to be left.
    fn serve(
        &self,
        port: &BusePort,
        waker: &Waker,
        mut fetch: impl FnMut(&BusePort) -> io::Result<Option<Next>>,
    ) {
        if let Err(error) = sawmill_sys::reclaim::set_io_flusher() {
            tracing::debug!(%error, "buse: cannot make a thread an I/O flusher");
        }
        while self.gate.pass() {
            match fetch(port) {
                Ok(Some(Next::Fetch)) => (),
                Ok(Some(Next::End)) => break,
                Ok(None) => wait(port, waker),
                Err(error) => {
                    tracing::error!(%error, id = self.id, "buse: a port fails");
                    self.gate.failed();
                    break;
                }
            }
        }
        self.gate.ended();
    }

    fn write_chunk(&self, offset: u64, records: u64) {
        let chunk = self.writes.memory().lend(offset, self.layout.chunk_bytes);
        let write_bytes_max =
            WRITE_BYTES_MAX.min(u64::from(self.device.geometry().request_bytes_max));
        let changes = chunk.and_then(|chunk| {
            Some((self.layout.changes(&chunk, records, write_bytes_max)?, chunk))
        });
        let Some((mut changes, chunk)) = changes else {
            return self.refuse(&self.writes, offset);
        };
        if !self.device.geometry().operations.discard {
            // A disk that was made for another device may have some: a discard may do nothing.
            changes.retain(|change| change.operation != Operation::Discard);
        }
        self.gate.taken(|counts| {
            for Change { operation, length, .. } in &changes {
                match operation {
                    Operation::Discard => counts.discards += 1,
                    Operation::WriteZeroes => counts.write_zeroes += 1,
                    _ => {
                        counts.writes += 1;
                        counts.bytes_in += length;
                    }
                }
            }
        });
        let error = apply(&self.device, chunk, &changes);
        let text = error.as_ref().map(ToString::to_string);
        if self.answer(&self.writes, offset, error, 0)
            && let Some(error) = text
        {
            // Its users have long had their answers.
            let (id, changes) = (self.id, changes.len());
            tracing::error!(error, id, changes, "buse: a chunk of completed writes failed");
        }
    }

    /// Whether the device behind takes no requests any more, and so none of the completed writes.
    pub(super) fn is_device_closed(&self) -> bool {
        let (sender, receiver) = sync_channel(1);
        let on_outcome = move |outcome: Outcome| drop(sender.send(outcome));
        self.device.submit(Request::bare(Operation::Flush, 0, 0, Flags::default(), on_outcome));
        matches!(receiver.recv(), Ok(Err(error)) if error.kind() == ErrorKind::Closed)
    }

    fn flush(self: &Arc<Self>, token: u64) {
        self.gate.taken(|counts| counts.flushes += 1);
        let service = Arc::clone(self);
        let on_outcome = move |outcome: Outcome| {
            service.answer(&service.writes, token, outcome.err(), 0);
        };
        self.device.submit(Request::bare(Operation::Flush, 0, 0, Flags::default(), on_outcome));
    }

    fn read(self: &Arc<Self>, address: u64, length: u64, offset: u64) {
        let part_bytes = u64::from(self.device.geometry().request_bytes_max);
        let lent = parts(length, part_bytes).map(|(start, length)| {
            let piece = self.reads.memory().lend(offset.checked_add(start)?, length)?;
            Some((address.checked_add(start)?, piece))
        });
        // Whole or not at all.
        let Some(lent) = lent.collect::<Option<Vec<_>>>().filter(|lent| !lent.is_empty()) else {
            return self.refuse(&self.reads, offset);
        };
        self.gate.taken(|counts| counts.reads += 1);
        let left = Mutex::new((lent.len(), None));
        let read = Arc::new(ReadInParts { service: Arc::clone(self), token: offset, length, left });
        for (address, piece) in lent {
            let length = piece.len() as u64;
            let exchange = Box::new(ReadExchange { piece, read: Arc::clone(&read) });
            let (operation, flags) = (Operation::Read, Flags::default());
            self.device.submit(Request::new(operation, address, length, flags, exchange));
        }
    }

    /// Acknowledges a packet. The answer that a closed device gives is none: the next server gets
    /// the packet. Returns whether it was acknowledged.
    fn answer(&self, port: &BusePort, token: u64, error: Option<Error>, read_bytes: u64) -> bool {
        let is_closed = error.as_ref().is_some_and(|error| error.kind() == ErrorKind::Closed);
        if is_closed && self.is_recoverable && self.gate.abandon() {
            self.gate.answered(EIO, 0);
            self.wakers.iter().for_each(Waker::wake);
            return false;
        }
        let errno = number_of(error);
        let read_bytes = if errno == 0 { read_bytes } else { 0 };
        if let Err(error) = port.acknowledge(&acknowledgement(token, errno)) {
            // ENODEV: the device was removed meanwhile.
            if error.raw_os_error() != Some(Errno::NODEV.raw_os_error()) {
                tracing::error!(%error, id = self.id, token, "buse: an answer is not taken");
            }
        }
        self.gate.answered(errno, read_bytes);
        true
    }

    /// The kernel sent what it never should.
    fn refuse(&self, port: &BusePort, token: u64) {
        tracing::error!(id = self.id, token, "buse: the kernel sent a packet that makes no sense");
        self.gate.violated();
        let _ = port.acknowledge(&acknowledgement(token, EINVAL));
    }
}

/// A read in flight, in as many parts as the device wants.
struct ReadInParts {
    service: Arc<Service>,
    token: u64,
    length: u64,
    /// The parts without an answer, and the error that counts.
    left: Mutex<(usize, Option<Error>)>,
}

impl ReadInParts {
    fn end_part(&self, outcome: Outcome) {
        let mut left = self.left.lock();
        left.0 -= 1;
        if let Err(error) = outcome {
            keep_worst(&mut left.1, error);
        }
        if left.0 > 0 {
            return;
        }
        let error = left.1.take();
        drop(left);
        self.service.answer(&self.service.reads, self.token, error, self.length);
    }
}

/// The parts of a range: start and length of each.
pub(super) fn parts(length: u64, part_bytes: u64) -> impl Iterator<Item = (u64, u64)> {
    let part_bytes = part_bytes.max(1);
    let starts = (0..length.div_ceil(part_bytes)).map(move |part| part * part_bytes);
    starts.map(move |start| (start, part_bytes.min(length - start)))
}

/// A part of a read.
struct ReadExchange {
    piece: MemoryPiece,
    read: Arc<ReadInParts>,
}

impl Exchange for ReadExchange {
    fn fill(&mut self, _offset: u64, _into: &mut [u8]) {}

    fn buffer(&mut self) -> &mut [u8] {
        &mut self.piece
    }

    fn complete(self: Box<Self>, outcome: Outcome) {
        let ReadExchange { piece, read } = *self;
        drop(piece);
        read.end_part(outcome);
    }
}

/// The positive error number of an outcome; 0 without an error.
fn number_of(error: Option<Error>) -> i32 {
    let Some(error) = error else { return 0 };
    // At this level only: the kernel logs a failed read or flush itself.
    tracing::debug!(%error, "buse: a request failed");
    errno(error.kind())
}

fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name(name.to_owned()).stack_size(STACK_BYTES).spawn(run)
}

/// Sleeps until the port has a packet, or the waker is used.
fn wait(port: &BusePort, waker: &Waker) {
    let mut fds = [PollFd::new(waker, PollFlags::IN), PollFd::new(port, PollFlags::IN)];
    // An interrupted wait is one that ended early.
    let _ = poll(&mut fds, None);
    if fds[0].revents().contains(PollFlags::IN) {
        // The waker carries no data: it only signals.
        waker.clear();
    }
}
