//! The statements of a sealed packet: commands, data, replies, acknowledgements, notes about links.
//!
//! Invariants: the statements of a packet follow each other without gaps; a statement of kind 0, or
//! the end of the body, ends them, and only zeroes follow. Every statement is self-contained: it
//! names its place and use number, so that statements may come in any order, twice, or never.
//!
//! Not here: the state of a place, and the effect of a statement (`crates/link`).

use super::{GRAIN_BYTES, LINKS_MAX, check_length, check_reserved, control, text};
use crate::error::check_field;
use crate::layout::layout;
use crate::{FormatError, Result};

layout! {
    /// A command: the initiator's request; the first of a write's bytes follow.
    command_at, "Command", 32;
    KIND: 0, 1, "kind";
    OPERATION: 1, 1, "operation";
    PLACE: 2, 2, "place";
    FLAGS: 4, 1, "flags";
    EXPORT: 5, 1, "export";
    INLINE_BYTES: 6, 2, "inline_bytes";
    USE_NUMBER: 8, 8, "use_number";
    ADDRESS: 16, 8, "address";
    LENGTH: 24, 8, "length";
}

layout! {
    /// Bytes of a write or of a reply; they follow.
    data_at, "Data", 20;
    KIND: 0, 1, "kind";
    RESERVED: 1, 1, "reserved";
    PLACE: 2, 2, "place";
    OFFSET: 4, 4, "offset";
    USE_NUMBER: 8, 8, "use_number";
    BYTES: 16, 4, "bytes";
}

layout! {
    /// A reply: how a command ended; the first of its bytes, or the text of an error, follow.
    reply_at, "Reply", 20;
    KIND: 0, 1, "kind";
    STATUS: 1, 1, "status";
    PLACE: 2, 2, "place";
    INLINE_BYTES: 4, 2, "inline_bytes";
    RESERVED: 6, 2, "reserved";
    USE_NUMBER: 8, 8, "use_number";
    LENGTH: 16, 4, "length";
}

layout! {
    /// Which packets of a link have come; the runs follow, from the newest downwards.
    ack_at, "Acknowledgement", 16;
    KIND: 0, 1, "kind";
    LINK: 1, 1, "link";
    RUNS: 2, 1, "runs";
    RESERVED: 3, 1, "reserved";
    DELAY_US: 4, 4, "delay_us";
    LARGEST: 8, 8, "largest";
}

layout! {
    /// One run of an acknowledgement.
    run_at, "Run", 4;
    MISSING: 0, 2, "missing";
    RECEIVED: 2, 2, "received";
}

layout! {
    /// A message without a payload, about a link: ping, join, joined, leave.
    note_at, "Note", 16;
    KIND: 0, 1, "kind";
    LINK: 1, 1, "link";
    RESERVED: 2, 2, "reserved";
    PACKET_BYTES: 4, 4, "packet_bytes";
    TOKEN: 8, 8, "token";
}

layout! {
    /// The end of a connection, or a refusal; its text follows.
    close_at, "Close", 4;
    KIND: 0, 1, "kind";
    STATUS: 1, 1, "status";
    TEXT_BYTES: 2, 2, "text_bytes";
}

const WHAT: &str = "link statement";
const COMMAND: u8 = 1;
const DATA: u8 = 2;
const REPLY: u8 = 3;
const ACK: u8 = 4;
const NOTE_FIRST: u8 = 5;
const CLOSE: u8 = 9;

/// Runs that one acknowledgement may have.
pub const RUNS_MAX: usize = 32;
/// The longest text of a close or an error.
pub const TEXT_BYTES_MAX: usize = 400;

/// The operation of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Operation {
    /// The bytes of a range.
    Read = 1,
    /// Bytes for a range.
    Write = 2,
    /// A [packed write](crate::packed_write): bytes for many small ranges. `length` counts its
    /// payload.
    WritePacked = 3,
    /// Make durable.
    Flush = 4,
    /// No longer needed.
    Discard = 5,
    /// Zero the range.
    WriteZeroes = 6,
    /// The range will be read.
    Prefetch = 7,
    /// Which ranges hold data.
    Allocation = 8,
    /// Open an export: its name is the payload.
    Open = 16,
    /// Close an open export.
    Close = 17,
    /// Name all exports.
    List = 18,
}

impl Operation {
    fn from_code(code: u8) -> Option<Operation> {
        use Operation::*;
        [
            Read,
            Write,
            WritePacked,
            Flush,
            Discard,
            WriteZeroes,
            Prefetch,
            Allocation,
            Open,
            Close,
            List,
        ]
        .into_iter()
        .find(|operation| *operation as u8 == code)
    }

