//! What a name means, by its numbered records; and how one is added.
//!
//! Invariants: a writer creates a record, if absent, under the number after the newest record it
//! read. Records are never changed or deleted. So there are no gaps, and gets alone find the newest
//! record, even when a list leaves some out. A late call does no harm: a put finds its number
//! taken, and no process deletes.
//!
//! A rename or a delete is one record that names another object, and takes effect when that object
//! is created. If a name's newest record still waits for its object, a writer that depends on the
//! name first creates this object itself, with content that cancels the step (`settle`). So the
//! step cannot take effect later. Older stores hold `volumes/<name>` instead: it counts until there
//! is a record.
//!
//! Not here: create, rename and delete (`names`), a volume's status pins (`cuts::status_pins`), and
//! volumes without a name (`lost`).

use std::collections::BTreeMap;

use bytes::Bytes;
use sawmill_format::ids::{PutId, VolumeId};
use sawmill_format::kept_block::{PinnedStatus, status_pin_key};
use sawmill_format::name_record::{NAME_PREFIX, NameRecord, NameStep, name_key, parse_name_key};
use sawmill_format::volume_record::{VOLUME_PREFIX, VolumeRecord, parse_volume_key, volume_key};
use sawmill_store::{Blocking, Class, ObjectStore, PutOutcome};

use super::{TRIES_MAX, VolumeEntry, busy};
use crate::cuts::status_pins::{self, StatusPinContent};
use crate::store_calls::{self, store_error};
use crate::world::World;
use crate::{Error, ErrorKind, Result};

/// The present state of a name.
pub(crate) struct NameState {
    /// The number of its newest record; 0: it has none.
    pub(crate) number: u64,
    /// That record.
    pub(crate) newest: Option<NameRecord>,
    /// The volume that the name means.
    pub(crate) volume: Option<VolumeRecord>,
    /// Its newest record waits for an object.
    pub(crate) is_waiting: bool,
}

impl NameState {
    fn by(newest: NameRecord, awaited: Option<&[u8]>) -> Result<Self> {
        let (has_volume, is_waiting) = judge(&newest, awaited)?;
        let volume = has_volume.then(|| newest.volume.clone());
        Ok(NameState { number: newest.number, newest: Some(newest), volume, is_waiting })
    }
}

/// Reads the present state of a name.
pub(crate) fn read_state(store: &dyn ObjectStore, name: &str) -> Result<NameState> {
    store_calls::again_if_damaged(|| {
        let Some((number, bytes)) = newest(store, name)? else {
            let volume = store_calls::get(store, &volume_key(name), None, Class::Read)?;
            let volume = volume.map(|bytes| decode_old(name, &bytes)).transpose()?;
            return Ok(NameState { number: 0, newest: None, volume, is_waiting: false });
        };
        let newest = decode(name, number, &bytes)?;
        let awaited = match awaited_key(&newest) {
            Some(key) => store_calls::get(store, &key, None, Class::Read)?,
            None => None,
        };
        NameState::by(newest, awaited.as_deref())
    })
}

/// The newest record: doubles the stride up to a number that does not exist, then bisects. The
/// first two numbers at once, because most names have one record.
fn newest(store: &dyn ObjectStore, name: &str) -> Result<Option<(u64, Bytes)>> {
    let keys = [1, 2].map(|number| (name_key(name, number), None));
    let mut answers = store_calls::get_all(store, keys.into(), Class::Read).into_iter();
    let mut next = || answers.next().unwrap_or(Ok(None));
    let (first, second) = (next()?, next()?);
    let mut free = second.is_none().then_some(2);
    let mut found: Option<(u64, Bytes)> = match (first, second) {
        (None, _) => return Ok(None),
        (Some(first), None) => Some((1, first)),
        (Some(_), Some(second)) => Some((2, second)),
    };
    loop {
        let low = found.as_ref().map_or(0, |(number, _)| *number);
        let number = match free {
            None => (2 * low).max(1),
            Some(free) if free - low <= 1 => return Ok(found),
            Some(free) => low + (free - low) / 2,
        };
        match store_calls::get(store, &name_key(name, number), None, Class::Read)? {
            Some(bytes) => found = Some((number, bytes)),
            None => free = Some(number),
        }
    }
}

