//! The role of a store for a volume, and what it allows.
//!
//! Invariants: roles are numbered without gaps and create-only, so of two processes that want the
//! next number, one gets it. They are read by name, so that a list that lags cannot hide one.
//!
//! Not here: when a role is put (`destination`, `promote`), and a role's bytes
//! (`sawmill_format::role`).

use bytes::Bytes;
use sawmill_format::checkpoint::checkpoint_key;
use sawmill_format::ids::VolumeId;
use sawmill_format::role::{Role, RoleKind, role_key};
use sawmill_format::volume_record::VolumeRecord;
use sawmill_store::{Blocking, Class, ObjectStore, PutOutcome};

use crate::recovery::checkpoint as checkpoints;
use crate::store_calls::{self, store_error};
use crate::{Error, ErrorKind, Result};

/// The newest role; `None`: a primary.
pub(crate) fn newest(store: &dyn ObjectStore, volume_id: VolumeId) -> Result<Option<Role>> {
    let mut newest = None;
    loop {
        let number = newest.as_ref().map_or(1, |role: &Role| role.number + 1);
        match read(store, volume_id, number)? {
            Some(role) => newest = Some(role),
            None => return Ok(newest),
        }
    }
}

fn read(store: &dyn ObjectStore, volume_id: VolumeId, number: u64) -> Result<Option<Role>> {
    let key = role_key(volume_id, number);
    store_calls::again_if_damaged(|| {
        let Some(bytes) = store_calls::get(store, &key, None, Class::Read)? else {
            return Ok(None);
        };
        Role::decode(&bytes, volume_id, number).map(Some).map_err(|error| {
            Error::new(ErrorKind::Corrupt, format!("{key}: {error}; nothing was changed"))
                .with_source(error)
        })
    })
}

/// Takes the next number. Returns false if another process has it.
pub(crate) fn put(store: &dyn ObjectStore, role: &Role) -> Result<bool> {
    let bytes = role
        .encode()
        .map_err(|error| Error::new(ErrorKind::Invalid, error.to_string()).with_source(error))?;
    let key = role_key(role.volume_id, role.number);
    let outcome = Blocking(store).put(&key, Bytes::from(bytes), Class::Upload);
    Ok(outcome.map_err(|error| store_error(&error))? == PutOutcome::Created)
}

/// Whether `role` is still the newest, and from that very put.
pub(crate) fn is_current(store: &dyn ObjectStore, role: &Role) -> Result<bool> {
    let keys =
        [role.number, role.number + 1].map(|number| (role_key(role.volume_id, number), None));
    let mut answers = store_calls::get_all(store, keys.into(), Class::Read).into_iter();
    let (own, next) = (answers.next(), answers.next());
    let bytes = |answer: Option<store_calls::Answer>| answer.unwrap_or(Ok(None));
    if bytes(next)?.is_some() {
        return Ok(false);
    }
    let Some(own) = bytes(own)? else { return Ok(false) };
    if let Ok(found) = Role::decode(&own, role.volume_id, role.number) {
        return Ok(found.put_id == role.put_id);
    }
    // It may have been garbled in transit.
    Ok(read(store, role.volume_id, role.number)?.is_some_and(|found| found.put_id == role.put_id))
}

/// Whether a volume whose newest checkpoint is `number` is still as a copier left it: then its log
/// ends at the first name that does not exist, whatever was copied beyond.
pub(crate) fn is_copied(store: &dyn ObjectStore, volume_id: VolumeId, number: u64) -> Result<bool> {
    Ok(newest(store, volume_id)?.is_some_and(|role| match role.kind {
        RoleKind::Replica => true,
        // An earlier checkpoint is the store's own.
        RoleKind::Returned(begins) => number >= begins.checkpoint_number,
        RoleKind::Promoted(promoted) => number < promoted.checkpoint_number,
    }))
}

/// Whether a promotion's own history has started; never, if `role` is none.
pub(crate) fn is_begun(store: &dyn ObjectStore, role: &Role) -> Result<bool> {
    let Some(promoted) = role.promoted() else { return Ok(false) };
    match checkpoints::newest(store, role.volume_id) {
        Ok(newest) if newest.number_max >= promoted.checkpoint_number => return Ok(true),
        Err(error) if error.kind() != ErrorKind::Corrupt => return Err(error),
        _ => {}
    }
    // The list may lag.
    let key = checkpoint_key(role.volume_id, promoted.checkpoint_number);
    Ok(store_calls::get(store, &key, Some(0..16), Class::Read)?.is_some())
}

/// Whether the state may be recovered from checkpoint `to` because `from` or what follows it is
/// damaged. In a primary that leads to the same state. In a copy the state would be older, because
/// the log in between is incomplete. A promoted history has nothing before its first checkpoint.
pub(crate) fn may_fall(
    store: &dyn ObjectStore,
    volume_id: VolumeId,
    from: u64,
    to: u64,
) -> Result<bool> {
    Ok(!is_copied(store, volume_id, from)? && !is_copied(store, volume_id, to)?)
}

/// Refuses to write to a replica, or to a promoted one that is not finished; `number` is its newest
/// checkpoint.
pub(crate) fn require_primary(
    store: &dyn ObjectStore,
    record: &VolumeRecord,
    number: u64,
) -> Result<()> {
    let name = &record.name;
    let Some(role) = newest(store, record.volume_id)? else { return Ok(()) };
    let text = match role.promoted() {
        None => format!(
            "volume {name} is a replica of {}: only `sawmill replicate` writes to it. Open it with \
             --read-only, or make it a primary with `sawmill promote`",
            role.source
        ),
        Some(promoted) if number < promoted.checkpoint_number => format!(
            "the promotion of volume {name} was started but not finished (or the store's list \
             lags): run `sawmill promote` again, then try again"
        ),
        Some(_) => return Ok(()),
    };
    Err(Error::new(ErrorKind::Refused, text))
}
