//! Binary formats of one record per request.
//!
//! Invariant: a record that the end of the file cuts off is an error, never left out. Not here:
//! `octf`, which is binary too, and which must be sorted.

use super::source::TraceSource;
use super::{Operation, Request, Requests, TraceError};
use sawmill_console::exit::Result;

/// The `N` bytes at `at` of a record, as a number; the caller checks the length.
fn bytes_at<const N: usize>(record: &[u8], at: usize) -> [u8; N] {
    let mut bytes = [0; N];
    if let Some(found) = record.get(at..at + N) {
        bytes.copy_from_slice(found);
    }
    bytes
}

fn bad(source: &TraceSource, expected: &str, found: String) -> TraceError {
    TraceError::Line { place: source.place(), expected: expected.to_owned(), found }
}

/// VMware's format: 32 bytes, little-endian: sequence u32, bytes u32, scatter elements u32, SCSI
/// command u16, version u16, sector u64, microseconds u64.
pub(super) struct Vscsi;

/// Bytes of a vscsi record.
pub(super) const VSCSI_RECORD_BYTES: usize = 32;

/// The operation of a SCSI command; none for commands without data that are not a flush.
fn scsi(command: u16) -> Option<Operation> {
    match command {
        0x08 | 0x28 | 0x88 | 0xa8 => Some(Operation::Read),
        0x0a | 0x2a | 0x8a | 0xaa => Some(Operation::Write),
        0x35 | 0x91 => Some(Operation::Flush),
        0x42 => Some(Operation::Discard),
        0x41 | 0x93 => Some(Operation::Zero),
        _ => None,
    }
}

/// Whether a record can be part of a vscsi trace: it has a command that SCSI disks get, and a
/// length of whole sectors.
pub(super) fn is_vscsi(record: &[u8]) -> bool {
    let command = u16::from_le_bytes(bytes_at(record, 12));
    let length = u32::from_le_bytes(bytes_at(record, 4));
    let few_elements = u32::from_le_bytes(bytes_at(record, 8)) < 1 << 16;
    scsi(command).is_some() && length.is_multiple_of(512) && few_elements
}

impl Requests for Vscsi {
    fn next(&mut self, source: &mut TraceSource) -> Result<Option<Request>, TraceError> {
        loop {
            let mut record = [0; VSCSI_RECORD_BYTES];
            let length = source.record(&mut record)?;
            if length == 0 {
                return Ok(None);
            }
            if length < record.len() {
                return Err(bad(
                    source,
                    "a record of 32 bytes",
                    format!("{length} bytes, then the end"),
                ));
            }
            let command = u16::from_le_bytes(bytes_at(&record, 12));
            // A wrong record shows here first: SCSI commands have one byte.
            if command > 0xff {
                return Err(bad(source, "a SCSI command of one byte", format!("{command:#x}")));
            }
            // Other commands (inquiries, mode pages) carry no data of the disk.
            let Some(operation) = scsi(command) else { continue };
            let is_flush = operation == Operation::Flush;
            let sector = u64::from_le_bytes(bytes_at(&record, 16));
            let microseconds = u64::from_le_bytes(bytes_at(&record, 24));
            let (Some(address), Some(at_ns)) =
                (sector.checked_mul(512), microseconds.checked_mul(1000))
            else {
                return Err(bad(
                    source,
                    "a sector and a time in bounds",
                    format!("{sector}, {microseconds}"),
                ));
            };
            let length = u64::from(u32::from_le_bytes(bytes_at(&record, 4)));
            // SYNCHRONIZE CACHE may name a range; here a flush has none.
            let (address, length) = if is_flush { (0, 0) } else { (address, length) };
            return Ok(Some(Request { at_ns, operation, device: 0, address, length }));
        }
    }

    fn place(&self, source: &TraceSource) -> String {
        source.place()
    }
}

/// HP's SRT 1.3: a text that ends with a form feed, then big-endian records of 32-bit words: size
/// of the record, id, seconds, microseconds, start, stop, bytes, block, device, ..., flags.
#[derive(Default)]
pub(super) struct Srt {
    past_header: bool,
}

/// How such a file begins.
pub(super) const SRT_MAGIC: &[u8] = b"$$TR_IOREC";
/// Bytes of the words that a record has in every version.
const SRT_RECORD_BYTES_MIN: usize = 52;
const SRT_RECORD_BYTES_MAX: usize = 4096;
/// Blocks are counted in sectors of these old disks.
const SRT_BLOCK_BYTES: u64 = 256;

impl Requests for Srt {
    fn next(&mut self, source: &mut TraceSource) -> Result<Option<Request>, TraceError> {
        if !std::mem::replace(&mut self.past_header, true) && !source.skip_past(b'\x0c')? {
            return Err(bad(source, "a form feed at the end of a text header", "none".to_owned()));
        }
        let mut record = [0; SRT_RECORD_BYTES_MIN];
        let length = source.record(&mut record)?;
        if length == 0 {
            return Ok(None);
        }
        let word = |number: usize| u32::from_be_bytes(bytes_at(&record, 4 * number));
        let size = word(0) as usize;
        if length < record.len() || !(SRT_RECORD_BYTES_MIN..=SRT_RECORD_BYTES_MAX).contains(&size) {
            // The start of the next record is unknown now.
            let _ = source.rest()?;
            let found = format!("{length} bytes that give a size of {size}");
            return Err(bad(source, "a record of 52 to 4096 bytes", found));
        }
        let mut tail = vec![0; size - SRT_RECORD_BYTES_MIN];
        if source.more(&mut tail)? < tail.len() {
            return Err(bad(source, "a whole record", "the end of the file".to_owned()));
        }
        let at_ns = u64::from(word(2)) * 1_000_000_000 + u64::from(word(3)) * 1000;
        let operation = if word(11) & 1 == 1 { Operation::Read } else { Operation::Write };
        let (address, device) =
            (u64::from(word(7)) * SRT_BLOCK_BYTES, u64::from(word(8) >> 8 & 0xff));
        Ok(Some(Request { at_ns, operation, device, address, length: u64::from(word(6)) }))
    }

    fn place(&self, source: &TraceSource) -> String {
        source.place()
    }
}
