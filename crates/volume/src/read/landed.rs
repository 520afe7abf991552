//! Frames that read-ahead has brought, in memory until a reader takes them. They go to the read
//! cache too, but that may be slow, refuse them, or be absent.
//!
//! Invariants: at most `bytes_max`, and what the process has for all volumes (`ahead_memory`). The
//! oldest answers go first. The frames of one answer share
//! its memory, so they are put together, and all of it counts until the last was taken. A volume at
//! rest keeps none.
//!
//! Not here: what is fetched (`ahead`, `fetch`), and the clock.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;

use super::ahead_memory::AheadMemory;
use crate::stored_data::FrameName;

/// Answers kept at most, with those that are used up but came after one that is not.
const ANSWERS_MAX: usize = 4096;

/// What one answer of the store brought.
struct Answer {
    names: Vec<FrameName>,
    /// Frames that no reader has taken yet.
    frames_left: usize,
    /// 0 once none is left.
    bytes: u64,
    at: Duration,
}

struct LandedFrame {
    /// Of the answer that brought it.
    number: u64,
    data: Bytes,
    /// How much of it readers have taken.
    taken_bytes: usize,
}

#[derive(Default)]
struct LandedState {
    frames: HashMap<FrameName, LandedFrame>,
    /// In order of arrival, numbered from `first_number` on. Bounded by [`ANSWERS_MAX`].
    answers: VecDeque<Answer>,
    first_number: u64,
    bytes: u64,
    /// Whether somebody will see to it that they are forgotten.
    has_end: bool,
}

impl LandedState {
    fn drop_frame(&mut self, name: FrameName) {
        let Some(frame) = self.frames.remove(&name) else { return };
        let place = (frame.number - self.first_number) as usize;
        let Some(answer) = self.answers.get_mut(place) else {
            return;
        };
        answer.frames_left -= 1;
        if answer.frames_left == 0 {
            self.bytes -= std::mem::take(&mut answer.bytes);
        }
        while self.answers.front().is_some_and(|answer| answer.frames_left == 0) {
            self.drop_oldest();
        }
    }

    fn drop_oldest(&mut self) {
        let Some(answer) = self.answers.pop_front() else { return };
        let number = self.first_number;
        self.first_number += 1;
        self.bytes -= answer.bytes;
        for name in answer.names {
            // A later answer may have brought it again.
            if self.frames.get(&name).is_some_and(|frame| frame.number == number) {
                self.frames.remove(&name);
            }
        }
    }
}

/// The frames that wait for a reader.
pub(crate) struct Landed {
    state: Mutex<LandedState>,
    bytes_max: u64,
    memory: Arc<AheadMemory>,
    /// As many as in `frames`: a reader of cached data takes no lock.
    count: AtomicUsize,
}

impl Drop for Landed {
    fn drop(&mut self) {
        self.memory.give_back(self.state.get_mut().bytes);
    }
}

impl Landed {
    pub(super) fn new(bytes_max: u64, memory: Arc<AheadMemory>) -> Self {
        Landed { state: Mutex::default(), bytes_max, memory, count: AtomicUsize::new(0) }
    }

    /// Changes what is kept; what that frees is given back.
    fn give_up<T>(&self, state: &mut LandedState, change: impl FnOnce(&mut LandedState) -> T) -> T {
        let before = state.bytes;
        let outcome = change(state);
        self.memory.give_back(before - state.bytes);
        self.count.store(state.frames.len(), Ordering::Release);
        outcome
    }

