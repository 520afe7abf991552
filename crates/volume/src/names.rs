//! Volumes by name: create, find, list, rename, delete. Numbered records of each name (`ledger`)
//! define its volume; everything else of a volume is stored under its id, so that a name can be
//! reused without meeting old data.
//!
//! Invariant: a volume has one name at any moment, from the put that creates the first to the put
//! of the status pin that deletes it; a rename is a single put too. An older version, or a list
//! that lags (`lost`), may have left two names: then nothing deletes the volume before one of them
//! is gone.
//!
//! Not here: the records of a name (`ledger`), volumes without a name (`lost`), and the removal of
//! a volume's objects (`cuts::removal`).

use bytes::Bytes;
use sawmill_format::checkpoint::{Checkpoint, checkpoint_key};
use sawmill_format::ids::{PutId, VolumeId};
use sawmill_format::kept_block::{KeptBlock, NAME_BYTES_MAX, PinnedStatus};
use sawmill_format::name_record::NameStep;
use sawmill_format::role::RoleKind;
use sawmill_format::volume_record::VolumeRecord;
use sawmill_store::{Blocking, Class, ObjectStore, PutOutcome};

use crate::cuts::status_pins::{self, StatusPinContent};
use crate::cuts::{DeleteReport, KeptFences, PinHolder, release_pins, remove_objects};
use crate::fencing::{FenceAttempt, fence, require_fencing};
use crate::options::CreateOptions;
use crate::recovery::stored::{StoredVolume, end_of_log, stored_of};
use crate::recovery::{Reporter, checkpoint};
use crate::replicate::role;
use crate::store_calls::{cannot_encode, store_error};
use crate::world::{RealWorld, World};
use crate::{Error, ErrorKind, Result, limits};

pub(crate) mod ledger;
mod lost;

pub use lost::{UnnamedVolume, name_unnamed, unnamed};

/// How often an operation is retried after another command was faster.
const TRIES_MAX: u32 = 8;

/// One volume of a store.
#[derive(Clone, Debug)]
pub struct VolumeEntry {
    /// Its name.
    pub name: String,
    /// Its record, or why it cannot be read.
    pub record: Result<VolumeRecord>,
}

/// Reads a volume's stored part, step by step.
pub(crate) fn stored(
    store: &dyn ObjectStore,
    name: &str,
    reporter: &mut Reporter<'_>,
) -> Result<StoredVolume> {
    stored_of(store, find(store, name)?, reporter)
}

/// Makes a new, empty volume. Refuses a store that cannot keep two writers apart, unless told to go
/// on.
pub fn create(
    store: &dyn ObjectStore,
    name: &str,
    options: &CreateOptions,
) -> Result<VolumeRecord> {
    check_name(name)?;
    check_options(options)?;
    require_free(store, name)?;
    if !options.no_fencing {
        require_fencing(store)?;
    }
    create_in(&RealWorld::default(), store, name, options)
}

/// As [`create`] in a given world, without a probe of the store.
pub fn create_in(
    world: &dyn World,
    store: &dyn ObjectStore,
    name: &str,
    options: &CreateOptions,
) -> Result<VolumeRecord> {
    check_name(name)?;
    check_options(options)?;
    let volume_id = VolumeId(world.random()?);
    let record = VolumeRecord {
        volume_id,
        put_id: PutId(world.random()?),
        size_bytes: options.size_bytes,
        block_bytes: options.block_bytes,
        segment_bytes: options.segment_bytes,
        frame_bytes: limits::FRAME_BYTES,
        flush_mode: options.flush,
        created_unix_ms: world.unix_ms(),
        name: name.to_owned(),
    };
    // The first checkpoint is put before the name: a name that can be found can be opened.
    let first = Checkpoint {
        volume_id,
        put_id: PutId(world.random()?),
        number: 1,
        epoch: 0,
        through_sequence: 0,
        next_sequence: 1,
        position: 0,
        wall_unix_ms: world.unix_ms(),
        attached_ms: 0,
        repeats: 0,
        size_bytes: options.size_bytes,
        clean: true,
        extent_total: 0,
        live_bytes: 0,
        segments: Vec::new(),
        parts: Vec::new(),
        kept: KeptBlock { retention_s: options.retention_s, ..KeptBlock::default() },
    };
    put(store, &checkpoint_key(volume_id, 1), first.encode().map_err(cannot_encode)?)?;
    ledger::claim(world, store, name, &record)?.ok_or_else(|| {
        // Another command was faster; only this one knows its checkpoint. If the delete fails, one
        // small object is left behind.
        let _ = Blocking(store).delete(vec![checkpoint_key(volume_id, 1)], Class::Background);
        exists(name)
    })
}

