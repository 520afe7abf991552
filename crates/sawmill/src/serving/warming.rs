//! Warming in a process that serves volumes: the steps that a command asks for, and the boot sets
//! that it fetches by itself when it has started.
//!
//! Invariants: one step at a time runs for each store, so that volumes with one base fetch what
//! they share once, background work has a bound, and a store that is away holds up no other. Who
//! waits for a turn gets it next. A boot set delays and fails nothing: what is wrong with it is one
//! line in the log, a store that refused one is asked for no other, and one that is unavailable is
//! asked again later. No volume is held while a
//! store is asked for a boot set, so that a hand-off need not wait for that.
//!
//! Not here: what is fetched, and in which order (`sawmill_volume`).

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use sawmill_console::exit::{Exit, Failure, Result};
use sawmill_console::units::human_size;
use sawmill_format::ids::VolumeId;
use sawmill_store::ObjectStore;
use sawmill_volume::Volume;
use sawmill_volume::boot_set::{self, BootSetHolders};

use super::{ServeProcess, ServedVolume};
use crate::control::protocol::{
    RecordingReply, WARM_RANGES_MAX, WarmReply, WarmRoomReply, WarmStepRequest,
};

/// How long a command's request waits for its turn. It occupies one of the threads for requests.
const TURN_WAIT_MAX: Duration = Duration::from_secs(1);
/// Turns of a volume whose store is unavailable, or has had no time for 30 s, and the pause between
/// them: many machines may start together.
const TURNS_MAX: u32 = 5;
const TURN_PAUSE: Duration = Duration::from_secs(60);
/// Boot sets that are remembered for the next volumes: 64 MiB of ranges at most.
const FOUND_SETS_MAX: usize = 64;

/// Addresses and lengths.
type SetRanges = Arc<[(u64, u64)]>;

/// Fetches the boot sets of a process that has started.
struct BootSets {
    serving: Weak<ServeProcess>,
    /// Of each set at most.
    bytes_max: u64,
    /// Those of bases, by the store's URL and the volumes that may have one.
    found: HashMap<(String, BootSetHolders), Option<SetRanges>>,
    /// URLs of stores that did not give a set, or not what one names, and why.
    failed_stores: HashMap<String, Exit>,
    /// Volumes that have another turn.
    put_off: Vec<usize>,
    /// What is left of the room that the cache had for all of them: it is counted once.
    frames_left: Option<u64>,
}

impl ServeProcess {
    /// What the cache has room for.
    pub(super) fn warm_room(volume: &Volume) -> Result<WarmRoomReply> {
        Ok(WarmRoomReply {
            frames: volume.spare_frames()?,
            frame_bytes: u64::from(volume.record().frame_bytes),
            size_bytes: volume.status().size_bytes,
        })
    }

    /// One step for a command, while `is_wanted`; an empty one if others have the turn for long: a
    /// request that waited for it would keep others from being carried out.
    pub(super) fn warm_now(
        &self,
        served: &ServedVolume,
        request: &WarmStepRequest,
        is_wanted: &dyn Fn() -> bool,
    ) -> Result<WarmReply> {
        if request.ranges.len() > WARM_RANGES_MAX {
            let text = format!("at most {WARM_RANGES_MAX} ranges are warmed in one step");
            return Err(Failure::usage(text));
        }
        let turn = self.warm_turn(served).try_lock_for(TURN_WAIT_MAX);
        let Some(turn) = turn else { return Ok(WarmReply::default()) };
        // After the wait, or a hand-off would wait for it too.
        let outcome = served.volume().and_then(|volume| Self::step(&volume, request, is_wanted));
        MutexGuard::unlock_fair(turn);
        outcome
    }

    fn warm_turn(&self, served: &ServedVolume) -> &Mutex<()> {
        &self.warm_turns[&served.address.store_url]
    }

    fn step(
        volume: &Volume,
        request: &WarmStepRequest,
        is_wanted: &dyn Fn() -> bool,
    ) -> Result<WarmReply> {
        let step = volume.warm(&request.ranges, request.frames_max, is_wanted)?;
        Ok(WarmReply {
            fetched_frames: step.fetched_frames,
            fetched_bytes: step.fetched_bytes,
            present_bytes: step.present_bytes,
            left_bytes: step.left_bytes,
            is_full: step.is_full,
            done_bytes: step.done_bytes,
        })
    }

