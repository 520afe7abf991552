//! The head of a journal record. Its first 28 bytes, the *slot*, verify alone: they are written
//! when space is reserved, so that recovery can skip a slot that was not filled before the process
//! died.
//!
//! Invariant: the header's CRC leaves the slot's CRC out. With it inside, the header's CRC would
//! not depend on the slot at all (see [`crate::crc`]), and a slot torn from the rest of an older
//! lap's header would verify.
//!
//! Not here: the superblock (`superblock`), the check of the payload (`crc::payload_check`, called
//! by the reader), and what recovery concludes from a bad record (`recovery::cases` in
//! `sawmill-volume`).

use crate::error::{check_field, check_identity};
use crate::layout::layout;
use crate::preamble::check_available;
use crate::{FormatError, Result, crc};

layout! {
    /// Bytes of a record header.
    record_at, "Journal record header", 80;
    MAGIC: 0, 4, "magic";
    SLOT_BYTES: 4, 4, "slot_bytes";
    POSITION: 8, 8, "position";
    TAG: 16, 8, "tag";
    SLOT_CRC: 24, 4, "slot_crc";
    VERSION: 28, 1, "version";
    OPERATION: 29, 1, "operation";
    FLAGS: 30, 2, "flags";
    EPOCH: 32, 8, "epoch";
    LOGGED: 40, 8, "logged";
    ADDRESS: 48, 8, "address";
    LENGTH: 56, 8, "length";
    PAYLOAD_CRC: 64, 4, "payload_crc";
    RESERVED: 68, 8, "reserved";
    HEADER_CRC: 76, 4, "header_crc";
}
use record_at as at;

const WHAT: &str = "journal record";
const MAGIC: [u8; 4] = *b"SWJR";
const SLOT_END: usize = at::SLOT_CRC.offset + at::SLOT_CRC.size;

/// The version of records.
pub const RECORD_VERSION: u8 = 1;
/// Bytes of a record before its payload.
pub const RECORD_HEADER_BYTES: usize = at::SIZE;

/// What a record does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum RecordOperation {
    /// Writes its payload at `address`.
    Write = 1,
    /// Empties `length` bytes at `address`.
    Discard = 2,
    /// Zeroes `length` bytes at `address`.
    Zero = 3,
    /// Fills space.
    Pad = 4,
    /// A reserved slot that was given up.
    Void = 5,
}

/// The head of a journal record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RecordHeader {
    /// Bytes of header and payload, or of all the space a pad fills.
    pub slot_bytes: u32,
    /// Its position.
    pub position: u64,
    /// The journal's tag.
    pub tag: u64,
    /// What it does.
    pub operation: RecordOperation,
    /// The attachment that wrote it.
    pub epoch: u64,
    /// The journal was flushed through this position when the slot was reserved.
    pub logged: u64,
    /// First byte on the disk.
    pub address: u64,
    /// Bytes on the disk.
    pub length: u64,
    /// [`payload_check`](crate::crc::payload_check) of the payload; 0 when there is none.
    pub payload_crc: u32,
}

impl RecordHeader {
    /// Writes the part that makes the slot skippable, and zeroes the rest of the header.
    ///
    /// # Panics
    /// When `slot` is shorter than a header.
    #[inline]
    pub fn encode_slot(&self, slot: &mut [u8]) {
        let header = &mut slot[..RECORD_HEADER_BYTES];
        at::MAGIC.put(header, MAGIC);
        at::SLOT_BYTES.put(header, self.slot_bytes.to_le_bytes());
        at::POSITION.put(header, self.position.to_le_bytes());
        at::TAG.put(header, self.tag.to_le_bytes());
        let crc = crc::crc32c(&header[..at::SLOT_CRC.offset]);
        at::SLOT_CRC.put(header, crc.to_le_bytes());
        header[SLOT_END..].fill(0);
    }

    /// Writes the whole header.
    #[inline]
    pub fn encode(&self, header: &mut [u8; RECORD_HEADER_BYTES]) {
        debug_assert_eq!(self.check(), Ok(()));
        self.encode_slot(header);
        at::VERSION.put(header, [RECORD_VERSION]);
        at::OPERATION.put(header, [self.operation as u8]);
        at::EPOCH.put(header, self.epoch.to_le_bytes());
        at::LOGGED.put(header, self.logged.to_le_bytes());
        at::ADDRESS.put(header, self.address.to_le_bytes());
        at::LENGTH.put(header, self.length.to_le_bytes());
        at::PAYLOAD_CRC.put(header, self.payload_crc.to_le_bytes());
        let crc = header_crc(header);
        at::HEADER_CRC.put(header, crc.to_le_bytes());
    }

