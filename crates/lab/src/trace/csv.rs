//! Sawmill's own format: a header line that names the columns, in any order, then a line per
//! request.
//!
//! Columns: one of `time_s`, `time_ms`, `time_us`, `time_ns`; `operation` (read, write, flush,
//! discard, zero, or R, W, F, D, Z); `address_bytes` or `address_sectors`; `length_bytes` or
//! `length_sectors`; optionally `device`. Sectors have 512 bytes. Other columns are ignored; quotes
//! are not supported.
//!
//! Invariant: lines that begin with `#` are ignored everywhere, because `layers::record`, which
//! writes this format, puts operations that traces lack on such lines.
//!
//! Not here: the notation of numbers (`number`), whether a time or an address is plausible
//! (`super`).

use super::number::{nanoseconds, sectors, whole};
use super::source::TraceSource;
use super::{Operation, Request, Requests, TraceError};
use sawmill_console::exit::Result;

/// What a header must have.
const EXPECTED_HEADER: &str = "a header line that names time_s (or time_ms, time_us, time_ns), \
     operation, address_bytes (or address_sectors), length_bytes (or length_sectors) and perhaps \
     device";
const TIMES: [(&str, u32); 4] = [("time_s", 9), ("time_ms", 6), ("time_us", 3), ("time_ns", 0)];

type Bytes = fn(&str) -> Option<u64>;

/// Where the columns are.
struct Columns {
    time: (usize, u32),
    operation: usize,
    address: (usize, Bytes),
    length: (usize, Bytes),
    device: Option<usize>,
}

/// The reader of a CSV file. Its columns are known after the header.
#[derive(Default)]
pub(super) struct Csv {
    columns: Option<Columns>,
    line: Vec<u8>,
}

/// Whether a line is the header of such a file.
pub(super) fn is_header(line: &str) -> bool {
    Columns::named(line).is_some()
}

impl Columns {
    fn named(header: &str) -> Option<Columns> {
        let names: Vec<&str> = header.split(',').map(str::trim).collect();
        let at = |column_name: &str| names.iter().position(|name| *name == column_name);
        let measured = |what: &str| {
            let bytes = at(&format!("{what}_bytes")).map(|column| (column, whole as Bytes));
            bytes.or_else(|| Some((at(&format!("{what}_sectors"))?, sectors as Bytes)))
        };
        Some(Columns {
            time: TIMES.iter().find_map(|(name, digits)| Some((at(name)?, *digits)))?,
            operation: at("operation")?,
            address: measured("address")?,
            length: measured("length")?,
            device: at("device"),
        })
    }

    fn request(&self, line: &str) -> Option<Request> {
        let fields: Vec<&str> = line.split(',').map(str::trim).collect();
        let operation = match *fields.get(self.operation)? {
            "R" | "r" | "read" => Operation::Read,
            "W" | "w" | "write" => Operation::Write,
            "F" | "f" | "flush" => Operation::Flush,
            "D" | "d" | "discard" => Operation::Discard,
            "Z" | "z" | "zero" => Operation::Zero,
            _ => return None,
        };
        let at_ns = nanoseconds(fields.get(self.time.0)?, self.time.1)?;
        let device = self.device.map_or(Some(0), |column| whole(fields.get(column)?))?;
        // Before the columns of the range, which may be empty for a flush.
        if operation == Operation::Flush {
            return Some(Request { at_ns, operation, device, address: 0, length: 0 });
        }
        let address = (self.address.1)(fields.get(self.address.0)?)?;
        let length = (self.length.1)(fields.get(self.length.0)?)?;
        Some(Request { at_ns, operation, device, address, length })
    }
}

impl Requests for Csv {
    fn next(&mut self, source: &mut TraceSource) -> Result<Option<Request>, TraceError> {
        while source.line(&mut self.line)? {
            let text = String::from_utf8_lossy(&self.line);
            if text.trim().is_empty() || text.starts_with('#') {
                continue;
            }
            let bad = |expected: &str| {
                let (expected, found) = (expected.to_owned(), text.clone().into_owned());
                TraceError::Line { place: source.place(), expected, found }
            };
            let Some(columns) = &self.columns else {
                self.columns = Some(Columns::named(&text).ok_or_else(|| bad(EXPECTED_HEADER))?);
                continue;
            };
            let expected =
                "the columns that the header names, with read, write, flush, discard or zero";
            return columns.request(&text).map(Some).ok_or_else(|| bad(expected));
        }
        Ok(None)
    }

    fn place(&self, source: &TraceSource) -> String {
        source.place()
    }
}
