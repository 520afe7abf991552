//! The target's places: a command is gathered from its statements, executed by the device, and
//! answered. The answer stays until the initiator reuses the place, which is its receipt.
//!
//! Invariants: a command is executed once, however often its statements arrive: a statement of an
//! earlier use of the place, or a duplicate, changes nothing. Bytes are copied once, from the
//! packet to the buffer that the device reads. Reuse of a place in use is a violation. No
//! allocation: the buffer and the exchange of a place are reused.
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
use crate::connection::PacketFill;
use crate::grains::{GrainSet, grains_of};
use crate::halves::{SentPiece, SentPieces};
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

struct TargetPlace {
    use_number: u64,
    phase: Phase,
    command: Option<Command>,
    come: GrainSet,
    /// Present unless the device has it.
    exchange: Option<Box<PlaceExchange>>,
    unsent: UnsentPieces,
    status: u8,
    answer_bytes: u32,
}

/// A place's buffer, and the exchange of the request that uses it.
pub(super) struct PlaceExchange {
    pub(super) place: u16,
    pub(super) buffer: Box<[u8]>,
    /// Bytes of the request's payload or answer.
    pub(super) length: usize,
    pub(super) served: Option<Arc<dyn PlaceOwner>>,
    /// Set while a device has the request.
    pub(super) work: Option<RequestGuard>,
}

/// The owner of the place, which is notified of the device's answer.
pub(super) trait PlaceOwner: Send + Sync {
    fn answered(&self, place_exchange: Box<PlaceExchange>, outcome: Outcome);
}

/// The places of a connection.
pub(super) struct TargetPlaces {
    places: Box<[Mutex<TargetPlace>]>,
    place_bytes: u32,
}

/// A complete command.
pub(super) struct WholeCommand {
    pub(super) command: Command,
    pub(super) exchange: Box<PlaceExchange>,
}

impl TargetPlaces {
    pub(super) fn new(count: u16, place_bytes: u32) -> Self {
        let place = |place| {
            let buffer = vec![0; place_bytes as usize].into();
            Mutex::new(TargetPlace {
                use_number: 0,
                phase: Phase::Idle,
                command: None,
                come: GrainSet::new(place_bytes as usize),
                exchange: Some(Box::new(PlaceExchange {
                    place,
                    buffer,
                    length: 0,
                    served: None,
                    work: None,
                })),
                unsent: UnsentPieces::new(place_bytes as usize),
                status: 0,
                answer_bytes: 0,
            })
        };
        TargetPlaces { places: (0..count).map(place).collect(), place_bytes }
    }

    /// The number of places, and the number of those with an unanswered command.
    pub(super) fn counts(&self) -> (usize, usize) {
        let busy = |place: &&Mutex<TargetPlace>| {
            matches!(place.lock().phase, Phase::Gathering | Phase::Working)
        };
        (self.places.len(), self.places.iter().filter(busy).count())
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

    /// The place, ready for statements of use `use_number`; none if they are late or duplicates.
    fn gathering(
        &self,
        index: u16,
        use_number: u64,
    ) -> Result<Option<MutexGuard<'_, TargetPlace>>, Violation> {
        let place = self
            .places
            .get(usize::from(index))
            .ok_or(Violation::Rule("it names a place that does not exist"))?;
        let mut place = place.lock();
        if use_number < place.use_number
            || (use_number == place.use_number && place.phase != Phase::Gathering)
        {
            return Ok(None);
        }
        if use_number > place.use_number {
            if !matches!(place.phase, Phase::Idle | Phase::Answered) {
                return Err(Violation::Rule("a place is reused before its request was answered"));
            }
            (place.use_number, place.phase, place.command) = (use_number, Phase::Gathering, None);
            place.come.clear();
        }
        Ok(Some(place))
    }

    fn command(&self, command: &Command, inline: &[u8]) -> Result<Option<WholeCommand>, Violation> {
        let fits = command.length <= self.place_bytes.into()
            || !(command.operation.sends_payload() || command.operation == Operation::Read);
        if !fits {
            return Err(Violation::Rule("a command is longer than a place"));
        }
        let Some(mut place) = self.gathering(command.place, command.use_number)? else {
            return Ok(None);
        };
        if place.command.is_none() {
            place.command = Some(*command);
        }
        place.store(0, inline);
        place.whole()
    }

    fn data(&self, data: &Data<'_>) -> Result<Option<WholeCommand>, Violation> {
        if statement::check_piece(data.offset.into(), data.bytes.len(), self.place_bytes.into())
            .is_err()
            && data.offset as usize + data.bytes.len() > self.place_bytes as usize
        {
            return Err(Violation::Rule("bytes outside the place"));
        }
        let Some(mut place) = self.gathering(data.place, data.use_number)? else { return Ok(None) };
        place.store(data.offset, data.bytes);
        place.whole()
    }

    /// The device has answered: the answer of the place is ready to be sent.
    pub(super) fn answered(&self, mut exchange: Box<PlaceExchange>, outcome: Outcome) {
        let index = usize::from(exchange.place);
        let mut place = self.places[index].lock();
        let reads = place.command.is_some_and(|command| {
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
        place.exchange = Some(exchange);
        (place.phase, place.status, place.answer_bytes) = (Phase::Answered, status, bytes as u32);
        place.unsent.begin(bytes);
    }

    /// Puts a place's answer into a packet.
    pub(super) fn put(
        &self,
        index: u16,
        body: &mut Body<'_>,
        pieces: &mut SentPieces,
    ) -> PacketFill {
        let Some(place) = self.places.get(usize::from(index)) else { return PacketFill::All };
        let place = &mut *place.lock();
        let Some(exchange) = place.exchange.as_ref().filter(|_| place.phase == Phase::Answered)
        else {
            return PacketFill::All;
        };
        let (use_number, status, length) = (place.use_number, place.status, place.answer_bytes);
        let head = Head::Reply(Reply { place: index, use_number, status, length });
        let fill = |offset: usize, into: &mut [u8]| {
            into.copy_from_slice(&exchange.buffer[offset..offset + into.len()]);
        };
        place.unsent.put(&head, length as usize, &fill, body, pieces)
    }

    /// A piece of an answer was lost. Returns whether it must be sent again.
    pub(super) fn lost(&self, piece: &SentPiece) -> bool {
        let Some(place) = self.places.get(usize::from(piece.place)) else { return false };
        let mut place = place.lock();
        let goes = place.phase == Phase::Answered && place.use_number == piece.use_number;
        if goes {
            place.unsent.lost(piece);
        }
        goes
    }
}

impl TargetPlace {
    fn store(&mut self, offset: u32, bytes: &[u8]) {
        let Some(exchange) = &mut self.exchange else { return };
        let start = offset as usize;
        exchange.buffer[start..start + bytes.len()].copy_from_slice(bytes);
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
        let Some(mut exchange) = self.exchange.take() else { return Ok(None) };
        self.phase = Phase::Working;
        let moves = command.operation.sends_payload() || command.operation == Operation::Read;
        exchange.length = if moves { command.length as usize } else { 0 };
        Ok(Some(WholeCommand { command, exchange }))
    }
}

impl Exchange for PlaceExchange {
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