    /// Whether its payload goes to the target.
    #[must_use]
    pub fn sends_payload(self) -> bool {
        matches!(self, Operation::Write | Operation::WritePacked | Operation::Open)
    }

    /// The flags that its command may have.
    fn flags(self) -> u8 {
        match self {
            Operation::Open => {
                control::OPEN_READ_ONLY | control::OPEN_TAKE_OVER | control::OPEN_SHARED
            }
            Operation::Close | Operation::List => 0,
            _ => FUA | NO_UNMAP,
        }
    }
}

/// Flag of a command: complete only when durable.
pub const FUA: u8 = 1;
/// Flag of a command: zeroes keep their space.
pub const NO_UNMAP: u8 = 2;

/// A command's fixed fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Command {
    /// The operation.
    pub operation: Operation,
    /// The place that it fills until it is answered.
    pub place: u16,
    /// [`FUA`], [`NO_UNMAP`]; for an open see [`super::control`].
    pub flags: u8,
    /// The open export's number, from the answer to its open.
    pub export: u8,
    /// Which use of the place: grows with each use.
    pub use_number: u64,
    /// First byte of the range.
    pub address: u64,
    /// Bytes of the range; for packed writes and opens, of the payload.
    pub length: u64,
}

/// Bytes of a request or a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Data<'a> {
    /// The place.
    pub place: u16,
    /// Which use of it.
    pub use_number: u64,
    /// Where in the payload they begin: a multiple of [`GRAIN_BYTES`].
    pub offset: u32,
    /// The bytes.
    pub bytes: &'a [u8],
}

/// A reply's fixed fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reply {
    /// The place.
    pub place: u16,
    /// Which use of it.
    pub use_number: u64,
    /// 0, or what went wrong (see `status` on the page).
    pub status: u8,
    /// Bytes of the whole payload: of a read, of the answer to a control, of an error's text.
    pub length: u32,
}

/// What a note says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum NoteKind {
    /// A liveness check: the acknowledgement of its packet is the answer.
    Ping = 5,
    /// This path belongs to link `link` of the connection.
    Join = 6,
    /// The answer to a join, with its token.
    Joined = 7,
    /// Link `link` is about to end: send nothing more on it.
    Leave = 8,
}

/// A message without a payload, about a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Note {
    /// What it says.
    pub kind: NoteKind,
    /// The link that it concerns.
    pub link: u8,
    /// Join, joined: the longest packet that the sender takes on this link.
    pub packet_bytes: u32,
    /// The value that its answer must carry.
    pub token: u64,
}

/// An acknowledgement: its runs are read from the bytes as they are asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ack<'a> {
    /// The link whose packets are acknowledged: one of the receiver of this.
    pub link: u8,
    /// Microseconds between the newest packet's arrival and this.
    pub delay_us: u32,
    /// The newest packet's number.
    pub largest: u64,
    runs: &'a [u8],
}

impl Ack<'_> {
    /// First and last number of each run, from the newest downwards. No number occurs twice, and
    /// none is below zero.
    pub fn runs(&self) -> impl Iterator<Item = (u64, u64)> {
        let mut next = self.largest + 1;
        self.runs.chunks_exact(run_at::SIZE).map_while(move |run| {
            let last = next.checked_sub(1 + u64::from(run_at::MISSING.u16(run)))?;
            let first = (last + 1).checked_sub(u64::from(run_at::RECEIVED.u16(run)))?;
            next = first;
            Some((first, last))
        })
    }
}

