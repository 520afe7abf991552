//! Volumes by name: create, find, list, rename, delete. The name is an object of its own (`volumes/<name>`);
//! everything else of a volume lives under its id, so that a name can be given again without meeting old
//! data.

use bytes::Bytes;
use sawmill_format::checkpoint::{Checkpoint, checkpoint_key};
use sawmill_format::ids::{PutId, VolumeId};
use sawmill_format::kept::Kept;
use sawmill_format::role::RoleKind;
use sawmill_format::volume_record::{VOLUME_PREFIX, VolumeRecord, parse_volume_key, volume_key};
use sawmill_store::{Blocking, Class, ObjectStore, PutOutcome};

use crate::ask::{self, store_error};
use crate::cuts::{Kin, bury, let_go, put_tombstone};
use crate::open::{self, demand_fencing, fence};
use crate::options::CreateOptions;
use crate::recovery::checkpoint;
use crate::replicate::role;
use crate::world::{RealWorld, World};
use crate::{Error, ErrorKind, Result, limits};

/// One volume of a store.
#[derive(Clone, Debug)]
pub struct Listed {
    /// Its name.
    pub name: String,
    /// Its record, or why it cannot be read.
    pub record: Result<VolumeRecord>,
}

/// What a delete removed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Deleted {
    /// Objects.
    pub objects: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Clones that still need the data: it goes with the last of them.
    pub pinned_by: Vec<String>,
}

/// Makes a new, empty volume. Refuses a store that cannot keep two writers apart, unless told to go on.
pub fn create(store: &dyn ObjectStore, name: &str, options: &CreateOptions) -> Result<VolumeRecord> {
    check_name(name)?;
    check_options(options)?;
    if ask::get(store, &volume_key(name), None, Class::Read)?.is_some() {
        return Err(exists(name));
    }
    demand_fencing(store, options.no_fencing)?;
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
    // The first checkpoint goes first: a name that can be found can be opened.
    let first = Checkpoint {
        volume_id,
        put_id: PutId(world.random()?),
        number: 1,
        epoch: 0,
        through_sequence: 0,
        next_sequence: 1,
        position: 0,
        wall_unix_ms: world.unix_ms(),
        size_bytes: options.size_bytes,
        clean: true,
        extent_total: 0,
        live_bytes: 0,
        segments: Vec::new(),
        parts: Vec::new(),
        kept: Kept { retention_s: options.retention_s, ..Kept::default() },
    };
    put(store, &checkpoint_key(volume_id, 1), first.encode())?;
    let encoded = record.encode().map_err(|error| Error::new(ErrorKind::Invalid, error.to_string()))?;
    match put(store, &volume_key(name), encoded)? {
        PutOutcome::Created => Ok(record),
        PutOutcome::Taken => {
            // Somebody was faster; what we made is ours alone. A failure leaves one small object behind.
            let _ = Blocking(store).delete(vec![checkpoint_key(volume_id, 1)], Class::Background);
            Err(exists(name))
        }
    }
}

/// Finds a volume.
pub fn find(store: &dyn ObjectStore, name: &str) -> Result<VolumeRecord> {
    check_name(name)?;
    ask::again_if_damaged(|| {
        let bytes = ask::get(store, &volume_key(name), None, Class::Read)?.ok_or_else(|| {
            let text = format!(
                "there is no volume {name:?} in this store: `sawmill list` shows them, `sawmill create` \
                 makes one"
            );
            Error::new(ErrorKind::NotFound, text)
        })?;
        decode(name, &bytes)
    })
}

/// Lists the volumes of a store, sorted by name.
pub fn list(store: &dyn ObjectStore) -> Result<Vec<Listed>> {
    let listed = Blocking(store).list(VOLUME_PREFIX, Class::Read).map_err(|error| store_error(&error))?;
    let mut names: Vec<String> =
        listed.iter().filter_map(|object| parse_volume_key(&object.key)).map(str::to_owned).collect();
    names.sort();
    let mut volumes = Vec::new();
    for names in names.chunks(32) {
        let wanted = names.iter().map(|name| (volume_key(name), None)).collect();
        for (name, answer) in names.iter().zip(ask::get_all(store, wanted, Class::Read)) {
            let record = match answer {
                // Deleted since it was listed.
                Ok(None) => continue,
                Ok(Some(bytes)) => decode(name, &bytes),
                Err(error) => Err(error),
            };
            volumes.push(Listed { name: name.clone(), record });
        }
    }
    Ok(volumes)
}

/// Gives a volume another name. It keeps its id, and with it its data, its journals and whoever has it open.
///
/// The new name is made first and the old one deleted last, so a crash in between leaves both: two names of
/// one volume. That is safe (attaching goes by id, and `delete` refuses either), and the same rename again
/// finishes it.
pub fn rename(store: &dyn ObjectStore, old: &str, new: &str) -> Result<VolumeRecord> {
    rename_in(&RealWorld::default(), store, old, new)
}