/// The object whose creation makes a step take effect.
fn awaited_key(record: &NameRecord) -> Option<String> {
    match &record.step {
        NameStep::Moves { to, number } => Some(name_key(to, *number)),
        NameStep::Ends { status_pin } => Some(status_pin_key(record.volume.volume_id, *status_pin)),
        NameStep::Claims | NameStep::Void => None,
    }
}

/// Whether a name with this newest record means its volume, and whether it waits: `awaited` is the
/// object that [`awaited_key`] names, if it is there.
fn judge(record: &NameRecord, awaited: Option<&[u8]>) -> Result<(bool, bool)> {
    let volume_id = record.volume.volume_id;
    Ok(match (&record.step, awaited) {
        (NameStep::Claims, _) => (true, false),
        (NameStep::Void, _) => (false, false),
        (NameStep::Moves { .. } | NameStep::Ends { .. }, None) => (true, true),
        (NameStep::Moves { to, number }, Some(bytes)) => {
            let awaited_record = decode(to, *number, bytes)?;
            (
                awaited_record.step != NameStep::Claims
                    || awaited_record.volume.volume_id != volume_id,
                false,
            )
        }
        (NameStep::Ends { status_pin }, Some(bytes)) => {
            let (status, _) = status_pins::decode(volume_id, *status_pin, bytes)?;
            (status == PinnedStatus::Lives, false)
        }
    })
}

/// As [`read_state`], but afterwards no earlier step can take effect any more.
pub(crate) fn settle(world: &dyn World, store: &dyn ObjectStore, name: &str) -> Result<NameState> {
    for _ in 0..TRIES_MAX {
        let standing = read_state(store, name)?;
        let Some(newest) = standing.newest.as_ref().filter(|_| standing.is_waiting) else {
            return Ok(standing);
        };
        let volume = &newest.volume;
        // A faster process has settled it too.
        match &newest.step {
            NameStep::Moves { to, number } => {
                append(world, store, to, *number, NameStep::Void, volume)?;
            }
            NameStep::Ends { status_pin } => {
                let (lives, content) = (PinnedStatus::Lives, StatusPinContent { fence: 0, name });
                status_pins::put(world, store, volume.volume_id, *status_pin, lives, content)?;
            }
            NameStep::Claims | NameStep::Void => {}
        }
    }
    Err(busy(name))
}

/// Adds a record at a place that was free; `None`: another process was faster.
pub(crate) fn append(
    world: &dyn World,
    store: &dyn ObjectStore,
    name: &str,
    number: u64,
    step: NameStep,
    volume: &VolumeRecord,
) -> Result<Option<VolumeRecord>> {
    let put_id = PutId(world.random()?);
    let volume = VolumeRecord { put_id, name: name.to_owned(), ..volume.clone() };
    let record = NameRecord { number, step, volume };
    let encoded = record
        .encode()
        .map_err(|error| Error::new(ErrorKind::Invalid, error.to_string()).with_source(error))?;
    let put = Blocking(store).put(&name_key(name, number), Bytes::from(encoded), Class::Upload);
    match put.map_err(|error| store_error(&error))? {
        PutOutcome::Created => Ok(Some(record.volume)),
        PutOutcome::Taken => Ok(None),
    }
}

/// Gives a free name to a volume; `None`: it is not free.
pub(crate) fn claim(
    world: &dyn World,
    store: &dyn ObjectStore,
    name: &str,
    volume: &VolumeRecord,
) -> Result<Option<VolumeRecord>> {
    for _ in 0..TRIES_MAX {
        let standing = read_state(store, name)?;
        if standing.volume.is_some() {
            return Ok(None);
        }
        let claimed = append(world, store, name, standing.number + 1, NameStep::Claims, volume)?;
        if claimed.is_some() {
            return Ok(claimed);
        }
    }
    Err(busy(name))
}

