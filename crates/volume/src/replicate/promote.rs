//! Makes a replica a volume of its own: a role (create-only, so one of two promotions wins), then a
//! checkpoint with which its own history starts, as if it had been attached and closed cleanly.
//!
//! Why there is no fence: that checkpoint has a random epoch, number and first sequence, far above
//! any that the source or a late copier uses. They are in the role, so a process that finishes
//! another one's promotion makes the same history. If two finish at the same time, one puts the
//! checkpoint, and both have promoted.
//!
//! Invariants: the state is read again after the role is put, and the checkpoint is put after all
//! that it names. Unless the caller takes the replica as it is, one that lacks a segment, or falls
//! back to an older checkpoint, is not promoted.
//!
//! Not here: roles and their numbers (`role`), what a promotion would find (`drill`), and how a
//! fail-back begins (`destination`).

use bytes::Bytes;
use sawmill_format::checkpoint::{Checkpoint, CheckpointIdentity, checkpoint_key, kept_key};
use sawmill_format::ids::PutId;
use sawmill_format::kept_block::{CutKind, KeptBlock};
use sawmill_format::role::{PromotionPoint, Role, RoleKind};
use sawmill_format::segment::segment_key;
use sawmill_format::volume_record::VolumeRecord;
use sawmill_store::{Blocking, Class, ObjectStore, PutOutcome};

use super::{destination_objects, role};
use crate::limits::AttachmentBounds;
use crate::map::freeze::freeze_map;
use crate::recovery::stored;
use crate::recovery::stored::StoredVolume;
use crate::recovery::{Reporter, checkpoint as checkpoints};
use crate::store_calls::{self, cannot_encode, store_error};
use crate::world::World;
use crate::{Error, ErrorKind, Result, limits, names};

/// The result of a promotion.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Promotion {
    /// The volume.
    pub record: VolumeRecord,
    /// What it was a replica of.
    pub source: String,
    /// The epoch of its own history; the next attachment has the next one.
    pub epoch: u64,
    /// All writes before this position are in it.
    pub position: u64,
    /// When the newest checkpoint or segment in it was made, in milliseconds since 1970, by the
    /// writer's clock.
    pub wall_unix_ms: u64,
}

/// Makes a replica a volume of its own. Finishes a promotion that was started and interrupted.
///
/// Errors: `Refused` if it is not a replica, was promoted before, is being promoted by another
/// process, or if a fail-back has not brought the source's history yet; `Corrupt` if its newest
/// checkpoint is unreadable, or an object that it needs does not exist.
pub fn promote(world: &dyn World, store: &dyn ObjectStore, name: &str) -> Result<Promotion> {
    promote_as(world, store, name, false)
}

/// As [`promote`], even if the result is older than what was copied, or lacks something. Only for a
/// lost source, when there is nothing better.
pub fn promote_as_it_is(
    world: &dyn World,
    store: &dyn ObjectStore,
    name: &str,
) -> Result<Promotion> {
    promote_as(world, store, name, true)
}

fn promote_as(
    world: &dyn World,
    store: &dyn ObjectStore,
    name: &str,
    as_it_is: bool,
) -> Result<Promotion> {
    let record = names::find(store, name)?;
    let id = record.volume_id;
    let role = match role::newest(store, id)? {
        None => return Err(no_replica(name)),
        Some(role) if role::is_begun(store, &role)? => return Err(promoted_before(name, &role)),
        Some(role) => role,
    };
    let mut stored = read_replica(world, store, &record, &role, as_it_is)?;
    let role = match role.promoted() {
        Some(_) => role,
        None => {
            let role = reserve_promotion(world, store, &record, &role, &stored)?;
            // A copier may have continued until then.
            stored = read_replica(world, store, &record, &role, as_it_is)?;
            role
        }
    };
    let Some(promoted) = role.promoted() else {
        let text = format!(
            "volume {name}: the promotion was put, but the role does not name it: this is a \
             bug; report it with the log"
        );
        return Err(Error::new(ErrorKind::Internal, text));
    };
    if stored.newest.checkpoint.number >= promoted.checkpoint_number {
        return Ok(promotion_of(&stored, &role, promoted.epoch));
    }
    let begun = begin_history(world, store, &stored, &role, promoted)?;
    Ok(Promotion { position: begun.position, ..promotion_of(&stored, &role, promoted.epoch) })
}

