//! The target's slots: a command is gathered from its statements, executed by the device, and
//! answered. The answer stays until the initiator reuses the slot, which is its receipt.
//!
//! Invariants: a command is executed once, however often its statements arrive: a statement of an
//! earlier use of the slot, or a duplicate, changes nothing. Bytes are copied once, from the packet
//! to the buffer that the device reads. Reuse of a slot in use is a violation. No allocation: the
//! buffer and the exchange of a slot are reused.
//!
//! Not here: which device, and access to it (`served`).

use parking_lot::{Mutex, MutexGuard};
use sawmill_device::{Exchange, Outcome, Reply as Answer};
use sawmill_format::link::GRAIN_BYTES;
use sawmill_format::link::statement::{
    Body, Command, Data, Operation, Reply, Statement, TEXT_BYTES_MAX,
};
use sawmill_format::link::{control, statement};

use super::exports::RequestGuard;
use crate::connection::SlotFill;
use crate::grains::{GrainSet, grains_of};
use crate::path::{SentPiece, SentPieces};
use crate::status::status_of;
use crate::unsent_pieces::{Head, UnsentPieces};
use crate::violation::Violation;
use std::sync::Arc;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// No statement of this use has arrived.
    Idle,
    /// Statements are arriving.
    Gathering,
    /// At the device.
    Working,
    /// The answer is being sent.
    Answered,
}

struct Slot {
    use_number: u64,
    phase: Phase,
    command: Option<Command>,
    come: GrainSet,
    /// Present unless the device has it.
    exchange: Option<Box<SlotExchange>>,
    unsent: UnsentPieces,
    status: u8,
    answer_bytes: u32,
}

/// A slot's buffer, and the exchange of the request that uses it.
pub(super) struct SlotExchange {
    pub(super) slot: u16,
    pub(super) buffer: Box<[u8]>,
    /// Bytes of the request's payload or answer.
    pub(super) length: usize,
    pub(super) served: Option<Arc<dyn SlotOwner>>,
    /// Set while a device has the request.
    pub(super) work: Option<RequestGuard>,
}

/// The owner of the slot, which is notified of the device's answer.
pub(super) trait SlotOwner: Send + Sync {
    fn answered(&self, slot_exchange: Box<SlotExchange>, outcome: Outcome);
}

/// The slots of a connection.
pub(super) struct Slots {
    slots: Box<[Mutex<Slot>]>,
    slot_bytes: u32,
}

/// A complete command.
pub(super) struct WholeCommand {
    pub(super) command: Command,
    pub(super) exchange: Box<SlotExchange>,
}

impl Slots {
    pub(super) fn new(count: u16, slot_bytes: u32) -> Self {
        let slot = |slot| {
            let buffer = vec![0; slot_bytes as usize].into();
            Mutex::new(Slot {
                use_number: 0,
                phase: Phase::Idle,
                command: None,
                come: GrainSet::new(slot_bytes as usize),
                exchange: Some(Box::new(SlotExchange {
                    slot,
                    buffer,
                    length: 0,
                    served: None,
                    work: None,
                })),
                unsent: UnsentPieces::new(slot_bytes as usize),
                status: 0,
                answer_bytes: 0,
            })
        };
        Slots { slots: (0..count).map(slot).collect(), slot_bytes }
    }

    /// The number of slots, and the number of those with an unanswered command.
    pub(super) fn counts(&self) -> (usize, usize) {
        let busy =
            |slot: &&Mutex<Slot>| matches!(slot.lock().phase, Phase::Gathering | Phase::Working);
        (self.slots.len(), self.slots.iter().filter(busy).count())
    }

    /// Handles a statement. Returns the command if it is complete now.
    pub(super) fn take(
        &self,
        statement: &Statement<'_>,
    ) -> Result<Option<WholeCommand>, Violation> {
        match statement {
            Statement::Command(command, inline) => self.command(command, inline),
            Statement::Data(data) => self.data(data),
            _ => Err(Violation::Rule("an initiator sends no replies")),
        }
    }

