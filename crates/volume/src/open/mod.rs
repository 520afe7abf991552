//! Opening a volume: find the end of its log, judge the journal, fence other writers, replay, start the
//! loops.
//!
//! The order is such that everything that can refuse does so before anything is written: checkpoint, roll
//! forward, journal and scan only read. Then: intent (in the journal) -> fence (in the store) -> the
//! checkpoint repeated under the next number (`repeat`) -> journal bound to the new epoch. A crash between
//! any two of these is met by the next attach: the intent tells it that the fence was our own.

use std::sync::Arc;

use bytes::Bytes;
use sawmill_format::ids::{PutId, VolumeId};
use sawmill_format::segment::{SegmentHeader, SegmentRole, segment_key};
use sawmill_format::volume_record::VolumeRecord;
use sawmill_store::{Blocking, Bodies, Class, ObjectStore, PutOutcome, probe_conditional_create};

use crate::ask::store_error;
use crate::cuts::Place;
use crate::options::OpenOptions;
use crate::recovery::checkpoint::{self, Newest};
use crate::recovery::roll_forward::{LogEnd, roll_forward};
use crate::recovery::{RecoveryReport, Reporter};
use crate::replicate::role;
use crate::shared::{Shared, View};
use crate::world::World;
use crate::{Error, ErrorKind, Result, limits, names};

mod attach;
mod bind;
pub(crate) mod journal;
mod make;
mod memory;
mod repeat;
mod seen;
mod settle;

pub(crate) use attach::{Attached, attach};
pub(crate) use memory::spare_path;
pub use seen::{Age, age_of};

/// A volume as the store has it.
pub(crate) struct Stored {
    pub(crate) record: VolumeRecord,
    pub(crate) newest: Newest,
    pub(crate) view: View,
    pub(crate) end: LogEnd,
}

/// Reads a volume's stored part, step by step.
pub(crate) fn stored(store: &dyn ObjectStore, name: &str, reporter: &mut Reporter<'_>) -> Result<Stored> {
    stored_of(store, names::find(store, name)?, reporter)
}

/// The same of a volume that was found before; its name may have changed since.
pub(crate) fn stored_of(
    store: &dyn ObjectStore,
    record: VolumeRecord,
    reporter: &mut Reporter<'_>,
) -> Result<Stored> {
    stored_as(store, record, reporter, &|from, older, damage| {
        demand_may_fall(store, older.checkpoint.volume_id, from, older, damage)
    })
}

/// The same, of a replica also an older state than was copied, when what was copied is damaged.
pub(crate) fn stored_as_it_is(
    store: &dyn ObjectStore,
    record: VolumeRecord,
    reporter: &mut Reporter<'_>,
) -> Result<Stored> {
    stored_as(store, record, reporter, &|_, _, _| Ok(()))
}

/// `may_fall` is asked before a state is had from another checkpoint than from the newest, and may refuse.
fn stored_as(
    store: &dyn ObjectStore,
    record: VolumeRecord,
    reporter: &mut Reporter<'_>,
    may_fall: &dyn Fn(u64, &Newest, &Error) -> Result<()>,
) -> Result<Stored> {
    reporter.step("volume record", format!("id {}, {} bytes", record.volume_id, record.size_bytes));
    let mut newest = checkpoint::newest(store, record.volume_id)?;
    loop {
        let (loaded, number_max) = (newest.checkpoint.number, newest.number_max);
        match stored_from(store, &record, newest, reporter) {
            Err(error) if error.kind() == ErrorKind::Corrupt => {
                // A writer may have gone on, and deleted what that checkpoint named. Or a part of it is
                // damaged: then the one before, with more to roll forward, leads to the same state.
                newest = checkpoint::newest(store, record.volume_id)?;
                if newest.number_max == number_max {
                    let older = checkpoint::newest_below(store, record.volume_id, loaded);
                    newest = older.map_err(|_| error.clone())?;
                    may_fall(loaded, &newest, &error)?;
                    newest.notes.push(format!("checkpoint {loaded} was skipped: {error}"));
                }
            }
            read => return read,
        }
    }
}

