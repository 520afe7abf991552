//! The stored part of a volume: newest checkpoint, its map, and the log rolled forward over it.
//!
//! Invariants: reading changes nothing in the store. A state that is read from an older checkpoint
//! than the newest has all that the newest recorded as stored, or is refused. Not here: the
//! journal's part ([`crate::open`]), and how a name leads to a record ([`crate::names`]).

use sawmill_format::checkpoint::checkpoint_key;
use sawmill_format::ids::VolumeId;
use sawmill_format::volume_record::VolumeRecord;
use sawmill_store::ObjectStore;

use super::checkpoint::{self, NewestCheckpoint};
use super::end::{LogEnd, start_of};
use super::map_hold::LoadTime;
use super::roll_forward::{ask_headers, roll_forward, roll_forward_asked};
use super::{RecoveryStep, Reporter};
use crate::replicate::role;
use crate::view::View;
use crate::{Error, ErrorKind, Result};

/// A volume as the store has it.
pub(crate) struct StoredVolume {
    pub(crate) record: VolumeRecord,
    pub(crate) newest: NewestCheckpoint,
    pub(crate) view: View,
    pub(crate) end: LogEnd,
}

/// Reads a volume's stored part, step by step. The volume was found before; its name may have
/// changed since.
pub(crate) fn stored_of(
    store: &dyn ObjectStore,
    record: VolumeRecord,
    reporter: &mut Reporter<'_>,
) -> Result<StoredVolume> {
    stored_with(store, record, reporter, LoadTime::AtOnce)
}

/// As [`stored_of`], with the map loaded at that time.
pub(crate) fn stored_with(
    store: &dyn ObjectStore,
    record: VolumeRecord,
    reporter: &mut Reporter<'_>,
    load_time: LoadTime,
) -> Result<StoredVolume> {
    let may_fall = |checkpoint: &DamagedCheckpoint, older: &NewestCheckpoint| {
        require_may_fall(store, older.checkpoint.volume_id, checkpoint, older)
    };
    let (stored, skipped) = stored_as(store, record, reporter, load_time, &may_fall)?;
    match skipped {
        Some(skipped) if stored.end.next_sequence <= skipped.through_sequence => {
            Err(skipped.not_reached(&stored))
        }
        _ => Ok(stored),
    }
}

/// As [`stored_of`], but damage in a replica may lead to an older state than the copied one.
pub(crate) fn stored_as_it_is(
    store: &dyn ObjectStore,
    record: VolumeRecord,
    reporter: &mut Reporter<'_>,
) -> Result<StoredVolume> {
    let read = stored_as(store, record, reporter, LoadTime::AtOnce, &|_, _| Ok(()));
    read.map(|(stored, _)| stored)
}

/// The newest checkpoint, which is damaged in part.
struct DamagedCheckpoint {
    number: u64,
    /// All segments up to this one were stored.
    through_sequence: u64,
    damage: Error,
}

impl DamagedCheckpoint {
    /// The error that the log does not lead from an older checkpoint to the state of this one:
    /// segments are missing that were stored.
    fn not_reached(&self, stored: &StoredVolume) -> Error {
        let DamagedCheckpoint { number, through_sequence, damage } = self;
        let key = checkpoint_key(stored.record.volume_id, *number);
        let (to, next) = (stored.newest.checkpoint.number, stored.end.next_sequence);
        let text = format!(
            "{damage}. Checkpoint {to}, the one before it, does not lead to the same state: \
             {key} says that segments through {through_sequence} were stored, and segment {next} \
             is missing. Restore the damaged object or the missing segments from a copy of the \
             store; to serve what is left, an older state, remove {key}"
        );
        Error::new(ErrorKind::Corrupt, text).with_source(damage.clone())
    }
}