    /// The slot, ready for statements of use `use_number`; none if they are late or duplicates.
    fn gathering(
        &self,
        index: u16,
        use_number: u64,
    ) -> Result<Option<MutexGuard<'_, Slot>>, Violation> {
        let slot = self
            .slots
            .get(usize::from(index))
            .ok_or(Violation::Rule("it names a slot that does not exist"))?;
        let mut slot = slot.lock();
        if use_number < slot.use_number
            || (use_number == slot.use_number && slot.phase != Phase::Gathering)
        {
            return Ok(None);
        }
        if use_number > slot.use_number {
            if !matches!(slot.phase, Phase::Idle | Phase::Answered) {
                return Err(Violation::Rule("a slot is reused before its request was answered"));
            }
            (slot.use_number, slot.phase, slot.command) = (use_number, Phase::Gathering, None);
            slot.come.clear();
        }
        Ok(Some(slot))
    }

    fn command(&self, command: &Command, inline: &[u8]) -> Result<Option<WholeCommand>, Violation> {
        let fits = command.length <= self.slot_bytes.into()
            || !(command.operation.sends_payload() || command.operation == Operation::Read);
        if !fits {
            return Err(Violation::Rule("a command is longer than a slot"));
        }
        let Some(mut slot) = self.gathering(command.slot, command.use_number)? else {
            return Ok(None);
        };
        if slot.command.is_none() {
            slot.command = Some(*command);
        }
        slot.place(0, inline);
        slot.whole()
    }

    fn data(&self, data: &Data<'_>) -> Result<Option<WholeCommand>, Violation> {
        if statement::check_piece(data.offset.into(), data.bytes.len(), self.slot_bytes.into())
            .is_err()
            && data.offset as usize + data.bytes.len() > self.slot_bytes as usize
        {
            return Err(Violation::Rule("bytes outside the slot"));
        }
        let Some(mut slot) = self.gathering(data.slot, data.use_number)? else { return Ok(None) };
        slot.place(data.offset, data.bytes);
        slot.whole()
    }

    /// The device has answered: the answer of the slot is ready to be sent.
    pub(super) fn answered(&self, mut exchange: Box<SlotExchange>, outcome: Outcome) {
        let index = usize::from(exchange.slot);
        let mut slot = self.slots[index].lock();
        let reads = slot.command.is_some_and(|command| {
            matches!(command.operation, Operation::Read | Operation::Open | Operation::List)
        });
        let (status, bytes) = match outcome {
            Ok(Answer::Allocation(runs)) => {
                let runs = runs.iter().map(|run| (run.length, run.data));
                (0, control::put_runs(&mut exchange.buffer, runs))
            }
            Ok(Answer::Done) => (0, if reads { exchange.length } else { 0 }),
            Err(error) => {
                let text = error.to_string();
                let mut end = text.len().min(TEXT_BYTES_MAX).min(exchange.buffer.len());
                while !text.is_char_boundary(end) {
                    end -= 1;
                }
                exchange.buffer[..end].copy_from_slice(&text.as_bytes()[..end]);
                (status_of(error.kind()), end)
            }
        };
        slot.exchange = Some(exchange);
        (slot.phase, slot.status, slot.answer_bytes) = (Phase::Answered, status, bytes as u32);
        slot.unsent.begin(bytes);
    }

    /// Puts a slot's answer into a packet.
    pub(super) fn put(&self, index: u16, body: &mut Body<'_>, pieces: &mut SentPieces) -> SlotFill {
        let Some(slot) = self.slots.get(usize::from(index)) else { return SlotFill::All };
        let slot = &mut *slot.lock();
        let Some(carried) = slot.exchange.as_ref().filter(|_| slot.phase == Phase::Answered) else {
            return SlotFill::All;
        };
        let (use_number, status, length) = (slot.use_number, slot.status, slot.answer_bytes);
        let head = Head::Reply(Reply { slot: index, use_number, status, length });
        let fill = |offset: usize, into: &mut [u8]| {
            into.copy_from_slice(&carried.buffer[offset..offset + into.len()]);
        };
        slot.unsent.put(&head, length as usize, &fill, body, pieces)
    }

    /// A piece of an answer was lost. Returns whether it must be sent again.
    pub(super) fn lost(&self, piece: &SentPiece) -> bool {
        let Some(slot) = self.slots.get(usize::from(piece.slot)) else { return false };
        let mut slot = slot.lock();
        let goes = slot.phase == Phase::Answered && slot.use_number == piece.use_number;
        if goes {
            slot.unsent.lost(piece);
        }
        goes
    }
}

impl Slot {
    fn place(&mut self, offset: u32, bytes: &[u8]) {
        let Some(carried) = &mut self.exchange else { return };
        let start = offset as usize;
        carried.buffer[start..start + bytes.len()].copy_from_slice(bytes);
        let first = offset / GRAIN_BYTES as u32;
        self.come.insert(first, first + grains_of(bytes.len()));
    }

    /// The command, once all of it has arrived.
    fn whole(&mut self) -> Result<Option<WholeCommand>, Violation> {
        let Some(command) = self.command else { return Ok(None) };
        let payload = if command.operation.sends_payload() { command.length as usize } else { 0 };
        let needs = grains_of(payload);
        if self.come.end() > needs {
            return Err(Violation::Rule("more bytes arrived than the command has"));
        }
        if self.come.count() < needs {
            return Ok(None);
        }
        let Some(mut carried) = self.exchange.take() else { return Ok(None) };
        self.phase = Phase::Working;
        let moves = command.operation.sends_payload() || command.operation == Operation::Read;
        carried.length = if moves { command.length as usize } else { 0 };
        Ok(Some(WholeCommand { command, exchange: carried }))
    }
}

impl Exchange for SlotExchange {
    fn fill(&mut self, offset: u64, into: &mut [u8]) {
        let start = offset as usize;
        into.copy_from_slice(&self.buffer[start..start + into.len()]);
    }

    fn buffer(&mut self) -> &mut [u8] {
        &mut self.buffer[..self.length]
    }

    fn complete(mut self: Box<Self>, outcome: Outcome) {
        if let Some(served) = self.served.take() {
            served.answered(self, outcome);
        }
    }
}
