//! The role of a store for a volume that lies in several: a replica of another, or promoted.
//!
//! Invariants: numbers are taken one after the other from 1 and never freed, so that a reader that
//! gets the next one by name misses none; the newest counts. A volume without a role is a primary.
//!
//! Not here: which process may put one, and when (the engine decides).

use crate::error::{check_field, check_identity};
use crate::ids::{PutId, VolumeId};
use crate::layout::layout;
use crate::preamble::{self, CRC_BYTES, Kind};
use crate::{FormatError, Result, crc};

layout! {
    /// Bytes of the fixed part; the source and the CRC follow.
    at, "Role", 96;
    PREAMBLE: 0, 16, "preamble";
    VOLUME_ID: 16, 16, "volume_id";
    PUT_ID: 32, 16, "put_id";
    NUMBER: 48, 8, "number";
    WALL_UNIX_MS: 56, 8, "wall_unix_ms";
    EPOCH: 64, 8, "epoch";
    CHECKPOINT_NUMBER: 72, 8, "checkpoint_number";
    NEXT_SEQUENCE: 80, 8, "next_sequence";
    KIND: 88, 1, "kind";
    RESERVED_1: 89, 1, "reserved";
    SOURCE_BYTES: 90, 2, "source_bytes";
    RESERVED_2: 92, 4, "reserved";
}

const KIND: Kind = Kind::Role;
const WHAT: &str = KIND.name();

/// The longest text that names a source.
pub const SOURCE_BYTES_MAX: usize = 4096;

/// Where a promoted history begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PromotionPoint {
    /// The epoch of the checkpoint that it begins with.
    pub epoch: u64,
    /// The number of that checkpoint.
    pub checkpoint_number: u64,
    /// Its first sequence.
    pub next_sequence: u64,
}

/// The role.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RoleKind {
    /// A replica: only a copier writes it.
    Replica,
    /// A promoted replica: it no longer follows a source.
    Promoted(PromotionPoint),
    /// A former primary, now a replica. The source's history supersedes its own from this position
    /// on. All zero: not known.
    Returned(PromotionPoint),
}

/// A role of a store for a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Role {
    /// The volume.
    pub volume_id: VolumeId,
    /// This put.
    pub put_id: PutId,
    /// Its number, from 1.
    pub number: u64,
    /// When, in milliseconds since 1970, UTC.
    pub wall_unix_ms: u64,
    /// What it is.
    pub kind: RoleKind,
    /// What it was a replica of, for people.
    pub source: String,
}

impl Role {
    /// The object's bytes, or which field cannot be written.
    pub fn encode(&self) -> Result<Vec<u8>> {
        self.check()?;
        let length = at::SIZE + self.source.len() + CRC_BYTES;
        let mut bytes = vec![0; at::SIZE];
        preamble::put(&mut bytes, KIND, length);
        at::VOLUME_ID.put(&mut bytes, self.volume_id.0);
        at::PUT_ID.put(&mut bytes, self.put_id.0);
        at::NUMBER.put(&mut bytes, self.number.to_le_bytes());
        at::WALL_UNIX_MS.put(&mut bytes, self.wall_unix_ms.to_le_bytes());
        if let RoleKind::Promoted(promoted) | RoleKind::Returned(promoted) = &self.kind {
            at::EPOCH.put(&mut bytes, promoted.epoch.to_le_bytes());
            at::CHECKPOINT_NUMBER.put(&mut bytes, promoted.checkpoint_number.to_le_bytes());
            at::NEXT_SEQUENCE.put(&mut bytes, promoted.next_sequence.to_le_bytes());
        }
        let kind = match self.kind {
            RoleKind::Replica => 1,
            RoleKind::Promoted(_) => 2,
            RoleKind::Returned(_) => 3,
        };
        at::KIND.put(&mut bytes, [kind]);
        at::SOURCE_BYTES.put(&mut bytes, (self.source.len() as u16).to_le_bytes());
        bytes.extend_from_slice(self.source.as_bytes());
        crc::seal(&mut bytes);
        Ok(bytes)
    }

    /// Reads the whole object.
    pub fn decode(bytes: &[u8], volume_id: VolumeId, number: u64) -> Result<Role> {
        preamble::open_whole(bytes, KIND, at::SIZE + CRC_BYTES)?;
        preamble::check_reserved(KIND, bytes, &[at::RESERVED_1, at::RESERVED_2])?;
        check_identity(WHAT, "volume_id", volume_id, VolumeId(at::VOLUME_ID.array(bytes)))?;
        check_identity(WHAT, "number", number, at::NUMBER.u64(bytes))?;
        let source = &bytes[at::SIZE..bytes.len() - CRC_BYTES];
        let agrees = usize::from(at::SOURCE_BYTES.u16(bytes)) == source.len();
        check_field(WHAT, "source_bytes", "it does not agree with the length", agrees)?;
        let why = "it is not UTF-8";
        let source = str::from_utf8(source).map_err(|_| FormatError::Field {
            what: WHAT,
            field: "source",
            why,
        })?;
        let begins = PromotionPoint {
            epoch: at::EPOCH.u64(bytes),
            checkpoint_number: at::CHECKPOINT_NUMBER.u64(bytes),
            next_sequence: at::NEXT_SEQUENCE.u64(bytes),
        };
        let kind = match at::KIND.u8(bytes) {
            1 => {
                let places = [at::EPOCH, at::CHECKPOINT_NUMBER, at::NEXT_SEQUENCE];
                let zero = places.iter().all(|field| field.is_zero(bytes));
                check_field(WHAT, "epoch", "a replica has no history of its own", zero)?;
                RoleKind::Replica
            }
            2 => RoleKind::Promoted(begins),
            3 => RoleKind::Returned(begins),
            _ => return Err(FormatError::Field { what: WHAT, field: "kind", why: "no such role" }),
        };
        let role = Role {
            volume_id,
            put_id: PutId(at::PUT_ID.array(bytes)),
            number,
            wall_unix_ms: at::WALL_UNIX_MS.u64(bytes),
            kind,
            source: source.to_owned(),
        };
        role.check()?;
        Ok(role)
    }

    /// Where its own history begins, when it was promoted.
    pub fn promoted(&self) -> Option<PromotionPoint> {
        match self.kind {
            RoleKind::Promoted(promoted) => Some(promoted),
            RoleKind::Replica | RoleKind::Returned(_) => None,
        }
    }

    /// Whether the fields keep the rules of the structure.
    pub fn check(&self) -> Result<()> {
        check_field(WHAT, "number", "numbers begin with 1", self.number > 0)?;
        let fits = self.source.len() <= SOURCE_BYTES_MAX;
        check_field(WHAT, "source_bytes", "the source's name is too long", fits)
    }
}

/// The key of a role.
pub fn role_key(volume_id: VolumeId, number: u64) -> String {
    format!("{volume_id}/role/{number:020}")
}
