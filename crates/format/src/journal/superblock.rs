//! The journal superblock: which volume owns the journal, and the marks that recovery starts from.
//!
//! Invariant: a block has the lowest version that has all the fields it uses. A build that does not
//! know a field refuses a block that uses it, and reads the others.
//!
//! Not here: when a copy is written, and how a copy that failed to sync is handled
//! (`crates/volume/src/journal/superblock.rs`).

use crate::error::{check_field, check_identity};
use crate::ids::{PutId, VolumeId};
use crate::layout::layout;
use crate::preamble::{self, Kind};
use crate::{FormatError, Result, crc};

layout! {
    /// Bytes of one copy.
    superblock_at, "Journal superblock", 4096;
    PREAMBLE: 0, 16, "preamble";
    VOLUME_ID: 16, 16, "volume_id";
    JOURNAL_TAG: 32, 8, "journal_tag";
    REVISION: 40, 8, "revision";
    EPOCH: 48, 8, "epoch";
    INTENT_EPOCH: 56, 8, "intent_epoch";
    INTENT_PUT_ID: 64, 16, "intent_put_id";
    CAPACITY_BYTES: 80, 8, "capacity_bytes";
    TRIM: 88, 8, "trim";
    LOGGED: 96, 8, "logged";
    STORED_SEQUENCE: 104, 8, "stored_sequence";
    STORED_POSITION: 112, 8, "stored_position";
    FLAGS: 120, 4, "flags";
    RESERVED_1: 124, 4, "reserved";
    BOUND_EPOCH: 128, 8, "bound_epoch";
    BOUND_POSITION: 136, 8, "bound_position";
    MEMORY_BOOT_ID: 144, 16, "memory_boot_id";
    MEMORY_FOLDER_BYTES: 160, 2, "memory_folder_bytes";
    MEMORY_FOLDER: 162, 1022, "memory_folder";
    COPY_FROM: 1184, 8, "copy_from";
    COPY_AT: 1192, 8, "copy_at";
    COPY_BYTES: 1200, 8, "copy_bytes";
    RESERVED_2: 1208, 2884, "reserved";
    CRC: 4092, 4, "crc";
}
use superblock_at as at;

const KIND: Kind = Kind::JournalSuperblock;
const WHAT: &str = KIND.name();
const FLAG_CLEAN: u32 = 1;

/// The version that records where memory is in use, and nothing else that came later.
const MEMORY_VERSION: u16 = 2;
/// The version that records where a copy of a part of the ring is.
const RING_COPY_VERSION: u16 = 3;
const _: () = assert!(RING_COPY_VERSION == KIND.version_max());
/// The longest folder name, in bytes, that a superblock holds.
pub const MEMORY_FOLDER_BYTES_MAX: usize = at::MEMORY_FOLDER.size;

/// Bytes of one superblock copy; copy 0 is at byte 0 of the journal, copy 1 right after it.
pub const SUPERBLOCK_BYTES: usize = at::SIZE;
/// The largest ring; the limit keeps sums of positions in range.
pub const CAPACITY_BYTES_MAX: u64 = 1 << 62;

/// Where the newest part of a journal is, in memory that outlives the process (the staging file).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Memory {
    /// The kernel's boot; the memory is lost when that boot ends.
    pub boot_id: [u8; 16],
    /// The folder, as the system's bytes; 1 to [`MEMORY_FOLDER_BYTES_MAX`] of them, none of them 0.
    pub folder: Vec<u8>,
}

/// A part of the ring that is being rewritten in place; meanwhile, a copy of it is elsewhere in the
/// ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingCopy {
    /// The position of the part.
    pub from: u64,
    /// The position where its copy is.
    pub at: u64,
    /// Bytes of both, not 0; they do not overlap.
    pub bytes: u64,
}

/// The volume of a journal, and the marks that recovery starts from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Superblock {
    /// The volume whose writes it holds.
    pub volume_id: VolumeId,
    /// Random, new at each format; every record repeats it.
    pub journal_tag: u64,
    /// Counts the superblocks written; copy `revision % 2` holds it.
    pub revision: u64,
    /// The attachment whose records it holds.
    pub epoch: u64,
    /// An epoch that an attachment is about to take; 0 = none.
    pub intent_epoch: u64,
    /// The put of the fence for `intent_epoch`.
    pub intent_put_id: PutId,
    /// Bytes of the ring; a multiple of 4096, not 0, at most [`CAPACITY_BYTES_MAX`].
    pub capacity_bytes: u64,
    /// Recovery may start at this position.
    pub trim: u64,
    /// Flushed through this position.
    pub logged: u64,
    /// The last segment known stored with all before it; 0 = none.
    pub stored_sequence: u64,
    /// All writes below this position are stored.
    pub stored_position: u64,
    /// The attachment ended with everything stored.
    pub clean: bool,
    /// The epoch that was bound last: the one whose records begin at `bound_position`. 0 = none.
    pub bound_epoch: u64,
    /// At and past this position only records of `bound_epoch` count; any others there were
    /// discarded.
    pub bound_position: u64,
    /// The memory that may alone hold what `bound_epoch` accepted. Without it and `ring_copy` the
    /// block is of version 1.
    pub memory: Option<Memory>,
    /// The copy that replaces a part of the ring. Without it the block is of an older version.
    pub ring_copy: Option<RingCopy>,
}

