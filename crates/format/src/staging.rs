//! The staging file: journal bytes that survive the process before they are on the SSD. Its first
//! page identifies its journal; the second begins with three numbers, which the engine keeps up to
//! date.
//!
//! Invariant: the header's CRC covers the first page only, so the numbers change without it. The
//! decoder checks volume and tag; its caller judges boot and epoch (`open` in `sawmill-volume`).
//!
//! Not here: the numbers themselves (`sawmill-sys`). They change with every write and have no
//! checksum; the records' own checksums decide.

use crate::error::{check_field, check_identity};
use crate::ids::VolumeId;
use crate::layout::layout;
use crate::preamble::{self, Kind};
use crate::{Result, crc};

layout! {
    /// Bytes of the first page.
    at, "Staging header", 4096;
    PREAMBLE: 0, 16, "preamble";
    VOLUME_ID: 16, 16, "volume_id";
    JOURNAL_TAG: 32, 8, "journal_tag";
    CAPACITY_BYTES: 40, 8, "capacity_bytes";
    BOOT_ID: 48, 16, "boot_id";
    EPOCH: 64, 8, "epoch";
    RESERVED: 72, 4020, "reserved";
    CRC: 4092, 4, "crc";
}

layout! {
    /// The numbers of the second page, each a u64, after the header.
    numbers_at, "Numbers", 24;
    WRITTEN: 0, 8, "written";
    SYNC_FAILED: 8, 8, "sync_failed";
    SYNCED: 16, 8, "synced";
}

const KIND: Kind = Kind::Staging;
const WHAT: &str = KIND.name();

/// Bytes of the header's page.
pub const STAGING_HEADER_BYTES: usize = at::SIZE;
/// Where the numbers begin.
pub const NUMBERS_OFFSET_BYTES: u64 = at::SIZE as u64;

/// Which journal's staging file is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StagingIdentity {
    /// The volume.
    pub volume_id: VolumeId,
    /// The journal's tag.
    pub journal_tag: u64,
}

/// The journal whose bytes the staging file holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StagingHeader {
    /// The volume.
    pub volume_id: VolumeId,
    /// The journal's tag.
    pub journal_tag: u64,
    /// Bytes of the ring; not 0.
    pub capacity_bytes: u64,
    /// The kernel's boot that wrote it; after another boot the content is invalid.
    pub boot_id: [u8; 16],
    /// The attachment that wrote it; once the journal is bound to a later one, the content is
    /// invalid.
    pub epoch: u64,
}

impl StagingHeader {
    /// The page's bytes, or which field breaks a rule.
    pub fn encode(&self) -> Result<[u8; STAGING_HEADER_BYTES]> {
        self.check()?;
        let mut bytes = [0; STAGING_HEADER_BYTES];
        preamble::put(&mut bytes, KIND, STAGING_HEADER_BYTES);
        at::VOLUME_ID.put(&mut bytes, self.volume_id.0);
        at::JOURNAL_TAG.put(&mut bytes, self.journal_tag.to_le_bytes());
        at::CAPACITY_BYTES.put(&mut bytes, self.capacity_bytes.to_le_bytes());
        at::BOOT_ID.put(&mut bytes, self.boot_id);
        at::EPOCH.put(&mut bytes, self.epoch.to_le_bytes());
        crc::seal_in_place(&mut bytes);
        Ok(bytes)
    }

    /// Reads the first page of a staging file; `bytes` may be longer.
    pub fn decode(bytes: &[u8], expected: &StagingIdentity) -> Result<StagingHeader> {
        let bytes = preamble::open_sealed(bytes, KIND, STAGING_HEADER_BYTES)?;
        check_field(WHAT, "length", "it is not 4096", bytes.len() == STAGING_HEADER_BYTES)?;
        preamble::check_reserved(KIND, bytes, &[at::RESERVED])?;
        check_identity(
            WHAT,
            "volume_id",
            expected.volume_id,
            VolumeId(at::VOLUME_ID.array(bytes)),
        )?;
        check_identity(WHAT, "journal_tag", expected.journal_tag, at::JOURNAL_TAG.u64(bytes))?;
        let header = StagingHeader {
            volume_id: expected.volume_id,
            journal_tag: expected.journal_tag,
            capacity_bytes: at::CAPACITY_BYTES.u64(bytes),
            boot_id: at::BOOT_ID.array(bytes),
            epoch: at::EPOCH.u64(bytes),
        };
        header.check()?;
        Ok(header)
    }

    /// Whether the fields keep the rules of the structure; the decoder refuses those that do not.
    pub fn check(&self) -> Result<()> {
        check_field(WHAT, "capacity_bytes", "it is zero", self.capacity_bytes > 0)
    }
}