    /// Ends a recording and keeps it.
    pub(super) fn end_recording(volume: &Volume, recording: u64) -> Result<RecordingReply> {
        let none = RecordingReply { kept_with: None, ranges: 0, bytes: 0, is_cut: false };
        let Some((set, seen)) = volume.end_recording(recording)? else { return Ok(none) };
        Ok(RecordingReply {
            kept_with: Some(set.volume_id.to_string()),
            ranges: set.ranges.len() as u64,
            bytes: set.bytes(),
            is_cut: seen.is_cut,
        })
    }

    /// Fetches the boot set of each volume, `bytes_max` at most, one after the other, on a thread
    /// of its own.
    pub(crate) fn fetch_boot_sets(self: &Arc<Self>, bytes_max: u64) {
        if self.cache.lock().is_none() {
            return;
        }
        let mut boot_sets = BootSets {
            serving: Arc::downgrade(self),
            bytes_max,
            found: HashMap::new(),
            failed_stores: HashMap::new(),
            put_off: Vec::new(),
            frames_left: None,
        };
        let count = self.volumes.len();
        let work = move || boot_sets.fetch_all((0..count).collect());
        if let Err(error) = std::thread::Builder::new().name("boot-set".into()).spawn(work) {
            tracing::warn!("boot sets are not fetched, which does no harm: {error}");
        }
    }
}

/// Calls `act` with a volume of the process, if both still serve.
fn with_volume<T>(
    serving: &Weak<ServeProcess>,
    index: usize,
    act: impl FnOnce(&ServeProcess, &ServedVolume, &Volume) -> Result<T>,
) -> Result<Option<T>> {
    let Some(serving) = serving.upgrade() else { return Ok(None) };
    let served = &serving.volumes[index];
    // Away, or given up: somebody else serves it, or nobody does.
    let Ok(volume) = served.volume() else { return Ok(None) };
    act(&serving, served, &volume).map(Some)
}

impl BootSets {
    /// Fetches the boot sets of these volumes. Those whose store is unavailable, or too busy, have
    /// further turns later.
    fn fetch_all(&mut self, mut indices: Vec<usize>) {
        for turn in 1..=TURNS_MAX {
            indices.into_iter().for_each(|index| self.fetch(index));
            indices = std::mem::take(&mut self.put_off);
            if indices.is_empty() || turn == TURNS_MAX {
                return;
            }
            std::thread::sleep(TURN_PAUSE);
            self.failed_stores.retain(|_, exit| *exit == Exit::Denied);
        }
    }

    /// Fetches the boot set of one volume, if it has one.
    fn fetch(&mut self, index: usize) {
        let facts = with_volume(&self.serving, index, |_, served, volume| {
            let store = Arc::clone(&served.store) as Arc<dyn ObjectStore>;
            let key = (served.address.store_url.clone(), volume.boot_set_holders());
            Ok((served.name().to_owned(), volume.record().volume_id, store, key))
        });
        let Ok(Some((name, volume_id, store, key))) = facts else { return };
        if let Some(exit) = self.failed_stores.get(&key.0) {
            if *exit == Exit::Unavailable {
                self.put_off.push(index);
            }
            return;
        }
        let url = key.0.clone();
        let ranges = self.find(key, volume_id, &*store);
        drop(store);
        let fetched = ranges.and_then(|ranges| match ranges {
            Some(ranges) => self.fetch_ranges(index, &name, &ranges),
            None => Ok(()),
        });
        let Err(failure) = fetched else { return };
        // One volume that was fenced says nothing of the others.
        let exit = failure.exit();
        let failure = failure.of_volume(&name);
        tracing::warn!("a boot set was not fetched, which does no harm: {failure}");
        if exit == Exit::Unavailable {
            self.put_off.push(index);
        }
        if matches!(exit, Exit::Unavailable | Exit::Denied) {
            self.failed_stores.insert(url, exit);
        }
    }

