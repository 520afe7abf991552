//! Checks whether this store may hold a replica of that volume, before anything is copied, and
//! records the role.
//!
//! Invariant: a store that holds the volume as a primary becomes a replica only on request, only of
//! a history that was promoted after everything it has, and a fence after the role keeps its
//! writers out. A copier of another source or history puts a role of its own, which ends the
//! previous copier.
//!
//! Not here: reading roles and what a role allows (`role`), the fence itself (`crate::fencing`),
//! and copying (`copier`).

use sawmill_format::checkpoint::Checkpoint;
use sawmill_format::ids::PutId;
use sawmill_format::kept_block::{PinnedStatus, tombstone_key};
use sawmill_format::role::{PromotionPoint, Role, RoleKind, role_key};
use sawmill_format::volume_record::VolumeRecord;
use sawmill_store::{Blocking, Class, ObjectStore};

use super::options::CopyOptions;
use super::{destination_objects, role};
use crate::cuts::status_pins;
use crate::fencing::{FenceAttempt, fence};
use crate::recovery::checkpoint as checkpoints;
use crate::recovery::stored::end_of_log;
use crate::store_calls::{self, store_error};
use crate::world::World;
use crate::{Error, ErrorKind, Result, names};

/// Whether the destination is still the replica that the copier found or made.
pub(super) fn check_role(destination: &dyn ObjectStore, role: &Role) -> Result<()> {
    if role::is_current(destination, role)? {
        return Ok(());
    }
    let text =
        "the destination is no longer this replica: it was promoted or deleted; copying stops";
    Err(Error::new(ErrorKind::Fenced, text))
}

pub(super) fn require_no_lineage(record: &VolumeRecord, root: &Checkpoint) -> Result<()> {
    if root.kept.lineage.is_empty() {
        return Ok(());
    }
    let text = format!(
        "volume {} is a clone and shares segments with its base, which a replica cannot: `sawmill \
         copy` it to a volume of its own, and replicate that",
        record.name
    );
    Err(Error::new(ErrorKind::Refused, text))
}

pub(super) fn require_copyable(
    source: &dyn ObjectStore,
    record: &VolumeRecord,
    root: &Checkpoint,
) -> Result<()> {
    require_no_lineage(record, root)?;
    let Some(role) = role::newest(source, record.volume_id)? else { return Ok(()) };
    let text = match role.promoted() {
        None => format!(
            "volume {} is a replica itself, of {}: replicate from there, or promote it first",
            record.name, role.source
        ),
        Some(promoted) if root.number < promoted.checkpoint_number => {
            format!(
                "the promotion of volume {} is not finished: run `sawmill promote` again",
                record.name
            )
        }
        Some(_) => return Ok(()),
    };
    Err(Error::new(ErrorKind::Refused, text))
}

/// Whether the volume has its name at the destination. Refuses another volume's name, and a second
/// name.
pub(super) fn check_names(
    destination: &dyn ObjectStore,
    record: &VolumeRecord,
    name: &str,
) -> Result<bool> {
    let newest = status_pins::newest(destination, record.volume_id)?;
    let is_old =
        |key| store_calls::get(destination, key, None, Class::Read).map(|found| found.is_some());
    if newest.status == PinnedStatus::Deleted
        || newest.number == 0 && is_old(&tombstone_key(record.volume_id))?
    {
        let text = format!(
            "volume {} ({}) was deleted at the destination, and clones there still need its data: \
             delete them first, or replicate to another store",
            record.name, record.volume_id
        );
        return Err(Error::new(ErrorKind::Refused, text));
    }
    let mut is_named = false;
    for listed in names::list(destination)? {
        let same = listed.record.as_ref().is_ok_and(|there| there.volume_id == record.volume_id);
        if listed.name == name && !same {
            let text = format!(
                "the destination has another volume called {name:?}: choose another name for the \
                 replica, or `sawmill delete` that one first"
            );
            return Err(Error::new(ErrorKind::Exists, text));
        }
        if same && listed.name != name {
            let text = format!(
                "the destination has this volume already, as {:?}: give that name, or rename it \
                 there to {name:?}",
                listed.name
            );
            return Err(Error::new(ErrorKind::Refused, text));
        }
        is_named |= same;
    }
    Ok(is_named)
}

