//! What a target of a link must know of an export after a restart: a file in the state folder.
//!
//! Invariant: it is replaced, durably, before any of its content takes effect. Losing it cuts off
//! the attached initiators, and loses nothing else.
//!
//! Not here: which initiators are admitted (`crates/link/src/target`).

use crate::error::{check_field, check_identity};
use crate::layout::layout;
use crate::preamble::{self, CRC_BYTES, Kind};
use crate::{FormatError, Result, crc};

layout! {
    /// Bytes of the fixed part; the text and the CRC follow.
    at, "Export state", 48;
    PREAMBLE: 0, 16, "preamble";
    RESERVATION: 16, 8, "reservation";
    FAILED_SYNCS: 24, 8, "failed_syncs";
    EPOCH: 32, 8, "epoch";
    SHARED: 40, 1, "shared";
    RESERVED: 41, 3, "reserved";
    IDENTITY_BYTES: 44, 4, "identity_bytes";
}

const KIND: Kind = Kind::ExportState;
const WHAT: &str = KIND.name();
const BYTES_MIN: usize = at::SIZE + CRC_BYTES;

/// The durable state of an export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportState {
    /// The reservation whose writes the export accepts: a random number; 0: none.
    pub reservation: u64,
    /// Syncs of its device that failed.
    pub failed_syncs: u64,
    /// For a volume, the attachment that this state belongs to. Else 0.
    pub epoch: u64,
    /// Several initiators may share the reservation.
    pub shared: bool,
    /// The identity of the exported volume, file or disk.
    pub identity: String,
}

impl ExportState {
    /// The file's bytes, or which field cannot be written.
    pub fn encode(&self) -> Result<Vec<u8>> {
        let length = BYTES_MIN + self.identity.len();
        let mut bytes = Vec::with_capacity(length);
        bytes.resize(at::SIZE, 0);
        preamble::put(&mut bytes, KIND, length);
        at::RESERVATION.put(&mut bytes, self.reservation.to_le_bytes());
        at::FAILED_SYNCS.put(&mut bytes, self.failed_syncs.to_le_bytes());
        at::EPOCH.put(&mut bytes, self.epoch.to_le_bytes());
        at::SHARED.put(&mut bytes, [u8::from(self.shared)]);
        at::IDENTITY_BYTES.put_count(&mut bytes, WHAT, self.identity.len())?;
        bytes.extend_from_slice(self.identity.as_bytes());
        crc::seal(&mut bytes);
        Ok(bytes)
    }

    /// Reads the whole file; that of another volume, file or disk is refused.
    pub fn decode(bytes: &[u8], identity: &str) -> Result<ExportState> {
        preamble::open_whole(bytes, KIND, BYTES_MIN)?;
        if !at::RESERVED.is_zero(bytes) {
            return Err(FormatError::Reserved { what: WHAT });
        }
        let shared = at::SHARED.u8(bytes);
        check_field(WHAT, "shared", "neither 0 nor 1", shared <= 1)?;
        let found = &bytes[at::SIZE..bytes.len() - CRC_BYTES];
        let agrees = at::IDENTITY_BYTES.u32(bytes) as usize == found.len();
        check_field(WHAT, "identity_bytes", "it does not agree with the length", agrees)?;
        let why = "it is not UTF-8";
        let found = str::from_utf8(found);
        let found = found.map_err(|_| FormatError::Field { what: WHAT, field: "identity", why })?;
        check_identity(WHAT, "identity", identity, found)?;
        Ok(ExportState {
            reservation: at::RESERVATION.u64(bytes),
            failed_syncs: at::FAILED_SYNCS.u64(bytes),
            epoch: at::EPOCH.u64(bytes),
            shared: shared == 1,
            identity: identity.to_owned(),
        })
    }
}
