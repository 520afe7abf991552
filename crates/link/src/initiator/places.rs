//! The initiator's places: each carries one chunk of a request to the target, until it is answered.
//!
//! Invariants: a place stands for a buffer of the target, granted at the handshake; a chunk
//! without a place waits. The use number of a place grows with each use, so that late packets of an
//! earlier use are recognized and dropped. A place is free again only when its whole answer has
//! arrived.
//!
//! Not here: which chunk is sent next (`pending`).

use std::sync::Arc;

use parking_lot::Mutex;
use sawmill_device::{Error, ErrorKind};
use sawmill_format::link::statement::{Body, Command, Data, Operation, Reply, Statement};
use sawmill_format::link::{GRAIN_BYTES, statement};

use super::pending::{Chunk, CompletedRequest, PendingRequests};
use crate::connection::{ConnectionEnd, PacketFill};
use crate::grains::{GrainSet, grains_of};
use crate::halves::{SentPiece, SentPieces};
use crate::status::error_of;
use crate::unsent_pieces::{Head, UnsentPieces};
use crate::violation::Violation;

struct InitiatorPlace {
    /// Whether the place is in use.
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

/// The places of a connection.
pub(crate) struct InitiatorPlaces {
    places: Box<[Mutex<InitiatorPlace>]>,
    free: Mutex<Vec<u16>>,
    place_bytes: u32,
    pendings: Arc<PendingRequests>,
    requests: Box<dyn Fn(CompletedRequest) + Send + Sync>,
}

impl InitiatorPlaces {
    pub(crate) fn new(
        count: u16,
        place_bytes: u32,
        pendings: Arc<PendingRequests>,
        completed_request: Box<dyn Fn(CompletedRequest) + Send + Sync>,
    ) -> Self {
        let command = Command {
            operation: Operation::Flush,
            place: 0,
            flags: 0,
            export: 0,
            use_number: 0,
            address: 0,
            length: 0,
        };
        let place = |place| {
            Mutex::new(InitiatorPlace {
                live: false,
                command: Command { place, ..command },
                export: 0,
                chunk: Chunk { entry: 0, offset: 0, length: 0 },
                unsent: UnsentPieces::new(place_bytes as usize),
                reply: None,
                come: GrainSet::new(place_bytes as usize),
                failure: None,
            })
        };
        InitiatorPlaces {
            places: (0..count).map(place).collect(),
            free: Mutex::new((0..count).rev().collect()),
            place_bytes,
            pendings,
            requests: completed_request,
        }
    }

    /// The number of free places.
    pub(crate) fn free(&self) -> usize {
        self.free.lock().len()
    }

    pub(crate) fn count(&self) -> usize {
        self.places.len()
    }

    pub(crate) fn place_bytes(&self) -> u32 {
        self.place_bytes
    }

    /// Fills free places with waiting chunks, and calls `ready` for each. Returns requests that no
    /// place can carry, to be failed.
    pub(crate) fn dispatch(
        &self,
        admit: impl Fn(Operation) -> bool,
        ready: impl Fn(u16),
    ) -> Vec<CompletedRequest> {
        let mut failed_requests = Vec::new();
        loop {
            let Some(index) = self.free.lock().pop() else { return failed_requests };
            let Some((chunk, command)) = self.pendings.next_chunk(self.place_bytes.into(), &admit)
            else {
                self.free.lock().push(index);
                return failed_requests;
            };
            if command.operation.sends_payload() && command.length > self.place_bytes.into() {
                // The request cannot be split, and it is longer than this target's places.
                self.free.lock().push(index);
                let (length, most) = (command.length, self.place_bytes);
                let text = format!(
                    "a request of {length} bytes is longer than the {most} that the target \
                     granted for one request"
                );
                failed_requests.extend(
                    self.pendings
                        .answered(chunk.entry, Some(Error::new(ErrorKind::Unavailable, text))),
                );
                continue;
            }
            let mut place = self.places[usize::from(index)].lock();
            let use_number = place.command.use_number + 1;
            let export = self.pendings.number(command.export);
            place.command = Command { place: index, use_number, export, ..command };
            (place.export, place.chunk) = (command.export, chunk);
            (place.live, place.reply, place.failure) = (true, None, None);
            place.come.clear();
            let bytes = payload_bytes(&place.command);
            place.unsent.begin(bytes);
            drop(place);
            ready(index);
        }
    }

    /// Takes all chunks in flight out of the places: the connection is gone.
    pub(crate) fn abandon(&self) -> Vec<Chunk> {
        let mut chunks = Vec::new();
        for place in &self.places {
            let mut place = place.lock();
            if std::mem::take(&mut place.live) {
                chunks.push(place.chunk);
            }
        }
        chunks
    }

