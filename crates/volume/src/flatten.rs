//! Flattening a clone: data that still lies in its ancestors is rewritten into the clone's own
//! segments, and then the pins are released.
//!
//! Data is read and written back to the same address, through the ordinary path, in address order.
//! So there must be no other writes meanwhile; the caller has attached the volume for this alone.
//! Invariant: pins are released only when neither of the newest two checkpoints lists a segment of
//! an ancestor, not even a dead one that a snapshot needs.

use sawmill_device::BlockDeviceExt;
use sawmill_store::ObjectStore;

use crate::cuts::{Lineage, PinHolder, release_pins};
use crate::names;
use crate::recovery::checkpoint;
use crate::status::Safety;
use crate::volume::Volume;
use crate::world::{RealWorld, World};
use crate::{ErrorKind, Result, limits};

/// Bytes of disk looked up at once, and bytes copied at once.
const STEP_BYTES: u64 = 1 << 30;
const COPY_BYTES: u64 = limits::RECORD_PAYLOAD_BYTES_MAX;

impl Volume {
    /// Rewrites the data that lies in ancestors; there must be no other writes meanwhile.
    /// `progress` gets the bytes of disk done, and their total. Returns the bytes written.
    pub fn flatten(&self, progress: &mut dyn FnMut(u64, u64)) -> Result<u64> {
        // What has been overwritten must not count as inherited any more.
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

/// Releases the ancestors of a volume, if neither of its newest two checkpoints needs any of them.
/// Returns whether it needs none now; a volume without ancestors needs none.
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
        // Only the first checkpoint exists yet, and it lists all that the clone inherited.
        Err(error) if error.kind() == ErrorKind::Corrupt => return Ok(false),
        Err(error) => return Err(error),
    };
    let ranges = Lineage::new(&lineage);
    let inherits = |sequence: u64| ranges.ancestor(sequence).is_some();
    let listed =
        newest.segments.iter().chain(&before.segments).any(|segment| inherits(segment.sequence));
    let end = crate::recovery::stored::end_of_log(store, &record)?;
    if listed || !end.clean {
        return Ok(false);
    }
    let outcome =
        release_pins(world, store, &PinHolder { clone_id: record.volume_id, lineage: &lineage });
    outcome.map(|_| true)
}