/// Refuses to show an older state of a replica for a damaged one.
fn demand_may_fall(
    store: &dyn ObjectStore,
    volume_id: VolumeId,
    from: u64,
    older: &Newest,
    damage: &Error,
) -> Result<()> {
    let to = older.checkpoint.number;
    if role::may_fall(store, volume_id, from, to)? {
        return Ok(());
    }
    let text = format!(
        "{damage}. Checkpoint {to}, the one before it, is an older state of this replica and is not used \
         instead. Run `sawmill replicate` again to restore what is missing; remove a damaged object first"
    );
    Err(Error::new(ErrorKind::Corrupt, text))
}

/// Reads a volume's stored part from one checkpoint on.
fn stored_from(
    store: &dyn ObjectStore,
    record: &VolumeRecord,
    newest: Newest,
    reporter: &mut Reporter<'_>,
) -> Result<Stored> {
    let root = &newest.checkpoint;
    reporter.step(
        "newest checkpoint",
        format!(
            "number {}, epoch {}, through segment {}, {} parts{}",
            root.number,
            root.epoch,
            root.through_sequence,
            root.parts.len(),
            if newest.notes.is_empty() { String::new() } else { format!("; {}", newest.notes.join("; ")) }
        ),
    );
    let mut view = checkpoint::load(store, root)?;
    reporter.step("map", format!("{} extents, {} segments", view.map.extents(), root.segments.len()));
    let mut end = start_of(root);
    roll_forward(store, record.volume_id, Some(&mut view), &mut end)?;
    reporter.step(
        "roll forward",
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
    // The record says what the volume was born with.
    let record = VolumeRecord { size_bytes: end.size_bytes, ..record.clone() };
    Ok(Stored { record, newest, view, end })
}

/// The end of the log as a checkpoint knew it.
pub(crate) fn start_of(root: &sawmill_format::checkpoint::Checkpoint) -> LogEnd {
    LogEnd {
        checkpoint_number: root.number,
        state_number: if root.repeats > 0 { root.repeats } else { root.number },
        size_bytes: root.size_bytes,
        epoch: root.epoch,
        epoch_before: 0,
        fence_put_id: None,
        next_sequence: root.next_sequence,
        stored_sequence: root.through_sequence,
        position: root.position,
        clean: root.clean,
        log_bytes: 0,
        place: Place::behind(root, root.through_sequence, root.position, root.wall_unix_ms),
        rolled_back: None,
        segments: 0,
        extents: 0,
    }
}

/// Where a volume's log ends, without its map.
pub(crate) fn end_of_log(store: &dyn ObjectStore, record: &VolumeRecord) -> Result<LogEnd> {
    let newest = checkpoint::newest(store, record.volume_id)?;
    let mut end = start_of(&newest.checkpoint);
    roll_forward(store, record.volume_id, None, &mut end)?;
    Ok(end)
}

/// What an attachment takes with its fence: an epoch of its own.
///
/// Epochs grow, by steps of chance. Where histories parted (a store was copied, or put back from a backup),
/// each goes on from the same epoch to another one, so that equal epochs mean one history: what is known by
/// its epoch (frames in the read cache, a journal, its memory) is never taken for another history's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Claim {
    pub(crate) epoch: u64,
    pub(crate) put_id: PutId,
}

impl Claim {
    /// A new claim behind epoch `after`.
    pub(crate) fn after(after: u64, world: &dyn World) -> Result<Self> {
        let [a, b, c, d, ..] = world.random()?;
        let step = 1 + u64::from(u32::from_le_bytes([a, b, c, d]));
        let Some(epoch) = after.checked_add(step) else {
            let text = "the volume has used up its epochs; copy it to a new one";
            return Err(Error::new(ErrorKind::Full, text));
        };
        Ok(Claim { epoch, put_id: PutId(world.random()?) })
    }
}

