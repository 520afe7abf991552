//! Warming in a process that serves volumes: the steps that a command asks for, and the boot sets
//! that it fetches by itself when it has started.
//!
//! Invariants: one step at a time runs in a process, so that volumes with one base fetch what they
//! share once, and background work has a bound. A boot set delays and fails nothing: what is wrong
//! with it is one line in the log. No volume is held while a store is asked for a boot set, so that
//! a hand-off need not wait for that.
//!
//! Not here: what is fetched, and in which order (`sawmill_volume`).

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::Instant;

use sawmill_console::exit::{Failure, Result};
use sawmill_console::units::human_size;
use sawmill_store::ObjectStore;
use sawmill_volume::boot_set::{self, BootSetHolders};
use sawmill_volume::{Volume, WarmStep};

use super::{ServeProcess, ServedVolume};
use crate::control::protocol::{RecordingReply, WarmReply, WarmRoomReply, WarmStepRequest};

/// Boot sets that were found, by the store's URL and the volumes that may have one.
type FoundSets = HashMap<(String, BootSetHolders), Option<Arc<[(u64, u64)]>>>;

impl ServeProcess {
    /// What the cache has room for.
    pub(super) fn warm_room(volume: &Volume) -> Result<WarmRoomReply> {
        Ok(WarmRoomReply {
            frames: volume.spare_frames()?,
            frame_bytes: u64::from(volume.record().frame_bytes),
            size_bytes: volume.status().size_bytes,
        })
    }

    /// One step for a command; an empty one while another has the turn: a request that waited for
    /// it would keep others from being carried out.
    pub(super) fn warm_now(&self, volume: &Volume, request: &WarmStepRequest) -> Result<WarmReply> {
        match self.warm_turn.try_lock() {
            Some(_turn) => Self::step(volume, request),
            None => Ok(WarmReply::default()),
        }
    }

    fn step(volume: &Volume, request: &WarmStepRequest) -> Result<WarmReply> {
        let step = volume.warm(&request.ranges, request.frames_max, &|| true)?;
        let WarmStep { fetched_frames, fetched_bytes, present_bytes, left_bytes, done_bytes } =
            step;
        Ok(WarmReply { fetched_frames, fetched_bytes, present_bytes, left_bytes, done_bytes })
    }

    /// Ends a recording and keeps it.
    pub(super) fn end_recording(volume: &Volume) -> Result<RecordingReply> {
        let none = RecordingReply { kept_with: None, ranges: 0, bytes: 0, is_cut: false };
        let Some((set, seen)) = volume.end_recording()? else { return Ok(none) };
        Ok(RecordingReply {
            kept_with: Some(set.volume_id.to_string()),
            ranges: set.ranges.len() as u64,
            bytes: set.bytes(),
            is_cut: seen.is_cut,
        })
    }

    /// Fetches the boot set of each volume, one after the other, on a thread of its own.
    pub(crate) fn fetch_boot_sets(self: &Arc<Self>) {
        if self.cache.lock().is_none() {
            return;
        }
        let (serving, count) = (Arc::downgrade(self), self.volumes.len());
        let work = move || {
            let mut found = FoundSets::new();
            for index in 0..count {
                if let Err(failure) = fetch_boot_set(&serving, index, &mut found) {
                    tracing::warn!("a boot set was not fetched, which does no harm: {failure}");
                }
            }
        };
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

/// Fetches the boot set of one volume, if it has one.
fn fetch_boot_set(serving: &Weak<ServeProcess>, index: usize, found: &mut FoundSets) -> Result<()> {
    let facts = with_volume(serving, index, |_, served, volume| {
        let store = Arc::clone(&served.store) as Arc<dyn ObjectStore>;
        let key = (served.address.store_url.clone(), volume.boot_set_holders());
        Ok((served.name().to_owned(), store, key))
    })?;
    let Some((name, store, key)) = facts else { return Ok(()) };
    let ranges = match found.get(&key) {
        Some(known) => known.clone(),
        None => {
            let set = key.1.find(&*store).map_err(|error| Failure::from(error).of_volume(&name))?;
            let ranges = set.map(|set| Arc::from(boot_set::bounded(&set)));
            found.insert(key, ranges.clone());
            ranges
        }
    };
    drop(store);
    let Some(ranges) = ranges else { return Ok(()) };
    let began = Instant::now();
    let room = with_volume(serving, index, |_, _, volume| Ok(volume.spare_frames()?))?;
    let mut frames_max = room.unwrap_or_default();
    let mut left = ranges.to_vec();
    let mut sum = WarmReply::default();
    while !left.is_empty() {
        let request = WarmStepRequest { ranges: left, frames_max };
        let step = with_volume(serving, index, |serving, _, volume| {
            let _turn = serving.warm_turn.lock();
            ServeProcess::step(volume, &request)
        });
        let Some(step) = step.map_err(|failure| failure.of_volume(&name))? else { return Ok(()) };
        frames_max -= step.fetched_frames.min(frames_max);
        left = request.ranges;
        sum.add(&step, &mut left);
    }
    tracing::info!(
        volume = name,
        took = ?began.elapsed(),
        "boot set: {} fetched, {} were there, {} do not fit",
        human_size(sum.fetched_bytes),
        human_size(sum.present_bytes),
        human_size(sum.left_bytes)
    );
    Ok(())
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
