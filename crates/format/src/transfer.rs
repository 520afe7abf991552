//! How far an import or export got: a file in the state folder of the volume, beside its journal.
//!
//! Invariant: the first `done_bytes` of the disk are in place and durable: in the store for an
//! import, synced for an export. Losing the file costs copying again.
//!
//! Not here: when a transfer may be resumed; the binary decides.

use crate::error::{check_field, check_identity};
use crate::ids::VolumeId;
use crate::layout::layout;
use crate::preamble::{self, CRC_BYTES, Kind};
use crate::{FormatError, Result, crc};

layout! {
    /// Bytes of the fixed part; the two texts and the CRC follow.
    at, "Transfer progress", 72;
    PREAMBLE: 0, 16, "preamble";
    VOLUME_ID: 16, 16, "volume_id";
    SIZE_BYTES: 32, 8, "size_bytes";
    DONE_BYTES: 40, 8, "done_bytes";
    EPOCH: 48, 8, "epoch";
    POSITION: 56, 8, "position";
    FAR_NAME_BYTES: 64, 4, "far_name_bytes";
    FAR_STATE_BYTES: 68, 4, "far_state_bytes";
}

const KIND: Kind = Kind::TransferProgress;
const WHAT: &str = KIND.name();
const BYTES_MIN: usize = at::SIZE + CRC_BYTES;

/// How far a transfer got.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TransferProgress {
    /// The volume on this side.
    pub volume_id: VolumeId,
    /// Bytes to transfer in all, holes included.
    pub size_bytes: u64,
    /// Bytes from the start that are in place and durable.
    pub done_bytes: u64,
    /// Import: the attachment that writes. Export: 0.
    pub epoch: u64,
    /// Export: the cut that is read. Import: 0.
    pub position: u64,
    /// The other end: a path or a URL.
    pub far_name: String,
    /// Distinguishes the other end from an earlier or later state of itself; empty if nothing does.
    pub far_state: String,
}

impl TransferProgress {
    /// The file's bytes, or which field breaks a rule.
    pub fn encode(&self) -> Result<Vec<u8>> {
        self.check()?;
        let length = BYTES_MIN + self.far_name.len() + self.far_state.len();
        let mut bytes = Vec::with_capacity(length);
        bytes.resize(at::SIZE, 0);
        preamble::put(&mut bytes, KIND, length);
        at::VOLUME_ID.put(&mut bytes, self.volume_id.0);
        at::SIZE_BYTES.put(&mut bytes, self.size_bytes.to_le_bytes());
        at::DONE_BYTES.put(&mut bytes, self.done_bytes.to_le_bytes());
        at::EPOCH.put(&mut bytes, self.epoch.to_le_bytes());
        at::POSITION.put(&mut bytes, self.position.to_le_bytes());
        at::FAR_NAME_BYTES.put_count(&mut bytes, WHAT, self.far_name.len())?;
        at::FAR_STATE_BYTES.put_count(&mut bytes, WHAT, self.far_state.len())?;
        bytes.extend_from_slice(self.far_name.as_bytes());
        bytes.extend_from_slice(self.far_state.as_bytes());
        crc::seal(&mut bytes);
        Ok(bytes)
    }

    /// Reads the whole file; another volume's file is refused.
    pub fn decode(bytes: &[u8], volume_id: VolumeId) -> Result<TransferProgress> {
        preamble::open_whole(bytes, KIND, BYTES_MIN)?;
        check_identity(WHAT, "volume_id", volume_id, VolumeId(at::VOLUME_ID.array(bytes)))?;
        let texts = &bytes[at::SIZE..bytes.len() - CRC_BYTES];
        let name_bytes = u64::from(at::FAR_NAME_BYTES.u32(bytes));
        let agrees = name_bytes + u64::from(at::FAR_STATE_BYTES.u32(bytes)) == texts.len() as u64;
        check_field(WHAT, "length", "it does not agree with the lengths of the texts", agrees)?;
        let (name, state) = texts.split_at(name_bytes as usize);
        let text = |field, bytes| {
            let why = "it is not UTF-8";
            let text =
                str::from_utf8(bytes).map_err(|_| FormatError::Field { what: WHAT, field, why });
            text.map(str::to_owned)
        };
        let progress = TransferProgress {
            volume_id,
            size_bytes: at::SIZE_BYTES.u64(bytes),
            done_bytes: at::DONE_BYTES.u64(bytes),
            epoch: at::EPOCH.u64(bytes),
            position: at::POSITION.u64(bytes),
            far_name: text("far_name", name)?,
            far_state: text("far_state", state)?,
        };
        progress.check()?;
        Ok(progress)
    }

    /// Whether the fields keep the rules of the structure.
    pub fn check(&self) -> Result<()> {
        let within = self.done_bytes <= self.size_bytes;
        check_field(WHAT, "done_bytes", "it is beyond size_bytes", within)
    }
}