    /// Reads the slot at `position` of the journal with this tag, and returns its `slot_bytes`.
    pub fn decode_slot(bytes: &[u8], tag: u64, position: u64) -> Result<u32> {
        check_available(WHAT, bytes, SLOT_END)?;
        if at::MAGIC.array(bytes) != MAGIC {
            return Err(FormatError::Magic { what: WHAT });
        }
        if crc::crc32c(&bytes[..at::SLOT_CRC.offset]) != at::SLOT_CRC.u32(bytes) {
            return Err(FormatError::Checksum { what: WHAT });
        }
        check_identity(WHAT, "tag", tag, at::TAG.u64(bytes))?;
        check_identity(WHAT, "position", position, at::POSITION.u64(bytes))?;
        let slot_bytes = at::SLOT_BYTES.u32(bytes);
        let least = slot_bytes as usize >= RECORD_HEADER_BYTES;
        check_field(WHAT, "slot_bytes", "it is less than a header", least)?;
        Ok(slot_bytes)
    }

    /// Reads the header at `position` of the journal with this tag. The caller compares the payload
    /// with `payload_crc`.
    ///
    /// Unlike elsewhere, the CRC is checked before the version: a torn or unfilled slot is common
    /// after a crash, and must not look like a newer Sawmill's.
    pub fn decode(bytes: &[u8], tag: u64, position: u64) -> Result<RecordHeader> {
        check_available(WHAT, bytes, RECORD_HEADER_BYTES)?;
        let slot_bytes = Self::decode_slot(bytes, tag, position)?;
        if header_crc(bytes) != at::HEADER_CRC.u32(bytes) {
            return Err(FormatError::Checksum { what: WHAT });
        }
        let version = at::VERSION.u8(bytes);
        if version != RECORD_VERSION {
            let (found, supported) = (u16::from(version), u16::from(RECORD_VERSION));
            return Err(FormatError::Version { what: WHAT, found, supported });
        }
        if !at::FLAGS.is_zero(bytes) || !at::RESERVED.is_zero(bytes) {
            return Err(FormatError::Reserved { what: WHAT });
        }
        let header = RecordHeader {
            slot_bytes,
            position,
            tag,
            operation: match at::OPERATION.u8(bytes) {
                1 => RecordOperation::Write,
                2 => RecordOperation::Discard,
                3 => RecordOperation::Zero,
                4 => RecordOperation::Pad,
                5 => RecordOperation::Void,
                _ => {
                    let why = "no such operation";
                    return Err(FormatError::Field { what: WHAT, field: "operation", why });
                }
            },
            epoch: at::EPOCH.u64(bytes),
            logged: at::LOGGED.u64(bytes),
            address: at::ADDRESS.u64(bytes),
            length: at::LENGTH.u64(bytes),
            payload_crc: at::PAYLOAD_CRC.u32(bytes),
        };
        header.check()?;
        Ok(header)
    }

    /// Whether the fields keep the rules of the structure; the decoder refuses those that do not.
    pub fn check(&self) -> Result<()> {
        let check = |field, why, holds| check_field(WHAT, field, why, holds);
        let slot_bytes = u64::from(self.slot_bytes);
        check("slot_bytes", "it is less than a header", slot_bytes >= RECORD_HEADER_BYTES as u64)?;
        let fits = self.address.checked_add(self.length).is_some();
        check("length", "it ends past the last address", fits)?;
        match self.operation {
            RecordOperation::Write => {
                let exact = self.length.checked_add(RECORD_HEADER_BYTES as u64) == Some(slot_bytes);
                check("slot_bytes", "a write's is header and length", exact)
            }
            RecordOperation::Discard | RecordOperation::Zero | RecordOperation::Void => {
                check("payload_crc", "a record without payload has one", self.payload_crc == 0)
            }
            RecordOperation::Pad => {
                check("payload_crc", "a record without payload has one", self.payload_crc == 0)?;
                check("address", "a pad has one", self.address == 0)?;
                check("length", "a pad has one", self.length == 0)
            }
        }
    }
}

/// The CRC of the header without its two CRC fields: bytes 0..24 and 28..76.
#[inline]
fn header_crc(header: &[u8]) -> u32 {
    const COVERED: usize = at::HEADER_CRC.offset - at::SLOT_CRC.size;
    let mut covered = [0; COVERED];
    covered[..at::SLOT_CRC.offset].copy_from_slice(&header[..at::SLOT_CRC.offset]);
    covered[at::SLOT_CRC.offset..].copy_from_slice(&header[SLOT_END..at::HEADER_CRC.offset]);
    crc::crc32c(&covered)
}
