//! The 16 bytes that open every object and structure but a few (`docs/format/README.md` lists
//! those): magic, kind, version, length.
//!
//! Invariant: magic, kind and version keep their place and meaning in every future version.
//!
//! Not here: the checks of a structure's identity and fields (`error`), and how a CRC is made
//! (`crc`).

use crate::crc;
use crate::layout::{Field, layout};
use crate::{FormatError, Result};

layout! {
    /// The preamble's bytes.
    at, "Preamble", 16;
    MAGIC: 0, 4, "magic";
    KIND: 4, 2, "kind";
    VERSION: 6, 2, "version";
    LENGTH: 8, 8, "length";
}

/// The first four bytes.
pub const MAGIC: [u8; 4] = *b"SAWM";
/// Bytes of the preamble.
pub const PREAMBLE_BYTES: usize = at::SIZE;
/// The first version of every kind. A structure is written in the lowest version that has all the
/// fields it uses.
pub const VERSION_FIRST: u16 = 1;
/// Bytes of the CRC at the end of a structure.
pub(crate) const CRC_BYTES: usize = 4;

/// Which structure follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum Kind {
    /// [`crate::volume_record`]
    VolumeRecord = 1,
    /// [`crate::segment`]
    Segment = 2,
    /// [`crate::checkpoint`]
    Checkpoint = 3,
    /// [`crate::map_part`]
    MapPart = 4,
    /// [`crate::journal`]
    JournalSuperblock = 5,
    /// [`crate::staging`]
    Staging = 6,
    /// [`crate::cache_index`]
    CacheIndex = 7,
    /// [`crate::kept_block::Pin`]
    Pin = 10,
    /// [`crate::role`]
    Role = 11,
    /// [`crate::name_record`]
    NameRecord = 12,
    /// [`crate::boot_set`]
    BootSet = 13,
    /// [`crate::transfer`]
    TransferProgress = 16,
    /// [`crate::export_state`]
    ExportState = 17,
    /// [`crate::newest_state`]
    NewestState = 18,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Kind; 14] = [
        Kind::VolumeRecord,
        Kind::Segment,
        Kind::Checkpoint,
        Kind::MapPart,
        Kind::JournalSuperblock,
        Kind::Staging,
        Kind::CacheIndex,
        Kind::Pin,
        Kind::Role,
        Kind::NameRecord,
        Kind::BootSet,
        Kind::TransferProgress,
        Kind::ExportState,
        Kind::NewestState,
    ];

    /// Its name in errors and pages.
    pub const fn name(self) -> &'static str {
        match self {
            Kind::VolumeRecord => "volume record",
            Kind::Segment => "segment",
            Kind::Checkpoint => "checkpoint",
            Kind::MapPart => "map part",
            Kind::JournalSuperblock => "journal superblock",
            Kind::Staging => "staging header",
            Kind::CacheIndex => "cache index",
            Kind::Pin => "pin",
            Kind::Role => "role",
            Kind::NameRecord => "name record",
            Kind::BootSet => "boot set",
            Kind::TransferProgress => "transfer progress",
            Kind::ExportState => "export state",
            Kind::NewestState => "newest state",
        }
    }

    /// The newest version of it that this build reads.
    pub const fn version_max(self) -> u16 {
        match self {
            Kind::Segment | Kind::CacheIndex | Kind::MapPart => 2,
            Kind::Checkpoint => 5,
            Kind::JournalSuperblock => 3,
            Kind::VolumeRecord
            | Kind::Staging
            | Kind::Pin
            | Kind::Role
            | Kind::NameRecord
            | Kind::BootSet
            | Kind::TransferProgress
            | Kind::ExportState
            | Kind::NewestState => VERSION_FIRST,
        }
    }

    /// The kind with this number.
    pub fn from_number(number: u16) -> Option<Kind> {
        Self::ALL.into_iter().find(|kind| *kind as u16 == number)
    }
}