impl Superblock {
    /// Which copy holds this revision: 0 or 1.
    pub const fn copy(&self) -> usize {
        (self.revision % 2) as usize
    }

    /// Where this revision goes in the journal file.
    pub const fn offset_bytes(&self) -> u64 {
        (self.copy() * SUPERBLOCK_BYTES) as u64
    }

    /// The block's bytes, or which field breaks a rule.
    pub fn encode(&self) -> Result<[u8; SUPERBLOCK_BYTES]> {
        self.check()?;
        let mut bytes = [0; SUPERBLOCK_BYTES];
        let version = match (&self.ring_copy, &self.memory) {
            (Some(_), _) => RING_COPY_VERSION,
            (None, Some(_)) => MEMORY_VERSION,
            (None, None) => preamble::VERSION_FIRST,
        };
        preamble::put_version(&mut bytes, KIND, version, SUPERBLOCK_BYTES);
        at::VOLUME_ID.put(&mut bytes, self.volume_id.0);
        at::JOURNAL_TAG.put(&mut bytes, self.journal_tag.to_le_bytes());
        at::REVISION.put(&mut bytes, self.revision.to_le_bytes());
        at::EPOCH.put(&mut bytes, self.epoch.to_le_bytes());
        at::INTENT_EPOCH.put(&mut bytes, self.intent_epoch.to_le_bytes());
        at::INTENT_PUT_ID.put(&mut bytes, self.intent_put_id.0);
        at::CAPACITY_BYTES.put(&mut bytes, self.capacity_bytes.to_le_bytes());
        at::TRIM.put(&mut bytes, self.trim.to_le_bytes());
        at::LOGGED.put(&mut bytes, self.logged.to_le_bytes());
        at::STORED_SEQUENCE.put(&mut bytes, self.stored_sequence.to_le_bytes());
        at::STORED_POSITION.put(&mut bytes, self.stored_position.to_le_bytes());
        at::FLAGS.put(&mut bytes, (if self.clean { FLAG_CLEAN } else { 0 }).to_le_bytes());
        at::BOUND_EPOCH.put(&mut bytes, self.bound_epoch.to_le_bytes());
        at::BOUND_POSITION.put(&mut bytes, self.bound_position.to_le_bytes());
        if let Some(Memory { boot_id, folder }) = &self.memory {
            at::MEMORY_BOOT_ID.put(&mut bytes, *boot_id);
            // `check` bounds the length.
            at::MEMORY_FOLDER_BYTES.put(&mut bytes, (folder.len() as u16).to_le_bytes());
            bytes[at::MEMORY_FOLDER.offset..][..folder.len()].copy_from_slice(folder);
        }
        if let Some(RingCopy { from, at, bytes: length }) = &self.ring_copy {
            at::COPY_FROM.put(&mut bytes, from.to_le_bytes());
            at::COPY_AT.put(&mut bytes, at.to_le_bytes());
            at::COPY_BYTES.put(&mut bytes, length.to_le_bytes());
        }
        crc::seal_in_place(&mut bytes);
        Ok(bytes)
    }

    /// Reads one copy; `block` has [`SUPERBLOCK_BYTES`]. A journal of another volume is refused.
    pub fn decode(block: &[u8], volume_id: VolumeId) -> Result<Superblock> {
        let superblock = Self::decode_any(block)?;
        check_identity(WHAT, "volume_id", volume_id, superblock.volume_id)?;
        superblock.check()?;
        Ok(superblock)
    }

    /// The volume that this copy names as the journal's owner, for tools and for a clear error.
    pub fn owner(block: &[u8]) -> Result<VolumeId> {
        Self::decode_any(block).map(|superblock| superblock.volume_id)
    }

    fn decode_any(bytes: &[u8]) -> Result<Superblock> {
        preamble::open_whole(bytes, KIND, SUPERBLOCK_BYTES)?;
        check_field(WHAT, "length", "it is not 4096", bytes.len() == SUPERBLOCK_BYTES)?;
        preamble::check_reserved(KIND, bytes, &[at::RESERVED_1, at::RESERVED_2])?;
        let flags = at::FLAGS.u32(bytes);
        if flags & !FLAG_CLEAN != 0 {
            return Err(FormatError::Reserved { what: WHAT });
        }
        let memory = memory_of(bytes)?;
        Ok(Superblock {
            volume_id: VolumeId(at::VOLUME_ID.array(bytes)),
            journal_tag: at::JOURNAL_TAG.u64(bytes),
            revision: at::REVISION.u64(bytes),
            epoch: at::EPOCH.u64(bytes),
            intent_epoch: at::INTENT_EPOCH.u64(bytes),
            intent_put_id: PutId(at::INTENT_PUT_ID.array(bytes)),
            capacity_bytes: at::CAPACITY_BYTES.u64(bytes),
            trim: at::TRIM.u64(bytes),
            logged: at::LOGGED.u64(bytes),
            stored_sequence: at::STORED_SEQUENCE.u64(bytes),
            stored_position: at::STORED_POSITION.u64(bytes),
            clean: flags & FLAG_CLEAN != 0,
            bound_epoch: at::BOUND_EPOCH.u64(bytes),
            bound_position: at::BOUND_POSITION.u64(bytes),
            memory,
            ring_copy: ring_copy_of(bytes)?,
        })
    }

