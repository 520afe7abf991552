//! Warming: what given ranges hold of the store is fetched into the read cache before anybody reads
//! it, behind all other calls to the store.
//!
//! Invariants: which frames are fetched follows from the map at that moment, so an outdated list of
//! ranges costs time and never shows old data. A frame takes no room of one that was read lately,
//! and at most half of a full cache (`cache`). At most [`limits::WARM_FRAMES_MAX`] frames are on
//! their way. What the journal has is here already, and does not count. A step ends: after so many
//! frames, so many addresses, or so long without a frame. Damage of one frame keeps no other out.
//!
//! Not here: ranges recorded before (`boot_set`), and hints of clients (`ahead`).

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::Duration;

use super::fetch::{self, FetchResult, Purpose, Waiter};
use super::{ReadContext, ReadSource, resolve};
use crate::cache::{FrameKey, ReadCache, SpareInsert};
use crate::stored_data::FrameName;
use crate::{Error, ErrorKind, Result, limits};

/// Addresses looked at together.
const LOOK_BYTES: u64 = 4 << 20;
/// A step that got no frame for so long gives up: its caller may ask again.
const QUIET_TIME_MAX: Duration = Duration::from_secs(30);
/// A step ends when so many frames were fetched.
const STEP_FRAMES: u64 = 512;
/// Frames asked for together: what a start reads early comes early.
const TOGETHER_FRAMES: usize = limits::WARM_FRAMES_MAX / 4;
/// How often a step asks whether it is still wanted.
const WANTED_EVERY: Duration = Duration::from_millis(100);

/// What a step of warming did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WarmStep {
    /// Frames fetched into the cache, and their bytes.
    pub fetched_frames: u64,
    /// See `fetched_frames`.
    pub fetched_bytes: u64,
    /// Bytes that the cache had.
    pub present_bytes: u64,
    /// Bytes that are left out: there is no room for them, they are damaged, or they were deleted
    /// or moved meanwhile.
    pub left_bytes: u64,
    /// The cache has no more room for what nobody has read.
    pub is_full: bool,
    /// Bytes of the ranges, in their order, that this step is done with.
    pub done_bytes: u64,
}

/// A step under way.
struct WarmRun<'a> {
    context: &'a Arc<ReadContext>,
    cache: Arc<ReadCache>,
    frames_left: u64,
    /// Room for all frames on their way: their waiters never block.
    sender: SyncSender<(FrameName, FetchResult)>,
    receiver: Receiver<(FrameName, FetchResult)>,
    on_their_way: usize,
    /// Not asked for yet.
    wanted: Vec<FrameName>,
    /// Ranges may share frames.
    seen: HashSet<FrameName>,
    /// Addresses looked at.
    looked_bytes: u64,
    /// When the last frame arrived, or the first was asked for.
    last_arrival: Duration,
    step: WarmStep,
}

/// Fetches what `ranges` hold into the cache, `frames_max` frames at most. Returns after a while,
/// with how much of the ranges is done, or when `is_wanted` says no. An error if the store is
/// unavailable or sends nothing for long: what was fetched by then stays. Blocks; never call it on
/// a thread of the store.
pub(crate) fn step(
    context: &Arc<ReadContext>,
    ranges: &[(u64, u64)],
    frames_max: u64,
    is_wanted: &dyn Fn() -> bool,
) -> Result<WarmStep> {
    let cache = context.stored.cache().ok_or_else(no_cache)?;
    let (sender, receiver) = sync_channel(limits::WARM_FRAMES_MAX);
    let mut run = WarmRun {
        context,
        cache,
        frames_left: frames_max,
        sender,
        receiver,
        on_their_way: 0,
        wanted: Vec::new(),
        seen: HashSet::new(),
        looked_bytes: 0,
        last_arrival: context.attachment.world.now(),
        step: WarmStep::default(),
    };
    let size_bytes = context.attachment.geometry.now().size_bytes;
    'ranges: for (address, length) in ranges {
        let end = address.saturating_add(*length);
        // What lies beyond a disk that shrank is done.
        let inside = (*address).min(size_bytes)..end.min(size_bytes);
        let mut at = inside.start;
        while at < inside.end {
            if run.is_enough() || !is_wanted() {
                run.step.done_bytes = run.step.done_bytes.saturating_add(at - address);
                break 'ranges;
            }
            let bytes = LOOK_BYTES.min(inside.end - at);
            run.look(at, bytes, is_wanted)?;
            at += bytes;
        }
        run.step.done_bytes = run.step.done_bytes.saturating_add(*length);
    }
    run.ask(is_wanted)?;
    while run.on_their_way > 0 && is_wanted() {
        run.take_one()?;
    }
    Ok(run.step)
}

pub(crate) fn no_cache() -> Error {
    let text = "the volume is served without a read cache, so there is nothing to warm";
    Error::new(ErrorKind::Refused, text)
}