/// Gives a free name to a volume that may have been deleted here before, or whose name was lost. An
/// earlier status pin that lands late no longer counts. `None`: the name is not free.
pub(crate) fn name_again(
    world: &dyn World,
    store: &dyn ObjectStore,
    name: &str,
    volume: &VolumeRecord,
) -> Result<Option<VolumeRecord>> {
    let volume_id = volume.volume_id;
    let number = status_pins::newest(store, volume_id)?.number + 1;
    let (lives, content) = (PinnedStatus::Lives, StatusPinContent { fence: 0, name });
    let is_created = status_pins::put(world, store, volume_id, number, lives, content)?;
    if !is_created && status_pins::newest(store, volume_id)?.is_gone() {
        return Err(busy(name));
    }
    claim(world, store, name, volume)
}

/// Removes the record that an older version left and a numbered one has superseded: only an older
/// version reads it. Whether it goes, and when, changes nothing.
pub(crate) fn remove_old(store: &dyn ObjectStore, name: &str, was: &NameState) {
    if was.number == 0 {
        let _ = Blocking(store).delete(vec![volume_key(name)], Class::Background);
    }
}

/// All names that a list shows and that mean a volume, each verified; sorted.
pub(crate) fn all(store: &dyn ObjectStore) -> Result<Vec<VolumeEntry>> {
    let list =
        |prefix| Blocking(store).list(prefix, Class::Read).map_err(|error| store_error(&error));
    let mut numbers = BTreeMap::<String, u64>::new();
    for object in list(VOLUME_PREFIX)? {
        if let Some(name) = parse_volume_key(&object.key) {
            numbers.insert(name.to_owned(), 0);
        }
    }
    for object in list(NAME_PREFIX)? {
        if let Some((name, number)) = parse_name_key(&object.key) {
            let newest = numbers.entry(name.to_owned()).or_default();
            *newest = number.max(*newest);
        }
    }
    let numbers: Vec<_> = numbers.into_iter().collect();
    let mut listed = Vec::new();
    for chunk in numbers.chunks(32) {
        listed.extend(some(store, chunk));
    }
    Ok(listed)
}

/// As [`all`], for some names, each with the newest number that the list showed.
fn some(store: &dyn ObjectStore, names: &[(String, u64)]) -> Vec<VolumeEntry> {
    let requests = names.iter().flat_map(|(name, number)| {
        [name_key(name, (*number).max(1)), name_key(name, number + 1)].map(|key| (key, None))
    });
    let mut answers = store_calls::get_all(store, requests.collect(), Class::Read).into_iter();
    let mut next = || answers.next().unwrap_or(Ok(None));
    let mut found = Vec::new();
    for (name, number) in names {
        found.push(match (next(), next()) {
            (Ok(Some(bytes)), Ok(None)) => decode(name, *number, &bytes).ok(),
            _ => None,
        });
    }
    let keys = found.iter().flatten().filter_map(awaited_key).map(|key| (key, None)).collect();
    let mut awaited = store_calls::get_all(store, keys, Class::Read).into_iter();
    let mut listed = Vec::new();
    for ((name, _), newest) in names.iter().zip(found) {
        let state = newest.and_then(|newest| match awaited_key(&newest) {
            None => NameState::by(newest, None).ok(),
            Some(_) => NameState::by(newest, awaited.next()?.ok()?.as_deref()).ok(),
        });
        // The list lags, or something could not be read.
        let standing = state.map_or_else(|| read_state(store, name), Ok);
        if let Some(record) = standing.map(|standing| standing.volume).transpose() {
            listed.push(VolumeEntry { name: name.clone(), record });
        }
    }
    listed
}

/// Whether a name means this volume.
pub(crate) fn means(store: &dyn ObjectStore, name: &str, volume_id: VolumeId) -> Result<bool> {
    Ok(read_state(store, name)?.volume.is_some_and(|volume| volume.volume_id == volume_id))
}

pub(super) fn decode(name: &str, number: u64, bytes: &[u8]) -> Result<NameRecord> {
    let damaged = |error| Error::caused(ErrorKind::Corrupt, name_key(name, number), error);
    NameRecord::decode(bytes, name, number).map_err(damaged)
}

fn decode_old(name: &str, bytes: &[u8]) -> Result<VolumeRecord> {
    let damaged = |error| Error::caused(ErrorKind::Corrupt, volume_key(name), error);
    VolumeRecord::decode(bytes, name).map_err(damaged)
}
