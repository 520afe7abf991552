//! Boot sets: what a start of a volume reads, recorded once and fetched first by every clone.
//!
//! The boot set of a clone is that of the nearest of its ancestors that has one, so that all clones
//! of a base share it; any other volume has its own. A set is an object of its volume, and the one
//! with the highest number counts.
//!
//! Invariants: a set is a hint, and names addresses alone. One that is damaged, too long or of
//! another volume counts as absent. Nothing else of a volume depends on it.
//!
//! Not here: recording and fetching by an open volume (`open_volume`), what is seen while it is
//! recorded (`read::reads_seen`), and when a server does either (the binary).

use sawmill_format::boot_set::{self, BootSet, boot_set_key, boot_set_prefix, parse_boot_set_key};
use sawmill_format::ids::VolumeId;
use sawmill_format::volume_record::VolumeRecord;
use sawmill_store::{Blocking, Class, ObjectStore};

use crate::cuts::Lineage;
use crate::recovery::checkpoint;
use crate::store_calls::{self, store_error, want_named};
use crate::{Error, ErrorKind, Result, limits};

mod open_volume;

/// Ancestors asked for a set.
const ANCESTORS_MAX: usize = 8;
/// No writer reaches this number: an object with it, or a higher one, must not keep others from
/// recording.
const NUMBER_MAX: u64 = u64::MAX / 2;
/// Sets of one volume that are read, when the newest are damaged.
const READ_MAX: usize = 3;

/// The volumes that may have a volume's boot set, the first one first.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct BootSetHolders(Vec<VolumeId>);

impl BootSetHolders {
    fn new(own: VolumeId, lineage: &Lineage) -> Self {
        let ancestors = lineage.entries().iter().rev().map(|entry| entry.volume_id);
        let ancestors: Vec<_> = ancestors.take(ANCESTORS_MAX).collect();
        BootSetHolders(if ancestors.is_empty() { vec![own] } else { ancestors })
    }

    /// Whether other volumes may look for the same set.
    #[must_use]
    pub fn are_shared(&self, own: VolumeId) -> bool {
        self.0[..] != [own]
    }

    /// Of a volume that may be served or not.
    pub fn of(store: &dyn ObjectStore, record: &VolumeRecord) -> Result<Self> {
        let newest = checkpoint::newest(store, record.volume_id)?.checkpoint;
        Ok(Self::new(record.volume_id, &Lineage::new(&newest.kept.lineage)))
    }

    /// The boot set that counts. A damaged one is logged and passed over.
    pub fn find(&self, store: &dyn ObjectStore) -> Result<Option<BootSet>> {
        for volume_id in &self.0 {
            let numbers = numbers(store, *volume_id)?;
            for number in numbers.into_iter().rev().take(READ_MAX) {
                match read(store, *volume_id, number) {
                    Ok(Some(set)) => return Ok(Some(set)),
                    Ok(None) => {}
                    Err(error) if error.kind() == ErrorKind::Corrupt => {
                        tracing::warn!("{error}; this boot set is ignored");
                    }
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(None)
    }

    /// Deletes all sets of the volume that has the one that counts. Returns how many.
    pub fn delete(&self, store: &dyn ObjectStore) -> Result<usize> {
        for volume_id in &self.0 {
            let numbers = numbers(store, *volume_id)?;
            if !numbers.is_empty() {
                delete(store, *volume_id, &numbers)?;
                return Ok(numbers.len());
            }
        }
        Ok(0)
    }
}

/// The numbers of a volume's sets, the lowest first.
fn numbers(store: &dyn ObjectStore, volume_id: VolumeId) -> Result<Vec<u64>> {
    let listed = Blocking(store).list(&boot_set_prefix(volume_id), Class::Background);
    let listed = listed.map_err(|error| store_error(&error))?;
    let mut numbers: Vec<u64> = listed
        .iter()
        .filter_map(|object| parse_boot_set_key(&object.key))
        .filter(|(owner, number)| *owner == volume_id && (1..NUMBER_MAX).contains(number))
        .map(|(_, number)| number)
        .collect();
    numbers.sort_unstable();
    Ok(numbers)
}

/// A set, or none if a list that lags has shown it.
fn read(store: &dyn ObjectStore, volume_id: VolumeId, number: u64) -> Result<Option<BootSet>> {
    let key = boot_set_key(volume_id, number);
    store_calls::again_if_damaged(|| {
        let get = want_named(key.clone(), boot_set::BYTES_MAX as u32, Class::Background);
        let Some(bytes) = store_calls::get_again(store, &get)? else { return Ok(None) };
        BootSet::decode(&bytes, volume_id, number).map(Some).map_err(|error| {
            Error::new(ErrorKind::Corrupt, format!("{key}: {error}")).with_source(error)
        })
    })
}

fn delete(store: &dyn ObjectStore, volume_id: VolumeId, numbers: &[u64]) -> Result<()> {
    let keys = numbers.iter().map(|number| boot_set_key(volume_id, *number)).collect();
    Blocking(store).delete(keys, Class::Background).map_err(|error| store_error(&error))
}

/// The first `bytes_max` of a set's ranges, whatever the set says: what a server fetches by itself.
#[must_use]
pub fn bounded(set: &BootSet, bytes_max: u64) -> Vec<(u64, u64)> {
    let mut left = bytes_max.min(limits::BOOT_SET_BYTES_MAX);
    let mut ranges = Vec::new();
    for (address, length) in &set.ranges {
        let length = (*length).min(left);
        left -= length;
        if length > 0 {
            ranges.push((*address, length));
        }
    }
    ranges
}