/// A statement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Statement<'a> {
    /// A command with the first bytes of its payload.
    Command(Command, &'a [u8]),
    /// More bytes.
    Data(Data<'a>),
    /// A reply with the first bytes of its payload.
    Reply(Reply, &'a [u8]),
    /// Which packets came.
    Ack(Ack<'a>),
    /// A note about a link.
    Note(Note),
    /// The connection ends: status and text.
    Close(u8, &'a str),
}

/// Reads the statements of a body one after the other.
pub struct Statements<'a>(&'a [u8]);

impl<'a> Statements<'a> {
    /// The statements of an opened body.
    #[must_use]
    pub fn new(body: &'a [u8]) -> Self {
        Statements(body)
    }

    fn take(&mut self, bytes: usize) -> Result<&'a [u8]> {
        check_length(WHAT, self.0, bytes)?;
        let (front, rest) = self.0.split_at(bytes);
        self.0 = rest;
        Ok(front)
    }

    fn command(&mut self) -> Result<Statement<'a>> {
        let at = self.take(command_at::SIZE)?;
        let operation = Operation::from_code(command_at::OPERATION.u8(at));
        let why = "no such operation";
        let operation =
            operation.ok_or(FormatError::Field { what: WHAT, field: "operation", why })?;
        let command = Command {
            operation,
            place: command_at::PLACE.u16(at),
            flags: command_at::FLAGS.u8(at),
            export: command_at::EXPORT.u8(at),
            use_number: command_at::USE_NUMBER.u64(at),
            address: command_at::ADDRESS.u64(at),
            length: command_at::LENGTH.u64(at),
        };
        check_field(WHAT, "flags", "unknown ones", command.flags & !operation.flags() == 0)?;
        let inline = self.take(command_at::INLINE_BYTES.u16(at).into())?;
        let fits = if operation.sends_payload() { command.length } else { 0 };
        check_piece(0, inline.len(), fits)?;
        Ok(Statement::Command(command, inline))
    }

    fn data(&mut self) -> Result<Statement<'a>> {
        let at = self.take(data_at::SIZE)?;
        check_reserved(WHAT, data_at::RESERVED, at)?;
        let offset = data_at::OFFSET.u32(at);
        let on_grain = (offset as usize).is_multiple_of(GRAIN_BYTES);
        check_field(WHAT, "offset", "not a multiple of the grain", on_grain)?;
        let bytes = self.take(data_at::BYTES.u32(at) as usize)?;
        check_field(WHAT, "bytes", "none", !bytes.is_empty())?;
        Ok(Statement::Data(Data {
            place: data_at::PLACE.u16(at),
            use_number: data_at::USE_NUMBER.u64(at),
            offset,
            bytes,
        }))
    }

    fn reply(&mut self) -> Result<Statement<'a>> {
        let at = self.take(reply_at::SIZE)?;
        check_reserved(WHAT, reply_at::RESERVED, at)?;
        let reply = Reply {
            place: reply_at::PLACE.u16(at),
            use_number: reply_at::USE_NUMBER.u64(at),
            status: reply_at::STATUS.u8(at),
            length: reply_at::LENGTH.u32(at),
        };
        let inline = self.take(reply_at::INLINE_BYTES.u16(at).into())?;
        check_piece(0, inline.len(), reply.length.into())?;
        Ok(Statement::Reply(reply, inline))
    }

    fn ack(&mut self) -> Result<Statement<'a>> {
        let at = self.take(ack_at::SIZE)?;
        check_reserved(WHAT, ack_at::RESERVED, at)?;
        let (link, count) = (ack_at::LINK.u8(at), usize::from(ack_at::RUNS.u8(at)));
        check_field(WHAT, "link", "no such link", usize::from(link) < LINKS_MAX)?;
        check_field(WHAT, "runs", "none or too many", (1..=RUNS_MAX).contains(&count))?;
        let largest = ack_at::LARGEST.u64(at);
        check_field(WHAT, "largest", "no such number", largest < super::NUMBER_END)?;
        let runs = self.take(count * run_at::SIZE)?;
        let ack = Ack { link, delay_us: ack_at::DELAY_US.u32(at), largest, runs };
        check_field(
            WHAT,
            "missing",
            "the newest is missing itself",
            run_at::MISSING.u16(runs) == 0,
        )?;
        let each = runs.chunks_exact(run_at::SIZE).all(|run| run_at::RECEIVED.u16(run) > 0);
        let whole = each && ack.runs().count() == count;
        check_field(WHAT, "runs", "an empty one, or one that goes below zero", whole)?;
        Ok(Statement::Ack(ack))
    }

    fn note(&mut self) -> Result<Statement<'a>> {
        let at = self.take(note_at::SIZE)?;
        check_reserved(WHAT, note_at::RESERVED, at)?;
        use NoteKind::*;
        let kinds = [Ping, Join, Joined, Leave];
        let kind = kinds[usize::from(note_at::KIND.u8(at) - NOTE_FIRST)];
        let link = note_at::LINK.u8(at);
        check_field(WHAT, "link", "no such link", usize::from(link) < LINKS_MAX)?;
        let (packet_bytes, token) = (note_at::PACKET_BYTES.u32(at), note_at::TOKEN.u64(at));
        Ok(Statement::Note(Note { kind, link, packet_bytes, token }))
    }

    fn close(&mut self) -> Result<Statement<'a>> {
        let at = self.take(close_at::SIZE)?;
        let bytes = usize::from(close_at::TEXT_BYTES.u16(at));
        check_field(WHAT, "text_bytes", "too many", bytes <= TEXT_BYTES_MAX)?;
        let bytes = self.take(bytes)?;
        Ok(Statement::Close(close_at::STATUS.u8(at), text(WHAT, bytes, bytes.len())?))
    }
}

