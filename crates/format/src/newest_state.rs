//! The newest state of a volume that a machine has seen in a store: a file in the state folder of
//! the volume, beside its journal.
//!
//! Invariant: it never records a state that the volume did not reach: its writer had the volume
//! attached. Losing it costs only the warning that the store has become older.
//!
//! Not here: how an older store is handled (`crates/volume/src/open`).

use crate::error::{check_field, check_identity};
use crate::ids::VolumeId;
use crate::layout::layout;
use crate::preamble::{self, CRC_BYTES, Kind};
use crate::{Result, crc};

layout! {
    /// Bytes without the CRC, which follows.
    at, "Newest state", 56;
    PREAMBLE: 0, 16, "preamble";
    VOLUME_ID: 16, 16, "volume_id";
    EPOCH: 32, 8, "epoch";
    STORED_SEQUENCE: 40, 8, "stored_sequence";
    WALL_UNIX_MS: 48, 8, "wall_unix_ms";
}

const KIND: Kind = Kind::NewestState;
const WHAT: &str = KIND.name();
const BYTES: usize = at::SIZE + CRC_BYTES;

/// How far a volume had come when this machine last saw it in its store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewestState {
    /// The volume.
    pub volume_id: VolumeId,
    /// The attachment; not zero.
    pub epoch: u64,
    /// The last segment that was in the store, with all before it.
    pub stored_sequence: u64,
    /// The time, by the machine's clock: for people.
    pub wall_unix_ms: u64,
}

impl NewestState {
    /// The file's bytes, or which field breaks a rule.
    pub fn encode(&self) -> Result<Vec<u8>> {
        check_epoch(self.epoch)?;
        let mut bytes = vec![0; at::SIZE];
        preamble::put(&mut bytes, KIND, BYTES);
        at::VOLUME_ID.put(&mut bytes, self.volume_id.0);
        at::EPOCH.put(&mut bytes, self.epoch.to_le_bytes());
        at::STORED_SEQUENCE.put(&mut bytes, self.stored_sequence.to_le_bytes());
        at::WALL_UNIX_MS.put(&mut bytes, self.wall_unix_ms.to_le_bytes());
        crc::seal(&mut bytes);
        Ok(bytes)
    }

    /// Reads the whole file; another volume's file is refused.
    pub fn decode(bytes: &[u8], volume_id: VolumeId) -> Result<NewestState> {
        preamble::open_whole(bytes, KIND, BYTES)?;
        check_identity(WHAT, "volume_id", volume_id, VolumeId(at::VOLUME_ID.array(bytes)))?;
        check_field(WHAT, "length", "it is not that of the structure", bytes.len() == BYTES)?;
        let epoch = at::EPOCH.u64(bytes);
        check_epoch(epoch)?;
        let stored_sequence = at::STORED_SEQUENCE.u64(bytes);
        Ok(NewestState {
            volume_id,
            epoch,
            stored_sequence,
            wall_unix_ms: at::WALL_UNIX_MS.u64(bytes),
        })
    }
}

fn check_epoch(epoch: u64) -> Result<()> {
    check_field(WHAT, "epoch", "it is zero", epoch > 0)
}
