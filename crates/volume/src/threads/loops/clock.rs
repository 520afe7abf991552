//! The clock: ends the rests that have a limit, finds threads that are stuck, and starts others for
//! the loops that wait.
//!
//! Invariants: a panic costs one round, not the clock. It waits for no log: another thread writes,
//! while the system has one.
//!
//! Not here: which loop runs next (`ready`).

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::{Calls, LOOK_EVERY, LoopThreads, NewThread, Seat, State};
use crate::threads::wake::Wake;

/// How often the log is told the same.
const SAID_EVERY: Duration = Duration::from_secs(60);

/// What the clock does when `state` is free again.
struct Looked {
    calls: Vec<Calls>,
    new: Vec<NewThread>,
    said: Option<Message>,
}

/// What the clock has to say.
#[derive(Clone)]
enum Message {
    Stuck { stuck: usize },
    Refused { error: Arc<io::Error>, threads: usize },
}

impl Message {
    fn say(&self) {
        match self {
            Message::Stuck { stuck } => {
                tracing::warn!(stuck, "threads of volumes wait for a local disk: does it hang?");
            }
            Message::Refused { error, threads } => {
                tracing::warn!(%error, threads, "volumes share fewer threads");
            }
        }
    }
}

/// While a thread writes to the log.
struct Saying(Arc<LoopThreads>);

impl Drop for Saying {
    fn drop(&mut self) {
        self.0.is_saying.store(false, Ordering::Release);
    }
}

/// Whether it is time to say this again; notes that it was said.
fn is_due(said_at: &mut Option<Instant>, now: Instant) -> bool {
    let is_due = said_at.is_none_or(|at| now.saturating_duration_since(at) >= SAID_EVERY);
    if is_due {
        *said_at = Some(now);
    }
    is_due
}

impl LoopThreads {
    /// The clock's thread.
    pub(super) fn keep_time(self: &Arc<Self>) {
        // Nothing else ends rests or starts threads.
        while catch_unwind(AssertUnwindSafe(|| self.keep_time_until_last())).is_err() {
            let mut state = self.state.lock();
            self.earlier.wait_for(&mut state, LOOK_EVERY);
        }
    }

    fn keep_time_until_last(self: &Arc<Self>) {
        let mut state = self.state.lock();
        while state.loops > 0 {
            let first = state.due.first_key_value().map(|(first, _)| *first);
            let due_at = first.map(|(at, _)| at);
            let now = Instant::now();
            if state.look_at.is_some_and(|at| at <= now) {
                let looked = self.look(&mut state, now);
                drop(state);
                self.act(looked, now);
                state = self.state.lock();
            } else if let Some((at, number)) = first.filter(|(at, _)| *at <= now) {
                let Some(over) = state.due.remove(&(at, number)) else { continue };
                *over.due_at.lock() = None;
                drop(state);
                over.end_rest();
                state = self.state.lock();
            } else {
                state.clock_at = due_at.into_iter().chain(state.look_at).min();
                match state.clock_at {
                    Some(at) => {
                        let left = at.saturating_duration_since(now);
                        self.earlier.wait_for(&mut state, left);
                    }
                    None => self.earlier.wait(&mut state),
                }
            }
        }
        state.has_clock = false;
    }

    /// Loops find no thread: those that run give way, and the clock looks, at once if it may start
    /// a thread. Returns who is to be woken, because they sleep with threads that others need.
    pub(super) fn look_soon(&self, state: &mut State) -> Vec<Arc<Wake>> {
        let was_short = self.is_short.swap(true, Ordering::Relaxed);
        let may_start = state.to_start() > 0 && !state.has_start_failed;
        let at = Instant::now() + if may_start { Duration::ZERO } else { LOOK_EVERY };
        if state.look_at.is_none_or(|look_at| at < look_at) {
            state.look_at = Some(at);
            self.wake_clock(state, at);
        }
        if was_short || may_start { Vec::new() } else { self.sleepers.lock().clone() }
    }

    /// Has the clock wake up at that time, if it would wake up later.
    pub(super) fn wake_clock(&self, state: &mut State, at: Instant) {
        if state.clock_at.is_none_or(|clock_at| at < clock_at) {
            state.clock_at = Some(at);
            self.earlier.notify_all();
        }
    }

    /// Finds the threads that are stuck, and others for the loops that wait.
    fn look(self: &Arc<Self>, state: &mut State, now: Instant) -> Looked {
        let (now_ns, stuck_after) = (self.now_ns(), self.limits.stuck_after);
        let is_found = |seat: &&Arc<Seat>| {
            seat.is_in_long_step(now_ns, stuck_after)
                && !seat.is_stuck.swap(true, Ordering::Relaxed)
        };
        let found = state.seats.iter().filter(is_found).count();
        state.stuck += found;
        let said = (found > 0 && is_due(&mut state.stuck_said_at, now))
            .then_some(Message::Stuck { stuck: state.stuck });
        let idle = std::iter::from_fn(|| state.call_idle());
        let calls = idle.map(|idle| Calls { idle: Some(idle), sleepers: Vec::new() }).collect();
        let is_waiting = state.ready.open() > state.arriving;
        let new = (0..state.to_start()).map(|_| self.take_seat(state)).collect();
        // Also when threads are started, because that can fail.
        state.look_at = is_waiting.then_some(now + LOOK_EVERY);
        Looked { calls, new, said }
    }

    /// Does what was found to do, without the lock.
    fn act(self: &Arc<Self>, looked: Looked, now: Instant) {
        looked.calls.into_iter().for_each(Calls::call);
        // Those behind one that was refused give their places back.
        let refused = looked.new.into_iter().find_map(|new| self.start_thread(new).err());
        let mut state = self.state.lock();
        state.has_start_failed = refused.is_some();
        let threads = state.seats.len();
        let is_said = refused.is_some() && is_due(&mut state.refused_said_at, now);
        drop(state);
        looked.said.into_iter().for_each(|message| self.say(&message));
        if let Some(error) = refused {
            let sleepers = self.sleepers.lock().clone();
            sleepers.iter().for_each(|wake| wake.notify());
            if is_said {
                self.say(&Message::Refused { error: Arc::new(error), threads });
            }
        }
    }

    /// Logs a message on a thread of its own, because the log may hang with the disk that it is
    /// about; on this one if there is no other. While one is written, others are left out.
    fn say(self: &Arc<Self>, message: &Message) {
        if self.is_saying.swap(true, Ordering::AcqRel) {
            return;
        }
        let (saying, own) = (Saying(self.clone()), message.clone());
        let write = move || {
            let _saying = saying;
            own.say();
        };
        if (self.spawn)("volume-log", Box::new(write)).is_err() {
            message.say();
        }
    }
}