    /// Whether the fields keep the rules of the structure; the decoder refuses those that do not.
    pub fn check(&self) -> Result<()> {
        let blocks = (1..=CAPACITY_BYTES_MAX).contains(&self.capacity_bytes)
            && self.capacity_bytes.is_multiple_of(SUPERBLOCK_BYTES as u64);
        check_field(
            WHAT,
            "capacity_bytes",
            "it is zero, beyond 2^62, or not a multiple of 4096",
            blocks,
        )?;
        if let Some(copy) = self.ring_copy {
            // Both lie in one lap of the ring.
            let apart = copy.from.checked_add(copy.bytes).is_some_and(|end| end <= copy.at);
            let reach = copy.at.checked_add(copy.bytes).and_then(|end| end.checked_sub(copy.from));
            let fits =
                copy.bytes > 0 && apart && reach.is_some_and(|reach| reach <= self.capacity_bytes);
            check_field(
                WHAT,
                "copy_bytes",
                "the copy does not fit the ring beside its original",
                fits,
            )?;
        }
        let Some(Memory { folder, .. }) = &self.memory else { return Ok(()) };
        let is_valid =
            (1..=MEMORY_FOLDER_BYTES_MAX).contains(&folder.len()) && !folder.contains(&0);
        check_field(WHAT, "memory_folder", "it is empty, too long, or has a zero byte", is_valid)
    }
}

/// The copy that a block of version 3 names; older versions have zeroes there.
fn ring_copy_of(bytes: &[u8]) -> Result<Option<RingCopy>> {
    let version = preamble::Preamble::decode(bytes)?.version;
    if version < RING_COPY_VERSION {
        preamble::check_reserved(KIND, bytes, &[at::COPY_FROM, at::COPY_AT, at::COPY_BYTES])?;
        return Ok(None);
    }
    let (from, at, bytes) =
        (at::COPY_FROM.u64(bytes), at::COPY_AT.u64(bytes), at::COPY_BYTES.u64(bytes));
    Ok(Some(RingCopy { from, at, bytes }))
}

/// The memory that a block of version 2 names, and that one of version 3 may name; version 1 has
/// zeroes there.
fn memory_of(bytes: &[u8]) -> Result<Option<Memory>> {
    let folder_bytes = usize::from(at::MEMORY_FOLDER_BYTES.u16(bytes));
    let folder = at::MEMORY_FOLDER.of(bytes);
    let version = preamble::Preamble::decode(bytes)?.version;
    let has = folder_bytes > 0;
    let agrees = version > MEMORY_VERSION || has == (version == MEMORY_VERSION);
    let agrees = agrees && folder_bytes <= folder.len();
    check_field(WHAT, "memory_folder_bytes", "it does not agree with the version", agrees)?;
    let (folder, rest) = folder.split_at(folder_bytes);
    let boot_id = at::MEMORY_BOOT_ID.array(bytes);
    if rest.iter().any(|byte| *byte != 0) || !has && boot_id != [0; 16] {
        return Err(FormatError::Reserved { what: WHAT });
    }
    Ok(has.then(|| Memory { boot_id, folder: folder.to_vec() }))
}

/// The newest valid of the two copies. An intact copy of a newer format version is an error and not
/// skipped, because the other copy would be older than what a newer Sawmill has done since. When
/// both copies are bad, the error is that of a copy that belongs to another volume, if there is
/// one, or of copy 0.
pub fn choose_superblock(copy_0: &[u8], copy_1: &[u8], volume_id: VolumeId) -> Result<Superblock> {
    let read = |copy: usize, block: &[u8]| match Superblock::decode(block, volume_id) {
        Ok(superblock) if superblock.copy() != copy => Err(FormatError::Field {
            what: WHAT,
            field: "revision",
            why: "it belongs in the other copy",
        }),
        read => read,
    };
    match (read(0, copy_0), read(1, copy_1)) {
        (Err(error @ FormatError::Version { .. }), _) if crc::is_sealed(copy_0) => Err(error),
        (_, Err(error @ FormatError::Version { .. })) if crc::is_sealed(copy_1) => Err(error),
        (Ok(one), Ok(other)) => Ok(if one.revision > other.revision { one } else { other }),
        (Ok(only), Err(_)) | (Err(_), Ok(only)) => Ok(only),
        (Err(_), Err(error @ FormatError::Identity { .. })) => Err(error),
        (Err(error), Err(_)) => Err(error),
    }
}