/// Finds a volume.
pub fn find(store: &dyn ObjectStore, name: &str) -> Result<VolumeRecord> {
    check_name(name)?;
    ledger::read_state(store, name)?.volume.ok_or_else(|| not_found(name))
}

/// A name whose state was settled. If that changes, it has a later record.
pub(crate) struct SettledName<'a> {
    pub(crate) name: &'a str,
    /// The number of its newest record; 0: it has none.
    pub(crate) number: u64,
}

/// As [`find`], for a caller that goes on to write: no rename or delete that was abandoned before
/// can take effect later.
pub(crate) fn find_for_good<'a>(
    world: &dyn World,
    store: &dyn ObjectStore,
    name: &'a str,
) -> Result<(SettledName<'a>, VolumeRecord)> {
    check_name(name)?;
    let settled = ledger::settle(world, store, name)?;
    let record = settled.volume.ok_or_else(|| not_found(name))?;
    Ok((SettledName { name, number: settled.number }, record))
}

/// Called after a writer has put its fence: a delete that did not meet the fence must be visible
/// now.
pub(crate) fn require_undeleted(
    world: &dyn World,
    store: &dyn ObjectStore,
    name: &str,
    volume_id: VolumeId,
) -> Result<()> {
    ledger::settle(world, store, name)?;
    if status_pins::newest(store, volume_id)?.is_gone() {
        let text = format!("volume {name} was deleted while it was being attached");
        return Err(Error::new(ErrorKind::NotFound, text));
    }
    Ok(())
}

/// Lists the volumes of a store, sorted by name.
pub fn list(store: &dyn ObjectStore) -> Result<Vec<VolumeEntry>> {
    ledger::all(store)
}

/// Renames a volume. It keeps its id, and with it its data, its journals and its open attachments.
///
/// A record of the old name announces the new one; the volume moves with the put of the new name's
/// record. A crash before that leaves the old name, and its next use cancels the attempt.
pub fn rename(store: &dyn ObjectStore, old: &str, new: &str) -> Result<VolumeRecord> {
    rename_in(&RealWorld::default(), store, old, new)
}

/// As [`rename`] in a given world.
pub fn rename_in(
    world: &dyn World,
    store: &dyn ObjectStore,
    old: &str,
    new: &str,
) -> Result<VolumeRecord> {
    check_name(new)?;
    if old == new {
        let text = format!("the name is already {old:?}");
        return Err(Error::new(ErrorKind::Invalid, text));
    }
    check_name(old)?;
    for _ in 0..TRIES_MAX {
        let from = ledger::settle(world, store, old)?;
        let record = from.volume.clone().ok_or_else(|| not_found(old))?;
        if let Some(other) = other_name(store, &record)?.filter(|other| other != new) {
            return Err(two_names(old, &other));
        }
        let to = ledger::read_state(store, new)?;
        let number = to.number + 1;
        let is_named = match to.volume {
            Some(there) if there.volume_id != record.volume_id => return Err(exists(new)),
            // The volume has both names: the old one moves to a new claim of the other.
            Some(_) => ledger::append(world, store, new, number, NameStep::Claims, &record)?,
            None => None,
        };
        let step = NameStep::Moves { to: new.to_owned(), number };
        if ledger::append(world, store, old, from.number + 1, step, &record)?.is_none() {
            continue;
        }
        let renamed = match is_named {
            Some(renamed) => Some(renamed),
            None => ledger::append(world, store, new, number, NameStep::Claims, &record)?,
        };
        if let Some(renamed) = renamed {
            ledger::remove_old(store, old, &from);
            return Ok(renamed);
        }
    }
    Err(busy(old))
}

/// Another name of the same volume, if the volume's status pins or a list show one.
fn other_name(store: &dyn ObjectStore, record: &VolumeRecord) -> Result<Option<String>> {
    let last_name = status_pins::newest(store, record.volume_id)?.name;
    if check_name(&last_name).is_ok()
        && last_name != record.name
        && ledger::means(store, &last_name, record.volume_id)?
    {
        return Ok(Some(last_name));
    }
    let same = |entry: &VolumeEntry| {
        let id = entry.record.as_ref().map(|record| record.volume_id);
        entry.name != record.name && id.ok() == Some(record.volume_id)
    };
    Ok(list(store)?.into_iter().find(same).map(|listed| listed.name))
}

