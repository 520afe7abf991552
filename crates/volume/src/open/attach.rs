//! Attaches for writing, according to the verdict. See `open` for the order and the reasons.
//!
//! Invariant: a fence is put only while the journal durably holds an intent with its epoch and put
//! id.
//!
//! Not here: the verdict on the journal (`journal`), the file (`make`), and its new owner (`bind`).

use std::time::Duration;

use sawmill_format::ids::VolumeId;
use sawmill_format::journal::{RING_START_BYTES, Superblock};
use sawmill_format::role::role_key;
use sawmill_format::volume_record::VolumeRecord;
use sawmill_store::{Class, ObjectStore};
use sawmill_sys::BLOCK_BYTES;

use super::bind::{BoundJournal, FenceIntent, bind};
use super::journal::{self, JournalVerdict, UsableJournal, judge};
use super::make::make_journal;
use super::memory;
use super::repeat::repeat_checkpoint;
use super::undisturbed::is_undisturbed;
use crate::disk::Lock;
use crate::fencing::{FenceAttempt, fence, require_fencing};
use crate::journal::superblock::SuperblockFile;
use crate::names::SettledName;
use crate::options::OpenOptions;
use crate::recovery::map_hold::LoadTime;
use crate::recovery::roll_forward::{headers, roll_forward};
use crate::recovery::stored::{StoredVolume, stored_with};
use crate::recovery::{RecoveryStep, Reporter, checkpoint};
use crate::replicate::role::require_primary;
use crate::store_calls::{self, PendingAnswers, want};
use crate::world::World;
use crate::{Error, ErrorKind, Result, limits, names};

/// A live writer may put segments as fast as we find them; after this many attempts the attach
/// gives up.
const FENCE_TRIES_MAX: u32 = 1000;

/// How often a live writer may advance during an attach.
const ATTACH_TRIES_MAX: u32 = 20;

/// The state that the loops start from.
pub(crate) struct AttachState {
    pub(crate) stored: StoredVolume,
    pub(crate) bound: BoundJournal,
    pub(crate) lock: Lock,
    /// A time at which no other attachment had taken over yet.
    pub(crate) looked_at: Duration,
}

/// Attaches for writing. A live writer may advance, and delete, so fast that what was read of it is
/// gone when the fence is put. Then everything is read again, from its newest checkpoint on.
pub(crate) fn attach(
    store: &dyn ObjectStore,
    name: &str,
    options: &OpenOptions,
    world: &dyn World,
    reporter: &mut Reporter<'_>,
) -> Result<AttachState> {
    let mut earlier = EarlierTries::default();
    for _ in 0..ATTACH_TRIES_MAX {
        if let Some(attached) = try_attach(store, name, options, world, reporter, &mut earlier)? {
            return Ok(attached);
        }
        reporter.step(
            RecoveryStep::Again,
            "the writer was active while it was being fenced".to_owned(),
        );
    }
    let text = format!("volume {name} is being written faster than it can be fenced: try again");
    Err(Error::new(ErrorKind::Unavailable, text))
}

/// What the tries of one attach before this one have done.
#[derive(Default)]
struct EarlierTries {
    /// The epoch that the last one took, and the one that it fenced.
    own: Option<(u64, u64)>,
    is_probed: bool,
}