impl WarmRun<'_> {
    fn is_enough(&self) -> bool {
        let asked = self.on_their_way + self.wanted.len();
        self.step.fetched_frames + asked as u64 >= STEP_FRAMES
            || self.looked_bytes >= limits::WARM_LOOK_BYTES_MAX
    }

    /// Asks for what a range holds, and puts into the cache what arrives meanwhile.
    fn look(&mut self, address: u64, length: u64, is_wanted: &dyn Fn() -> bool) -> Result<()> {
        if let Some(error) = self.context.attachment.state.refusal() {
            return Err(error);
        }
        self.looked_bytes += length;
        // Nothing would be found in a part of the map that is not loaded yet.
        self.context.stored.view().map.load(address, length)?;
        for piece in resolve(self.context, address, length) {
            match piece.source {
                ReadSource::Frame { name, .. } if self.seen.insert(name) => self.sort(name),
                // A reader beside a writer has moved on since the map was loaded.
                ReadSource::Unloaded => self.step.left_bytes += piece.length,
                _ => {}
            }
        }
        if self.wanted.len() >= TOGETHER_FRAMES { self.ask(is_wanted) } else { Ok(()) }
    }

    /// Asks for the frames that are wanted. Of several ranges, those that lie side by side come in
    /// one answer.
    fn ask(&mut self, is_wanted: &dyn Fn() -> bool) -> Result<()> {
        let mut wanted = std::mem::take(&mut self.wanted);
        wanted.sort_unstable_by_key(|name: &FrameName| (name.sequence, name.frame));
        for names in wanted.chunks(TOGETHER_FRAMES) {
            while self.on_their_way + names.len() > limits::WARM_FRAMES_MAX {
                if !is_wanted() {
                    return Ok(());
                }
                self.take_one()?;
            }
            if self.on_their_way == 0 {
                self.last_arrival = self.context.attachment.world.now();
            }
            self.on_their_way += names.len();
            let frames = names.iter().map(|name| (*name, Some(self.waiter(*name)))).collect();
            fetch::fetch(self.context, frames, Purpose::Warm);
        }
        Ok(())
    }

    /// Counts a frame that is here or has no room, or notes it as wanted.
    fn sort(&mut self, name: FrameName) {
        let Some(key) = self.key(name) else { return };
        let bytes = self.frame_bytes(name);
        // A visit, so that it is not given up for what comes in now.
        if self.cache.contains(key) {
            self.cache.visit(key);
            self.step.present_bytes += bytes;
        } else if self.frames_left == 0 {
            self.step.left_bytes += bytes;
        } else {
            self.frames_left -= 1;
            self.wanted.push(name);
        }
    }

    fn key(&self, name: FrameName) -> Option<FrameKey> {
        self.context.stored.cached(name).map(|(_, key)| key)
    }

    /// The data of a frame: the last one of a segment may be short.
    fn frame_bytes(&self, name: FrameName) -> u64 {
        let frame_bytes = u64::from(self.context.attachment.record.frame_bytes);
        let info = self.context.stored.view().segments.get(name.sequence);
        info.map_or(frame_bytes, |info| {
            info.data_bytes.saturating_sub(u64::from(name.frame) * frame_bytes).min(frame_bytes)
        })
    }

    fn waiter(&self, name: FrameName) -> Waiter {
        let sender = self.sender.clone();
        Box::new(move |result| {
            // A step that was given up takes nothing more.
            let _ = sender.try_send((name, result));
        })
    }

    /// No frame came for a while. An error if that is no longer to be waited for.
    fn check_quiet(&self) -> Result<()> {
        // A volume that ends has failed its waiters once: those that came later see it here.
        if let Some(error) = self.context.attachment.state.refusal() {
            return Err(error);
        }
        if self.context.attachment.world.now().saturating_sub(self.last_arrival) < QUIET_TIME_MAX {
            return Ok(());
        }
        let seconds = QUIET_TIME_MAX.as_secs();
        let text = format!("the store is unavailable or busy: it has sent nothing for {seconds} s");
        Err(Error::new(ErrorKind::Unavailable, text))
    }

    /// Waits a while for a frame, and puts it into the cache.
    fn take_one(&mut self) -> Result<()> {
        let (name, result) = match self.receiver.recv_timeout(WANTED_EVERY) {
            Ok(found) => found,
            Err(RecvTimeoutError::Timeout) => return self.check_quiet(),
            // Not while this end holds a sender.
            Err(RecvTimeoutError::Disconnected) => return Ok(()),
        };
        self.on_their_way -= 1;
        self.last_arrival = self.context.attachment.world.now();
        let data = match result {
            FetchResult::Frame(data) => data,
            // One frame is no reason to go without the others. The log has it.
            FetchResult::Failed(error) if error.kind() == ErrorKind::Corrupt => {
                self.step.left_bytes += self.frame_bytes(name);
                return Ok(());
            }
            FetchResult::Failed(error) | FetchResult::Away(error) => return Err(error),
            // The map has moved on: what it has now, the next read fetches.
            FetchResult::Gone => {
                self.step.left_bytes += self.frame_bytes(name);
                return Ok(());
            }
        };
        let Some(key) = self.key(name) else { return Ok(()) };
        let bytes = data.len() as u64;
        match self.cache.insert_spare(key, &data) {
            SpareInsert::Kept => {
                self.step.fetched_frames += 1;
                self.step.fetched_bytes += bytes;
            }
            SpareInsert::Present => self.step.present_bytes += bytes,
            SpareInsert::NoRoom => {
                self.step.left_bytes += bytes;
                self.frames_left = 0;
                self.step.is_full = true;
            }
            SpareInsert::Unfit => self.step.left_bytes += bytes,
            SpareInsert::Off => {
                let text = "the disk of the read cache cannot be written at present; see the log";
                return Err(Error::new(ErrorKind::Unavailable, text));
            }
        }
        Ok(())
    }
}
