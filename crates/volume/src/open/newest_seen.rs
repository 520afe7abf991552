//! Whether a store is older than the state that this machine last saw there: restored from a
//! backup, an old copy, or with lost objects. A journal shows that by itself; this module serves a
//! machine without a journal.
//!
//! Not here: where that state is kept (the binary keeps it).

use sawmill_format::newest_state::NewestState;

use crate::options::OpenOptions;
use crate::recovery::stored::StoredVolume;
use crate::{Error, ErrorKind, Result};

/// The end of the log in a store, compared with the end that was seen there before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Age {
    /// It has everything that was seen.
    AsSeen,
    /// It ends before that.
    Older,
}

/// Compares the end of the log in a store (an epoch and the last segment) with the one seen before.
#[must_use]
pub fn age_of(seen: &NewestState, epoch: u64, stored_sequence: u64) -> Age {
    match (epoch, stored_sequence) < (seen.epoch, seen.stored_sequence) {
        true => Age::Older,
        false => Age::AsSeen,
    }
}

/// Refuses a store that is older than the state seen before, unless the options accept that.
pub(super) fn require_not_older(stored: &StoredVolume, options: &OpenOptions) -> Result<()> {
    let Some(seen) = &options.seen else { return Ok(()) };
    let (epoch, sequence) = (stored.end.epoch, stored.end.stored_sequence);
    if age_of(seen, epoch, sequence) == Age::AsSeen {
        return Ok(());
    }
    let name = &stored.record.name;
    let text = format!(
        "volume {name} ends in epoch {epoch} with segment {sequence}, but this machine has seen it \
         there in epoch {} with segment {}: the store was restored from a backup, is an old copy, \
         or has lost objects",
        seen.epoch, seen.stored_sequence
    );
    if options.accept_older_store {
        tracing::warn!("{text}; accepted");
        return Ok(());
    }
    let text = format!(
        "{text}. Nothing was changed. Restore the newer store, or pass --accept-older-store to \
         `serve` to continue with the volume as it is there"
    );
    Err(Error::new(ErrorKind::Refused, text))
}

#[cfg(test)]
mod tests {
    use sawmill_format::ids::VolumeId;

    use super::*;

    #[test]
    fn a_store_is_older_by_its_epoch_and_in_one_epoch_by_its_segments() {
        let seen = NewestState {
            volume_id: VolumeId([1; 16]),
            epoch: 7,
            stored_sequence: 100,
            wall_unix_ms: 0,
        };
        let age = |epoch, sequence| age_of(&seen, epoch, sequence);
        assert_eq!([age(6, 500), age(7, 99)], [Age::Older; 2]);
        assert_eq!(
            [age(7, 100), age(7, 101), age(8, 0)],
            [Age::AsSeen; 3],
            "a later epoch went on from it"
        );
    }
}
