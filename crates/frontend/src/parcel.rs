//! The encoding of pieces of doors ([`DoorPiece`]), also between two versions of this program.
//!
//! `docs/format/hand_over.md` describes the layout byte by byte. Each value has one encoding: the
//! reader accepts only bytes that the writer would produce. A new layout gets a new version number,
//! and older readers refuse it. A new fact does not, because readers ignore unknown facts.
//!
//! Invariant: no input makes the reader panic, or allocate more than is proportional to the input's
//! length.
//!
//! Not here: moving bytes and descriptors ([`passing`](crate::passing)), and the meaning of a
//! door's facts (the doors).

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::str::FromStr;

use sawmill_device::{Error, ErrorKind, Result};

use crate::DoorPiece;

/// The start of every parcel.
const MAGIC: [u8; 8] = *b"SAWMHAND";
/// The version that is written, and the newest that is supported.
const VERSION: u64 = 1;

/// Encodes these pieces, with their descriptors in the order that [`unpack`] expects.
#[must_use]
pub fn pack(pieces: &[DoorPiece]) -> (Vec<u8>, Vec<BorrowedFd<'_>>) {
    let mut out = MAGIC.to_vec();
    push_number(&mut out, VERSION);
    push_number(&mut out, pieces.len() as u64);
    for piece in pieces {
        push_bytes(&mut out, piece.what.as_bytes());
        push_number(&mut out, piece.facts.len() as u64);
        for (name, value) in &piece.facts {
            push_bytes(&mut out, name.as_bytes());
            push_bytes(&mut out, value.as_bytes());
        }
        push_bytes(&mut out, &piece.bytes);
        push_number(&mut out, piece.descriptors.len() as u64);
    }
    (out, pieces.iter().flat_map(|piece| &piece.descriptors).map(AsFd::as_fd).collect())
}

fn push_number(out: &mut Vec<u8>, number: u64) {
    out.extend_from_slice(&number.to_le_bytes());
}

fn push_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    push_number(out, bytes.len() as u64);
    out.extend_from_slice(bytes);
}

/// Decodes the pieces. Returns `Invalid` for bytes that are not a parcel, a newer version, or a
/// number of descriptors that does not match the pieces; all descriptors are closed then.
pub fn unpack(bytes: &[u8], descriptors: Vec<OwnedFd>) -> Result<Vec<DoorPiece>> {
    let mut reader = Reader { bytes, at: 0 };
    if reader.take(MAGIC.len() as u64, "magic")? != MAGIC {
        return Err(invalid("it does not start with SAWMHAND".into()));
    }
    let version = reader.number("version")?;
    if version != VERSION {
        return Err(invalid(format!(
            "its version is {version}; this program knows version {VERSION}"
        )));
    }
    let mut descriptors = descriptors.into_iter();
    let mut pieces = Vec::new();
    for _ in 0..reader.number("number of pieces")? {
        pieces.push(reader.piece(&mut descriptors)?);
    }
    if reader.at != bytes.len() {
        return Err(invalid(format!("{} bytes follow its end", bytes.len() - reader.at)));
    }
    // A descriptor too many would be lost here without a trace, and with it perhaps a client's
    // connection.
    match descriptors.len() {
        0 => Ok(pieces),
        left => Err(invalid(format!("{left} descriptors belong to no piece"))),
    }
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, length: u64, what: &str) -> Result<&'a [u8]> {
        let rest = &self.bytes[self.at..];
        // Every length is a claim of the other process: it is compared with what is there before
        // anything is allocated.
        let length = usize::try_from(length).ok().filter(|length| *length <= rest.len());
        let length = length
            .ok_or_else(|| invalid(format!("it ends inside its {what} at byte {}", self.at)))?;
        self.at += length;
        Ok(&rest[..length])
    }

    fn number(&mut self, what: &str) -> Result<u64> {
        let bytes = self.take(8, what)?;
        Ok(bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte)))
    }

    fn bytes(&mut self, what: &str) -> Result<&'a [u8]> {
        let length = self.number(what)?;
        self.take(length, what)
    }

    fn text(&mut self, what: &str) -> Result<String> {
        let at = self.at;
        let text = std::str::from_utf8(self.bytes(what)?);
        text.map(str::to_owned)
            .map_err(|_| invalid(format!("the {what} at byte {at} is not UTF-8")))
    }

    fn piece(&mut self, descriptors: &mut std::vec::IntoIter<OwnedFd>) -> Result<DoorPiece> {
        let mut piece = DoorPiece { what: self.text("name of a piece")?, ..DoorPiece::default() };
        for _ in 0..self.number("number of facts")? {
            let (name, value) = (self.text("name of a fact")?, self.text("fact")?);
            // In order, so that no fact comes twice and the same pieces always have the same bytes.
            if piece.facts.last_key_value().is_some_and(|(last, _)| *last >= name) {
                return Err(invalid(format!(
                    "the fact {name:?} of a {} is out of order",
                    piece.what
                )));
            }
            piece.facts.insert(name, value);
        }
        piece.bytes = self.bytes("bytes of a piece")?.to_vec();
        let count = self.number("number of descriptors")?;
        let remaining_count = descriptors.len();
        let count = usize::try_from(count)
            .ok()
            .filter(|count| *count <= remaining_count)
            .ok_or_else(|| {
                invalid(format!(
                    "a {} has {count} descriptors where {remaining_count} are left",
                    piece.what
                ))
            })?;
        piece.descriptors.extend(descriptors.take(count));
        Ok(piece)
    }
}

fn invalid(text: String) -> Error {
    Error::new(ErrorKind::Invalid, format!("hand-over: invalid parcel: {text}"))
}

impl DoorPiece {
    /// A piece without facts, bytes and descriptors.
    #[must_use]
    pub fn new(what: &str) -> Self {
        DoorPiece { what: what.into(), ..DoorPiece::default() }
    }

    /// The piece with one more fact.
    #[must_use]
    pub fn with(mut self, name: &str, value: impl ToString) -> Self {
        self.facts.insert(name.into(), value.to_string());
        self
    }

    /// The fact with this name. Returns `Invalid` if it is missing.
    pub fn fact(&self, name: &str) -> Result<&str> {
        self.facts.get(name).map(String::as_str).ok_or_else(|| {
            Error::new(
                ErrorKind::Invalid,
                format!("hand-over: a {} has no fact {name:?}", self.what),
            )
        })
    }

    /// The fact with this name as a number, a flag or an address. Returns `Invalid` if it is
    /// missing or cannot be parsed.
    pub fn parsed<T: FromStr>(&self, name: &str) -> Result<T> {
        let value = self.fact(name)?;
        value.parse().map_err(|_| {
            let text =
                format!("hand-over: the fact {name:?} of a {} cannot be {value:?}", self.what);
            Error::new(ErrorKind::Invalid, text)
        })
    }
}