/// What the replica holds; refused unless it is complete and the newest that was copied.
fn read_replica(
    world: &dyn World,
    store: &dyn ObjectStore,
    record: &VolumeRecord,
    role: &Role,
    as_it_is: bool,
) -> Result<StoredVolume> {
    let reporter = &mut Reporter::new(world);
    if as_it_is {
        return stored::stored_as_it_is(store, record.clone(), reporter);
    }
    let stored = stored::stored_of(store, record.clone(), reporter)?;
    require_arrived(record, role, stored.newest.checkpoint.number)?;
    let damaged = |what: &str| {
        let text = format!(
            "{what}: nothing was promoted. If the source still exists, run `sawmill replicate` \
             again; if it is lost, `sawmill promote --as-it-is` promotes what is here"
        );
        Err(Error::new(ErrorKind::Corrupt, text))
    };
    if let Some(note) = stored.newest.notes.first() {
        return damaged(note);
    }
    let live = stored.view.segments.snapshot().into_iter().filter(|(_, info)| info.live_bytes > 0);
    let wanted =
        live.map(|(sequence, _)| segment_key(record.volume_id, u64::from(sequence))).collect();
    match destination_objects::missing(store, record.volume_id, &wanted)?.first() {
        Some(key) => damaged(&format!("{key} is gone")),
        None => Ok(stored),
    }
}

/// Refuses a fail-back that has not brought the source's history yet: that history supersedes what
/// is there.
pub(super) fn require_arrived(record: &VolumeRecord, role: &Role, number: u64) -> Result<()> {
    match role.kind {
        RoleKind::Returned(begins) if number < begins.checkpoint_number => {
            let text = format!(
                "the fail-back of volume {} cannot be promoted yet: it still holds what {} has \
                 superseded; run `sawmill replicate --fail-back` again",
                record.name, role.source
            );
            Err(Error::new(ErrorKind::Refused, text))
        }
        _ => Ok(()),
    }
}

/// When the newest checkpoint or segment was made.
pub(super) fn newest_wall(stored: &StoredVolume) -> u64 {
    let segments = stored.view.segments.snapshot();
    let newest = segments.iter().map(|(_, info)| info.wall_unix_ms).max().unwrap_or_default();
    newest.max(stored.newest.checkpoint.wall_unix_ms)
}

pub(super) fn promotion_of(stored: &StoredVolume, role: &Role, epoch: u64) -> Promotion {
    Promotion {
        record: stored.record.clone(),
        source: role.source.clone(),
        epoch,
        position: stored.end.position,
        wall_unix_ms: newest_wall(stored),
    }
}

pub(super) fn no_replica(name: &str) -> Error {
    let text =
        format!("volume {name} is a primary, not a replica: there is nothing to promote; serve it");
    Error::new(ErrorKind::Refused, text)
}

pub(super) fn promoted_before(name: &str, role: &Role) -> Error {
    let text = format!(
        "volume {name} was promoted already (it was a replica of {}): nothing was changed; serve \
        it",
        role.source
    );
    Error::new(ErrorKind::Refused, text)
}

/// Reserves the promotion for this process, with numbers far above everything there is.
fn reserve_promotion(
    world: &dyn World,
    store: &dyn ObjectStore,
    record: &VolumeRecord,
    replica: &Role,
    stored: &StoredVolume,
) -> Result<Role> {
    let (end, number_max) = (&stored.end, stored.newest.number_max);
    let chance = u128::from_le_bytes(world.random()?);
    // The source would have to be this many sequences and checkpoints ahead for a late copy to
    // conflict.
    let margin = |chance: u128| (1 << 20) + (chance as u64 & ((1 << 20) - 1));
    let promoted = PromotionPoint {
        epoch: end.epoch + (1 << 32) + (chance as u64 & ((1 << 44) - 1)),
        checkpoint_number: number_max + margin(chance >> 64),
        next_sequence: end.next_sequence + margin(chance >> 96),
    };
    if promoted.next_sequence >= limits::SEQUENCE_MAX {
        let text =
            "the volume has too few segment sequences left to be promoted; copy it to a new one";
        return Err(Error::new(ErrorKind::Full, text));
    }
    let role = Role {
        put_id: PutId(world.random()?),
        number: replica.number + 1,
        wall_unix_ms: world.unix_ms(),
        kind: RoleKind::Promoted(promoted),
        ..replica.clone()
    };
    if role::put(store, &role)? {
        return Ok(role);
    }
    let text = format!(
        "volume {}: lost to a concurrent promotion; this command changed nothing",
        record.name
    );
    Err(Error::new(ErrorKind::Refused, text))
}

