//! The drill: what a promotion would find, and what of the source it would lose. Changes nothing.
//!
//! Invariant: "nothing would be lost" is reported only if source and replica are the same volume,
//! have one history, and end with the same segment. A position alone says nothing about another
//! history, a snapshot or a resize.
//!
//! Not here: reading and verifying the replica (`crate::check`), and the promotion (`promote`).

use sawmill_store::ObjectStore;

use super::promote::{
    Promotion, newest_wall, no_replica, promoted_before, promotion_of, require_arrived,
};
use super::role;
use crate::check::{CheckReport, Damage, check};
use crate::recovery::Reporter;
use crate::recovery::stored;
use crate::recovery::stored::StoredVolume;
use crate::world::World;
use crate::{Result, names};

/// What a promotion would find.
#[derive(Clone, Debug)]
pub struct Drill {
    /// What a promotion would result in; the epoch is the replica's.
    pub promotion: Promotion,
    /// Everything in the replica, read and verified. An unreadable checkpoint is damage here,
    /// because the state before it is older.
    pub check: CheckReport,
    end: End,
}

/// Distinguishes two ends of one history.
#[derive(Clone, Debug, PartialEq, Eq)]
struct End {
    checkpoint_number: u64,
    stored_sequence: u64,
    size_bytes: u64,
    retention_s: u64,
}

/// What of the source would be lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplicaLag {
    /// Nothing that it has stored.
    Nothing,
    /// This much of its log, in bytes and in milliseconds between the newest writes. Both are zero
    /// if only a snapshot, a resize or the like is missing.
    By {
        /// Bytes of log.
        bytes: u64,
        /// Milliseconds between the newest writes.
        ms: u64,
    },
    /// The source's address now leads to another volume or history: a comparison is impossible.
    Elsewhere,
}

/// What [`promote`](super::promote) would find and make, with everything verified. Changes nothing.
///
/// Errors: those of `promote`, except that damage is listed.
pub fn drill(
    world: &dyn World,
    store: &dyn ObjectStore,
    name: &str,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Drill> {
    let record = names::find(store, name)?;
    let role = role::newest(store, record.volume_id)?.ok_or_else(|| no_replica(name))?;
    if role::is_begun(store, &role)? {
        return Err(promoted_before(name, &role));
    }
    let stored = stored::stored_as_it_is(store, record.clone(), &mut Reporter::new(world))?;
    require_arrived(&record, &role, stored.newest.checkpoint.number)?;
    let mut check = check(store, &record, progress)?;
    for note in &stored.newest.notes {
        let is_reported =
            |one: &Damage| one.what.contains(note.as_str()) || note.contains(one.object.as_str());
        if !check.damage.iter().any(is_reported) {
            check.damage.push(Damage::of(&record.name, note));
        }
    }
    check.notes.retain(|note| !stored.newest.notes.contains(note));
    let promotion = promotion_of(&stored, &role, stored.end.epoch);
    Ok(Drill { promotion, check, end: end_of(&stored) })
}

fn end_of(stored: &StoredVolume) -> End {
    End {
        checkpoint_number: stored.newest.checkpoint.number,
        stored_sequence: stored.end.stored_sequence,
        size_bytes: stored.record.size_bytes,
        retention_s: stored.view.cuts.lock().retention_s,
    }
}

/// How far a replica is behind volume `name` of `source`, measured against what that has stored.
pub fn behind(
    world: &dyn World,
    source: &dyn ObjectStore,
    name: &str,
    drill: &Drill,
) -> Result<ReplicaLag> {
    let stored = names::stored(source, name, &mut Reporter::new(world))?;
    let begins = role::newest(source, stored.record.volume_id)?.and_then(|role| role.promoted());
    let number = drill.end.checkpoint_number;
    let is_one = stored.record.volume_id == drill.promotion.record.volume_id
        && number <= stored.newest.number_max
        && begins.is_none_or(|begins| number >= begins.checkpoint_number);
    if !is_one {
        return Ok(ReplicaLag::Elsewhere);
    }
    let end = End { checkpoint_number: number, ..end_of(&stored) };
    if end == drill.end && stored.end.epoch == drill.promotion.epoch {
        return Ok(ReplicaLag::Nothing);
    }
    if end.stored_sequence < drill.end.stored_sequence
        || stored.end.position < drill.promotion.position
    {
        return Ok(ReplicaLag::Elsewhere);
    }
    let bytes = stored.end.position - drill.promotion.position;
    // The same end was written at the same moment.
    let ms = if bytes == 0 {
        0
    } else {
        newest_wall(&stored).saturating_sub(drill.promotion.wall_unix_ms)
    };
    Ok(ReplicaLag::By { bytes, ms })
}
