//! What a place has to send: a head (a command or a reply) and its bytes, in as many packets as
//! they need.
//!
//! Invariants: a piece that is in a packet is in no other one until it counts as lost. The text of
//! a failure is sent whole. No allocation after `new`.
//!
//! Not here: when a place has something to send, and where its bytes are (`initiator`, `target`).

use sawmill_format::link::GRAIN_BYTES;
use sawmill_format::link::statement::{Body, Command, Reply, command_at, data_at, reply_at};

use crate::connection::PacketFill;
use crate::grains::{GrainSet, grains_of};
use crate::halves::{PieceKind, SentPiece, SentPieces};

/// The statement that is sent first, although it may arrive last.
pub(crate) enum Head {
    Command(Command),
    Reply(Reply),
}

/// Copies the bytes from an offset on.
type Fill<'a> = &'a dyn Fn(usize, &mut [u8]);

impl Head {
    /// Place and use number.
    fn use_of_place(&self) -> (u16, u64) {
        match self {
            Head::Command(command) => (command.place, command.use_number),
            Head::Reply(reply) => (reply.place, reply.use_number),
        }
    }

    /// Puts the head into a packet with as many of its `bytes` as fit. Returns their number.
    fn put(&self, body: &mut Body<'_>, bytes: usize, fill: Fill<'_>) -> Option<usize> {
        let fill = |into: &mut [u8]| fill(0, into);
        match self {
            Head::Command(command) => {
                let inline = body.payload_room(command_at::SIZE, bytes);
                body.command(command, inline, fill).then_some(inline)
            }
            Head::Reply(reply) => {
                let inline = body.payload_room(reply_at::SIZE, bytes);
                let whole = reply.status == 0 || inline == bytes;
                (whole && body.reply(reply, inline, fill)).then_some(inline)
            }
        }
    }
}

/// The pieces of a use of a place that are in no packet.
pub(crate) struct UnsentPieces {
    head: bool,
    rest: GrainSet,
}

impl UnsentPieces {
    /// Nothing to send, for a place of this many bytes.
    pub(crate) fn new(place_bytes: usize) -> Self {
        UnsentPieces { head: false, rest: GrainSet::new(place_bytes) }
    }

    /// Starts to send a head and this many bytes.
    pub(crate) fn begin(&mut self, bytes: usize) {
        self.head = true;
        self.rest.clear();
        self.rest.insert(0, grains_of(bytes));
    }

    /// Puts as much as fits into a packet: a head with this many bytes.
    pub(crate) fn put(
        &mut self,
        head: &Head,
        bytes: usize,
        fill: Fill<'_>,
        body: &mut Body<'_>,
        pieces: &mut SentPieces,
    ) -> PacketFill {
        let (place, use_number) = head.use_of_place();
        while !pieces.is_full() {
            let (kind, offset, put) = if self.head {
                let Some(inline) = head.put(body, bytes, fill) else { return PacketFill::More };
                self.head = false;
                (PieceKind::Head, 0, inline)
            } else if let Some((first, end)) = self.rest.first_run() {
                let offset = first as usize * GRAIN_BYTES;
                let want = (end as usize * GRAIN_BYTES).min(bytes) - offset;
                let room = body.payload_room(data_at::SIZE, want);
                let at = offset as u32;
                if room == 0 || !body.data(place, use_number, at, room, |into| fill(offset, into)) {
                    return PacketFill::More;
                }
                (PieceKind::Body, offset, room)
            } else {
                return PacketFill::All;
            };
            let first = (offset / GRAIN_BYTES) as u32;
            self.rest.remove(first, first + grains_of(put));
            pieces.push(SentPiece {
                kind,
                place,
                use_number,
                offset: offset as u32,
                bytes: put as u32,
            });
        }
        if self.head || self.rest.count() > 0 { PacketFill::More } else { PacketFill::All }
    }

    /// A piece of this use was lost and must be sent again.
    pub(crate) fn lost(&mut self, piece: &SentPiece) {
        self.head |= piece.kind == PieceKind::Head;
        let first = piece.offset / GRAIN_BYTES as u32;
        self.rest.insert(first, first + grains_of(piece.bytes as usize));
    }
}