/// Makes the destination a replica, unless it is one.
pub(super) fn take_role(
    world: &dyn World,
    source: &dyn ObjectStore,
    destination: &dyn ObjectStore,
    record: &VolumeRecord,
    options: &CopyOptions,
) -> Result<Role> {
    let id = record.volume_id;
    let found = role::newest(destination, id)?;
    let root_numbers = destination_objects::roots(destination, id)?;
    let number = match root_numbers.is_empty() {
        true => 0,
        false => checkpoints::newest(destination, id)?.number_max,
    };
    // Read after the destination's: the source advances, and another copier may follow it.
    let source_number = checkpoints::newest(source, id)?.number_max;
    if number > source_number {
        let text = format!(
            "the destination is ahead of the source (checkpoint {number} against {source_number}): \
             it was promoted and written to, or the source is an old copy; nothing was changed. To \
             return to the source's state, delete the volume at the destination first"
        );
        return Err(Error::new(ErrorKind::Refused, text));
    }
    // Only a history that was promoted after the destination's own may replace that.
    let begins = role::newest(source, id)?.and_then(|role| role.promoted());
    let is_before = begins.is_some_and(|promoted| number < promoted.checkpoint_number);
    if let Some(role) = &found
        && role.promoted().is_none()
    {
        let found = LeftReplica { role, number, begins: begins.filter(|_| is_before) };
        return take_up(world, destination, record, &found, options);
    }
    let is_primary = found.is_some() || !root_numbers.is_empty();
    if is_primary && !(options.fail_back && is_before) {
        return Err(not_a_replica(record, options.fail_back));
    }
    let role = Role {
        volume_id: id,
        put_id: PutId(world.random()?),
        number: found.map_or(1, |role| role.number + 1),
        wall_unix_ms: world.unix_ms(),
        kind: match begins {
            Some(begins) if is_primary => RoleKind::Returned(begins),
            _ => RoleKind::Replica,
        },
        source: options.source_text.clone(),
    };
    if is_primary && is_same_store(world, source, destination, &role)? {
        return Err(same_store());
    }
    put_role(destination, &role)?;
    if let RoleKind::Returned(begins) = role.kind {
        shut_out_writers(world, destination, record, begins)?;
    }
    Ok(role)
}

/// A replica that another copier has left.
struct LeftReplica<'a> {
    role: &'a Role,
    /// Its newest checkpoint.
    number: u64,
    /// Where the source's history begins, if that is later.
    begins: Option<PromotionPoint>,
}

/// Resumes a replica. A copier of another source, or of another history than the source's, may
/// still be at work: a new role ends it.
fn take_up(
    world: &dyn World,
    destination: &dyn ObjectStore,
    record: &VolumeRecord,
    replica: &LeftReplica<'_>,
    options: &CopyOptions,
) -> Result<Role> {
    let LeftReplica { role: found, number, begins } = *replica;
    // What the copier wrote itself is still all that the replica has.
    let is_own =
        matches!(found.kind, RoleKind::Returned(waits) if number < waits.checkpoint_number);
    let kind = match begins {
        Some(begins) if is_own => RoleKind::Returned(begins),
        _ => found.kind,
    };
    let is_same_history = is_own && kind == found.kind || begins.is_none() || number == 0;
    let is_same = found.source == options.source_text && is_same_history;
    let role = match is_same {
        true => found.clone(),
        false => {
            let role = Role {
                put_id: PutId(world.random()?),
                number: found.number + 1,
                wall_unix_ms: world.unix_ms(),
                kind,
                source: options.source_text.clone(),
                ..found.clone()
            };
            put_role(destination, &role)?;
            role
        }
    };
    if let RoleKind::Returned(begins) = role.kind
        && is_own
    {
        // The process that made it a replica may have died before this.
        shut_out_writers(world, destination, record, begins)?;
    }
    Ok(role)
}

