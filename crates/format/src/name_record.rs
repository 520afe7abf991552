//! The name record: one step in the life of a volume's name. Object `names/<name>/<number>`.
//!
//! Invariants: numbers are taken one after the other from 1, and each object is created once and
//! never changed or deleted, so that a reader that gets the next number by key misses none; the
//! newest counts. Each record carries the whole volume record of the volume that it concerns.
//!
//! Not here: which process may put one, and when (the engine decides).

use crate::error::{check_field, check_identity};
use crate::layout::layout;
use crate::preamble::{self, CRC_BYTES, Kind};
use crate::volume_record::VolumeRecord;
use crate::{FormatError, Result, crc};

layout! {
    /// Bytes of the fixed part; the target's name, the volume record and the CRC follow.
    at, "Name record", 72;
    PREAMBLE: 0, 16, "preamble";
    VOLUME_ID: 16, 16, "volume_id";
    PUT_ID: 32, 16, "put_id";
    NUMBER: 48, 8, "number";
    TARGET_NUMBER: 56, 8, "target_number";
    KIND: 64, 1, "kind";
    RESERVED_1: 65, 1, "reserved";
    TARGET_BYTES: 66, 2, "target_bytes";
    RESERVED_2: 68, 4, "reserved";
}

const KIND: Kind = Kind::NameRecord;
const WHAT: &str = KIND.name();

/// What a record states about its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NameStep {
    /// From now on the name means the volume.
    Claims,
    /// It means the volume until `number` of the name `to` claims that volume; then it is free.
    Moves {
        /// The new name.
        to: String,
        /// The record there that decides.
        number: u64,
    },
    /// It means the volume until status pin `status_pin` of the volume deletes it; then the name
    /// is free.
    Ends {
        /// The number of the status pin that decides: see [`crate::kept_block::status_pin_key`].
        status_pin: u64,
    },
    /// The name is free. This step prevents a move to this number from taking effect late.
    Void,
}

/// One step in the life of a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NameRecord {
    /// Its number, from 1.
    pub number: u64,
    /// What it states.
    pub step: NameStep,
    /// The volume that it concerns. Its `put_id` is the record's, its `name` the one in the key.
    pub volume: VolumeRecord,
}

impl NameRecord {
    /// The object's bytes, or which field cannot be written.
    pub fn encode(&self) -> Result<Vec<u8>> {
        self.check()?;
        let volume = self.volume.encode()?;
        let (kind, to, target_number) = match &self.step {
            NameStep::Claims => (1, "", 0),
            NameStep::Moves { to, number } => (2, to.as_str(), *number),
            NameStep::Ends { status_pin } => (3, "", *status_pin),
            NameStep::Void => (4, "", 0),
        };
        let mut bytes = vec![0; at::SIZE];
        preamble::put(&mut bytes, KIND, at::SIZE + to.len() + volume.len() + CRC_BYTES);
        at::VOLUME_ID.put(&mut bytes, self.volume.volume_id.0);
        at::PUT_ID.put(&mut bytes, self.volume.put_id.0);
        at::NUMBER.put(&mut bytes, self.number.to_le_bytes());
        at::TARGET_NUMBER.put(&mut bytes, target_number.to_le_bytes());
        at::KIND.put(&mut bytes, [kind]);
        at::TARGET_BYTES.put(&mut bytes, (to.len() as u16).to_le_bytes());
        bytes.extend_from_slice(to.as_bytes());
        bytes.extend_from_slice(&volume);
        crc::seal(&mut bytes);
        Ok(bytes)
    }

    /// Reads the object `names/<name>/<number>`; a record of another place is refused.
    pub fn decode(bytes: &[u8], name: &str, number: u64) -> Result<NameRecord> {
        preamble::open_whole(bytes, KIND, at::SIZE + CRC_BYTES)?;
        preamble::check_reserved(KIND, bytes, &[at::RESERVED_1, at::RESERVED_2])?;
        check_identity(WHAT, "number", number, at::NUMBER.u64(bytes))?;
        let rest = &bytes[at::SIZE..bytes.len() - CRC_BYTES];
        let why = "it does not agree with the length";
        let (to, volume) = rest
            .split_at_checked(usize::from(at::TARGET_BYTES.u16(bytes)))
            .ok_or(FormatError::Field { what: WHAT, field: "target_bytes", why })?;
        let why = "it is not UTF-8";
        let to = str::from_utf8(to).map_err(|_| FormatError::Field {
            what: WHAT,
            field: "target",
            why,
        })?;
        let volume = VolumeRecord::decode(volume, name)?;
        let is_its_own = at::VOLUME_ID.array(bytes) == volume.volume_id.0;
        check_field(WHAT, "volume_id", "it is not that of the volume record", is_its_own)?;
        let is_its_own = at::PUT_ID.array(bytes) == volume.put_id.0;
        check_field(WHAT, "put_id", "it is not that of the volume record", is_its_own)?;
        let target_number = at::TARGET_NUMBER.u64(bytes);
        let step = match at::KIND.u8(bytes) {
            1 => NameStep::Claims,
            2 => NameStep::Moves { to: to.to_owned(), number: target_number },
            3 => NameStep::Ends { status_pin: target_number },
            4 => NameStep::Void,
            _ => return Err(FormatError::Field { what: WHAT, field: "kind", why: "no such step" }),
        };
        let has_name = matches!(step, NameStep::Moves { .. });
        check_field(WHAT, "target_bytes", "only a move has a target", has_name || to.is_empty())?;
        let has_number = has_name || matches!(step, NameStep::Ends { .. });
        check_field(
            WHAT,
            "target_number",
            "this step has no target",
            has_number || target_number == 0,
        )?;
        let record = NameRecord { number, step, volume };
        record.check()?;
        Ok(record)
    }

    /// Whether the fields keep the rules of the structure.
    pub fn check(&self) -> Result<()> {
        let check = |field, why, holds| check_field(WHAT, field, why, holds);
        check("number", "it is zero", self.number > 0)?;
        match &self.step {
            NameStep::Moves { to, number } => {
                check(
                    "target_bytes",
                    "a name has 1 to 65535 bytes",
                    (1..=0xffff).contains(&to.len()),
                )?;
                check("target_number", "it is zero", *number > 0)?;
            }
            NameStep::Ends { status_pin } => check("target_number", "it is zero", *status_pin > 0)?,
            NameStep::Claims | NameStep::Void => {}
        }
        self.volume.check()
    }
}

/// The key of the record with this number of a name.
pub fn name_key(name: &str, number: u64) -> String {
    format!("{NAME_PREFIX}{name}/{number:020}")
}

/// The prefix of all name records, for listing.
pub const NAME_PREFIX: &str = "names/";

/// The name and the number in a name record's key; `None` when it is another key.
pub fn parse_name_key(key: &str) -> Option<(&str, u64)> {
    let (name, number) = key.strip_prefix(NAME_PREFIX)?.split_once('/')?;
    let number = crate::layout::parse_number(number)?;
    (!name.is_empty()).then_some((name, number))
}
