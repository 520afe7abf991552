//! What the threads of loops share under one lock, and how many of them there may be.
//!
//! Invariants: threads that run loops, beside those that are stuck, are at most `threads_max` and
//! one for each group that would have none; all that exist are at most `all_threads_max`. Threads
//! are wanted exactly while there is a loop to take.
//!
//! Not here: which loop is taken (`ready`), and when (`loops`).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::ready::ReadyLoops;
use super::{
    ALL_THREADS_MAX, GROUP_THREADS_MAX, IDLE_TIME_MAX, IdleThread, LoopGroup, SLEEPERS_MAX,
    STUCK_AFTER, Seat, THREADS_MAX, VolumeLoop,
};

/// How many threads there may be, and for how long. Tests have others.
#[derive(Clone, Copy)]
pub(super) struct LoopLimits {
    pub(super) threads_max: usize,
    pub(super) all_threads_max: usize,
    pub(super) group_threads_max: usize,
    pub(super) sleepers_max: usize,
    pub(super) stuck_after: Duration,
    pub(super) idle_time_max: Duration,
}

impl Default for LoopLimits {
    fn default() -> Self {
        LoopLimits {
            threads_max: THREADS_MAX,
            all_threads_max: ALL_THREADS_MAX,
            group_threads_max: GROUP_THREADS_MAX,
            sleepers_max: SLEEPERS_MAX,
            stuck_after: STUCK_AFTER,
            idle_time_max: IDLE_TIME_MAX,
        }
    }
}

pub(super) struct State {
    pub(super) limits: LoopLimits,
    pub(super) ready: ReadyLoops<Arc<VolumeLoop>>,
    /// Threads that wait for a loop; the last one was the last to work. Bounded by `seats`.
    pub(super) idle: Vec<Arc<IdleThread>>,
    /// A seat for each thread, also for those that are being started. Bounded by `all_threads_max`.
    pub(super) seats: Vec<Arc<Seat>>,
    /// How many of them the clock has found stuck, in the step that they are in.
    pub(super) stuck: usize,
    /// How many are about to look for a loop: they are being started, were called, or have just
    /// left one.
    pub(super) arriving: usize,
    /// Bounded by the loops: each is here once at most.
    pub(super) due: BTreeMap<(Instant, u64), Arc<VolumeLoop>>,
    /// The loops that have not ended, and the number of the last one.
    pub(super) loops: usize,
    pub(super) last_number: u64,
    pub(super) has_clock: bool,
    /// The system had no thread for us when the clock last asked.
    pub(super) has_start_failed: bool,
    /// When the clock looks for loops that find no thread.
    pub(super) look_at: Option<Instant>,
    /// When the clock wakes up; `None`: when it is told to.
    pub(super) clock_at: Option<Instant>,
    /// When the log was last told of threads that are stuck, and of those that were refused.
    pub(super) stuck_said_at: Option<Instant>,
    pub(super) refused_said_at: Option<Instant>,
}

impl State {
    pub(super) fn new(limits: LoopLimits) -> Self {
        State {
            limits,
            ready: ReadyLoops::new(limits.group_threads_max),
            idle: Vec::new(),
            seats: Vec::new(),
            stuck: 0,
            arriving: 0,
            due: BTreeMap::new(),
            loops: 0,
            last_number: 0,
            has_clock: false,
            has_start_failed: false,
            look_at: None,
            clock_at: None,
            stuck_said_at: None,
            refused_said_at: None,
        }
    }

    /// Threads that are not stuck.
    pub(super) fn working(&self) -> usize {
        self.seats.len().saturating_sub(self.stuck)
    }

    /// How many threads may run loops now beside those that do, with what is ready: those that
    /// bring their number to the limit, but at least one for each group that has none.
    pub(super) fn wanted(&self) -> usize {
        let busy = self.ready.running().saturating_sub(self.stuck);
        let free = self.limits.threads_max.saturating_sub(busy);
        self.ready.open().min(free).max(self.ready.unserved())
    }

    /// A loop for this thread; there is one while threads are wanted.
    pub(super) fn take(&mut self) -> Option<Arc<VolumeLoop>> {
        let busy = self.ready.running().saturating_sub(self.stuck);
        match busy < self.limits.threads_max {
            true => self.ready.take(),
            false => self.ready.take_unserved(),
        }
    }

    /// An idle thread to call, if one is wanted.
    pub(super) fn call_idle(&mut self) -> Option<Arc<IdleThread>> {
        if self.wanted() <= self.arriving {
            return None;
        }
        let idle = self.idle.pop()?;
        self.arriving += 1;
        Some(idle)
    }

    /// How many threads to start.
    pub(super) fn to_start(&self) -> usize {
        let room = self.limits.all_threads_max.saturating_sub(self.seats.len());
        self.wanted().saturating_sub(self.arriving).min(room)
    }

    /// A loop of this group has left its thread, which looks for another.
    pub(super) fn leave(&mut self, group: LoopGroup) {
        self.ready.leave(group);
        self.arriving += 1;
    }

    /// A thread is in no step: it is not stuck.
    pub(super) fn count_again(&mut self, seat: &Seat) {
        if seat.is_stuck.swap(false, Ordering::Relaxed) {
            self.stuck -= 1;
        }
    }

    pub(super) fn end_seat(&mut self, seat: &Arc<Seat>) {
        self.seats.retain(|other| !Arc::ptr_eq(other, seat));
    }
}