/// As [`rename`] in a given world.
pub fn rename_in(world: &dyn World, store: &dyn ObjectStore, old: &str, new: &str) -> Result<VolumeRecord> {
    check_name(new)?;
    if old == new {
        let text = format!("{old:?} is its name already");
        return Err(Error::new(ErrorKind::Invalid, text));
    }
    let record = find(store, old)?;
    if let Some(other) = other_name(store, &record)?.filter(|other| other != new) {
        let text = format!(
            "{old:?} is called {other:?} too, by a rename that was interrupted: finish that one first, with \
             `sawmill rename {old} {other}`"
        );
        return Err(Error::new(ErrorKind::Refused, text));
    }
    let renamed = VolumeRecord { name: new.to_owned(), put_id: PutId(world.random()?), ..record };
    let encoded = renamed.encode().map_err(|error| Error::new(ErrorKind::Invalid, error.to_string()))?;
    if put(store, &volume_key(new), encoded)? == PutOutcome::Taken {
        let there = find(store, new)?;
        if there.volume_id != renamed.volume_id {
            return Err(exists(new));
        }
    }
    let deleted = Blocking(store).delete(vec![volume_key(old)], Class::Upload);
    deleted.map_err(|error| store_error(&error))?;
    Ok(renamed)
}

/// Another name of the same volume: a rename died half way.
fn other_name(store: &dyn ObjectStore, record: &VolumeRecord) -> Result<Option<String>> {
    let same = |listed: &Listed| {
        let id = listed.record.as_ref().map(|record| record.volume_id);
        listed.name != record.name && id.ok() == Some(record.volume_id)
    };
    Ok(list(store)?.into_iter().find(same).map(|listed| listed.name))
}

/// Deletes a volume. A writer that has it attached is fenced first, and the last fence stays behind for ever,
/// so that the writer cannot take its absence for success. What clones still need goes with the last of them.
pub fn delete(store: &dyn ObjectStore, name: &str) -> Result<Deleted> {
    delete_in(&RealWorld::default(), store, name)
}

/// As [`delete`] in a given world.
pub fn delete_in(world: &dyn World, store: &dyn ObjectStore, name: &str) -> Result<Deleted> {
    let record = find(store, name)?;
    if let Some(other) = other_name(store, &record)? {
        let text = format!(
            "{name:?} and {other:?} are two names of one volume, left by a rename that was interrupted: \
             finish it with `sawmill rename {name} {other}` or `sawmill rename {other} {name}`, then delete"
        );
        return Err(Error::new(ErrorKind::Refused, text));
    }
    let volume_id = record.volume_id;
    let lost = |kind| matches!(kind, ErrorKind::Corrupt | ErrorKind::NotFound);
    // Nobody writes a replica: no writer is to be shut out, and its copier looks whether it is still there. A
    // fence would stand where its source goes on.
    let replica = match role::newest(store, volume_id)? {
        Some(role) if role::is_begun(store, &role)? => None,
        role => role,
    };
    let fence = match open::end_of_log(store, &record) {
        Ok(_) if replica.is_some() => 0,
        Ok(mut end) => fence(store, &record, &mut end, PutId(world.random()?), world)?,
        // A volume too damaged to be opened can still be deleted, but then nobody is kept out.
        Err(error) if lost(error.kind()) => 0,
        Err(error) => return Err(error),
    };
    // Its pins elsewhere stay for ever when it cannot say where they are: `check` of its base tells.
    let lineage = match checkpoint::newest(store, volume_id) {
        Ok(newest) => newest.checkpoint.kept.lineage,
        Err(error) if lost(error.kind()) => Vec::new(),
        Err(error) => return Err(error),
    };
    put_tombstone(world, store, volume_id, fence, name)?;
    let removed = Blocking(store).delete(vec![volume_key(name)], Class::Upload);
    removed.map_err(|error| store_error(&error))?;
    // But who wrote it before a fail-back may wake up, and has to meet the fence that was put then.
    let was_written = replica.is_some_and(|role| role.kind != RoleKind::Replica);
    let mut deleted = bury(store, volume_id, fence, was_written)?;
    deleted.objects += 1;
    let ancestors = let_go(world, store, &Kin { clone_id: volume_id, lineage: &lineage })?;
    deleted.objects += ancestors.objects;
    deleted.bytes += ancestors.bytes;
    Ok(deleted)
}

fn put(store: &dyn ObjectStore, key: &str, body: Vec<u8>) -> Result<PutOutcome> {
    Blocking(store).put(key, Bytes::from(body), Class::Upload).map_err(|error| store_error(&error))
}

fn decode(name: &str, bytes: &[u8]) -> Result<VolumeRecord> {
    let damaged = |error| Error::new(ErrorKind::Corrupt, format!("{}: {error}", volume_key(name)));
    VolumeRecord::decode(bytes, name).map_err(damaged)
}

pub(crate) fn exists(name: &str) -> Error {
    let text =
        format!("there is a volume {name:?} already: choose another name, or `sawmill delete {name}` first");
    Error::new(ErrorKind::Exists, text)
}

pub(crate) fn check_name(name: &str) -> Result<()> {
    let fine = !name.is_empty()
        && name.len() <= 128
        && !name.starts_with('.')
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte));
    if fine {
        return Ok(());
    }
    let text = format!(
        "{name:?} cannot name a volume: use 1 to 128 letters, digits, '.', '_', '-', not first a '.'"
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
        return invalid(format!("a block size of {block} is not offered: choose 512 or 4096"));
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
        "segments of {segment_bytes} bytes are not offered: choose a power of two from {} to {}",
        limits::SEGMENT_BYTES_MIN,
        limits::SEGMENT_BYTES_MAX
    );
    Err(Error::new(ErrorKind::Invalid, text))
}
