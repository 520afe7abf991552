//! Passes a store's objects to recovery: newest checkpoint, its map, roll forward.
//!
//! Input: a byte of choices (see `MEND`), then objects, each with its length (32 bits) in front. An
//! object lies under the key that its own fields name, so that a changed number moves it.
//!
//! Invariant: the same objects give the same result twice, with no more data than a volume may
//! have.
//!
//! Not here: objects one by one (`objects`), the journal (`journal_image`), attaching.

use std::collections::BTreeMap;
use std::sync::Mutex;

use bytes::Bytes;
use sawmill_format::boot_set::{self, boot_set_key};
use sawmill_format::checkpoint::{self, checkpoint_key};
use sawmill_format::ids::{PutId, VolumeId};
use sawmill_format::kept_block::{pin_at, pin_key};
use sawmill_format::map_part::{self, PartIdentity, part_key};
use sawmill_format::name_record::{self, name_key};
use sawmill_format::preamble::Kind;
use sawmill_format::role::{self, role_key};
use sawmill_format::segment::{self, segment_key};
use sawmill_format::volume_record::volume_key;
use sawmill_store::{
    Class, Completion, Get, List, ObjectInfo, ObjectStore, Put, PutOutcome, StoreError,
    StoreErrorKind,
};
use sawmill_volume::limits::SIZE_BYTES_MAX;
use sawmill_volume::{find, inspect};

use crate::mend::{id_at, kind_of, mended, u64_at};

/// Correct lengths, counts and checksums.
const MEND: u8 = 1;

/// The volume that is opened.
pub const NAME: &str = "disk1";

/// Objects in memory, answered at once.
#[derive(Default)]
pub struct Objects(Mutex<BTreeMap<String, Bytes>>);

impl Objects {
    /// All of them, as an input of this target.
    #[must_use]
    pub fn as_input(&self) -> Vec<u8> {
        let objects = self.0.lock().expect("no thread panicked");
        let mut input = vec![MEND];
        for object in objects.values() {
            input.extend_from_slice(&(object.len() as u32).to_le_bytes());
            input.extend_from_slice(object);
        }
        input
    }
}

impl ObjectStore for Objects {
    fn get(&self, get: Get, done: Completion<Bytes>) {
        let found = self.0.lock().expect("no thread panicked").get(&get.key).cloned();
        let error = |kind, text: &str| StoreError::new(kind, format!("{}: {text}", get.key));
        let cut = |object: Bytes| match get.range {
            None => Ok(object),
            Some(range) if range.start >= range.end.min(object.len() as u64) => {
                Err(error(StoreErrorKind::Invalid, "not one byte of it is asked for"))
            }
            Some(range) => {
                Ok(object.slice(range.start as usize..range.end.min(object.len() as u64) as usize))
            }
        };
        done(found.ok_or_else(|| error(StoreErrorKind::NotFound, "is not there")).and_then(cut));
    }

    fn put(&self, put: Put, done: Completion<PutOutcome>) {
        // Create-only, as the engine demands of every store.
        let is_new = !self.0.lock().expect("no thread panicked").contains_key(&put.key);
        if is_new {
            self.0.lock().expect("no thread panicked").insert(put.key, put.body);
        }
        done(Ok(if is_new { PutOutcome::Created } else { PutOutcome::Taken }));
    }

    fn list(&self, list: List, done: Completion<Vec<ObjectInfo>>) {
        let prefix = if list.prefix.is_empty() {
            String::new()
        } else {
            list.prefix.trim_end_matches('/').to_owned() + "/"
        };
        let objects = self.0.lock().expect("no thread panicked");
        let below = objects.iter().filter(|(key, _)| key.starts_with(&prefix));
        let listed = below
            .map(|(key, body)| ObjectInfo { key: key.clone(), size_bytes: body.len() as u64 })
            .collect();
        drop(objects);
        done(Ok(listed));
    }

    fn delete(&self, keys: Vec<String>, _: Class, done: Completion<()>) {
        self.0.lock().expect("no thread panicked").retain(|key, _| !keys.contains(key));
        done(Ok(()));
    }
}

/// The objects of an input, under the keys they name.
fn objects(bytes: &[u8]) -> Objects {
    let store = Objects::default();
    let Some((&choices, mut rest)) = bytes.split_first() else { return store };
    while let Some((length, after)) = rest.split_first_chunk() {
        let length = u32::from_le_bytes(*length) as usize;
        let (object, after) = after.split_at(length.min(after.len()));
        rest = after;
        let Some(kind) = kind_of(object) else { continue };
        let object = if choices & MEND != 0 { mended(object, kind) } else { object.to_vec() };
        let Some(key) = key_of(&object, kind) else { continue };
        // Of two objects with one key, the first stays, as in a store.
        store.0.lock().expect("no thread panicked").entry(key).or_insert_with(|| object.into());
    }
    store
}

fn key_of(object: &[u8], kind: Kind) -> Option<String> {
    // Every kind of object has its volume id at this place.
    let volume_id = VolumeId(id_at(object, segment::at::VOLUME_ID)?);
    match kind {
        Kind::VolumeRecord => Some(volume_key(NAME)),
        Kind::Segment => Some(segment_key(volume_id, u64_at(object, segment::at::SEQUENCE)?)),
        Kind::Checkpoint => {
            Some(checkpoint_key(volume_id, u64_at(object, checkpoint::at::NUMBER)?))
        }
        Kind::MapPart => Some(part_key(&PartIdentity {
            volume_id,
            group: u64_at(object, map_part::at::GROUP)?,
            number: u64_at(object, map_part::at::NUMBER)?,
            put_id: PutId(id_at(object, map_part::at::PUT_ID)?),
        })),
        Kind::Pin => Some(pin_key(volume_id, u64_at(object, pin_at::PIN_NUMBER)?)),
        Kind::NameRecord => Some(name_key(NAME, u64_at(object, name_record::at::NUMBER)?)),
        Kind::Role => Some(role_key(volume_id, u64_at(object, role::at::NUMBER)?)),
        Kind::BootSet => Some(boot_set_key(volume_id, u64_at(object, boot_set::at::NUMBER)?)),
        Kind::JournalSuperblock | Kind::Staging | Kind::CacheIndex => None,
        Kind::TransferProgress | Kind::ExportState | Kind::NewestState => None,
    }
}

/// Opens the volume that the objects of the input describe twice, and compares what is found.
pub fn run(bytes: &[u8]) {
    let store = objects(bytes);
    let Ok(record) = find(&store, NAME) else { return };
    let (once, again) = (inspect::at_rest(&store, &record), inspect::at_rest(&store, &record));
    assert_eq!(once.as_ref().ok(), again.as_ref().ok(), "the same objects are read alike");
    let Ok(found) = once else { return };
    assert!(found.live_bytes <= SIZE_BYTES_MAX, "no more is mapped than a volume can have");
    assert_eq!(found.live_bytes > 0, found.extents > 0, "what is mapped is mapped by extents");
}
