//! One error type for all decoders.
//!
//! Invariant: only a mismatch of names allocates, because a recovery may scan past many bad
//! records.
//!
//! Not here: which object it was, and what to do. The caller knows that, and adds it to this text.

use std::fmt;

use crate::ids::{PutId, VolumeId};

/// Why bytes were refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FormatError {
    /// Fewer bytes than the structure has.
    #[error("{what}: cut short, {have} bytes of {need}")]
    Truncated {
        /// Which structure.
        what: &'static str,
        /// Bytes it needs, as far as known.
        need: u64,
        /// Bytes that are there.
        have: u64,
    },
    /// The first bytes are not Sawmill's.
    #[error("{what}: not a Sawmill structure (wrong magic)")]
    Magic {
        /// Which structure was expected.
        what: &'static str,
    },
    /// Another structure than the expected one.
    #[error("{what}: found a structure of kind {found} where kind {expected} belongs")]
    Kind {
        /// Which structure was expected.
        what: &'static str,
        /// Its kind number.
        expected: u16,
        /// The kind number found.
        found: u16,
    },
    /// A version that this build cannot read.
    #[error(
        "{what}: format version {found}, this build reads up to {supported}; use a newer Sawmill"
    )]
    Version {
        /// Which structure.
        what: &'static str,
        /// Its version.
        found: u16,
        /// The newest version this build reads.
        supported: u16,
    },
    /// The bytes are not those that were written, or (frames, journal payloads) not those of this
    /// place.
    #[error("{what}: damaged, its checksum does not match")]
    Checksum {
        /// Which structure.
        what: &'static str,
    },
    /// Reserved bytes or bits are set though the checksum is right: a writer with an extension
    /// unknown here.
    #[error("{what}: reserved bytes are set; it may come from a newer Sawmill")]
    Reserved {
        /// Which structure.
        what: &'static str,
    },
    /// An intact structure that belongs elsewhere.
    #[error("{what}: belongs elsewhere, its {field} is {found} and not {expected}")]
    Identity {
        /// Which structure.
        what: &'static str,
        /// The part of the identity that differs.
        field: &'static str,
        /// What the caller asked for.
        expected: IdentityValue,
        /// The value in the structure.
        found: IdentityValue,
    },
    /// A field that breaks a rule of the structure.
    #[error("{what}: bad {field}: {why}")]
    Field {
        /// Which structure.
        what: &'static str,
        /// Which field or part, as named in `docs/format/`.
        field: &'static str,
        /// Which rule.
        why: &'static str,
    },
}

/// One part of an identity, as shown in [`FormatError::Identity`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum IdentityValue {
    /// A volume.
    Volume(VolumeId),
    /// A put.
    Put(PutId),
    /// A sequence, position, tag or number.
    Number(u64),
    /// The name of a volume.
    Name(Box<str>),
}

impl fmt::Display for IdentityValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Volume(id) => id.fmt(f),
            Self::Put(id) => id.fmt(f),
            Self::Number(number) => number.fmt(f),
            Self::Name(name) => write!(f, "{name:?}"),
        }
    }
}

impl From<VolumeId> for IdentityValue {
    fn from(id: VolumeId) -> Self {
        Self::Volume(id)
    }
}

impl From<PutId> for IdentityValue {
    fn from(id: PutId) -> Self {
        Self::Put(id)
    }
}

impl From<&str> for IdentityValue {
    fn from(name: &str) -> Self {
        Self::Name(name.into())
    }
}

impl From<u64> for IdentityValue {
    fn from(number: u64) -> Self {
        Self::Number(number)
    }
}

/// Refuses an intact structure whose `field` is not the one asked for.
pub(crate) fn check_identity<T: Into<IdentityValue> + PartialEq>(
    what: &'static str,
    field: &'static str,
    expected: T,
    found: T,
) -> crate::Result<()> {
    if expected == found {
        return Ok(());
    }
    Err(FormatError::Identity { what, field, expected: expected.into(), found: found.into() })
}

/// Refuses a field that breaks a rule.
pub(crate) fn check_field(
    what: &'static str,
    field: &'static str,
    why: &'static str,
    holds: bool,
) -> crate::Result<()> {
    if holds { Ok(()) } else { Err(FormatError::Field { what, field, why }) }
}
