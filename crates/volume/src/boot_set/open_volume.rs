//! What an open volume does with boot sets: records one, and fetches what one names.
//!
//! Invariant: a server that was fenced, or only reads, records nothing.
//!
//! Not here: whose set counts (`super`), and the bytes of a set (`sawmill_format::boot_set`).

use std::time::Duration;

use bytes::Bytes;
use sawmill_format::boot_set::{BootSet, boot_set_key};
use sawmill_format::ids::PutId;
use sawmill_format::kept_block::PinnedStatus;
use sawmill_store::{Blocking, Class, PutOutcome};

use super::{BootSetHolders, delete, numbers};
use crate::cuts::status_pins;
use crate::read::reads_seen::SeenReads;
use crate::read::warm::{self, WarmStep};
use crate::store_calls::{cannot_encode, store_error};
use crate::volume::Volume;
use crate::{Error, ErrorKind, Result};

/// Numbers tried, while others take them.
const TRIES_MAX: u32 = 16;

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
    /// the ranges is done: call it again with the rest. Stops early when `is_wanted` says no. An
    /// error if the store is unavailable, or sends nothing for long.
    pub fn warm(
        &self,
        ranges: &[(u64, u64)],
        frames_max: u64,
        is_wanted: &dyn Fn() -> bool,
    ) -> Result<WarmStep> {
        warm::step(&self.read, ranges, frames_max, is_wanted)
    }

    /// Notes which ranges of stored data are read from now on, for `time_max` at most. Returns what
    /// ends the recording. Refused while another one is under way.
    pub fn begin_recording(&self, time_max: Duration) -> Result<u64> {
        self.require_recordable()?;
        let world = &self.attachment.world;
        let token = u128::from_le_bytes(world.random()?) as u64;
        self.read.reads_seen.begin(token, world.now(), time_max).map_err(|left| {
            let text = format!(
                "another recording is under way: wait until it ends; it expires in {} s",
                left.as_secs() + 1
            );
            Error::new(ErrorKind::Refused, text)
        })?;
        Ok(token)
    }

    /// Ends a recording: what was read meanwhile becomes the boot set of this volume's base, or its
    /// own. None: it is no longer under way, or nothing was read.
    pub fn end_recording(&self, token: u64) -> Result<Option<(BootSet, SeenReads)>> {
        let Some(seen) = self.read.reads_seen.end(token) else { return Ok(None) };
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
