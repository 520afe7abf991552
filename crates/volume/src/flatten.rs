//! Flattening a clone: what still lies in its ancestors is written anew into segments of its own,
//! and then the pins go.
//!
//! Through the ordinary path, in address order: read, and write the same at the same place. So
//! nobody else may write meanwhile; who calls has attached the volume for this alone. Invariant:
//! pins go only when neither of the newest two checkpoints lists a segment of an ancestor, also no
//! dead one that a snapshot needs.

use sawmill_device::BlockDeviceExt;
use sawmill_store::ObjectStore;

use crate::cuts::{Lineage, PinHolder, let_go};
use crate::names;
use crate::recovery::checkpoint;
use crate::status::Safety;
use crate::volume::Volume;
use crate::world::{RealWorld, World};
use crate::{ErrorKind, Result, limits};

/// Bytes of the map looked at at once, and bytes copied at once.
const STEP_BYTES: u64 = 1 << 30;
const COPY_BYTES: u64 = limits::RECORD_PAYLOAD_BYTES_MAX;

impl Volume {
    /// Writes anew what lies in ancestors; nobody else may write meanwhile. `progress` hears how
    /// far it is, of how much. Returns the bytes written.
    pub fn flatten(&self, progress: &mut dyn FnMut(u64, u64)) -> Result<u64> {
        // What was written since is not inherited any more.
        self.wait(Safety::Stored, None)?;
        let (mut at, mut moved_bytes) = (0, 0);
        while at < self.attachment.record.size_bytes {
            let step = STEP_BYTES.min(self.attachment.record.size_bytes - at);
            let mut inherited = Vec::new();
            self.read.stored.view().map.lookup(at, step, &mut |piece| {
                let location = piece.location.map(|location| u64::from(location.sequence));
                if location
                    .is_some_and(|sequence| self.read.stored.lineage.ancestor(sequence).is_some())
                {
                    inherited.push((piece.address, piece.length));
                }
            });
            for (address, length) in inherited {
                for done in (0..length).step_by(COPY_BYTES as usize) {
                    let bytes =
                        self.read_at(address + done, COPY_BYTES.min(length - done) as usize)?;
                    self.write_at(address + done, &bytes)?;
                    moved_bytes += bytes.len() as u64;
                }
            }
            at += step;
            progress(at, self.attachment.record.size_bytes);
        }
        Ok(moved_bytes)
    }
}

/// Lets go of the ancestors of a volume, if neither of its newest two checkpoints needs any of
/// them; says whether. A volume without ancestors needs none.
pub fn release_ancestors(store: &dyn ObjectStore, name: &str) -> Result<bool> {
    release_ancestors_in(&RealWorld::default(), store, name)
}

/// As [`release_ancestors`] in a given world.
pub fn release_ancestors_in(
    world: &dyn World,
    store: &dyn ObjectStore,
    name: &str,
) -> Result<bool> {
    let record = names::find(store, name)?;
    let newest = checkpoint::newest(store, record.volume_id)?.checkpoint;
    let lineage = newest.kept.lineage.clone();
    if lineage.is_empty() {
        return Ok(true);
    }
    let before = match checkpoint::newest_below(store, record.volume_id, newest.number) {
        Ok(before) => before.checkpoint,
        // There is but one yet, the first, and it is all the clone inherited.
        Err(error) if error.kind() == ErrorKind::Corrupt => return Ok(false),
        Err(error) => return Err(error),
    };
    let ranges = Lineage::new(&lineage);
    let inherits = |sequence: u64| ranges.ancestor(sequence).is_some();
    let listed =
        newest.segments.iter().chain(&before.segments).any(|segment| inherits(segment.sequence));
    let journaled = crate::recovery::stored::end_of_log(store, &record)?;
    if listed || !journaled.clean {
        return Ok(false);
    }
    let gone = let_go(world, store, &PinHolder { clone_id: record.volume_id, lineage: &lineage });
    gone.map(|_| true)
}