    /// Keeps frames that share their memory. Returns true if the caller is to see to it that they
    /// are forgotten some day.
    pub(super) fn put(&self, frames: Vec<(FrameName, Bytes)>, at: Duration) -> bool {
        let bytes: u64 = frames.iter().map(|(_, data)| data.len() as u64).sum();
        if bytes == 0 || bytes > self.bytes_max {
            return false;
        }
        let mut state = self.state.lock();
        self.give_up(&mut state, |state| {
            frames.iter().for_each(|(name, _)| state.drop_frame(*name));
            while state.bytes + bytes > self.bytes_max || state.answers.len() == ANSWERS_MAX {
                state.drop_oldest();
            }
        });
        while !self.memory.take(bytes) {
            if state.answers.is_empty() {
                // The others have it all: their readers come first.
                return false;
            }
            self.give_up(&mut state, LandedState::drop_oldest);
        }
        let number = state.first_number + state.answers.len() as u64;
        let names: Vec<FrameName> = frames.iter().map(|(name, _)| *name).collect();
        state.answers.push_back(Answer { frames_left: names.len(), names, bytes, at });
        state.bytes += bytes;
        let new_frame = |data| LandedFrame { number, data, taken_bytes: 0 };
        state.frames.extend(frames.into_iter().map(|(name, data)| (name, new_frame(data))));
        self.count.store(state.frames.len(), Ordering::Release);
        !std::mem::replace(&mut state.has_end, true)
    }

    /// The frame, if it is here.
    pub(super) fn find(&self, name: FrameName) -> Option<Bytes> {
        if self.count.load(Ordering::Acquire) == 0 {
            return None;
        }
        self.state.lock().frames.get(&name).map(|frame| frame.data.clone())
    }

    /// Whether the frame is here.
    pub(super) fn contains(&self, name: FrameName) -> bool {
        self.count.load(Ordering::Acquire) > 0 && self.state.lock().frames.contains_key(&name)
    }

    /// Copies `[offset, offset + into.len())` of a frame, if it is here. Once as much was read as
    /// it has, in whatever order, it is gone.
    pub(super) fn read(&self, name: FrameName, offset: u32, into: &mut [u8]) -> bool {
        let Some(data) = self.find(name) else { return false };
        let end = offset as usize + into.len();
        let Some(part) = data.get(offset as usize..end) else { return false };
        into.copy_from_slice(part);
        let mut state = self.state.lock();
        let is_used_up = state.frames.get_mut(&name).is_some_and(|frame| {
            frame.taken_bytes += part.len();
            frame.taken_bytes >= frame.data.len()
        });
        if is_used_up {
            self.give_up(&mut state, |state| state.drop_frame(name));
        }
        true
    }