/// Deletes a volume. A writer that has it attached is fenced first, and that last fence is kept
/// forever, so that the writer can never take its data for stored. What clones still need is
/// deleted with the last of them.
///
/// A record of the name announces the delete; the put of the status pin `Deleted` ends name and
/// volume. A delete interrupted before that put leaves the volume; after one interrupted later, the
/// same delete again removes what is left.
pub fn delete(store: &dyn ObjectStore, name: &str) -> Result<DeleteReport> {
    delete_in(&RealWorld::default(), store, name)
}

/// As [`delete`] in a given world.
pub fn delete_in(world: &dyn World, store: &dyn ObjectStore, name: &str) -> Result<DeleteReport> {
    check_name(name)?;
    for _ in 0..TRIES_MAX {
        let was = ledger::settle(world, store, name)?;
        let Some(record) = &was.volume else {
            return Ok(delete_rest(world, store, name, &was)?.report);
        };
        if let Some(other) = other_name(store, record)? {
            return Err(two_names(name, &other));
        }
        let volume_id = record.volume_id;
        let status_pin = status_pins::newest(store, volume_id)?.number + 1;
        let step = NameStep::Ends { status_pin };
        if ledger::append(world, store, name, was.number + 1, step, record)?.is_none() {
            continue;
        }
        let fence = last_fence(world, store, record)?;
        let (deleted, content) = (PinnedStatus::Deleted, StatusPinContent { fence, name });
        let is_created = status_pins::put(world, store, volume_id, status_pin, deleted, content)?;
        if !is_created && !status_pins::newest(store, volume_id)?.is_gone() {
            let text = format!(
                "volume {name} was attached or renamed at the same time: nothing was deleted"
            );
            return Err(Error::new(ErrorKind::Refused, text));
        }
        ledger::remove_old(store, name, &was);
        return remove(world, store, volume_id);
    }
    Err(busy(name))
}

/// The remains of an interrupted delete, now removed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeleteRemains {
    /// The volume that had the name.
    pub volume_id: VolumeId,
    /// What was removed now.
    pub report: DeleteReport,
}

/// Removes what an interrupted delete has left of a volume, which cannot be attached any more.
pub fn finish_delete(store: &dyn ObjectStore, name: &str) -> Result<DeleteRemains> {
    let world = RealWorld::default();
    check_name(name)?;
    let was = ledger::settle(&world, store, name)?;
    match was.volume {
        Some(_) => Err(exists(name)),
        None => delete_rest(&world, store, name, &was),
    }
}

fn delete_rest(
    world: &dyn World,
    store: &dyn ObjectStore,
    name: &str,
    was: &ledger::NameState,
) -> Result<DeleteRemains> {
    if let Some(newest) = &was.newest
        && let NameStep::Ends { .. } = newest.step
        && status_pins::newest(store, newest.volume.volume_id)?.is_gone()
    {
        let volume_id = newest.volume.volume_id;
        let deleted = remove(world, store, volume_id)?;
        // The journal of a volume that is reported gone may be removed, so one revived meanwhile is
        // not reported.
        let has_report = deleted.objects > 0 || !deleted.pinned_by.is_empty();
        if has_report && status_pins::newest(store, volume_id)?.is_gone() {
            return Ok(DeleteRemains { volume_id, report: deleted });
        }
    }
    Err(not_found(name))
}

/// Fences the writer of a volume and returns the fence's sequence; 0: there is no fence.
fn last_fence(world: &dyn World, store: &dyn ObjectStore, record: &VolumeRecord) -> Result<u64> {
    // A replica has no writer to fence, and its copier checks whether the replica still exists. A
    // fence would take the place of the source's next segment.
    if replica(store, record.volume_id)?.is_some() {
        return Ok(0);
    }
    match end_of_log(store, record) {
        Ok(mut end) => {
            let attempt = FenceAttempt::after(end.epoch, world)?;
            fence(store, record, &mut end, attempt, world)
        }
        // A volume too damaged to be opened can still be deleted, but then no writer is fenced.
        Err(error) if is_lost(error.kind()) => Ok(0),
        Err(error) => Err(error),
    }
}

/// The role of a volume whose own history has not begun.
fn replica(
    store: &dyn ObjectStore,
    volume_id: VolumeId,
) -> Result<Option<sawmill_format::role::Role>> {
    match role::newest(store, volume_id)? {
        Some(role) if role::is_begun(store, &role)? => Ok(None),
        role => Ok(role),
    }
}