/// One attempt; `None` if the fenced writer advanced in the meantime.
fn try_attach(
    store: &dyn ObjectStore,
    name: &str,
    options: &OpenOptions,
    world: &dyn World,
    reporter: &mut Reporter<'_>,
    earlier: &mut EarlierTries,
) -> Result<Option<AttachState>> {
    let (name, record) = names::find_for_good(world, store, name)?;
    check_options(&record, options)?;
    // Before the probe puts its objects: a server may be running with this journal.
    let lock = journal::lock(options, world.disks())?;
    let role = ask_role(store, record.volume_id);
    let is_probed = options.no_fencing || options.store_is_probed || earlier.is_probed;
    let load_time = LoadTime::WhenNeeded { from_bytes: options.bounds.map_held_from_bytes };
    let recover = || stored_with(store, record, reporter, load_time);
    let (recovered, probed) = beside_probe(store, is_probed, recover);
    let mut stored = recovered?;
    if !matches!(role.wait()[..], [Ok(None)]) {
        require_primary(store, &stored.record, stored.newest.checkpoint.number)?;
    }
    probed?;
    earlier.is_probed = true;
    let memory = memory::in_use(options, world)?;
    let mut judged = judge(&stored, options, world)?;
    check_fits(&stored, &judged)?;
    reporter.step(RecoveryStep::Journal, judged.describe());
    if let JournalVerdict::Use(usable) = &mut judged
        && let Some(log) = &mut usable.log
    {
        log.doubt_syncs();
    }
    settle_intent(store, &mut stored, &mut judged, world)?;
    let attempt = FenceAttempt::after(stored.end.epoch, world)?;
    let is_made = matches!(judged, JournalVerdict::Make { .. });
    let intended = intend(&stored, options, judged, attempt, world)?;
    // A new journal is a file of its own.
    let lock: Lock = match is_made {
        true => Box::new((lock, journal::lock_file(options, world.disks())?)),
        false => lock,
    };
    if !shut_others_out(store, &name, &mut stored, attempt, world, &mut earlier.own)? {
        return Ok(None);
    }
    reporter.step(
        RecoveryStep::Fence,
        format!("epoch {} from segment {} on", stored.end.epoch, stored.end.stored_sequence),
    );
    let bound = bind(intended, &stored, options, memory, reporter)?;
    // All this may have taken long, and the number that the repeated checkpoint took may have been
    // deleted: the first flush relies on this check.
    let looked_at = world.now();
    require_last(store, &stored)?;
    Ok(Some(AttachState { stored, bound, lock, looked_at }))
}

/// Reads what is stored, and meanwhile probes whether the store keeps two writers apart. Neither
/// changes anything of the volume, and the probe takes longer.
fn beside_probe<T>(
    store: &dyn ObjectStore,
    is_probed: bool,
    recover: impl FnOnce() -> Result<T>,
) -> (Result<T>, Result<()>) {
    if is_probed {
        return (recover(), Ok(()));
    }
    std::thread::scope(|threads| {
        let builder = std::thread::Builder::new().name("probe".to_owned());
        let probe = builder.spawn_scoped(threads, || require_fencing(store));
        let recovered = recover();
        let probed = match probe {
            Ok(probe) => probe.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
            // The machine has no thread left: one after the other.
            Err(_) => require_fencing(store),
        };
        (recovered, probed)
    })
}

/// Asks for the first role: a primary that was never a replica has none.
fn ask_role(store: &dyn ObjectStore, volume_id: VolumeId) -> PendingAnswers {
    store_calls::ask_each(store, vec![want(role_key(volume_id, 1), None, Class::Read)])
}

/// Puts the fence, then the checkpoint again under the next number. `false`: the writer advanced in
/// the meantime.
fn shut_others_out(
    store: &dyn ObjectStore,
    name: &SettledName<'_>,
    stored: &mut StoredVolume,
    attempt: FenceAttempt,
    world: &dyn World,
    own: &mut Option<(u64, u64)>,
) -> Result<bool> {
    fence_at_end(store, stored, attempt, world)?;
    if let Some((_, before)) = own.filter(|(epoch, _)| *epoch == stored.end.epoch_before) {
        stored.end.epoch_before = before;
    }
    *own = Some((stored.end.epoch, stored.end.epoch_before));
    if !is_undisturbed(store, stored, name)? {
        if !has_no_writer_gone_on(store, stored)? {
            return Ok(false);
        }
        names::require_undeleted(world, store, name.name, stored.record.volume_id)?;
        // A process that made it a replica in the meantime puts a fence after that, so one of the
        // two sees the other.
        require_primary(store, &stored.record, stored.newest.checkpoint.number)?;
    }
    if !repeat_checkpoint(store, stored, world)? {
        require_last(store, stored)?;
        return Ok(false);
    }
    Ok(true)
}

fn check_options(record: &VolumeRecord, options: &OpenOptions) -> Result<()> {
    let least = limits::journal_bytes_min(record.segment_bytes);
    if options.journal_bytes < least {
        let text = format!(
            "a journal of {} bytes is too small for segments of {}: give --journal-bytes at least \
            {least}",
            options.journal_bytes, record.segment_bytes
        );
        return Err(Error::new(ErrorKind::Invalid, text));
    }
    if options.staging_bytes < limits::STAGING_BYTES_MIN
        || !options.staging_bytes.is_multiple_of(BLOCK_BYTES)
    {
        let text = format!(
            "a staging ring of {} bytes is not supported: at least {}, in multiples of \
            {BLOCK_BYTES}",
            options.staging_bytes,
            limits::STAGING_BYTES_MIN
        );
        return Err(Error::new(ErrorKind::Invalid, text));
    }
    if options.uploads_max == 0 || options.uploads_max > limits::UPLOADS_MAX {
        let text = format!(
            "{} uploads at once are not supported: 1 to {}",
            options.uploads_max,
            limits::UPLOADS_MAX
        );
        return Err(Error::new(ErrorKind::Invalid, text));
    }
    match options.gc.fault() {
        Some(text) => Err(Error::new(ErrorKind::Invalid, text)),
        None => Ok(()),
    }
}

