//! An answer while it arrives: chunk by chunk, in any order, until it is complete.
//!
//! Invariants: each byte of a successful read came from the server, once; only a command that asks
//! for runs gets any. An answer keeps at most what was requested, [`PIECES_MAX`] places and
//! [`EXTENTS_MAX`] runs, whatever the server sends. Not here: sockets, and waiting (`client`).

use std::collections::BTreeMap;
use std::fmt;
use std::io;

use sawmill_nbd_proto::chunk;

use crate::request::Command;
use crate::wire::{read_u32, read_u64, violation};

/// One run of an allocation answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Bytes in the run.
    pub length: u64,
    /// Bit 0: a hole; bit 1: reads as zeroes.
    pub flags: u64,
}

/// A successful answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reply {
    /// The bytes of a read.
    pub bytes: Vec<u8>,
    /// The runs of a block status.
    pub extents: Vec<Extent>,
}

/// Why a request failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The server answered with this error number.
    Errno(u32),
    /// The connection ended first: whether the request took effect is unknown.
    Gone,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Errno(number) => write!(f, "error {number}"),
            Failure::Gone => f.write_str("the connection ended"),
        }
    }
}

impl std::error::Error for Failure {}

/// The most runs of one allocation answer: a server that sends more does so forever, and they are
/// all kept.
const EXTENTS_MAX: usize = 1 << 20;
/// The most separate pieces of an incomplete read: only a server that sends single bytes needs
/// more.
const PIECES_MAX: usize = 1 << 16;

/// The answer to one request, so far.
pub(crate) struct Answer {
    offset: u64,
    takes_extents: bool,
    reply: Reply,
    errno: Option<u32>,
    received_pieces: Pieces,
}

impl Answer {
    /// The answer to this command, with nothing received yet.
    pub(crate) fn to(command: &Command) -> Self {
        let (offset, length) = match command {
            Command::Read { offset, length } => (*offset, *length as usize),
            _ => (0, 0),
        };
        Answer {
            offset,
            takes_extents: matches!(command, Command::BlockStatus { .. }),
            reply: Reply { bytes: vec![0; length], extents: Vec::new() },
            errno: None,
            received_pieces: Pieces::default(),
        }
    }

    /// How many bytes are to be read.
    pub(crate) fn requested_bytes(&self) -> usize {
        self.reply.bytes.len()
    }

    /// The server answers with this error number.
    pub(crate) fn fail(&mut self, errno: u32) {
        self.errno = Some(errno);
    }

    /// Takes all bytes of a read at once; they are as many as were asked for.
    pub(crate) fn take_whole(&mut self, bytes: Vec<u8>) -> io::Result<()> {
        self.reply.bytes = bytes;
        self.received_pieces.add(0, self.reply.bytes.len())
    }

    /// Takes a chunk.
    pub(crate) fn take_chunk(&mut self, kind: u16, mut payload: &[u8]) -> io::Result<()> {
        match kind {
            chunk::NONE => {}
            chunk::OFFSET_DATA => {
                let offset = read_u64(&mut payload)?;
                let place = self.place(offset, payload.len());
                place
                    .ok_or_else(|| violation("data outside what was asked for"))?
                    .copy_from_slice(payload);
                // Bytes that come twice are a violation: they could cover a gap when only their
                // number is counted.
                self.arrived(offset, payload.len())?;
            }
            chunk::OFFSET_HOLE => {
                let offset = read_u64(&mut payload)?;
                let length = read_u32(&mut payload)? as usize;
                let place = self.place(offset, length);
                place.ok_or_else(|| violation("a hole outside what was asked for"))?.fill(0);
                self.arrived(offset, length)?;
            }
            chunk::BLOCK_STATUS => {
                let _context = read_u32(&mut payload)?;
                // One context at most was negotiated, so its number says nothing.
                while !payload.is_empty() {
                    let length = u64::from(read_u32(&mut payload)?);
                    let flags = u64::from(read_u32(&mut payload)?);
                    self.take_extent(Extent { length, flags })?;
                }
            }
            chunk::BLOCK_STATUS_EXT => {
                let _context = read_u32(&mut payload)?;
                let count = read_u32(&mut payload)?;
                // A count that is too large ends with the payload, whose length is bounded.
                for _ in 0..count {
                    let (length, flags) = (read_u64(&mut payload)?, read_u64(&mut payload)?);
                    self.take_extent(Extent { length, flags })?;
                }
            }
            // The answer goes on: a server may send an error before its other chunks. Unknown
            // errors have this bit, too.
            error if error & chunk::ERROR_BIT != 0 => self.fail(read_u32(&mut payload)?),
            other => return Err(violation(format!("a chunk of unknown type {other:#x}"))),
        }
        Ok(())
    }

