//! Repeats the checkpoint that an attach started from, under the next number, before anything is
//! accepted.
//!
//! A fence stops the segments of the previous writer. But one of its checkpoints may still be in
//! flight: when it lands, it would be the newest, with a size or a past that the new attachment
//! does not have. Checkpoints are numbered without gaps, and a writer has at most one in flight. So
//! the attachment that takes the next number leaves none for the previous writer.
//!
//! Invariants: an attachment accepts nothing before it has put a checkpoint after its fence, even
//! if the previous writer seems to have ended, because it may have put one more. The repeated
//! checkpoint leads to the same state as its original.
//!
//! Not here: checkpoints of its own state (`engine::checkpoint`).

use bytes::Bytes;
use sawmill_format::checkpoint::{Checkpoint, checkpoint_key};
use sawmill_format::ids::PutId;
use sawmill_store::{Blocking, Class, ObjectStore, PutOutcome};

use crate::recovery::stored::StoredVolume;
use crate::store_calls::{cannot_encode, store_error};
use crate::world::World;
use crate::{Error, ErrorKind, Result};

/// Returns whether it is stored: `false` if another writer's checkpoint came first; the attach must
/// then start from that one.
pub(super) fn repeat_checkpoint(
    store: &dyn ObjectStore,
    stored: &mut StoredVolume,
    world: &dyn World,
) -> Result<bool> {
    let Some(number) = stored.newest.number_max.checked_add(1).filter(|number| *number < u64::MAX)
    else {
        let text = "the volume has used up its checkpoint numbers; copy it to a new one";
        return Err(Error::new(ErrorKind::Full, text));
    };
    let root = Checkpoint {
        number,
        put_id: PutId(world.random()?),
        repeats: stored.end.state_number,
        clean: false,
        ..stored.newest.checkpoint.clone()
    };
    let key = checkpoint_key(root.volume_id, number);
    let body = Bytes::from(root.encode().map_err(cannot_encode)?);
    let outcome = Blocking(store).put(&key, body, Class::Upload);
    match outcome.map_err(|error| store_error(&error))? {
        PutOutcome::Created => {
            // The original is the next to be deleted.
            stored.view.cuts.lock().begin_from(&stored.newest.checkpoint, &root);
            stored.end.checkpoint_number = number;
            stored.newest.number_max = number;
            stored.newest.checkpoint = root;
            Ok(true)
        }
        PutOutcome::Taken => Ok(false),
    }
}
