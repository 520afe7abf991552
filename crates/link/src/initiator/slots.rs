//! The initiator's slots: each carries one chunk of a request to the target, until it is answered.
//!
//! Invariants: a slot is the credit for a buffer of the target, granted at the handshake; a chunk
//! without a slot waits. The use number of a slot grows with each use, so that late packets of an
//! earlier use are recognized and dropped. A slot is free again only when its whole answer has
//! arrived.
//!
//! Not here: which chunk is sent next (`pending`).

use std::sync::Arc;

use parking_lot::Mutex;
use sawmill_device::{Error, ErrorKind};
use sawmill_format::link::statement::{Body, Command, Data, Operation, Reply, Statement};
use sawmill_format::link::{GRAIN_BYTES, statement};

use super::pending::{Chunk, CompletedRequest, PendingRequests};
use crate::connection::{SlotEnd, SlotFill};
use crate::grains::{GrainSet, grains_of};
use crate::path::{SentPiece, SentPieces};
use crate::status::error_of;
use crate::unsent_pieces::{Head, UnsentPieces};
use crate::violation::Violation;

struct Slot {
    /// Whether the slot is in use.
    live: bool,
    command: Command,
    /// The initiator's own number of the export; the command has the target's.
    export: u8,
    chunk: Chunk,
    unsent: UnsentPieces,
    reply: Option<Reply>,
    come: GrainSet,
    /// The text of a failure.
    failure: Option<Error>,
}

/// The slots of a connection.
pub(crate) struct Slots {
    slots: Box<[Mutex<Slot>]>,
    free: Mutex<Vec<u16>>,
    slot_bytes: u32,
    pendings: Arc<PendingRequests>,
    requests: Box<dyn Fn(CompletedRequest) + Send + Sync>,
}

impl Slots {
    pub(crate) fn new(
        count: u16,
        slot_bytes: u32,
        pendings: Arc<PendingRequests>,
        completed_request: Box<dyn Fn(CompletedRequest) + Send + Sync>,
    ) -> Self {
        let command = Command {
            operation: Operation::Flush,
            slot: 0,
            flags: 0,
            export: 0,
            use_number: 0,
            address: 0,
            length: 0,
        };
        let slot = |slot| {
            Mutex::new(Slot {
                live: false,
                command: Command { slot, ..command },
                export: 0,
                chunk: Chunk { place: 0, offset: 0, length: 0 },
                unsent: UnsentPieces::new(slot_bytes as usize),
                reply: None,
                come: GrainSet::new(slot_bytes as usize),
                failure: None,
            })
        };
        Slots {
            slots: (0..count).map(slot).collect(),
            free: Mutex::new((0..count).rev().collect()),
            slot_bytes,
            pendings,
            requests: completed_request,
        }
    }

    /// The number of free slots.
    pub(crate) fn free(&self) -> usize {
        self.free.lock().len()
    }

    pub(crate) fn count(&self) -> usize {
        self.slots.len()
    }

    pub(crate) fn slot_bytes(&self) -> u32 {
        self.slot_bytes
    }

    /// Fills free slots with waiting chunks, and calls `ready` for each. Returns requests that no
    /// slot can carry, to be failed.
    pub(crate) fn dispatch(
        &self,
        admit: impl Fn(Operation) -> bool,
        ready: impl Fn(u16),
    ) -> Vec<CompletedRequest> {
        let mut failed_requests = Vec::new();
        loop {
            let Some(index) = self.free.lock().pop() else { return failed_requests };
            let Some((chunk, command)) = self.pendings.next_chunk(self.slot_bytes.into(), &admit)
            else {
                self.free.lock().push(index);
                return failed_requests;
            };
            if command.operation.sends_payload() && command.length > self.slot_bytes.into() {
                // The request cannot be split, and it is longer than this target's slots.
                self.free.lock().push(index);
                let (length, most) = (command.length, self.slot_bytes);
                let text = format!(
                    "a request of {length} bytes is longer than the target's slots of {most}"
                );
                failed_requests.extend(
                    self.pendings
                        .answered(chunk.place, Some(Error::new(ErrorKind::Unavailable, text))),
                );
                continue;
            }
            let mut slot = self.slots[usize::from(index)].lock();
            let use_number = slot.command.use_number + 1;
            let export = self.pendings.number(command.export);
            slot.command = Command { slot: index, use_number, export, ..command };
            (slot.export, slot.chunk) = (command.export, chunk);
            (slot.live, slot.reply, slot.failure) = (true, None, None);
            slot.come.clear();
            let bytes = payload_bytes(&slot.command);
            slot.unsent.begin(bytes);
            drop(slot);
            ready(index);
        }
    }

    /// Takes all chunks in flight out of the slots: the connection is gone.
    pub(crate) fn abandon(&self) -> Vec<Chunk> {
        let mut chunks = Vec::new();
        for slot in &self.slots {
            let mut slot = slot.lock();
            if std::mem::take(&mut slot.live) {
                chunks.push(slot.chunk);
            }
        }
        chunks
    }