/// The content of the first 16 bytes, for tools that meet bytes of an unknown kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Preamble {
    /// The number of the kind; see [`Kind::from_number`].
    pub kind: u16,
    /// The version.
    pub version: u16,
    /// Bytes of the structure's header (segment), or of the whole structure (all others).
    pub length: u64,
}

impl Preamble {
    /// Reads any preamble. Nothing but the magic is checked.
    pub fn decode(bytes: &[u8]) -> Result<Preamble> {
        let what = "preamble";
        check_available(what, bytes, PREAMBLE_BYTES)?;
        if at::MAGIC.array(bytes) != MAGIC {
            return Err(FormatError::Magic { what });
        }
        Ok(Preamble {
            kind: at::KIND.u16(bytes),
            version: at::VERSION.u16(bytes),
            length: at::LENGTH.u64(bytes),
        })
    }
}

/// Writes the preamble to the first 16 bytes.
pub(crate) fn put(bytes: &mut [u8], kind: Kind, length: usize) {
    put_version(bytes, kind, VERSION_FIRST, length);
}

/// As [`put`], for a version other than the first.
pub(crate) fn put_version(bytes: &mut [u8], kind: Kind, version: u16, length: usize) {
    at::MAGIC.put(bytes, MAGIC);
    at::KIND.put(bytes, (kind as u16).to_le_bytes());
    at::VERSION.put(bytes, version.to_le_bytes());
    at::LENGTH.put(bytes, (length as u64).to_le_bytes());
}

pub(crate) fn check_available(what: &'static str, bytes: &[u8], need: usize) -> Result<()> {
    if bytes.len() < need {
        return Err(FormatError::Truncated { what, need: need as u64, have: bytes.len() as u64 });
    }
    Ok(())
}

/// Checks magic, kind and version, and returns the length.
pub(crate) fn open(bytes: &[u8], kind: Kind) -> Result<u64> {
    let what = kind.name();
    check_available(what, bytes, PREAMBLE_BYTES)?;
    if at::MAGIC.array(bytes) != MAGIC {
        return Err(FormatError::Magic { what });
    }
    let found = at::KIND.u16(bytes);
    if found != kind as u16 {
        return Err(FormatError::Kind { what, expected: kind as u16, found });
    }
    let found = at::VERSION.u16(bytes);
    let supported = kind.version_max();
    if found == 0 || found > supported {
        return Err(FormatError::Version { what, found, supported });
    }
    Ok(at::LENGTH.u64(bytes))
}

/// Checks the preamble, the length (at least `least`, and no more than is available) and the CRC at
/// the end, and returns exactly the structure's bytes.
pub(crate) fn open_sealed(bytes: &[u8], kind: Kind, least: usize) -> Result<&[u8]> {
    let what = kind.name();
    let length = open(bytes, kind)?;
    if length < least as u64 {
        return Err(FormatError::Field {
            what,
            field: "length",
            why: "it is less than the fixed fields take",
        });
    }
    let sealed = usize::try_from(length).ok().and_then(|length| bytes.get(..length));
    let sealed =
        sealed.ok_or(FormatError::Truncated { what, need: length, have: bytes.len() as u64 })?;
    if !crc::is_sealed(sealed) {
        return Err(FormatError::Checksum { what });
    }
    Ok(sealed)
}

/// As [`open_sealed`], for a structure that is its whole object, file or block: nothing may follow
/// it.
pub(crate) fn open_whole(bytes: &[u8], kind: Kind, least: usize) -> Result<()> {
    let what = kind.name();
    let length = open(bytes, kind)?;
    if length >= least as u64 && length < bytes.len() as u64 {
        return Err(FormatError::Field {
            what,
            field: "length",
            why: "bytes follow after the end",
        });
    }
    open_sealed(bytes, kind, least).map(|_| ())
}

/// Refuses reserved fields that are set.
pub(crate) fn check_reserved(kind: Kind, bytes: &[u8], fields: &[Field]) -> Result<()> {
    if fields.iter().all(|field| field.is_zero(bytes)) {
        return Ok(());
    }
    Err(FormatError::Reserved { what: kind.name() })
}