/// Puts the fence of `claim` at the end of the log, and moves `end` behind it. Returns its sequence.
/// A segment that got there first is another writer's: the log has grown, so this attach begins again.
pub(crate) fn fence(
    store: &dyn ObjectStore,
    record: &VolumeRecord,
    end: &mut LogEnd,
    claim: Claim,
    world: &dyn World,
) -> Result<u64> {
    let Claim { epoch, put_id } = claim;
    let sequence = end.next_sequence;
    if sequence >= limits::SEQUENCE_MAX {
        let text = "the volume has used up its segment sequences; copy it to a new one";
        return Err(Error::new(ErrorKind::Full, text));
    }
    let header = SegmentHeader {
        volume_id: record.volume_id,
        put_id,
        sequence,
        epoch,
        previous_sequence: end.stored_sequence,
        stored_through: end.stored_sequence,
        checkpoint_number: end.checkpoint_number,
        position_start: end.position,
        position_end: end.position,
        wall_unix_ms: world.unix_ms(),
        next_sequence: sequence + limits::FENCE_WINDOW,
        role: SegmentRole::Fence,
        frame_bytes: record.frame_bytes,
        data_bytes: 0,
        extents: Vec::new(),
        frames: Vec::new(),
        origins: Vec::new(),
        size_bytes: end.size_bytes,
    };
    let key = segment_key(record.volume_id, sequence);
    let outcome = Blocking(store).put(&key, Bytes::from(header.encode()), Class::Upload);
    match outcome.map_err(|error| store_error(&error))? {
        PutOutcome::Created => {
            end.epoch_before = end.epoch;
            end.epoch = epoch;
            end.fence_put_id = Some(put_id);
            end.stored_sequence = sequence;
            end.next_sequence = header.next_sequence;
            end.clean = false;
            Ok(sequence)
        }
        PutOutcome::Taken => Err(Error::new(ErrorKind::Exists, format!("another writer wrote {key}"))),
    }
}

/// Refuses a store that cannot keep two writers apart, unless told to go on.
pub(crate) fn demand_fencing(store: &dyn ObjectStore, no_fencing: bool) -> Result<()> {
    if no_fencing {
        return Ok(());
    }
    let probe =
        probe_conditional_create(store, 1, 8, Bodies::InHalves).map_err(|error| store_error(&error))?;
    if probe.is_honest() {
        return Ok(());
    }
    let text = format!(
        "this store cannot fence a second writer ({}): `sawmill doctor` says more; if no other process can \
         ever attach this volume, pass --no-fencing",
        probe.summary()
    );
    Err(Error::new(ErrorKind::Refused, text))
}

/// What attaching would find, without changing anything.
pub(crate) fn dry_run(
    store: &dyn ObjectStore,
    name: &str,
    journal: Option<&OpenOptions>,
    world: &dyn World,
) -> Result<RecoveryReport> {
    let mut reporter = Reporter::new(world);
    let stored = stored(store, name, &mut reporter)?;
    if let Some(options) = journal {
        match journal::judge(&stored, options, world) {
            Ok(judged) => reporter.step("journal", judged.describe()),
            Err(error) => reporter.step("journal", format!("would stop: {error}")),
        }
    }
    Ok(reporter.report)
}

/// Moves a read-only attachment to the newest cut, because a segment it needs is gone. One at a time; whoever
/// comes second finds that the first has moved on already.
pub(crate) fn follow(shared: &Arc<Shared>, missing: &Arc<View>) -> Result<bool> {
    let _one_at_a_time = shared.fetcher.following.lock();
    if !Arc::ptr_eq(&shared.view(), missing) {
        return Ok(false);
    }
    let mut reporter = Reporter::new(&*shared.world);
    let stored = stored_of(&*shared.store, shared.record.clone(), &mut reporter)?;
    if stored.end.position < shared.inbox.stored() {
        let text = "the store shows an older cut than before, which is not used";
        return Err(Error::new(ErrorKind::Unavailable, text));
    }
    tracing::info!("now reading the cut at position {}", stored.end.position);
    shared.inbox.set_stored(stored.end.position, stored.end.stored_sequence, stored.newest.number_max);
    *shared.view.write() = Arc::new(stored.view);
    Ok(true)
}
