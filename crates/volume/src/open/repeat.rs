//! The checkpoint an attach began from, put once more under the next number before anything is accepted.
//!
//! A fence stops the segments of the writer before. A checkpoint of its may still be on its way: it would be
//! the newest when it lands, of a size or with a past that nobody here relied on. Checkpoints are numbered
//! without gaps, and a writer has one on its way at most. So whoever takes the next number leaves it none.
//!
//! Invariants: who accepts anything has put a checkpoint behind its fence, also where the writer before seems
//! to have ended: it may have put one more. The repeated one leads to the same state as its original.
//!
//! Not here: checkpoints of a state of its own (`engine::checkpoint`).

use bytes::Bytes;
use sawmill_format::checkpoint::{Checkpoint, checkpoint_key};
use sawmill_format::ids::PutId;
use sawmill_store::{Blocking, Class, ObjectStore, PutOutcome};

use crate::ask::store_error;
use crate::recovery::stored::Stored;
use crate::world::World;
use crate::{Error, ErrorKind, Result};

/// Says whether it is there: `false` when a checkpoint of another came first, and is to be begun from.
pub(super) fn repeat_checkpoint(
    store: &dyn ObjectStore,
    stored: &mut Stored,
    world: &dyn World,
) -> Result<bool> {
    let Some(number) = stored.newest.number_max.checked_add(1).filter(|number| *number < u64::MAX) else {
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
    let outcome = Blocking(store).put(&key, Bytes::from(root.encode()), Class::Upload);
    match outcome.map_err(|error| store_error(&error))? {
        PutOutcome::Created => {
            // Its original is the next to be deleted.
            stored.view.cuts.lock().begin_from(&stored.newest.checkpoint, &root);
            stored.end.checkpoint_number = number;
            stored.newest.number_max = number;
            stored.newest.checkpoint = root;
            Ok(true)
        }
        PutOutcome::Taken => Ok(false),
    }
}
