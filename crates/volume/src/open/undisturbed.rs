//! Whether anybody else was active while an attach put its fence: what says so, asked at once.
//!
//! Invariants: all is asked after the fence. Yes only where each answer is a definite one that
//! leaves nothing open; what is there, or odd, leads to the checks one by one, which say what it is
//! (`attach::shut_others_out`). So it may be wrong only in one direction: it may cost time.
//!
//! The last checkpoint is asked for when the number after it was found free. A writer deletes them
//! one by one, the oldest first, so what is still there then has never had a successor. Asked the
//! other way around, both may have been used and deleted in between.
//!
//! Not here: what follows from another's activity.

use sawmill_format::checkpoint::{checkpoint_key, checkpoint_prefix, parse_checkpoint_key};
use sawmill_format::kept_block::status_pin_key;
use sawmill_format::name_record::name_key;
use sawmill_format::role::role_key;
use sawmill_store::{Class, ObjectStore};

use crate::names::SettledName;
use crate::recovery::stored::StoredVolume;
use crate::store_calls::{self, Answer};
use crate::{ErrorKind, Result};

/// Enough of an object to know that it is there.
const TOUCH_BYTES: u64 = 16;

/// Whether the checkpoint that the attach began from is still the newest, the name has no later
/// record, the volume no status pin, and the store no role for it. A store that does not answer is
/// an error: the checks one by one would only wait for it again.
pub(super) fn is_undisturbed(
    store: &dyn ObjectStore,
    stored: &StoredVolume,
    name: &SettledName<'_>,
) -> Result<bool> {
    let (volume_id, newest) = (stored.record.volume_id, stored.newest.number_max);
    // A name of an older version has no number that would be taken next.
    let (Some(next), 1..) = (newest.checked_add(1), name.number) else { return Ok(false) };
    let listed = store_calls::ask_list(store, checkpoint_prefix(volume_id));
    let free = [
        checkpoint_key(volume_id, next),
        name_key(name.name, name.number + 1),
        status_pin_key(volume_id, 1),
        role_key(volume_id, 1),
    ];
    let touch = |key: &String| store_calls::want(key.clone(), Some(0..TOUCH_BYTES), Class::Read);
    let answers = store_calls::get_each(store, free.iter().map(touch).collect());
    let listed = listed.wait()?;
    for (key, answer) in free.iter().zip(answers) {
        if is_there(answer)? != Some(false) {
            tracing::info!("{key} is there since this attach began");
            return Ok(false);
        }
    }
    let numbers = listed.iter().filter_map(|object| parse_checkpoint_key(&object.key));
    if numbers.filter(|(id, _)| *id == volume_id).any(|(_, number)| number > newest) {
        return Ok(false);
    }
    let last = touch(&checkpoint_key(volume_id, newest));
    let answer = store_calls::get_each(store, vec![last]).pop().unwrap_or(Ok(None));
    Ok(is_there(answer)? == Some(true))
}

/// Whether the object is there; `None`: it is odd.
fn is_there(answer: Answer) -> Result<Option<bool>> {
    match answer {
        Ok(found) => Ok(Some(found.is_some())),
        Err(error) if matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Denied) => {
            Err(error)
        }
        Err(_) => Ok(None),
    }
}