    fn place(&self, index: u16) -> Result<&Mutex<InitiatorPlace>, Violation> {
        self.places
            .get(usize::from(index))
            .ok_or(Violation::Rule("it names a place that does not exist"))
    }

    fn reply(&self, reply: &Reply, inline: &[u8]) -> Result<(), Violation> {
        let mut place = self.place(reply.place)?.lock();
        if !place.live || place.command.use_number != reply.use_number {
            return Ok(());
        }
        // A repeated reply may carry more of the payload than the first, if its packet was longer.
        if reply.status != 0 {
            let text = str::from_utf8(inline).unwrap_or("(unreadable text)");
            place.failure = Some(error_of(reply.status, text));
        } else {
            if !place.expects(reply.length.into()) {
                return Err(Violation::Rule("a reply is longer or shorter than requested"));
            }
            self.store(&mut place, 0, inline)?;
        }
        place.reply = Some(*reply);
        self.finish_if_whole(place, reply.place);
        Ok(())
    }

    fn data(&self, data: &Data<'_>) -> Result<(), Violation> {
        let mut place = self.place(data.place)?.lock();
        if !place.live || place.command.use_number != data.use_number {
            return Ok(());
        }
        self.store(&mut place, data.offset, data.bytes)?;
        self.finish_if_whole(place, data.place);
        Ok(())
    }

    fn store(
        &self,
        place: &mut InitiatorPlace,
        offset: u32,
        bytes: &[u8],
    ) -> Result<(), Violation> {
        let most = place.answer_bytes_max(self.place_bytes);
        if statement::check_piece(offset.into(), bytes.len(), most).is_err()
            && !(offset as u64 + bytes.len() as u64 <= most
                && place.command.operation != Operation::Read)
        {
            return Err(Violation::Rule("bytes outside the requested range"));
        }
        if !bytes.is_empty() {
            self.pendings.store(place.chunk.entry, place.chunk.offset + u64::from(offset), bytes);
            let first = offset / GRAIN_BYTES as u32;
            place.come.insert(first, first + grains_of(bytes.len()));
        }
        Ok(())
    }

    fn finish_if_whole(&self, mut place: parking_lot::MutexGuard<'_, InitiatorPlace>, index: u16) {
        let whole = place.reply.is_some_and(|reply| {
            reply.status != 0 || place.come.count() == grains_of(reply.length as usize)
        });
        if !whole {
            return;
        }
        if place.failure.is_none() && place.changes_in_memory() {
            self.pendings.changed(place.export);
        }
        place.live = false;
        let (entry, failure) = (place.chunk.entry, place.failure.take());
        drop(place);
        self.free.lock().push(index);
        if let Some(completed_request) = self.pendings.answered(entry, failure) {
            (self.requests)(completed_request);
        }
    }
}

impl InitiatorPlace {
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

    fn answer_bytes_max(&self, place_bytes: u32) -> u64 {
        match self.command.operation {
            Operation::Read => self.command.length,
            Operation::Open | Operation::List | Operation::Allocation => place_bytes.into(),
            _ => 0,
        }
    }
}

impl ConnectionEnd for InitiatorPlaces {
    fn take(&self, statement: &Statement<'_>) -> Result<(), Violation> {
        match statement {
            Statement::Reply(reply, inline) => self.reply(reply, inline),
            Statement::Data(data) => self.data(data),
            _ => Err(Violation::Rule("a target sends no commands")),
        }
    }

    fn put(&self, index: u16, body: &mut Body<'_>, pieces: &mut SentPieces) -> PacketFill {
        let Some(place) = self.places.get(usize::from(index)) else { return PacketFill::All };
        let place = &mut *place.lock();
        if !place.live {
            return PacketFill::All;
        }
        let (head, chunk) = (Head::Command(place.command), place.chunk);
        let fill = |offset: usize, into: &mut [u8]| {
            self.pendings.fill(chunk.entry, chunk.offset + offset as u64, into);
        };
        place.unsent.put(&head, payload_bytes(&place.command), &fill, body, pieces)
    }

    fn lost(&self, piece: &SentPiece) -> bool {
        let Some(place) = self.places.get(usize::from(piece.place)) else { return false };
        let mut place = place.lock();
        let goes = place.live && place.command.use_number == piece.use_number;
        if goes {
            place.unsent.lost(piece);
        }
        goes
    }
}

fn payload_bytes(command: &Command) -> usize {
    if command.operation.sends_payload() { command.length as usize } else { 0 }
}