/// Checks that `bytes` at `offset` of a payload of `length` bytes end within it, and on the grain
/// or at its end.
pub fn check_piece(offset: u64, bytes: usize, length: u64) -> Result<()> {
    let end = offset.saturating_add(bytes as u64);
    check_field(WHAT, "bytes", "past the end of the payload", end <= length)?;
    let on_grain = end == length || end.is_multiple_of(GRAIN_BYTES as u64);
    check_field(WHAT, "bytes", "neither on the grain nor at the end", on_grain)
}

impl<'a> Iterator for Statements<'a> {
    type Item = Result<Statement<'a>>;

    /// The next statement, or why the rest cannot be read: an error is the last item.
    fn next(&mut self) -> Option<Self::Item> {
        let statement = match *self.0.first()? {
            0 => {
                let rest = std::mem::take(&mut self.0);
                let is_zero = rest.iter().fold(0, |all, byte| all | byte) == 0;
                return (!is_zero).then_some(Err(FormatError::Reserved { what: WHAT }));
            }
            COMMAND => self.command(),
            DATA => self.data(),
            REPLY => self.reply(),
            ACK => self.ack(),
            NOTE_FIRST..CLOSE => self.note(),
            CLOSE => self.close(),
            _ => Err(FormatError::Field { what: WHAT, field: "kind", why: "no such statement" }),
        };
        if statement.is_err() {
            self.0 = &[];
        }
        Some(statement)
    }
}

/// How many runs from the front of `runs` follow each other within the range of a field; the first
/// run that is too long is the last.
fn runs_that_fit(runs: &[(u64, u64)]) -> usize {
    const RUN_LENGTH_MAX: u64 = u16::MAX as u64;
    let follows = |pair: &[(u64, u64)]| {
        let ((first, last), (_, next)) = (pair[0], pair[1]);
        last - first < RUN_LENGTH_MAX && first - 1 - next <= RUN_LENGTH_MAX
    };
    runs.len().min(1 + runs.windows(2).take_while(|pair| follows(pair)).count())
}

/// Writes statements one after the other into the room of a packet's body.
pub struct Body<'a> {
    room: &'a mut [u8],
    used: usize,
}

impl<'a> Body<'a> {
    /// An empty body in `room`.
    pub fn new(room: &'a mut [u8]) -> Self {
        Body { room, used: 0 }
    }

    /// Bytes written so far.
    #[must_use]
    pub fn used(&self) -> usize {
        self.used
    }

    /// Bytes that are left.
    #[must_use]
    pub fn left(&self) -> usize {
        self.room.len() - self.used
    }

    fn push(&mut self, bytes: usize) -> Option<&mut [u8]> {
        let room = self.room.get_mut(self.used..self.used + bytes)?;
        self.used += bytes;
        Some(room)
    }

    /// Bytes of a payload that fit behind `fixed` bytes: all `want`, or as many whole grains.
    #[must_use]
    pub fn payload_room(&self, fixed: usize, want: usize) -> usize {
        let room = self.left().saturating_sub(fixed).min(u16::MAX.into());
        if want <= room { want } else { room / GRAIN_BYTES * GRAIN_BYTES }
    }

    /// Adds a command; `fill` writes the first `inline` bytes of its payload. Returns false, and
    /// changes nothing, if there is no room.
    pub fn command(
        &mut self,
        command: &Command,
        inline: usize,
        fill: impl FnOnce(&mut [u8]),
    ) -> bool {
        let Some(at) = self.push(command_at::SIZE + inline) else { return false };
        command_at::KIND.put(at, [COMMAND]);
        command_at::OPERATION.put(at, [command.operation as u8]);
        command_at::PLACE.put(at, command.place.to_le_bytes());
        command_at::FLAGS.put(at, [command.flags]);
        command_at::EXPORT.put(at, [command.export]);
        command_at::INLINE_BYTES.put(at, (inline as u16).to_le_bytes());
        command_at::USE_NUMBER.put(at, command.use_number.to_le_bytes());
        command_at::ADDRESS.put(at, command.address.to_le_bytes());
        command_at::LENGTH.put(at, command.length.to_le_bytes());
        fill(&mut at[command_at::SIZE..]);
        true
    }

