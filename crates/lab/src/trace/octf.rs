//! Open CAS telemetry: a tar whose files `octf.trace.N` (one for each CPU) are protobuf messages,
//! each after its length. In an event, field 1 is a header with the time (2, ns), field 2 an I/O:
//! sector (1), sectors (2), device (4), operation (5: 1 read, 2 write, 3 discard), flush (6).
//!
//! The file of each CPU is in order. The whole is sorted by time, so it is read into memory
//! completely.
//!
//! Invariant: a length in the file selects only bytes that are there, and allocates nothing.
//!
//! Not here: other binary formats (`records`), decompression (`source`).

use super::number::SECTOR_BYTES;
use super::source::TraceSource;
use super::{Operation, Request, Requests, TraceError};
use sawmill_console::exit::Result;

/// Part of the names of the files that count.
pub(super) const MEMBER: &str = "/octf.trace.";
const TAR_BLOCK: usize = 512;

/// The reader of Open CAS telemetry, which is read as a whole and sorted by time.
#[derive(Default)]
pub(super) struct Octf {
    sorted: Option<std::vec::IntoIter<Request>>,
    errors: Vec<TraceError>,
}

impl Requests for Octf {
    fn next(&mut self, source: &mut TraceSource) -> Result<Option<Request>, TraceError> {
        if self.sorted.is_none() {
            let mut requests = Vec::new();
            self.read_tar(&source.rest()?, &mut requests);
            // Each queue has a file of its own in the archive.
            requests.sort_by_key(|request| request.at_ns);
            self.sorted = Some(requests.into_iter());
            self.errors.reverse();
        }
        match self.errors.pop() {
            Some(bad) => Err(bad),
            None => Ok(self.sorted.as_mut().and_then(Iterator::next)),
        }
    }

    /// Requests are sorted by time; their places in the file are not kept.
    fn place(&self, _source: &TraceSource) -> String {
        "a record".to_owned()
    }
}

impl Octf {
    fn note(&mut self, place: String, expected: &str, found: &str) {
        self.errors.push(TraceError::Line {
            place,
            expected: expected.to_owned(),
            found: found.to_owned(),
        });
    }

    fn read_tar(&mut self, tar: &[u8], requests: &mut Vec<Request>) {
        let mut at = 0;
        while let Some(head) = tar.get(at..at + TAR_BLOCK) {
            if head.iter().all(|byte| *byte == 0) {
                return;
            }
            let place = format!("byte {at}");
            let size = text_of(&head[124..136])
                .and_then(|text| usize::from_str_radix(text.trim(), 8).ok());
            let (Some(name), Some(size)) = (text_of(&head[..100]), size) else {
                return self.note(place, "the head of a file in a tar", "something else");
            };
            at += TAR_BLOCK;
            let Some(body) = tar.get(at..).and_then(|rest| rest.get(..size)) else {
                return self.note(place, "a whole file in the tar", &format!("{name}, cut short"));
            };
            if name.contains(MEMBER) {
                self.read_events(name, body, requests);
            }
            at += size.next_multiple_of(TAR_BLOCK);
        }
        if at != tar.len() || tar.is_empty() {
            self.note(format!("byte {at}"), "the end of a tar", "the end of the file");
        }
    }

    fn read_events(&mut self, name: &str, mut rest: &[u8], requests: &mut Vec<Request>) {
        let mut events = 0u64;
        while !rest.is_empty() {
            events += 1;
            let event = varint(&mut rest).and_then(|length| take(&mut rest, length));
            let Some(event) = event else {
                return self.note(
                    format!("{name} event {events}"),
                    "a whole event",
                    "the end of the file",
                );
            };
            match request(event) {
                Some(Some(request)) => requests.push(request),
                Some(None) => {}
                None => {
                    self.note(format!("{name} event {events}"), "a protobuf message", "other bytes")
                }
            }
        }
    }
}

fn text_of(field: &[u8]) -> Option<&str> {
    let end = field.iter().position(|byte| *byte == 0).unwrap_or(field.len());
    std::str::from_utf8(&field[..end]).ok()
}

/// `None`: not a message; `Some(None)`: another kind of event.
fn request(event: &[u8]) -> Option<Option<Request>> {
    let Some(io) = field(event, 2)?.bytes() else { return Some(None) };
    let at_ns = match field(event, 1)?.bytes() {
        Some(header) => field(header, 2)?.number(),
        None => 0,
    };
    let number = |field_number| Some(field(io, field_number)?.number());
    let (sector, sectors) = (number(1)?, number(2)?);
    let operation = match number(5)? {
        _ if number(6)? != 0 && sectors == 0 => Operation::Flush,
        2 => Operation::Write,
        3 => Operation::Discard,
        _ => Operation::Read,
    };
    let (address, length) = (sector.checked_mul(SECTOR_BYTES)?, sectors.checked_mul(SECTOR_BYTES)?);
    let address = if operation == Operation::Flush { 0 } else { address };
    Some(Some(Request { at_ns, operation, device: number(4)?, address, length }))
}

/// The value of a field. Absent fields are zero, because protobuf omits zeroes.
enum Value<'a> {
    Absent,
    Number(u64),
    Bytes(&'a [u8]),
}

impl<'a> Value<'a> {
    fn number(&self) -> u64 {
        if let Value::Number(number) = self { *number } else { 0 }
    }

    fn bytes(&self) -> Option<&'a [u8]> {
        if let Value::Bytes(bytes) = self { Some(bytes) } else { None }
    }
}

/// The last value of field `field_number`; none if the bytes are not a message.
fn field(mut message: &[u8], field_number: u64) -> Option<Value<'_>> {
    let mut found = Value::Absent;
    while !message.is_empty() {
        let key = varint(&mut message)?;
        let value = match key & 7 {
            0 => Value::Number(varint(&mut message)?),
            1 => Value::Bytes(take(&mut message, 8)?),
            2 => {
                let length = varint(&mut message)?;
                Value::Bytes(take(&mut message, length)?)
            }
            5 => Value::Bytes(take(&mut message, 4)?),
            _ => return None,
        };
        if key >> 3 == field_number {
            found = value;
        }
    }
    Some(found)
}

fn varint(bytes: &mut &[u8]) -> Option<u64> {
    let mut value = 0u64;
    // A number has ten bytes at most. Without the limit, damaged bytes could be a number without an
    // end.
    for shift in (0..64).step_by(7) {
        let (first, rest) = bytes.split_first()?;
        *bytes = rest;
        value |= u64::from(first & 127) << shift;
        if *first < 128 {
            return Some(value);
        }
    }
    None
}

fn take<'a>(bytes: &mut &'a [u8], length: u64) -> Option<&'a [u8]> {
    let (head, rest) = bytes.split_at_checked(usize::try_from(length).ok()?)?;
    *bytes = rest;
    Some(head)
}