    /// Forgets what came before `time`. Returns true if something is left, and the caller is to
    /// come again.
    pub(super) fn forget_before(&self, time: Duration) -> bool {
        let mut state = self.state.lock();
        self.give_up(&mut state, |state| {
            while state.answers.front().is_some_and(|answer| answer.at < time) {
                state.drop_oldest();
            }
        });
        state.has_end = !state.answers.is_empty();
        state.has_end
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn name(frame: u32) -> FrameName {
        FrameName { sequence: 1, epoch: 1, frame }
    }

    /// An answer of these frames, each of 100 bytes.
    fn answer(frames: std::ops::Range<u32>) -> Vec<(FrameName, Bytes)> {
        frames.map(|frame| (name(frame), Bytes::from(vec![frame as u8; 100]))).collect()
    }

    /// A volume that shares its memory with no other.
    fn alone(bytes_max: u64) -> Landed {
        Landed::new(bytes_max, Arc::default())
    }

    fn kept(landed: &Landed) -> Vec<u32> {
        (0..100).filter(|frame| landed.contains(name(*frame))).collect()
    }

    #[test]
    fn frames_in_memory_are_bounded_and_the_oldest_answers_go_first() {
        let landed = alone(500);
        assert!(landed.put(answer(0..2), SECOND), "the first asks for an end");
        assert!(!landed.put(answer(2..4), SECOND));
        assert!(!landed.put(answer(4..6), SECOND));
        assert_eq!(kept(&landed), [2, 3, 4, 5], "a part of an answer would hold all its memory");
        assert!(!landed.put(answer(10..16), SECOND), "longer than all may be");
        assert_eq!(kept(&landed), [2, 3, 4, 5]);
    }

    #[test]
    fn a_frame_stays_until_all_of_it_was_read_in_whatever_order() {
        let landed = alone(400);
        landed.put(answer(0..1), SECOND);
        let mut half = [9; 50];
        assert!(landed.read(name(0), 50, &mut half));
        assert!(landed.read(name(0), 0, &mut half), "a reader that goes backward");
        assert!(!landed.read(name(0), 0, &mut half), "taken");
    }

    #[test]
    fn a_frame_stays_until_it_was_read_and_its_answer_counts_until_the_last() {
        let landed = alone(400);
        landed.put(answer(0..2), SECOND);
        let mut half = [9; 50];
        assert!(landed.read(name(0), 0, &mut half));
        assert!(landed.read(name(0), 50, &mut half));
        assert_eq!(half, [0; 50]);
        assert!(!landed.read(name(0), 0, &mut half), "taken");
        landed.put(answer(2..4), SECOND);
        assert_eq!(kept(&landed), [1, 2, 3]);
        landed.put(answer(4..5), SECOND);
        assert_eq!(kept(&landed), [2, 3, 4], "frame 1 held the memory of two");
        let mut all = [0; 100];
        assert!((2..4).all(|frame| landed.read(name(frame), 0, &mut all)));
        landed.put(answer(5..8), SECOND);
        assert_eq!(kept(&landed), [4, 5, 6, 7], "what was taken made room");
        assert!(!landed.read(name(5), 60, &mut half), "beyond its end");
    }

    #[test]
    fn all_volumes_together_keep_no_more_than_the_process_has() {
        let memory = Arc::new(AheadMemory::new(600));
        let [first, second] = [(), ()].map(|()| Landed::new(500, memory.clone()));
        assert!(first.put(answer(0..5), SECOND));
        assert!(!second.put(answer(0..2), SECOND), "the first has most of it");
        assert!(second.put(answer(0..1), SECOND));
        assert!(!second.put(answer(1..2), SECOND));
        assert_eq!(kept(&second), [1], "its own oldest makes room");
        assert!(first.read(name(0), 0, &mut [0; 100]));
        assert!(!second.put(answer(2..4), SECOND), "an answer counts until its last frame");
        drop(first);
        second.put(answer(2..7), SECOND);
        assert_eq!(kept(&second), [2, 3, 4, 5, 6]);
        assert!(!second.forget_before(2 * SECOND));
        assert!(memory.take(600), "all was given back");
    }

    #[test]
    fn a_frame_that_came_twice_goes_with_its_later_answer() {
        let landed = alone(500);
        landed.put(answer(0..2), SECOND);
        landed.put(answer(1..3), SECOND);
        landed.put(answer(3..5), SECOND);
        assert_eq!(kept(&landed), [1, 2, 3, 4]);
    }

    #[test]
    fn what_came_lately_outlives_what_is_forgotten() {
        let landed = alone(1000);
        assert!(landed.put(answer(0..2), SECOND));
        assert!(!landed.put(answer(2..4), 9 * SECOND));
        assert!(landed.forget_before(5 * SECOND), "come again");
        assert_eq!(kept(&landed), [2, 3]);
        assert!(!landed.put(answer(4..5), 10 * SECOND), "somebody comes again");
        assert!(!landed.forget_before(11 * SECOND));
        assert!(kept(&landed).is_empty());
        assert!(landed.put(answer(5..6), 12 * SECOND), "and again after the end");
    }

    #[test]
    fn answers_in_memory_are_bounded_also_where_all_but_the_first_were_taken() {
        let landed = alone(1 << 20);
        landed.put(answer(0..1), SECOND);
        let mut all = [0; 100];
        for _ in 0..=ANSWERS_MAX {
            landed.put(answer(1..2), SECOND);
            assert!(landed.read(name(1), 0, &mut all));
        }
        assert!(landed.state.lock().answers.len() <= ANSWERS_MAX);
    }
}