/// Puts the checkpoint with which the promoted history starts: the state at the end of what was
/// copied. Returns it, or the one that another process put for the same promotion.
fn begin_history(
    world: &dyn World,
    store: &dyn ObjectStore,
    stored: &StoredVolume,
    role: &Role,
    point: PromotionPoint,
) -> Result<Checkpoint> {
    let (root, objects) = first_root(world, stored, role, point)?;
    // Cuts that start from the newest copied checkpoint need it under the name of a copy.
    let base = &stored.newest.checkpoint;
    let begins = |number, put_id| (number, put_id) == (base.number, base.put_id);
    if root.kept.cuts.iter().any(|cut| begins(cut.number, cut.put_id)) {
        let key = kept_key(base.volume_id, base.number, base.put_id);
        store_calls::put_all(store, vec![(key, base.encode().map_err(cannot_encode)?)])?;
    }
    store_calls::put_all(store, objects)?;
    // Twice, so that the newest two checkpoints are both in this history, because one may get
    // damaged.
    let root = put_or_read(store, root)?;
    put_or_read(store, Checkpoint { number: root.number + 1, ..root.clone() })?;
    Ok(root)
}

/// Puts a root. An existing one belongs to a process that finishes this promotion too, and counts.
fn put_or_read(store: &dyn ObjectStore, root: Checkpoint) -> Result<Checkpoint> {
    let key = checkpoint_key(root.volume_id, root.number);
    let body = Bytes::from(root.encode().map_err(cannot_encode)?);
    let put = Blocking(store).put(&key, body, Class::Upload);
    match put.map_err(|error| store_error(&error))? {
        PutOutcome::Created => Ok(root),
        PutOutcome::Taken => checkpoints::read(store, root.volume_id, Some(root.number)),
    }
}

/// Keys and bytes.
type Objects = Vec<(String, Vec<u8>)>;

fn first_root(
    world: &dyn World,
    stored: &StoredVolume,
    role: &Role,
    point: PromotionPoint,
) -> Result<(Checkpoint, Objects)> {
    let (view, base) = (&stored.view, &stored.newest.checkpoint);
    let (volume_id, number) = (base.volume_id, point.checkpoint_number);
    let put_id = PutId(world.random()?);
    let identity = CheckpointIdentity { volume_id, number };
    let frozen =
        freeze_map(&view.map, &base.parts, identity, put_id, &AttachmentBounds::default())?;
    let parts = frozen.parts;
    let objects = frozen.objects.into_iter().map(|part| (part.key, part.bytes)).collect();
    let (segments, _) = view.segments.freeze(number, &|_, _| true);
    let book = view.cuts.lock().clone();
    // Clones stayed with the source, and so did their pins.
    let cuts: Vec<_> = book.cuts.into_iter().filter(|cut| cut.kind != CutKind::Pin).collect();
    let dead = if cuts.is_empty() { Vec::new() } else { view.segments.dead() };
    let kept =
        KeptBlock { retention_s: book.retention_s, pins_next: 0, cuts, lineage: Vec::new(), dead };
    let root = Checkpoint {
        volume_id,
        put_id,
        number,
        epoch: point.epoch,
        through_sequence: stored.end.stored_sequence,
        next_sequence: point.next_sequence,
        position: stored.end.position,
        wall_unix_ms: role.wall_unix_ms,
        attached_ms: stored.newest.checkpoint.attached_ms,
        repeats: 0,
        size_bytes: stored.record.size_bytes,
        clean: true,
        extent_total: parts.iter().map(|part| u64::from(part.extents)).sum(),
        live_bytes: segments.iter().map(|segment| segment.live_bytes).sum(),
        segments,
        parts,
        kept,
    };
    Ok((root, objects))
}