/// Doors never write past the end of the disk. A record there means that the disk had grown, and
/// that the checkpoint with the new size was lost.
fn check_fits(stored: &StoredVolume, verdict: &JournalVerdict) -> Result<()> {
    let JournalVerdict::Use(usable) = verdict else { return Ok(()) };
    let found =
        usable.scan.iter().flat_map(|scan| &scan.records).filter_map(|found| found.record.as_ref());
    let unstored = found.filter(|record| record.position >= stored.end.position);
    let reach =
        unstored.map(|record| record.address.saturating_add(record.length)).max().unwrap_or(0);
    let size_bytes = stored.record.size_bytes;
    if reach <= size_bytes {
        return Ok(());
    }
    let text = format!(
        "the journal of volume {name} has writes up to byte {reach}, past the end of the disk \
         ({size_bytes} bytes): the disk had grown, and the checkpoint that recorded it cannot be \
         read; nothing was changed; run `sawmill check {name}`",
        name = stored.record.name
    );
    Err(Error::new(ErrorKind::Corrupt, text))
}

/// Makes the journal if necessary, and writes the intent into it.
fn intend(
    stored: &StoredVolume,
    options: &OpenOptions,
    verdict: JournalVerdict,
    attempt: FenceAttempt,
    world: &dyn World,
) -> Result<FenceIntent> {
    let FenceAttempt { epoch: intent_epoch, put_id } = attempt;
    match verdict {
        JournalVerdict::Use(usable) => {
            let UsableJournal { disk, mut superblock, log, scan } = *usable;
            if superblock.current().capacity_bytes + RING_START_BYTES != options.journal_bytes {
                tracing::info!(
                    "the journal keeps its size of {} bytes",
                    superblock.current().capacity_bytes + RING_START_BYTES
                );
            }
            superblock.write(|block| {
                // The fence of the last intent is in the store: this journal belongs to that epoch,
                // and a new intent must not make it forget that.
                block.epoch = stored.end.epoch;
                block.intent_epoch = intent_epoch;
                block.intent_put_id = put_id;
                if log.is_none() {
                    // Everything is stored, even if the attachment that closed it could not record
                    // that here.
                    block.memory = None;
                }
                if let Some(scan) = &scan {
                    // The following writes overwrite the torn record that this mark may lie in: see
                    // `judged`.
                    block.logged = scan.mark.min(scan.end);
                }
            })?;
            Ok(FenceIntent { disk, superblock, log, scan, first_position: 0 })
        }
        JournalVerdict::Make { old, .. } => {
            let path = &options.journal_path;
            let disk = make_journal(path, old, options, world)?;
            let capacity_bytes = (disk.size_bytes() - RING_START_BYTES) / BLOCK_BYTES * BLOCK_BYTES;
            let random = world.random()?;
            let mut tag = [0; 8];
            tag.copy_from_slice(&random[..8]);
            let first = Superblock {
                volume_id: stored.record.volume_id,
                journal_tag: u64::from_le_bytes(tag),
                revision: 0,
                epoch: 0,
                intent_epoch,
                intent_put_id: put_id,
                capacity_bytes,
                trim: stored.end.position,
                logged: 0,
                stored_sequence: 0,
                stored_position: 0,
                clean: false,
                bound_epoch: 0,
                bound_position: 0,
                memory: None,
                ring_copy: None,
            };
            let mut superblock = SuperblockFile::first(disk.clone(), first);
            superblock.write(|_| ())?;
            let first_position = stored.end.position;
            Ok(FenceIntent { disk, superblock, log: None, scan: None, first_position })
        }
    }
}

