//! Volumes that no name means: their names were lost, or their creation was interrupted.
//!
//! Invariants: a volume is found by the objects under its id, so none is overlooked; it gets a name
//! only when no name is known to mean it, it has not been deleted, and it is not an incomplete
//! copy. If a lagging list hides its name, the volume gets a second one, and cannot be deleted
//! until one of them is gone.
//!
//! Not here: the existing names (`ledger`).

use std::collections::BTreeSet;

use sawmill_format::checkpoint::parse_checkpoint_key;
use sawmill_format::ids::{PutId, VolumeId};
use sawmill_format::name_record::{NAME_PREFIX, parse_name_key};
use sawmill_format::volume_record::VolumeRecord;
use sawmill_store::{Blocking, Class, ObjectStore};

use super::{check_name, exists, ledger, list, replica};
use crate::cuts::status_pins;
use crate::options::CreateOptions;
use crate::recovery::checkpoint;
use crate::store_calls::{self, store_error};
use crate::world::{RealWorld, World};
use crate::{Error, ErrorKind, Result, limits};

/// A volume that no name means.
#[derive(Clone, Debug)]
pub struct UnnamedVolume {
    /// Its id.
    pub volume_id: VolumeId,
    /// Its size, or why that cannot be read.
    pub size_bytes: Result<u64>,
    /// It was deleted, and something of it is left: its clones need it, or the delete was
    /// interrupted.
    pub is_deleted: bool,
}

/// The volumes that no name means, by id. Lists every key of the store: a request for each thousand
/// objects.
pub fn unnamed(store: &dyn ObjectStore) -> Result<Vec<UnnamedVolume>> {
    let mut ids = BTreeSet::new();
    for object in Blocking(store).list("", Class::Read).map_err(|error| store_error(&error))? {
        ids.extend(parse_checkpoint_key(&object.key).map(|(volume_id, _)| volume_id));
    }
    for listed in list(store)? {
        // A name that cannot be read may mean any of them, so its error ends the search.
        ids.remove(&listed.record?.volume_id);
    }
    let described = ids.into_iter().map(|volume_id| {
        let newest = checkpoint::newest(store, volume_id);
        let size_bytes = newest.map(|newest| newest.checkpoint.size_bytes);
        Ok(UnnamedVolume {
            volume_id,
            size_bytes,
            is_deleted: status_pins::newest(store, volume_id)?.is_gone(),
        })
    });
    described.collect()
}

/// Names a volume that no name means. If all its records are gone, `block_bytes` and the defaults
/// of a new volume replace them.
pub fn name_unnamed(
    store: &dyn ObjectStore,
    volume_id: VolumeId,
    name: &str,
    block_bytes: Option<u32>,
) -> Result<VolumeRecord> {
    name_unnamed_in(&RealWorld::default(), store, volume_id, name, block_bytes)
}

fn name_unnamed_in(
    world: &dyn World,
    store: &dyn ObjectStore,
    volume_id: VolumeId,
    name: &str,
    block_bytes: Option<u32>,
) -> Result<VolumeRecord> {
    check_name(name)?;
    let refused = |text: String| Err(Error::new(ErrorKind::Refused, text));
    for listed in list(store)? {
        let other = &listed.name;
        if listed.record?.volume_id == volume_id {
            return refused(format!(
                "volume {volume_id} has a name: `sawmill rename {other} {name}`"
            ));
        }
    }
    // Refuses an id under which there is no volume to open.
    let newest = checkpoint::newest(store, volume_id)?;
    if status_pins::newest(store, volume_id)?.is_gone() {
        return refused(format!(
            "volume {volume_id} was deleted: its remains are deleted with its clones"
        ));
    }
    if replica(store, volume_id)?.is_some() {
        return refused(format!(
            "volume {volume_id} is a replica that has no name yet: run `sawmill replicate` again \
            to name it"
        ));
    }
    let record = match last_record(store, volume_id)? {
        Some(record) => record,
        None => record_again(world, volume_id, newest.checkpoint.size_bytes, block_bytes)?,
    };
    ledger::name_again(world, store, name, &record)?.ok_or_else(|| exists(name))
}

/// The record of the volume in some earlier name: records are never deleted.
fn last_record(store: &dyn ObjectStore, volume_id: VolumeId) -> Result<Option<VolumeRecord>> {
    for object in
        Blocking(store).list(NAME_PREFIX, Class::Read).map_err(|error| store_error(&error))?
    {
        let Some((name, number)) = parse_name_key(&object.key) else { continue };
        let Some(bytes) = store_calls::get(store, &object.key, None, Class::Read)? else {
            continue;
        };
        if let Ok(record) = ledger::decode(name, number, &bytes)
            && record.volume.volume_id == volume_id
        {
            return Ok(Some(record.volume));
        }
    }
    Ok(None)
}

fn record_again(
    world: &dyn World,
    volume_id: VolumeId,
    size_bytes: u64,
    block_bytes: Option<u32>,
) -> Result<VolumeRecord> {
    let Some(block_bytes) = block_bytes else {
        let text = format!(
            "the store no longer records the block size of volume {volume_id}: add `--block-size \
             4096` (the default of new volumes) or 512"
        );
        return Err(Error::new(ErrorKind::Invalid, text));
    };
    let options = CreateOptions { block_bytes, ..CreateOptions::new(size_bytes) };
    super::check_options(&options)?;
    Ok(VolumeRecord {
        volume_id,
        put_id: PutId(world.random()?),
        size_bytes,
        block_bytes,
        segment_bytes: options.segment_bytes,
        frame_bytes: limits::FRAME_BYTES,
        flush_mode: options.flush,
        created_unix_ms: world.unix_ms(),
        name: String::new(),
    })
}