    /// The ranges of the set that the volumes of `key` have.
    fn find(
        &mut self,
        key: (String, BootSetHolders),
        own: VolumeId,
        store: &dyn ObjectStore,
    ) -> Result<Option<SetRanges>> {
        if let Some(known) = self.found.get(&key) {
            return Ok(known.clone());
        }
        let set = key.1.find(store)?;
        let ranges: Option<SetRanges> =
            set.map(|set| boot_set::bounded(&set, self.bytes_max).into());
        if key.1.are_shared(own) {
            if self.found.len() >= FOUND_SETS_MAX {
                self.found.clear();
            }
            self.found.insert(key, ranges.clone());
        }
        Ok(ranges)
    }

    fn fetch_ranges(&mut self, index: usize, name: &str, ranges: &[(u64, u64)]) -> Result<()> {
        let began = Instant::now();
        let (frames_known, bytes_max) = (self.frames_left, self.bytes_max);
        let room = with_volume(&self.serving, index, |_, _, volume| {
            let frame_bytes = u64::from(volume.record().frame_bytes.max(1));
            let frames_left = frames_known.map_or_else(|| volume.spare_frames(), Ok)?;
            Ok((frames_left, bytes_max.div_ceil(frame_bytes)))
        })?;
        // Ranges are short, and frames are fetched whole: both are bounded.
        let Some((mut frames_left, mut allowed_frames)) = room else { return Ok(()) };
        let mut left = ranges.to_vec();
        let mut sum = WarmReply::default();
        while !left.is_empty() {
            let request =
                WarmStepRequest { ranges: left, frames_max: frames_left.min(allowed_frames) };
            let Some(serving) = self.serving.upgrade() else { return Ok(()) };
            let served = &serving.volumes[index];
            // Before the volume is held, or a hand-off would wait for the turn too.
            let turn = serving.warm_turn(served).lock();
            let Ok(volume) = served.volume() else { return Ok(()) };
            let outcome = ServeProcess::step(&volume, &request, &|| true);
            MutexGuard::unlock_fair(turn);
            let step = outcome?;
            frames_left = match step.is_full {
                true => 0,
                false => frames_left.saturating_sub(step.fetched_frames),
            };
            self.frames_left = Some(frames_left);
            allowed_frames = allowed_frames.saturating_sub(step.fetched_frames);
            left = request.ranges;
            sum.add(&step, &mut left);
        }
        tracing::info!(
            volume = name,
            took = ?began.elapsed(),
            "boot set: {} fetched, {} already cached, {} left out",
            human_size(sum.fetched_bytes),
            human_size(sum.present_bytes),
            human_size(sum.left_bytes)
        );
        Ok(())
    }
}

impl WarmReply {
    /// Adds a step, and takes what it has done from the ranges.
    pub(crate) fn add(&mut self, step: &WarmReply, ranges: &mut Vec<(u64, u64)>) {
        self.fetched_frames += step.fetched_frames;
        self.fetched_bytes += step.fetched_bytes;
        self.present_bytes += step.present_bytes;
        self.left_bytes += step.left_bytes;
        self.done_bytes = self.done_bytes.saturating_add(step.done_bytes);
        let mut done = step.done_bytes;
        let whole = ranges.iter().take_while(|(_, length)| match done.checked_sub(*length) {
            Some(rest) => {
                done = rest;
                true
            }
            None => false,
        });
        let count = whole.count();
        ranges.drain(..count);
        if let Some((address, length)) = ranges.first_mut() {
            *address += done;
            *length -= done;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_takes_what_it_has_done_from_the_ranges() {
        let mut ranges = vec![(0, 10), (100, 20), (50, 5)];
        let mut sum = WarmReply::default();
        let step = |done_bytes| WarmReply { fetched_bytes: 1, done_bytes, ..WarmReply::default() };
        sum.add(&step(4), &mut ranges);
        assert_eq!(ranges, [(4, 6), (100, 20), (50, 5)]);
        sum.add(&step(6 + 7), &mut ranges);
        assert_eq!(ranges, [(107, 13), (50, 5)]);
        sum.add(&step(13), &mut ranges);
        assert_eq!(ranges, [(50, 5)]);
        sum.add(&step(5), &mut ranges);
        assert!(ranges.is_empty());
        assert_eq!((sum.fetched_bytes, sum.done_bytes), (4, 35));
    }
}