/// Releases what a deleted volume pins, and removes the volume if nothing pins it.
fn remove(world: &dyn World, store: &dyn ObjectStore, volume_id: VolumeId) -> Result<DeleteReport> {
    // If its checkpoint is lost, its pins stay in the base; `check` of the base reports them.
    let lineage = match checkpoint::newest(store, volume_id) {
        Ok(newest) => newest.checkpoint.kept.lineage,
        Err(error) if is_lost(error.kind()) => Vec::new(),
        Err(error) => return Err(error),
    };
    // A writer from before a fail-back may still resume: keep the fence that stops it.
    let was_written = replica(store, volume_id)?.is_some_and(|role| role.kind != RoleKind::Replica);
    let fences = if was_written { KeptFences::All } else { KeptFences::Last };
    let ancestors =
        release_pins(world, store, &PinHolder { clone_id: volume_id, lineage: &lineage })?;
    let mut deleted = remove_objects(world, store, volume_id, fences)?;
    deleted.objects += ancestors.objects;
    deleted.bytes += ancestors.bytes;
    Ok(deleted)
}

fn is_lost(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::Corrupt | ErrorKind::NotFound)
}

fn put(store: &dyn ObjectStore, key: &str, body: Vec<u8>) -> Result<PutOutcome> {
    Blocking(store).put(key, Bytes::from(body), Class::Upload).map_err(|error| store_error(&error))
}

fn not_found(name: &str) -> Error {
    let text = format!(
        "there is no volume {name:?} in this store: `sawmill list` shows them, `sawmill create` \
        makes one"
    );
    Error::new(ErrorKind::NotFound, text)
}

/// Other commands were faster at every attempt.
fn busy(name: &str) -> Error {
    let text = format!("other commands are changing the name {name:?}: try again");
    Error::new(ErrorKind::Unavailable, text)
}

fn two_names(name: &str, other: &str) -> Error {
    let text = format!(
        "{name:?} and {other:?} are two names of one volume: make them one with `sawmill rename \
         {name} {other}` or `sawmill rename {other} {name}` first"
    );
    Error::new(ErrorKind::Refused, text)
}

/// Refuses a name that a volume already has.
pub(crate) fn require_free(store: &dyn ObjectStore, name: &str) -> Result<()> {
    match ledger::read_state(store, name)?.volume {
        Some(_) => Err(exists(name)),
        None => Ok(()),
    }
}

pub(crate) fn exists(name: &str) -> Error {
    let text = format!(
        "there is a volume {name:?} already: choose another name, or `sawmill delete {name}` first"
    );
    Error::new(ErrorKind::Exists, text)
}

pub(crate) fn check_name(name: &str) -> Result<()> {
    let fine = !name.is_empty()
        && name.len() <= NAME_BYTES_MAX
        && !name.starts_with('.')
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte));
    if fine {
        return Ok(());
    }
    let text = format!(
        "{name:?} is not a valid volume name: use 1 to {NAME_BYTES_MAX} letters, digits, '.', '_', \
        '-', not first a '.'"
    );
    Err(Error::new(ErrorKind::Invalid, text))
}

/// Whether a volume of such blocks can have this size.
pub(crate) fn check_size(size_bytes: u64, block_bytes: u32) -> Result<()> {
    let invalid = |text: String| Err(Error::new(ErrorKind::Invalid, text));
    if size_bytes == 0 || !size_bytes.is_multiple_of(u64::from(block_bytes)) {
        return invalid(format!(
            "a size of {size_bytes} bytes is not a multiple of the block size {block_bytes}"
        ));
    }
    if size_bytes > limits::SIZE_BYTES_MAX {
        let limit = limits::SIZE_BYTES_MAX;
        return invalid(format!("a size of {size_bytes} bytes is beyond the limit of {limit}"));
    }
    Ok(())
}

fn check_options(options: &CreateOptions) -> Result<()> {
    let invalid = |text: String| Err(Error::new(ErrorKind::Invalid, text));
    let block = u64::from(options.block_bytes);
    if block != 512 && block != 4096 {
        return invalid(format!("a block size of {block} is not supported: choose 512 or 4096"));
    }
    check_size(options.size_bytes, options.block_bytes)?;
    check_segment_bytes(options.segment_bytes)
}

/// Whether a volume may have such segments.
pub(crate) fn check_segment_bytes(segment_bytes: u32) -> Result<()> {
    let range = limits::SEGMENT_BYTES_MIN..=limits::SEGMENT_BYTES_MAX;
    if segment_bytes.is_power_of_two() && range.contains(&segment_bytes) {
        return Ok(());
    }
    let text = format!(
        "segments of {segment_bytes} bytes are not supported: choose a power of two from {} to {}",
        limits::SEGMENT_BYTES_MIN,
        limits::SEGMENT_BYTES_MAX
    );
    Err(Error::new(ErrorKind::Invalid, text))
}
