//! The status pins of a volume, which record that it is deleted, removed (its data is being
//! deleted) or live.
//!
//! Invariants: a status pin is created if absent, under the number after the newest that was read,
//! and stays forever; the newest counts. Of two processes that write the next one, one succeeds and
//! the other learns of it. So one process cannot remove a volume that another has just restored, or
//! the reverse.

use bytes::Bytes;
use sawmill_format::ids::{PutId, VolumeId};
use sawmill_format::kept_block::{Pin, PinnedStatus, status_pin_key};
use sawmill_store::{Blocking, Class, ObjectStore, PutOutcome};

use crate::store_calls::{self, cannot_encode, store_error};
use crate::world::World;
use crate::{Error, ErrorKind, Result};

/// The newest status pin.
pub(crate) struct NewestStatusPin {
    /// Its number; 0: there is none.
    pub(crate) number: u64,
    /// The status in it; a volume without any status pin lives.
    pub(crate) status: PinnedStatus,
    /// The last fence of a deleted volume; 0: none.
    pub(crate) fence: u64,
    /// The name recorded in it.
    pub(crate) name: String,
}

impl NewestStatusPin {
    pub(crate) fn is_gone(&self) -> bool {
        self.status != PinnedStatus::Lives
    }
}

/// Reads the status pins in order. There are few: one for each delete, and one for each restore.
pub(crate) fn newest(store: &dyn ObjectStore, volume_id: VolumeId) -> Result<NewestStatusPin> {
    let mut newest =
        NewestStatusPin { number: 0, status: PinnedStatus::Lives, fence: 0, name: String::new() };
    loop {
        let number = newest.number + 1;
        let found = store_calls::again_if_damaged(|| {
            let bytes =
                store_calls::get(store, &status_pin_key(volume_id, number), None, Class::Read)?;
            bytes.map(|bytes| decode(volume_id, number, &bytes)).transpose()
        })?;
        let Some((status, pin)) = found else { return Ok(newest) };
        newest = NewestStatusPin { number, status, fence: pin.through_sequence, name: pin.name };
    }
}

/// The content of a status pin.
#[derive(Clone, Copy)]
pub(crate) struct StatusPinContent<'a> {
    /// The last fence of a volume that is deleted; 0: none.
    pub(crate) fence: u64,
    /// The volume's name, or its last one.
    pub(crate) name: &'a str,
}

/// Creates a status pin. Returns false if another process has created a different one with that
/// number.
pub(crate) fn put(
    world: &dyn World,
    store: &dyn ObjectStore,
    volume_id: VolumeId,
    number: u64,
    status: PinnedStatus,
    content: StatusPinContent<'_>,
) -> Result<bool> {
    let pin = Pin {
        volume_id,
        put_id: PutId(world.random()?),
        pin_number: number,
        clone_id: volume_id,
        number: status as u64,
        through_sequence: content.fence,
        name: content.name.to_owned(),
    };
    let body = Bytes::from(pin.encode().map_err(cannot_encode)?);
    let put = Blocking(store).put(&status_pin_key(volume_id, number), body, Class::Upload);
    Ok(put.map_err(|error| store_error(&error))? == PutOutcome::Created)
}

pub(crate) fn decode(
    volume_id: VolumeId,
    number: u64,
    bytes: &[u8],
) -> Result<(PinnedStatus, Pin)> {
    let damaged = |what| {
        Error::new(ErrorKind::Corrupt, format!("{}: {what}", status_pin_key(volume_id, number)))
    };
    let pin = Pin::decode(bytes, volume_id, number)
        .map_err(|error| damaged(error.to_string()).with_source(error))?;
    let status = PinnedStatus::of(&pin)
        .ok_or_else(|| damaged("this version does not know its content".to_owned()))?;
    Ok((status, pin))
}