fn put_role(destination: &dyn ObjectStore, role: &Role) -> Result<()> {
    if role::put(destination, role)? {
        return Ok(());
    }
    let text = "another process changed the destination's role at the same moment: check the \
                destination, then try again";
    Err(Error::new(ErrorKind::Refused, text))
}

/// Refuses a store without conditional creation of objects: there, two concurrent promotions would
/// both win, and a copier could overwrite.
pub fn require_fencing(store: &dyn ObjectStore) -> Result<()> {
    crate::fencing::require_fencing(store)
}

fn not_a_replica(record: &VolumeRecord, fail_back: bool) -> Error {
    let text = if fail_back {
        "the source is not a promoted replica of what the destination holds: only a promoted \
         replica can replace a primary; if the writes at the destination may be lost, delete the \
         volume there first"
            .to_owned()
    } else {
        format!(
            "the destination holds volume {} as a primary, not as a replica: with --fail-back it \
             becomes a replica of a promoted source, and writes that exist only at the destination \
             are lost",
            record.name
        )
    };
    Error::new(ErrorKind::Refused, text)
}

fn same_store() -> Error {
    let text = "the destination is the source itself: a replica needs a store of its own";
    Error::new(ErrorKind::Refused, text)
}

/// Two URLs may lead to one store. Put an object at one and look for it at the other.
fn is_same_store(
    world: &dyn World,
    source: &dyn ObjectStore,
    destination: &dyn ObjectStore,
    role: &Role,
) -> Result<bool> {
    let number = u64::from_le_bytes(world.random()?[..8].try_into().unwrap_or_default()) | 1 << 63;
    let probe = Role { number, ..role.clone() };
    let key = role_key(role.volume_id, number);
    // A put that failed may have taken effect: the role is removed in any case.
    let put = role::put(destination, &probe);
    let visible_role = put.and_then(|_| store_calls::get(source, &key, None, Class::Read));
    let removed = Blocking(destination).delete(vec![key], Class::Upload);
    let visible_role = visible_role?;
    removed.map_err(|error| store_error(&error))?;
    Ok(visible_role.is_some())
}

/// Puts a fence that a writer attached to the destination meets; no new writer attaches. Once the
/// destination has the source's history, from `begins` on, there is no fence: it would take a name
/// at which the source continues.
fn shut_out_writers(
    world: &dyn World,
    destination: &dyn ObjectStore,
    record: &VolumeRecord,
    begins: PromotionPoint,
) -> Result<()> {
    loop {
        let mut end = end_of_log(destination, record)?;
        if end.checkpoint_number >= begins.checkpoint_number {
            return Ok(());
        }
        let attempt = FenceAttempt::after(end.epoch, world)?;
        match fence(destination, record, &mut end, attempt, world) {
            Ok(_) => return Ok(()),
            // The writer was faster: the log has grown.
            Err(error) if error.kind() == ErrorKind::Exists => {}
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use sawmill_store::{Call, CallKind, Fault, FaultStore, StoreOptions};

    use super::*;
    use crate::RealWorld;

    #[test]
    fn a_look_for_the_same_store_leaves_nothing_even_if_its_put_failed() {
        let open = || sawmill_store::open("memory:", StoreOptions::default()).unwrap();
        let (source, behind) = (open(), open());
        let lost = |call: &Call| match call.kind {
            CallKind::Put => Fault::LoseAnswer,
            _ => Fault::None,
        };
        let destination = FaultStore::new(behind.clone(), Box::new(lost));
        let role = Role {
            volume_id: sawmill_format::ids::VolumeId([7; 16]),
            put_id: PutId([1; 16]),
            number: 1,
            wall_unix_ms: 0,
            kind: RoleKind::Replica,
            source: "elsewhere".into(),
        };
        assert!(is_same_store(&RealWorld::default(), &*source, &*destination, &role).is_err());
        assert_eq!(Blocking(&*behind).list("", Class::Read).unwrap(), []);
    }
}
