//! Reading a record's payload: from the staging ring while it is there, else from the journal disk; verified.

use sawmill_format::journal::RECORD_HEADER_BYTES;

use super::{Journal, disk_failed};
use crate::record::Record;
use crate::{Error, ErrorKind, Result};

/// How a read of a record ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum JournalRead {
    /// The bytes are there and verified.
    Done,
    /// They would have to come from the device: ask again on a thread that may wait.
    Slow,
    /// The record was stored and its space used again: look the address up once more.
    Gone,
}

impl Journal {
    /// Copies payload bytes `[offset, offset + into.len())` of `record`.
    pub(crate) fn read(
        &self,
        record: &Record,
        offset: u64,
        into: &mut [u8],
        may_wait: bool,
    ) -> Result<JournalRead> {
        let length = into.len() as u64;
        let (first, last) = record.pieces(offset, length);
        let (start, end) = (record.piece_range(first).0, record.piece_range(last).1);
        if start == offset && end == offset + length {
            return self.read_pieces(record, first, start, into, may_wait);
        }
        // The range cuts pieces, and only whole pieces can be verified.
        let mut whole = vec![0; (end - start) as usize];
        let outcome = self.read_pieces(record, first, start, &mut whole, may_wait)?;
        if outcome == JournalRead::Done {
            let skip = (offset - start) as usize;
            into.copy_from_slice(&whole[skip..skip + into.len()]);
        }
        Ok(outcome)
    }

    fn read_pieces(
        &self,
        record: &Record,
        first: usize,
        start: u64,
        into: &mut [u8],
        may_wait: bool,
    ) -> Result<JournalRead> {
        let on_disk = match record.filled().and_then(|filled| filled.slot) {
            Some(slot) => self.ring.read(&slot, RECORD_HEADER_BYTES as u64 + start, into),
            None => into.len(),
        };
        if on_disk > 0 {
            match self.read_disk(record.payload_position() + start, &mut into[..on_disk], may_wait) {
                Ok(()) => {}
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return Ok(JournalRead::Slow),
                Err(error) => return Err(disk_failed("read", &error)),
            }
        }
        let verified = record.verify(first, into);
        // Asked after the bytes were copied: if the record was still kept then, they are its bytes.
        if self.trim() > record.position {
            return Ok(JournalRead::Gone);
        }
        if !verified {
            let text = format!(
                "journal record at position {}: its payload fails its checksum; nothing was returned; run \
                 `sawmill inspect journal`",
                record.position
            );
            return Err(Error::new(ErrorKind::Corrupt, text));
        }
        Ok(JournalRead::Done)
    }

    fn read_disk(&self, position: u64, into: &mut [u8], may_wait: bool) -> std::io::Result<()> {
        let mut done = 0;
        for (offset, length) in self.parts(position, into.len() as u64) {
            let part = &mut into[done..done + length as usize];
            if part.is_empty() {
                continue;
            }
            if may_wait {
                self.disk.read_at(offset, part)?;
            } else {
                self.disk.read_now(offset, part)?;
            }
            done += length as usize;
        }
        Ok(())
    }
}