/// An attach that died may have sent a fence that is not in the store yet and may land at any time.
/// A journal remembers one intent. So before it takes a new one, the old fence is put again until
/// it is there; otherwise it would be mistaken for another writer's when it lands.
fn settle_intent(
    store: &dyn ObjectStore,
    stored: &mut StoredVolume,
    verdict: &mut JournalVerdict,
    world: &dyn World,
) -> Result<()> {
    let JournalVerdict::Use(usable) = verdict else { return Ok(()) };
    let superblock = &mut usable.superblock;
    let Superblock { intent_epoch, intent_put_id, .. } = *superblock.current();
    if intent_epoch > stored.end.epoch {
        // The process that wrote it may have died before its sync: after a power cut, that fence
        // would look like another writer's.
        superblock.write(|_| ())?;
        let attempt = FenceAttempt { epoch: intent_epoch, put_id: intent_put_id };
        fence_at_end(store, stored, attempt, world)?;
    }
    Ok(())
}

/// Fences at the end of the log. If a live writer puts a segment there first, that segment is
/// applied, and the new end is tried.
fn fence_at_end(
    store: &dyn ObjectStore,
    stored: &mut StoredVolume,
    attempt: FenceAttempt,
    world: &dyn World,
) -> Result<()> {
    let epoch = stored.end.epoch;
    for _ in 0..FENCE_TRIES_MAX {
        match fence(store, &stored.record, &mut stored.end, attempt, world) {
            Ok(_) => return Ok(()),
            Err(error) if error.kind() == ErrorKind::Exists => resume_from(store, stored, world)?,
            Err(error) => return Err(error),
        }
        if stored.end.epoch == epoch {
            continue;
        }
        if stored.end.fence_put_id == Some(attempt.put_id) {
            return Ok(());
        }
        let text = format!(
            "another process attached volume {} at the same moment (epoch {}): make sure that only \
             one attaches, then try again",
            stored.record.name, stored.end.epoch
        );
        return Err(Error::new(ErrorKind::Fenced, text));
    }
    let text = format!(
        "volume {} is being written faster than it can be fenced: try again",
        stored.record.name
    );
    Err(Error::new(ErrorKind::Unavailable, text))
}

/// Applies what a live writer has put since. If the writer has already deleted some of that, starts
/// from its newest checkpoint.
fn resume_from(
    store: &dyn ObjectStore,
    stored: &mut StoredVolume,
    world: &dyn World,
) -> Result<()> {
    let volume_id = stored.record.volume_id;
    let rolled = roll_forward(store, volume_id, Some(&mut stored.view), &mut stored.end);
    match rolled {
        Err(error) if error.kind() == ErrorKind::Corrupt => {
            if checkpoint::newest(store, volume_id)?.number_max == stored.newest.number_max {
                return Err(error);
            }
            let name = stored.record.name.clone();
            *stored = names::stored(store, &name, &mut Reporter::new(world))?;
            Ok(())
        }
        rolled => rolled,
    }
}

/// If this process was stopped for long after it found the end of the log, the writer to be fenced
/// may have written past that end and deleted the very name that the fence then took. Names are
/// deleted only after a checkpoint that allows it.
///
/// A checkpoint that the writer put before it could know of the fence counts, because the writer
/// may have deleted by it. So this attach starts again, from that checkpoint. After later ones the
/// writer deletes nothing, because it checks for fences first (`engine::fence_check`).
fn has_no_writer_gone_on(store: &dyn ObjectStore, stored: &StoredVolume) -> Result<bool> {
    let newest = checkpoint::newest(store, stored.record.volume_id)?;
    if newest.number_max == stored.newest.number_max {
        return Ok(true);
    }
    if newest.checkpoint.epoch >= stored.end.epoch {
        return Err(taken_over(stored));
    }
    require_last(store, stored)?;
    Ok(false)
}

/// Refuses if another process fenced after us: otherwise two that fence each other would never end.
fn require_last(store: &dyn ObjectStore, stored: &StoredVolume) -> Result<()> {
    let (volume_id, mut end) = (stored.record.volume_id, stored.end.clone());
    // Whoever fences after us does so at this name, and a fence stays.
    if matches!(headers(store, volume_id, &[end.next_sequence])[..], [Ok(None)]) {
        return Ok(());
    }
    let rolled = roll_forward(store, volume_id, None, &mut end);
    if end.epoch != stored.end.epoch {
        return Err(taken_over(stored));
    }
    match rolled {
        // What follows may have been deleted since.
        Err(error) if error.kind() == ErrorKind::Corrupt => Ok(()),
        rolled => rolled,
    }
}

fn taken_over(stored: &StoredVolume) -> Error {
    let text = format!(
        "another process attached volume {} at the same moment: make sure that only one attaches, \
         then try again",
        stored.record.name
    );
    Error::new(ErrorKind::Fenced, text)
}
