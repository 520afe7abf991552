//! A record of the journal as the engine holds it in memory.
//!
//! Invariants: position, operation and range never change. `filled` is set before the record enters
//! the journal map; `complete` is set after, and only a complete record may leave the journal for a
//! segment. So no record can be swept from the map before it was put there.
//!
//! Checksums are kept per *piece*: the part of the payload within one 4 KiB page of the volume's
//! address space. So a read of any page is verified without reading the rest of a long record.
//!
//! Not here: a record's bytes on the disk (`sawmill_format::journal`), and reading its payload
//! (`journal::read`).

use std::sync::OnceLock;
use std::sync::atomic::Ordering;

use sawmill_format::crc::{join_payload_checks, payload_check};
use sawmill_format::journal::{RECORD_HEADER_BYTES, RecordOperation};
use sawmill_sys::FillProof;
use sawmill_sys::sync::{AtomicBool, switch_point};

/// The unit of verification, in bytes of the volume's address space.
pub(crate) const PAGE_BYTES: u64 = 4096;

/// The checksums of a payload's pieces.
pub(crate) enum Checks {
    None,
    One(u32),
    Many(Box<[u32]>),
}

/// What is known once the payload is in place.
pub(crate) struct PayloadFacts {
    /// Where the payload is in the staging ring; none for a record read back from the journal disk.
    pub(crate) slot: Option<FillProof>,
    pub(crate) checks: Checks,
}

/// A write, a discard, zeroes or a pad in the journal, with the checksums of its payload.
pub(crate) struct Record {
    pub(crate) position: u64,
    pub(crate) address: u64,
    pub(crate) length: u64,
    pub(crate) operation: RecordOperation,
    slot_bytes: u32,
    complete: AtomicBool,
    facts: OnceLock<PayloadFacts>,
}

impl Record {
    pub(crate) fn new(
        position: u64,
        operation: RecordOperation,
        address: u64,
        length: u64,
        slot_bytes: u32,
    ) -> Self {
        let complete = AtomicBool::new(false);
        Record {
            position,
            address,
            length,
            operation,
            slot_bytes,
            complete,
            facts: OnceLock::new(),
        }
    }

    /// Where the record ends in the journal.
    pub(crate) fn end(&self) -> u64 {
        self.position + u64::from(self.slot_bytes)
    }

    /// Bytes of payload in the journal.
    pub(crate) fn payload_bytes(&self) -> u64 {
        if self.operation == RecordOperation::Write { self.length } else { 0 }
    }

    /// Position of the payload's first byte.
    pub(crate) fn payload_position(&self) -> u64 {
        self.position + RECORD_HEADER_BYTES as u64
    }

    pub(crate) fn fill(&self, slot: Option<FillProof>, checks: Checks) {
        switch_point();
        let set = self.facts.set(PayloadFacts { slot, checks });
        debug_assert!(set.is_ok(), "a record is filled once");
    }

    pub(crate) fn filled(&self) -> Option<&PayloadFacts> {
        self.facts.get()
    }

    pub(crate) fn set_complete(&self) {
        self.complete.store(true, Ordering::Release);
    }

    pub(crate) fn is_complete(&self) -> bool {
        self.complete.load(Ordering::Acquire)
    }

    /// The pieces of the payload that `[offset, offset + length)` touches: first and last index.
    pub(crate) fn pieces(&self, offset: u64, length: u64) -> (usize, usize) {
        let page =
            |at: u64| ((self.address + at) / PAGE_BYTES - self.address / PAGE_BYTES) as usize;
        (page(offset), page(offset + length - 1))
    }

    /// The payload range of piece `index`.
    pub(crate) fn piece_range(&self, index: usize) -> (u64, u64) {
        piece_range(self.address, self.length, index)
    }

    /// Whether `bytes`, the payload of pieces `first..`, is what was accepted.
    pub(crate) fn verify(&self, first: usize, bytes: &[u8]) -> bool {
        let Some(filled) = self.filled() else { return false };
        let start = self.piece_range(first).0;
        let mut index = first;
        let mut done = 0;
        while done < bytes.len() {
            let (from, to) = self.piece_range(index);
            debug_assert_eq!(from, start + done as u64, "pieces are verified whole");
            let piece = &bytes[done..done + (to - from) as usize];
            let want = match &filled.checks {
                Checks::None => return false,
                Checks::One(check) => *check,
                Checks::Many(checks) => checks[index],
            };
            if payload_check(piece) != want {
                return false;
            }
            done += piece.len();
            index += 1;
        }
        true
    }
}

fn piece_range(address: u64, length: u64, index: usize) -> (u64, u64) {
    let page = (address / PAGE_BYTES + index as u64) * PAGE_BYTES;
    let from = page.max(address) - address;
    // The last page of all addresses ends past the greatest number. A record ends before.
    let to = page.saturating_add(PAGE_BYTES).min(address + length) - address;
    (from, to)
}

/// The checksums of a payload at `address`, and the checksum of all of it.
pub(crate) fn checks_of(address: u64, payload: &[u8]) -> (Checks, u32) {
    let length = payload.len() as u64;
    if length == 0 {
        return (Checks::None, 0);
    }
    let pieces = ((address + length - 1) / PAGE_BYTES - address / PAGE_BYTES + 1) as usize;
    if pieces == 1 {
        let whole = payload_check(payload);
        return (Checks::One(whole), whole);
    }
    let mut whole = 0;
    let checks = (0..pieces)
        .map(|index| {
            let (from, to) = piece_range(address, length, index);
            let check = payload_check(&payload[from as usize..to as usize]);
            whole = join_payload_checks(whole, check, (to - from) as usize);
            check
        })
        .collect();
    (Checks::Many(checks), whole)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_follow_the_pages_of_the_address_space() {
        let payload: Vec<u8> = (0..9000u32).map(|i| i as u8).collect();
        let record = Record::new(0, RecordOperation::Write, 4000, 9000, 9080);
        let (checks, whole) = checks_of(4000, &payload);
        assert_eq!(whole, payload_check(&payload));
        record.fill(None, checks);
        assert_eq!(record.piece_range(0), (0, 96));
        assert_eq!(record.piece_range(1), (96, 4192));
        assert_eq!(record.piece_range(3), (8288, 9000));
        assert_eq!(record.pieces(0, 9000), (0, 3));
        assert_eq!(record.pieces(96, 1), (1, 1));
        assert!(record.verify(0, &payload));
        assert!(record.verify(1, &payload[96..4192]));
        let mut wrong = payload.clone();
        wrong[8999] ^= 1;
        assert!(!record.verify(0, &wrong));
        assert!(record.verify(1, &wrong[96..8288]));
    }

    #[test]
    fn a_record_may_lie_in_the_last_page_of_all_addresses() {
        let address = u64::MAX - 5000;
        let record = Record::new(0, RecordOperation::Write, address, 5000, 5080);
        let (checks, _) = checks_of(address, &[7; 5000]);
        record.fill(None, checks);
        assert_eq!(record.piece_range(1), (905, 5000));
        assert!(record.verify(0, &[7; 5000]));
    }
}