    /// Checks that the answer may end here; a violation if bytes are missing.
    pub(crate) fn check_whole(&self) -> io::Result<()> {
        if self.errno.is_some() || self.received_pieces.is_all(self.reply.bytes.len()) {
            return Ok(());
        }
        Err(violation("an answer that ended before all that was asked for was there"))
    }

    /// The outcome of the answer so far.
    pub(crate) fn outcome(self) -> Result<Reply, Failure> {
        self.errno.map_or(Ok(self.reply), |errno| Err(Failure::Errno(errno)))
    }

    fn place(&mut self, offset: u64, length: usize) -> Option<&mut [u8]> {
        // The offset is the server's claim. Neither a place before the read nor one behind it may
        // be written.
        let from = usize::try_from(offset.checked_sub(self.offset)?).ok()?;
        self.reply.bytes.get_mut(from..from.checked_add(length)?)
    }

    /// Records that bytes of a read have arrived at `offset`.
    fn arrived(&mut self, offset: u64, length: usize) -> io::Result<()> {
        let from = (offset - self.offset) as usize;
        self.received_pieces.add(from, from + length)
    }

    fn take_extent(&mut self, extent: Extent) -> io::Result<()> {
        if !self.takes_extents {
            return Err(violation("runs of a block status that nobody asked for"));
        }
        if self.reply.extents.len() == EXTENTS_MAX {
            return Err(violation(format!("an answer of more than {EXTENTS_MAX} extents")));
        }
        self.reply.extents.push(extent);
        Ok(())
    }
}

/// The bytes received so far: pieces by their starts, with their ends. No two touch.
#[derive(Default)]
struct Pieces(BTreeMap<usize, usize>);

impl Pieces {
    fn add(&mut self, from: usize, end: usize) -> io::Result<()> {
        if from == end {
            return Ok(());
        }
        if self.0.range(..end).next_back().is_some_and(|(_, last)| *last > from) {
            return Err(violation("bytes that were there already"));
        }
        // Joined with its neighbors, so that a read in order is always one piece.
        let end = self.0.remove(&end).unwrap_or(end);
        let previous = self.0.range_mut(..from).next_back();
        if let Some((_, last)) = previous.filter(|(_, last)| **last == from) {
            *last = end;
            return Ok(());
        }
        if self.0.len() == PIECES_MAX {
            return Err(violation(format!("an answer in more than {PIECES_MAX} pieces")));
        }
        self.0.insert(from, end);
        Ok(())
    }

