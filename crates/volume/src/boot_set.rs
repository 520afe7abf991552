//! Boot sets: what a start of a volume reads, recorded once and fetched first by every clone.
//!
//! The boot set of a clone is that of the nearest of its ancestors that has one, so that all clones
//! of a base share it; any other volume has its own. A set is an object of its volume, and the one
//! with the highest number counts.
//!
//! Invariants: a set is a hint, and names addresses alone. One that is damaged, too long or of
//! another volume counts as absent. Nothing else of a volume depends on it.
//!
//! Not here: what is seen while it is recorded (`read::reads_seen`), fetching (`read::warm`), and
//! when a server does either (the binary).

use std::time::Duration;

use bytes::Bytes;
use sawmill_format::boot_set::{self, BootSet, boot_set_key, boot_set_prefix, parse_boot_set_key};
use sawmill_format::ids::{PutId, VolumeId};
use sawmill_format::kept_block::PinnedStatus;
use sawmill_format::volume_record::VolumeRecord;
use sawmill_store::{Blocking, Class, ObjectStore, PutOutcome};

use crate::cuts::{Lineage, status_pins};
use crate::read::reads_seen::SeenReads;
use crate::read::warm::{self, WarmStep};
use crate::recovery::checkpoint;
use crate::store_calls::{self, cannot_encode, store_error, want_named};
use crate::volume::Volume;
use crate::{Error, ErrorKind, Result, limits};

/// Ancestors asked for a set.
const ANCESTORS_MAX: usize = 8;
/// Sets of one volume that are read, when the newest are damaged.
const READ_MAX: usize = 3;
/// Numbers tried, while others take them.
const TRIES_MAX: u32 = 16;

/// The volumes that may have a volume's boot set, the first one first.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct BootSetHolders(Vec<VolumeId>);

impl BootSetHolders {
    fn new(own: VolumeId, lineage: &Lineage) -> Self {
        let ancestors = lineage.entries().iter().rev().map(|entry| entry.volume_id);
        let ancestors: Vec<_> = ancestors.take(ANCESTORS_MAX).collect();
        BootSetHolders(if ancestors.is_empty() { vec![own] } else { ancestors })
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
        .filter(|(owner, number)| *owner == volume_id && (1..u64::MAX).contains(number))
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

impl Volume {
    /// The volumes that may have its boot set.
    #[must_use]
    pub fn boot_set_holders(&self) -> BootSetHolders {
        BootSetHolders::new(self.attachment.record.volume_id, &self.read.stored.lineage)
    }

    /// How many frames the read cache takes without giving up what was read again, about.
    pub fn spare_frames(&self) -> Result<u64> {
        if let Some(error) = self.attachment.state.refusal() {
            return Err(error);
        }
        let cache = self.read.stored.cache().ok_or_else(warm::no_cache)?;
        Ok(u64::from(cache.spare_frames()))
    }

    /// Fetches into the read cache what `ranges` (addresses and lengths) hold, `frames_max` frames
    /// at most, behind all other calls to the store. Returns after some 32 MiB, with how much of
    /// the ranges is done: call it again with the rest. Stops early when `is_wanted` says no.
    pub fn warm(
        &self,
        ranges: &[(u64, u64)],
        frames_max: u64,
        is_wanted: &dyn Fn() -> bool,
    ) -> Result<WarmStep> {
        warm::step(&self.read, ranges, frames_max, is_wanted)
    }

    /// Notes which ranges of stored data are read from now on, for `time_max` at most.
    pub fn begin_recording(&self, time_max: Duration) -> Result<()> {
        self.require_recordable()?;
        self.read.reads_seen.begin(self.attachment.world.now().saturating_add(time_max));
        Ok(())
    }

    /// Ends a recording: what was read meanwhile becomes the boot set of this volume's base, or its
    /// own. None: nobody recorded, or nothing was read.
    pub fn end_recording(&self) -> Result<Option<(BootSet, SeenReads)>> {
        let Some(seen) = self.read.reads_seen.end() else { return Ok(None) };
        self.require_recordable()?;
        if seen.ranges.is_empty() {
            return Ok(None);
        }
        Ok(Some((self.put_boot_set(&seen)?, seen)))
    }

    /// A server that was fenced, or only reads, records nothing.
    fn require_recordable(&self) -> Result<()> {
        if let Some(error) = self.attachment.state.refusal() {
            return Err(error);
        }
        if self.attachment.read_only {
            let text = "a volume opened read-only records no boot set: record where it is served \
                        for writing";
            return Err(Error::new(ErrorKind::Refused, text));
        }
        Ok(())
    }

    fn put_boot_set(&self, seen: &SeenReads) -> Result<BootSet> {
        let (store, world) = (&*self.attachment.store, &self.attachment.world);
        let volume_id = self.boot_set_holders().0[0];
        let older = numbers(store, volume_id)?;
        let mut set = BootSet {
            volume_id,
            put_id: PutId(world.random()?),
            number: older.last().map_or(1, |number| number + 1),
            wall_unix_ms: world.unix_ms(),
            ranges: seen.ranges.clone(),
        };
        for _ in 0..TRIES_MAX {
            let body = Bytes::from(set.encode().map_err(cannot_encode)?);
            let key = boot_set_key(volume_id, set.number);
            let put = Blocking(store).put(&key, body, Class::Background);
            if put.map_err(|error| store_error(&error))? == PutOutcome::Created {
                return self.keep_alone(set, &older);
            }
            set.number += 1;
        }
        let text = "others record boot sets of the same base all the time: try again later";
        Err(Error::new(ErrorKind::Unavailable, text))
    }

    /// Deletes what a set replaces, or the set itself if its volume is gone by now: its objects are
    /// not looked at again.
    fn keep_alone(&self, set: BootSet, older: &[u64]) -> Result<BootSet> {
        let store = &*self.attachment.store;
        if status_pins::newest(store, set.volume_id)?.status == PinnedStatus::Removed {
            delete(store, set.volume_id, &[set.number])?;
            let text = format!("volume {} was deleted: there is no boot set", set.volume_id);
            return Err(Error::new(ErrorKind::NotFound, text));
        }
        delete(store, set.volume_id, older)?;
        Ok(set)
    }
}

/// The ranges of a set that a server fetches by itself: not more than a start reads, whatever the
/// set says.
#[must_use]
pub fn bounded(set: &BootSet) -> Vec<(u64, u64)> {
    let mut left = limits::BOOT_SET_BYTES_MAX;
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
