//! The volume record: the properties that are fixed when a volume is created. A part of each name
//! record; an object of its own, `volumes/<name>`, in stores older than those.
//!
//! Invariants: the encoder refuses what the decoder would refuse ([`VolumeRecord::check`]); a
//! record decodes only under its own name.
//!
//! Not here: anything that changes, and the rules for names beyond being non-empty UTF-8.

use std::fmt;
use std::str::FromStr;

use crate::error::{check_field, check_identity};
use crate::ids::{PutId, VolumeId};
use crate::layout::layout;
use crate::preamble::{self, CRC_BYTES, Kind};
use crate::{FormatError, Result, crc};

layout! {
    /// Bytes of the fixed part; the name and the CRC follow.
    at, "Volume record", 88;
    PREAMBLE: 0, 16, "preamble";
    VOLUME_ID: 16, 16, "volume_id";
    PUT_ID: 32, 16, "put_id";
    SIZE_BYTES: 48, 8, "size_bytes";
    BLOCK_BYTES: 56, 4, "block_bytes";
    SEGMENT_BYTES: 60, 4, "segment_bytes";
    FRAME_BYTES: 64, 4, "frame_bytes";
    FLUSH_MODE: 68, 1, "flush_mode";
    RESERVED_1: 69, 3, "reserved";
    CREATED_UNIX_MS: 72, 8, "created_unix_ms";
    NAME_BYTES: 80, 2, "name_bytes";
    RESERVED_2: 82, 6, "reserved";
}

const KIND: Kind = Kind::VolumeRecord;
const WHAT: &str = KIND.name();

/// What a completed flush promises.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum FlushMode {
    /// All writes before it are on the local SSD.
    #[default]
    Logged = 1,
    /// All writes before it are in the store.
    Stored = 2,
    /// Nothing but order.
    Weak = 3,
}

impl FlushMode {
    /// All modes.
    pub const ALL: [FlushMode; 3] = [FlushMode::Logged, FlushMode::Stored, FlushMode::Weak];

    /// Its name in configuration and commands.
    pub const fn name(self) -> &'static str {
        match self {
            FlushMode::Logged => "logged",
            FlushMode::Stored => "stored",
            FlushMode::Weak => "weak",
        }
    }
}

impl fmt::Display for FlushMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for FlushMode {
    type Err = FormatError;

    fn from_str(text: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|mode| mode.name() == text).ok_or(FormatError::Field {
            what: "flush mode",
            field: "text",
            why: "it is one of logged, stored, weak",
        })
    }
}

/// The properties that are fixed when a volume is created.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeRecord {
    /// The volume's name forever; its other objects are below this id.
    pub volume_id: VolumeId,
    /// This put.
    pub put_id: PutId,
    /// Size of the disk when it was created; a multiple of `block_bytes`.
    pub size_bytes: u64,
    /// 512 or 4096.
    pub block_bytes: u32,
    /// A segment is sealed at this much data.
    pub segment_bytes: u32,
    /// Data per frame.
    pub frame_bytes: u32,
    /// What a flush promises.
    pub flush_mode: FlushMode,
    /// Milliseconds since 1970, UTC.
    pub created_unix_ms: u64,
    /// The name people use; the last part of the object's key.
    pub name: String,
}

impl VolumeRecord {
    /// The object's bytes, or which field cannot be written.
    pub fn encode(&self) -> Result<Vec<u8>> {
        self.check()?;
        let length = at::SIZE + self.name.len() + CRC_BYTES;
        let mut bytes = Vec::with_capacity(length);
        bytes.resize(at::SIZE, 0);
        preamble::put(&mut bytes, KIND, length);
        at::VOLUME_ID.put(&mut bytes, self.volume_id.0);
        at::PUT_ID.put(&mut bytes, self.put_id.0);
        at::SIZE_BYTES.put(&mut bytes, self.size_bytes.to_le_bytes());
        at::BLOCK_BYTES.put(&mut bytes, self.block_bytes.to_le_bytes());
        at::SEGMENT_BYTES.put(&mut bytes, self.segment_bytes.to_le_bytes());
        at::FRAME_BYTES.put(&mut bytes, self.frame_bytes.to_le_bytes());
        at::FLUSH_MODE.put(&mut bytes, [self.flush_mode as u8]);
        at::CREATED_UNIX_MS.put(&mut bytes, self.created_unix_ms.to_le_bytes());
        at::NAME_BYTES.put(&mut bytes, (self.name.len() as u16).to_le_bytes());
        bytes.extend_from_slice(self.name.as_bytes());
        crc::seal(&mut bytes);
        Ok(bytes)
    }

    /// Reads the object `volumes/<name>`; a record of another name is refused.
    pub fn decode(bytes: &[u8], name: &str) -> Result<VolumeRecord> {
        preamble::open_whole(bytes, KIND, at::SIZE + CRC_BYTES)?;
        preamble::check_reserved(KIND, bytes, &[at::RESERVED_1, at::RESERVED_2])?;
        let found = &bytes[at::SIZE..bytes.len() - CRC_BYTES];
        let name_bytes = usize::from(at::NAME_BYTES.u16(bytes));
        check_field(
            WHAT,
            "name_bytes",
            "it does not agree with the length",
            name_bytes == found.len(),
        )?;
        let why = "it is not UTF-8";
        let found = str::from_utf8(found).map_err(|_| FormatError::Field {
            what: WHAT,
            field: "name",
            why,
        })?;
        check_identity(WHAT, "name", name, found)?;
        let mode = at::FLUSH_MODE.u8(bytes);
        let flush_mode = FlushMode::ALL.into_iter().find(|known| *known as u8 == mode);
        let why = "no such flush mode";
        let record = VolumeRecord {
            volume_id: VolumeId(at::VOLUME_ID.array(bytes)),
            put_id: PutId(at::PUT_ID.array(bytes)),
            size_bytes: at::SIZE_BYTES.u64(bytes),
            block_bytes: at::BLOCK_BYTES.u32(bytes),
            segment_bytes: at::SEGMENT_BYTES.u32(bytes),
            frame_bytes: at::FRAME_BYTES.u32(bytes),
            flush_mode: flush_mode.ok_or(FormatError::Field {
                what: WHAT,
                field: "flush_mode",
                why,
            })?,
            created_unix_ms: at::CREATED_UNIX_MS.u64(bytes),
            name: found.to_owned(),
        };
        record.check()?;
        Ok(record)
    }

    /// Whether the fields keep the rules of the structure.
    pub fn check(&self) -> Result<()> {
        let check = |field, why, holds| check_field(WHAT, field, why, holds);
        check(
            "name_bytes",
            "a name has 1 to 65535 bytes",
            (1..=0xffff).contains(&self.name.len()),
        )?;
        check("block_bytes", "it is 512 or 4096", matches!(self.block_bytes, 512 | 4096))?;
        let whole = self.size_bytes.is_multiple_of(u64::from(self.block_bytes));
        check("size_bytes", "it is not a multiple of block_bytes", whole)?;
        check("segment_bytes", "it is zero", self.segment_bytes > 0)?;
        check("frame_bytes", "it is zero", self.frame_bytes > 0)
    }
}

/// The key of the volume record of a name that has no name record.
pub fn volume_key(name: &str) -> String {
    format!("{VOLUME_PREFIX}{name}")
}

/// The prefix of all volume records, for listing.
pub const VOLUME_PREFIX: &str = "volumes/";

/// The name in a volume record's key; `None` when it is another key.
pub fn parse_volume_key(key: &str) -> Option<&str> {
    key.strip_prefix(VOLUME_PREFIX).filter(|name| !name.is_empty())
}