    fn is_all(&self, length: usize) -> bool {
        length == 0 || self.0.get(&0) == Some(&length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn data(offset: u64, bytes: &[u8]) -> Vec<u8> {
        [&offset.to_be_bytes()[..], bytes].concat()
    }

    fn hole(offset: u64, length: u32) -> Vec<u8> {
        [&offset.to_be_bytes()[..], &length.to_be_bytes()].concat()
    }

    fn expect_refusal(answer: &mut Answer, kind: u16, payload: &[u8], words: &str) {
        let error = answer.take_chunk(kind, payload).unwrap_err();
        assert!(error.to_string().contains(words), "{error}");
    }

    #[test]
    fn extents_without_end_are_a_violation_and_take_no_more_memory() {
        let mut answer = Answer::to(&Command::BlockStatus { offset: 0, length: 1 });
        let mut payload = vec![0; 4];
        (0..1 << 16).for_each(|_| payload.extend([0, 0, 0, 1, 0, 0, 0, 0]));
        let outcome = (0..1000)
            .map(|_| answer.take_chunk(chunk::BLOCK_STATUS, &payload))
            .find(Result::is_err);
        assert!(outcome.expect("it has an end").unwrap_err().to_string().contains("extents"));
        assert_eq!(answer.reply.extents.len(), EXTENTS_MAX);
    }

    #[test]
    fn a_read_succeeds_once_each_byte_came_in_whatever_order() {
        let mut answer = Answer::to(&Command::Read { offset: 4096, length: 10 });
        for (kind, payload) in [
            (chunk::OFFSET_DATA, data(4104, b"ij")),
            (chunk::OFFSET_HOLE, hole(4096, 3)),
            (chunk::OFFSET_DATA, data(4101, b"fgh")),
            (chunk::OFFSET_DATA, data(4100, b"")),
        ] {
            answer.take_chunk(kind, &payload).unwrap();
            answer.check_whole().unwrap_err();
        }
        answer.take_chunk(chunk::OFFSET_DATA, &data(4099, b"de")).unwrap();
        answer.check_whole().unwrap();
        assert_eq!(answer.outcome().unwrap().bytes, b"\0\0\0defghij");
    }

    #[test]
    fn a_read_that_ends_early_is_no_zeroes() {
        let mut answer = Answer::to(&Command::Read { offset: 0, length: 4 });
        answer.take_chunk(chunk::NONE, &[]).unwrap();
        assert!(answer.check_whole().unwrap_err().to_string().contains("ended before"));
        answer.take_chunk(chunk::OFFSET_DATA, &data(0, b"abc")).unwrap();
        answer.check_whole().unwrap_err();
        answer.fail(5);
        answer.check_whole().unwrap();
        assert_eq!(answer.outcome(), Err(Failure::Errno(5)));
    }

    #[test]
    fn bytes_outside_what_was_asked_for_or_twice_are_a_violation() {
        let mut answer = Answer::to(&Command::Read { offset: 512, length: 8 });
        answer.take_chunk(chunk::OFFSET_DATA, &data(514, b"cd")).unwrap();
        expect_refusal(&mut answer, chunk::OFFSET_DATA, &data(515, b"d"), "there already");
        expect_refusal(&mut answer, chunk::OFFSET_HOLE, &hole(512, 8), "there already");
        expect_refusal(&mut answer, chunk::OFFSET_DATA, &data(511, b"a"), "outside");
        expect_refusal(&mut answer, chunk::OFFSET_DATA, &data(519, b"ab"), "outside");
        expect_refusal(&mut answer, chunk::OFFSET_HOLE, &hole(u64::MAX, u32::MAX), "outside");
        expect_refusal(&mut answer, chunk::BLOCK_STATUS, &[0; 12], "nobody asked");
    }

    #[test]
    fn a_server_that_sends_single_bytes_takes_a_bounded_memory() {
        let mut answer = Answer::to(&Command::Read { offset: 0, length: 1 << 20 });
        let mut single =
            (0..1 << 19).map(|place| answer.take_chunk(chunk::OFFSET_DATA, &data(2 * place, b"x")));
        let error = single.find_map(Result::err).expect("it has an end");
        assert!(error.to_string().contains("pieces"), "{error}");
        assert_eq!(answer.received_pieces.0.len(), PIECES_MAX);
    }

    #[test]
    fn an_error_of_a_later_protocol_is_an_error() {
        let mut answer = Answer::to(&Command::Flush);
        answer.take_chunk(chunk::ERROR_BIT | 99, &[0, 0, 0, 28, 0, 0]).unwrap();
        assert_eq!(answer.outcome(), Err(Failure::Errno(28)));
    }
}