/// Calls `may_fall`, which may refuse, before it reads a state from an older checkpoint than the
/// newest.
fn stored_as(
    store: &dyn ObjectStore,
    record: VolumeRecord,
    reporter: &mut Reporter<'_>,
    load_time: LoadTime,
    may_fall: &dyn Fn(&DamagedCheckpoint, &NewestCheckpoint) -> Result<()>,
) -> Result<(StoredVolume, Option<DamagedCheckpoint>)> {
    reporter.step(
        RecoveryStep::VolumeRecord,
        format!("id {}, {} bytes", record.volume_id, record.size_bytes),
    );
    let mut newest = checkpoint::newest(store, record.volume_id)?;
    let mut first_skipped = None;
    loop {
        let (loaded, number_max) = (newest.checkpoint.number, newest.number_max);
        let through_sequence = newest.checkpoint.through_sequence;
        match stored_from(store, &record, newest, reporter, load_time) {
            Err(error) if error.kind() == ErrorKind::Corrupt => {
                // A writer may have advanced, and deleted what that checkpoint named. Or a part of
                // it is damaged: then the one before, with more to roll forward, leads to the same
                // state.
                newest = checkpoint::newest(store, record.volume_id)?;
                if newest.number_max == number_max {
                    newest = older_than(store, record.volume_id, loaded, &error)?;
                    tracing::warn!(%error, "checkpoint {loaded} is skipped: run `sawmill check`");
                    newest.notes.push(format!("checkpoint {loaded} was skipped: {error}"));
                    let skipped =
                        DamagedCheckpoint { number: loaded, through_sequence, damage: error };
                    may_fall(&skipped, &newest)?;
                    first_skipped.get_or_insert(skipped);
                } else {
                    first_skipped = None;
                }
            }
            read => return read.map(|stored| (stored, first_skipped)),
        }
    }
}

/// The newest checkpoint below `number`, which is damaged. Without one, the damage is the error; an
/// outage stays an outage.
fn older_than(
    store: &dyn ObjectStore,
    volume_id: VolumeId,
    number: u64,
    damage: &Error,
) -> Result<NewestCheckpoint> {
    let older = checkpoint::newest_below(store, volume_id, number);
    older.map_err(|error| if error.kind() == ErrorKind::Corrupt { damage.clone() } else { error })
}

/// Refuses to fall back to an older state when a replica is damaged.
fn require_may_fall(
    store: &dyn ObjectStore,
    volume_id: VolumeId,
    checkpoint: &DamagedCheckpoint,
    older: &NewestCheckpoint,
) -> Result<()> {
    let (to, damage) = (older.checkpoint.number, &checkpoint.damage);
    if role::may_fall(store, volume_id, checkpoint.number, to)? {
        return Ok(());
    }
    let text = format!(
        "{damage}. Checkpoint {to}, the one before it, is an older state of this replica and is \
         not used instead. Run `sawmill replicate` again to restore what is missing; remove a \
         damaged object first"
    );
    Err(Error::new(ErrorKind::Corrupt, text))
}

/// Reads a volume's stored part from one checkpoint on.
fn stored_from(
    store: &dyn ObjectStore,
    record: &VolumeRecord,
    newest: NewestCheckpoint,
    reporter: &mut Reporter<'_>,
    load_time: LoadTime,
) -> Result<StoredVolume> {
    let root = &newest.checkpoint;
    reporter.step(
        RecoveryStep::NewestCheckpoint,
        format!(
            "number {}, epoch {}, through segment {}, {} parts{}",
            root.number,
            root.epoch,
            root.through_sequence,
            root.parts.len(),
            if newest.notes.is_empty() {
                String::new()
            } else {
                format!("; {}", newest.notes.join("; "))
            }
        ),
    );
    let mut end = start_of(root);
    // What follows the checkpoint is asked for with its map: it does not depend on that.
    let asked = ask_headers(store, record.volume_id, &end)?;
    let mut view = load_time.view(store, root)?;
    reporter.step(
        RecoveryStep::Map,
        format!(
            "{} extents, {} segments{}",
            view.map.extents(),
            root.segments.len(),
            if view.map.is_whole() { "" } else { "; loaded when needed" }
        ),
    );
    roll_forward_asked(store, Some(&mut view), &mut end, asked)?;
    reporter.step(
        RecoveryStep::RollForward,
        format!(
            "{} segments, {} extents; the log ends before segment {}, at position {}, epoch {}{}",
            end.segments,
            end.extents,
            end.next_sequence,
            end.position,
            end.epoch,
            if end.clean { ", cleanly" } else { "" }
        ),
    );
    // The record has the size at creation, not the present one.
    let record = VolumeRecord { size_bytes: end.size_bytes, ..record.clone() };
    Ok(StoredVolume { record, newest, view, end })
}

/// Where a volume's log ends, without its map.
pub(crate) fn end_of_log(store: &dyn ObjectStore, record: &VolumeRecord) -> Result<LogEnd> {
    let newest = checkpoint::newest(store, record.volume_id)?;
    let mut end = start_of(&newest.checkpoint);
    roll_forward(store, record.volume_id, None, &mut end)?;
    Ok(end)
}