    fn slot(&self, index: u16) -> Result<&Mutex<Slot>, Violation> {
        self.slots
            .get(usize::from(index))
            .ok_or(Violation::Rule("it names a slot that does not exist"))
    }

    fn reply(&self, reply: &Reply, inline: &[u8]) -> Result<(), Violation> {
        let mut slot = self.slot(reply.slot)?.lock();
        if !slot.live || slot.command.use_number != reply.use_number {
            return Ok(());
        }
        // A repeated reply may carry more of the payload than the first, if its packet was longer.
        if reply.status != 0 {
            let text = str::from_utf8(inline).unwrap_or("(unreadable text)");
            slot.failure = Some(error_of(reply.status, text));
        } else {
            if !slot.expects(reply.length.into()) {
                return Err(Violation::Rule("a reply is longer or shorter than requested"));
            }
            self.place(&mut slot, 0, inline)?;
        }
        slot.reply = Some(*reply);
        self.finish_if_whole(slot, reply.slot);
        Ok(())
    }

    fn data(&self, data: &Data<'_>) -> Result<(), Violation> {
        let mut slot = self.slot(data.slot)?.lock();
        if !slot.live || slot.command.use_number != data.use_number {
            return Ok(());
        }
        self.place(&mut slot, data.offset, data.bytes)?;
        self.finish_if_whole(slot, data.slot);
        Ok(())
    }

    fn place(&self, slot: &mut Slot, offset: u32, bytes: &[u8]) -> Result<(), Violation> {
        let most = slot.answer_bytes_max(self.slot_bytes);
        if statement::check_piece(offset.into(), bytes.len(), most).is_err()
            && !(offset as u64 + bytes.len() as u64 <= most
                && slot.command.operation != Operation::Read)
        {
            return Err(Violation::Rule("bytes outside the requested range"));
        }
        if !bytes.is_empty() {
            self.pendings.place(slot.chunk.place, slot.chunk.offset + u64::from(offset), bytes);
            let first = offset / GRAIN_BYTES as u32;
            slot.come.insert(first, first + grains_of(bytes.len()));
        }
        Ok(())
    }

    fn finish_if_whole(&self, mut slot: parking_lot::MutexGuard<'_, Slot>, index: u16) {
        let whole = slot.reply.is_some_and(|reply| {
            reply.status != 0 || slot.come.count() == grains_of(reply.length as usize)
        });
        if !whole {
            return;
        }
        if slot.failure.is_none() && slot.changes_in_memory() {
            self.pendings.changed(slot.export);
        }
        slot.live = false;
        let (place, failure) = (slot.chunk.place, slot.failure.take());
        drop(slot);
        self.free.lock().push(index);
        if let Some(completed_request) = self.pendings.answered(place, failure) {
            (self.requests)(completed_request);
        }
    }
}

impl Slot {
    /// Whether it is a change that becomes durable only with a flush.
    fn changes_in_memory(&self) -> bool {
        use Operation::{Discard, Write, WritePacked, WriteZeroes};
        let changes = matches!(self.command.operation, Write | WritePacked | Discard | WriteZeroes);
        changes && self.command.flags & statement::FUA == 0
    }

    /// Whether an answer may have this many bytes.
    fn expects(&self, length: u64) -> bool {
        match self.command.operation {
            Operation::Read => length == self.command.length,
            Operation::Open | Operation::List | Operation::Allocation => true,
            _ => length == 0,
        }
    }

    fn answer_bytes_max(&self, slot_bytes: u32) -> u64 {
        match self.command.operation {
            Operation::Read => self.command.length,
            Operation::Open | Operation::List | Operation::Allocation => slot_bytes.into(),
            _ => 0,
        }
    }
}

impl SlotEnd for Slots {
    fn take(&self, statement: &Statement<'_>) -> Result<(), Violation> {
        match statement {
            Statement::Reply(reply, inline) => self.reply(reply, inline),
            Statement::Data(data) => self.data(data),
            _ => Err(Violation::Rule("a target sends no commands")),
        }
    }

    fn put(&self, index: u16, body: &mut Body<'_>, pieces: &mut SentPieces) -> SlotFill {
        let Some(slot) = self.slots.get(usize::from(index)) else { return SlotFill::All };
        let slot = &mut *slot.lock();
        if !slot.live {
            return SlotFill::All;
        }
        let (head, chunk) = (Head::Command(slot.command), slot.chunk);
        let fill = |offset: usize, into: &mut [u8]| {
            self.pendings.fill(chunk.place, chunk.offset + offset as u64, into);
        };
        slot.unsent.put(&head, payload_bytes(&slot.command), &fill, body, pieces)
    }

    fn lost(&self, piece: &SentPiece) -> bool {
        let Some(slot) = self.slots.get(usize::from(piece.slot)) else { return false };
        let mut slot = slot.lock();
        let goes = slot.live && slot.command.use_number == piece.use_number;
        if goes {
            slot.unsent.lost(piece);
        }
        goes
    }
}

fn payload_bytes(command: &Command) -> usize {
    if command.operation.sends_payload() { command.length as usize } else { 0 }
}