    /// Adds `bytes` of data, which `fill` writes.
    pub fn data(
        &mut self,
        place: u16,
        use_number: u64,
        offset: u32,
        bytes: usize,
        fill: impl FnOnce(&mut [u8]),
    ) -> bool {
        let Some(at) = self.push(data_at::SIZE + bytes) else { return false };
        data_at::KIND.put(at, [DATA]);
        data_at::RESERVED.put(at, [0]);
        data_at::PLACE.put(at, place.to_le_bytes());
        data_at::OFFSET.put(at, offset.to_le_bytes());
        data_at::USE_NUMBER.put(at, use_number.to_le_bytes());
        data_at::BYTES.put(at, (bytes as u32).to_le_bytes());
        fill(&mut at[data_at::SIZE..]);
        true
    }

    /// Adds a reply; `fill` writes the first `inline` bytes of its payload.
    pub fn reply(&mut self, reply: &Reply, inline: usize, fill: impl FnOnce(&mut [u8])) -> bool {
        let Some(at) = self.push(reply_at::SIZE + inline) else { return false };
        reply_at::KIND.put(at, [REPLY]);
        reply_at::STATUS.put(at, [reply.status]);
        reply_at::PLACE.put(at, reply.place.to_le_bytes());
        reply_at::INLINE_BYTES.put(at, (inline as u16).to_le_bytes());
        reply_at::RESERVED.put(at, [0; 2]);
        reply_at::USE_NUMBER.put(at, reply.use_number.to_le_bytes());
        reply_at::LENGTH.put(at, reply.length.to_le_bytes());
        fill(&mut at[reply_at::SIZE..]);
        true
    }

    /// Adds an acknowledgement of `runs` (first and last number, the newest first): as many as fit.
    /// A run that is too long for a field ends it: fewer packets are acknowledged, never others.
    pub fn ack(&mut self, link: u8, delay_us: u32, runs: &[(u64, u64)]) -> bool {
        let fit = self.left().saturating_sub(ack_at::SIZE) / run_at::SIZE;
        let count = runs_that_fit(runs).min(RUNS_MAX).min(fit);
        let Some(&(_, largest)) = runs.first().filter(|_| count > 0) else { return false };
        let Some(at) = self.push(ack_at::SIZE + count * run_at::SIZE) else { return false };
        ack_at::KIND.put(at, [ACK]);
        ack_at::LINK.put(at, [link]);
        ack_at::RUNS.put(at, [count as u8]);
        ack_at::RESERVED.put(at, [0]);
        ack_at::DELAY_US.put(at, delay_us.to_le_bytes());
        ack_at::LARGEST.put(at, largest.to_le_bytes());
        let mut next = largest + 1;
        for (&(first, last), at) in
            runs.iter().zip(at[ack_at::SIZE..].chunks_exact_mut(run_at::SIZE))
        {
            run_at::MISSING.put(at, ((next - 1 - last) as u16).to_le_bytes());
            let received = (last + 1 - first).min(u16::MAX.into()) as u16;
            run_at::RECEIVED.put(at, received.to_le_bytes());
            next = first;
        }
        true
    }

    /// Adds a note.
    pub fn note(&mut self, note: &Note) -> bool {
        let Some(at) = self.push(note_at::SIZE) else { return false };
        note_at::KIND.put(at, [note.kind as u8]);
        note_at::LINK.put(at, [note.link]);
        note_at::RESERVED.put(at, [0; 2]);
        note_at::PACKET_BYTES.put(at, note.packet_bytes.to_le_bytes());
        note_at::TOKEN.put(at, note.token.to_le_bytes());
        true
    }

    /// Adds a close with as much of its text as is permitted.
    pub fn close(&mut self, status: u8, text: &str) -> bool {
        let mut end =
            text.len().min(TEXT_BYTES_MAX).min(self.left().saturating_sub(close_at::SIZE));
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        let Some(at) = self.push(close_at::SIZE + end) else { return false };
        close_at::KIND.put(at, [CLOSE]);
        close_at::STATUS.put(at, [status]);
        close_at::TEXT_BYTES.put(at, (end as u16).to_le_bytes());
        at[close_at::SIZE..].copy_from_slice(&text.as_bytes()[..end]);
        true
    }

    /// Fills the rest with zeroes: an end, and a packet as long as the path should carry.
    pub fn pad(&mut self) {
        self.room[self.used..].fill(0);
        self.used = self.room.len();
    }
}
