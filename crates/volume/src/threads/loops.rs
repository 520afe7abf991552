//! The threads that run the loops of all volumes of a process. A loop has a thread while it has
//! something to do; a resting one has none.
//!
//! A thread that finds no loop to run ends after some time. A step may wait for a local disk, so
//! more threads start while all of them are in a step. One thread more, the clock, resumes the
//! loops whose rest has a limit, and looks after those that find no thread.
//!
//! Invariants:
//! 1. A loop is in one place: ready, run by one thread, parked in its [`Wake`], or ended.
//! 2. At most [`THREADS_MAX`] threads run loops, beside those that are stuck: in one step for
//!    longer than [`STUCK_AFTER`]. So a disk that hangs leaves threads to the volumes of other
//!    disks, however many hang, up to [`ALL_THREADS_MAX`] threads.
//! 3. While loops wait that may run, no thread is idle, or as many run as there may be, or the
//!    clock looks again within [`LOOK_EVERY`]. So a thread that could not be started is tried
//!    again.
//! 4. A thread that runs a loop takes turns: after [`TURN_TIME_MAX`], loops that wait come first.
//! 5. A loop that panics ends, even if what handles its panic panics too: nothing waits for it.
//!
//! Modules: [`ready`] (the loops that wait for a thread, in order).
//!
//! Not here: what a loop does and how long it may rest (`threads`).

mod ready;
#[cfg(all(test, feature = "shuttle"))]
mod schedules;
#[cfg(all(test, not(feature = "shuttle")))]
mod tests;

use std::collections::BTreeMap;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use sawmill_sys::sync::{AtomicBool, AtomicU64, AtomicUsize, Condvar, Mutex, ThreadId, thread_id};

use self::ready::ReadyLoops;
pub(super) use self::ready::{LoopGroup, LoopKind};
use super::wake::{ParkedLoop, Wake};
use crate::{Error, ErrorKind, Result};

/// The most threads that run loops, beside those that are stuck.
pub(crate) const THREADS_MAX: usize = 32;
/// The most threads, those that are stuck included. Then loops wait for a step that ends.
const ALL_THREADS_MAX: usize = 512;
/// A thread is stuck when one step takes longer than this: its disk hangs, or is very slow.
const STUCK_AFTER: Duration = Duration::from_millis(500);
/// How often the clock looks for loops that find no thread, while there are some.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// So many may sleep with their loop in a short rest, because it is woken sooner like that.
const SLEEPERS_MAX: usize = 4;
/// How long a loop keeps its thread while others wait for one; at least a step.
const TURN_TIME_MAX: Duration = Duration::from_millis(2);
/// A thread that was idle for this long ends.
const IDLE_TIME_MAX: Duration = Duration::from_secs(10);

/// What a loop does after a step.
pub(super) enum Rest {
    /// It steps again at once.
    No,
    /// Nothing for a moment: it steps again when it is notified, or after that time.
    Short { watch: Duration, sleep: Duration },
    /// Nothing until it is notified, or that time has passed.
    Long(Option<Duration>),
    /// It has ended.
    End,
}

/// A loop of a volume.
pub(super) trait SteppedLoop: Send {
    /// One step. `was_quiet`: the last rest was not ended by a notification.
    fn step(&mut self, was_quiet: bool) -> Rest;
    /// It has panicked.
    fn fail(&mut self);
}

/// Starts a thread with this name.
type Spawn = fn(&str, Box<dyn FnOnce() + Send>) -> io::Result<()>;

/// The threads of the volumes that were opened with clones of one set of options.
pub struct LoopThreads {
    state: Mutex<State>,
    /// For the clock: an earlier time, or the end.
    earlier: Condvar,
    /// Threads asleep with their loop.
    sleepers: AtomicUsize,
    /// Loops wait that may run, and no thread is free.
    is_short: AtomicBool,
    /// The times of `Seat` count from here.
    start: Instant,
    spawn: Spawn,
}

/// How many threads run the loops of volumes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoopThreadCounts {
    /// All of them, without the clock.
    pub threads: u64,
    /// Those that are in one step for too long: a local disk hangs, or is very slow.
    pub stuck: u64,
}

#[derive(Default)]
struct State {
    ready: ReadyLoops<Arc<VolumeLoop>>,
    /// Threads that wait for a loop; the last one was the last to work. Bounded by `seats`.
    idle: Vec<Arc<IdleThread>>,
    /// A seat for each thread. Bounded by `ALL_THREADS_MAX`.
    seats: Vec<Arc<Seat>>,
    /// How many of them the clock has found stuck, in the turn that they are in.
    stuck: usize,
    /// Bounded by the loops: each is here once at most.
    due: BTreeMap<(Instant, u64), Arc<VolumeLoop>>,
    /// The loops that have not ended, and the number of the last one.
    loops: usize,
    last_number: u64,
    has_clock: bool,
    /// The system had no thread for us when the clock last asked.
    has_start_failed: bool,
    /// When the clock looks for loops that find no thread.
    look_at: Option<Instant>,
    /// When the clock wakes up; `None`: when it is told to.
    clock_at: Option<Instant>,
}

/// What is known of a thread.
#[derive(Default)]
struct Seat {
    /// When its step began, in nanoseconds; 0: it is in none.
    step_began_ns: AtomicU64,
    /// It is in `State::stuck`; under its lock.
    is_stuck: AtomicBool,
}

#[derive(Default)]
struct IdleThread {
    is_called: Mutex<bool>,
    called: Condvar,
}

/// A loop, and how it is run.
pub(super) struct VolumeLoop {
    threads: Arc<LoopThreads>,
    number: u64,
    group: LoopGroup,
    /// What ends its rests.
    wake: Arc<Wake>,
    /// `None` while it runs, and after its end.
    stepped: Mutex<Option<Box<dyn SteppedLoop>>>,
    /// When its rest ends at the latest; beside `State::due`, under its lock.
    due_at: Mutex<Option<Instant>>,
    was_quiet: AtomicBool,
    run: Mutex<RunState>,
    ended: Condvar,
}

#[derive(Default)]
struct RunState {
    runner: Option<ThreadId>,
    has_ended: bool,
}

impl Default for LoopThreads {
    fn default() -> Self {
        Self::with(|name, work| std::thread::Builder::new().name(name.into()).spawn(work).map(drop))
    }
}

impl LoopThreads {
    fn with(spawn: Spawn) -> Self {
        LoopThreads {
            state: Mutex::default(),
            earlier: Condvar::default(),
            sleepers: AtomicUsize::new(0),
            is_short: AtomicBool::new(false),
            start: Instant::now(),
            spawn,
        }
    }

    /// Takes over a loop and runs it until it ends.
    pub(super) fn run(
        self: &Arc<Self>,
        group: LoopGroup,
        wake: Arc<Wake>,
        stepped: Box<dyn SteppedLoop>,
    ) -> Result<Arc<VolumeLoop>> {
        let cannot_start = |error| {
            let what = "a thread for the loops of volumes cannot be started";
            Error::caused(ErrorKind::Unavailable, what, error)
        };
        let mut state = self.state.lock();
        if !state.has_clock {
            let threads = self.clone();
            (self.spawn)("volume-clock", Box::new(move || threads.keep_time()))
                .map_err(cannot_start)?;
            state.has_clock = true;
        }
        if state.seats.is_empty() {
            self.start_thread(&mut state).map_err(cannot_start)?;
        }
        state.loops += 1;
        state.last_number += 1;
        let started = Arc::new(VolumeLoop {
            threads: self.clone(),
            number: state.last_number,
            group,
            wake,
            stepped: Mutex::new(Some(stepped)),
            due_at: Mutex::default(),
            was_quiet: AtomicBool::new(false),
            run: Mutex::default(),
            ended: Condvar::default(),
        });
        let called = self.make_ready(&mut state, started.clone());
        drop(state);
        called.iter().for_each(|idle| idle.call());
        Ok(started)
    }

    /// How many threads there are.
    #[must_use]
    pub fn counts(&self) -> LoopThreadCounts {
        let (state, now_ns) = (self.state.lock(), self.now_ns());
        let stuck = state.seats.iter().filter(|seat| seat.is_in_long_step(now_ns)).count();
        LoopThreadCounts { threads: state.seats.len() as u64, stuck: stuck as u64 }
    }

    fn now_ns(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    fn start_thread(self: &Arc<Self>, state: &mut State) -> io::Result<()> {
        let (threads, seat) = (self.clone(), Arc::new(Seat::default()));
        let own_seat = seat.clone();
        (self.spawn)("volume", Box::new(move || threads.work(&own_seat)))?;
        state.seats.push(seat);
        Ok(())
    }

    /// Makes a loop ready, and finds a thread for it if it may have one. The caller calls the one
    /// that is returned, without the lock.
    fn make_ready(
        self: &Arc<Self>,
        state: &mut State,
        ready: Arc<VolumeLoop>,
    ) -> Option<Arc<IdleThread>> {
        if let Some(at) = ready.due_at.lock().take() {
            state.due.remove(&(at, ready.number));
        }
        if !state.ready.push(ready.group, ready) {
            return None;
        }
        let idle = state.idle.pop();
        if idle.is_none() {
            self.look_soon(state);
        }
        idle
    }

    /// Starts one more thread, if there may be one and the system has one. Only the clock does,
    /// except for the first: a thread inherits priority and cores of the one that starts it, and
    /// those of a collector or of a door are not for the loops of all volumes.
    fn start_if_allowed(self: &Arc<Self>, state: &mut State) -> bool {
        if !state.may_start() {
            return false;
        }
        let started = self.start_thread(state);
        if let Err(error) = &started {
            tracing::warn!(%error, threads = state.seats.len(), "volumes share fewer threads");
        }
        started.is_ok()
    }

    /// A thread: runs loops until there have been none for some time.
    fn work(self: &Arc<Self>, seat: &Arc<Seat>) {
        while let Some(ready) = self.next(seat) {
            // Only a bug of this file panics here; it must not cost the thread too.
            let _ = catch_unwind(AssertUnwindSafe(|| ready.run(seat)));
        }
    }

    /// The next loop to run; `None`: this thread ends.
    fn next(self: &Arc<Self>, seat: &Arc<Seat>) -> Option<Arc<VolumeLoop>> {
        let mut state = self.state.lock();
        seat.leave_step();
        if seat.is_stuck.swap(false, Ordering::Relaxed) {
            state.stuck -= 1;
        }
        loop {
            if state.loops == 0 {
                break;
            }
            // Others took its place while it was stuck.
            if state.working() > THREADS_MAX {
                if state.ready.may_run() {
                    self.look_soon(&mut state);
                }
                break;
            }
            if let Some(ready) = state.ready.take() {
                if !state.ready.may_run() {
                    self.is_short.store(false, Ordering::Relaxed);
                }
                return Some(ready);
            }
            let idle = Arc::<IdleThread>::default();
            state.idle.push(idle.clone());
            drop(state);
            idle.wait();
            state = self.state.lock();
            // If it was called, there may be a loop. The last thread stays for those that cannot
            // start another.
            if let Some(at) = state.idle.iter().position(|other| Arc::ptr_eq(other, &idle)) {
                state.idle.remove(at);
                if state.working() > 1 && !state.ready.may_run() {
                    break;
                }
            }
        }
        state.seats.retain(|other| !Arc::ptr_eq(other, seat));
        None
    }

    /// A loop has left its thread, until the end of a rest if it has one.
    fn leave(self: &Arc<Self>, left: &Arc<VolumeLoop>, rest_limit: Option<Duration>) {
        // A rest so long that it never ends.
        let due_at = rest_limit.and_then(|limit| Instant::now().checked_add(limit));
        let mut state = self.state.lock();
        state.ready.leave(left.group);
        if let Some(at) = due_at {
            *left.due_at.lock() = Some(at);
            state.due.insert((at, left.number), left.clone());
            self.wake_clock(&mut state, at);
        }
    }

    /// A loop has left its thread to others that wait.
    fn leave_to_others(self: &Arc<Self>, left: &Arc<VolumeLoop>) {
        let mut state = self.state.lock();
        state.ready.leave(left.group);
        // This thread takes the next one.
        let _ = state.ready.push(left.group, left.clone());
    }

    /// A loop has ended. With the last one, the threads end.
    fn forget(&self, ended: &VolumeLoop) {
        let mut state = self.state.lock();
        state.ready.leave(ended.group);
        state.loops -= 1;
        if state.loops == 0 {
            self.earlier.notify_all();
            let idle = std::mem::take(&mut state.idle);
            drop(state);
            idle.iter().for_each(|idle| idle.call());
        }
    }

    /// The clock's thread.
    fn keep_time(self: &Arc<Self>) {
        let mut state = self.state.lock();
        while state.loops > 0 {
            let first = state.due.first_key_value().map(|(first, _)| *first);
            let due_at = first.map(|(at, _)| at);
            let now = Instant::now();
            if state.look_at.is_some_and(|at| at <= now) {
                self.look(&mut state, now);
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
                        let _ = self.earlier.wait_for(&mut state, left);
                    }
                    None => self.earlier.wait(&mut state),
                }
            }
        }
        state.has_clock = false;
    }

    /// Loops find no thread: those that run give way, and the clock looks, at once if it may start
    /// a thread.
    fn look_soon(&self, state: &mut State) {
        self.is_short.store(true, Ordering::Relaxed);
        let wait =
            if state.may_start() && !state.has_start_failed { Duration::ZERO } else { LOOK_EVERY };
        let at = Instant::now() + wait;
        if state.look_at.is_none_or(|look_at| at < look_at) {
            state.look_at = Some(at);
            self.wake_clock(state, at);
        }
    }

    /// Has the clock wake up at that time, if it would wake up later.
    fn wake_clock(&self, state: &mut State, at: Instant) {
        if state.clock_at.is_none_or(|clock_at| at < clock_at) {
            state.clock_at = Some(at);
            self.earlier.notify_all();
        }
    }

    /// Finds the threads that are stuck, and starts others for the loops that wait.
    fn look(self: &Arc<Self>, state: &mut State, now: Instant) {
        let (now_ns, stuck_before) = (self.now_ns(), state.stuck);
        let is_found = |seat: &&Arc<Seat>| {
            seat.is_in_long_step(now_ns) && !seat.is_stuck.swap(true, Ordering::Relaxed)
        };
        state.stuck += state.seats.iter().filter(is_found).count();
        if stuck_before == 0 && state.stuck > 0 {
            let stuck = state.stuck;
            tracing::warn!(stuck, "threads of volumes wait for a local disk: does it hang?");
        }
        state.look_at = None;
        if state.ready.may_run() && state.idle.is_empty() {
            let wanted = state.ready.may_run_count();
            let has_started = (0..wanted).all(|_| self.start_if_allowed(state));
            state.has_start_failed = !has_started && state.may_start();
            state.look_at = Some(now + LOOK_EVERY);
        }
    }
}

impl State {
    fn may_start(&self) -> bool {
        self.working() < THREADS_MAX && self.seats.len() < ALL_THREADS_MAX
    }

    /// Threads that are not stuck.
    fn working(&self) -> usize {
        self.seats.len().saturating_sub(self.stuck)
    }
}

impl Seat {
    fn is_in_long_step(&self, now_ns: u64) -> bool {
        let began_ns = self.step_began_ns.load(Ordering::Relaxed);
        began_ns > 0 && u128::from(now_ns.saturating_sub(began_ns)) > STUCK_AFTER.as_nanos()
    }

    fn leave_step(&self) {
        self.step_began_ns.store(0, Ordering::Relaxed);
    }
}

impl IdleThread {
    fn call(&self) {
        *self.is_called.lock() = true;
        self.called.notify_one();
    }

    fn wait(&self) {
        let mut is_called = self.is_called.lock();
        if !*is_called {
            let _ = self.called.wait_for(&mut is_called, IDLE_TIME_MAX);
        }
    }
}

/// A loop that is about to end; it has ended when this is dropped.
struct Ending<'a>(&'a Arc<VolumeLoop>);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.threads.forget(self.0);
        let mut run = self.0.run.lock();
        (run.runner, run.has_ended) = (None, true);
        self.0.ended.notify_all();
    }
}

impl VolumeLoop {
    /// Runs the loop until it rests, ends or others wait.
    fn run(self: &Arc<Self>, seat: &Seat) {
        self.run.lock().runner = Some(thread_id());
        // Until it is known that it goes on.
        let ending = Ending(self);
        let taken = self.stepped.lock().take();
        let Some(mut stepped) = taken else { return };
        let outcome = catch_unwind(AssertUnwindSafe(|| self.step_until_rest(&mut *stepped, seat)));
        match outcome {
            Ok(Rest::End) => {}
            Ok(rest) => {
                *self.stepped.lock() = Some(stepped);
                std::mem::forget(ending);
                self.run.lock().runner = None;
                return self.rest(rest);
            }
            Err(_) => {
                // Its callbacks may panic as well.
                let _ = catch_unwind(AssertUnwindSafe(|| stepped.fail()));
            }
        }
        // What the loop holds must be free when its end is seen.
        let _ = catch_unwind(AssertUnwindSafe(|| drop(stepped)));
    }

    /// Steps until the loop has to leave its thread, and says why.
    fn step_until_rest(&self, stepped: &mut dyn SteppedLoop, seat: &Seat) -> Rest {
        let threads = &self.threads;
        let mut was_quiet = self.was_quiet.swap(false, Ordering::AcqRel);
        let turn_began_ns = threads.now_ns();
        let turn_ns = TURN_TIME_MAX.as_nanos() as u64;
        loop {
            let now_ns = threads.now_ns().max(1);
            let is_short = threads.is_short.load(Ordering::Relaxed);
            if is_short && now_ns - turn_began_ns > turn_ns {
                // A step that says what it did last is not lost: it is asked again.
                self.was_quiet.store(was_quiet, Ordering::Release);
                return Rest::No;
            }
            seat.step_began_ns.store(now_ns, Ordering::Relaxed);
            match stepped.step(std::mem::take(&mut was_quiet)) {
                Rest::No => {}
                Rest::Short { watch, sleep } if !is_short => {
                    seat.leave_step();
                    self.wake.watch(watch);
                    if threads.sleepers.fetch_add(1, Ordering::AcqRel) >= SLEEPERS_MAX {
                        threads.sleepers.fetch_sub(1, Ordering::AcqRel);
                        return Rest::Short { watch, sleep };
                    }
                    was_quiet = !self.wake.sleep(Some(sleep));
                    threads.sleepers.fetch_sub(1, Ordering::AcqRel);
                }
                rest => return rest,
            }
        }
    }

    /// Leaves the thread to other loops until the rest is over.
    fn rest(self: &Arc<Self>, rest: Rest) {
        let limit = match rest {
            Rest::No => return self.threads.leave_to_others(self),
            Rest::Short { sleep, .. } => Some(sleep),
            Rest::Long(limit) => limit,
            Rest::End => None,
        };
        self.threads.leave(self, limit);
        if !self.wake.park(self.clone()) {
            self.clone().resume();
        }
    }

    /// The limit of its rest has passed.
    fn end_rest(&self) {
        match self.wake.unpark() {
            Some(resumed) => {
                self.was_quiet.store(true, Ordering::Release);
                resumed.resume();
            }
            // It is about to be parked, or runs again: then it steps once for nothing.
            None => self.wake.notify(),
        }
    }

    /// Waits until the loop has ended. Does not wait on the loop's own thread, which ends it soon:
    /// an answer that a step gives may close the volume.
    pub(super) fn wait_ended(&self) {
        self.wake.notify();
        let mut run = self.run.lock();
        while !run.has_ended && run.runner != Some(thread_id()) {
            self.ended.wait(&mut run);
        }
    }
}

impl ParkedLoop for VolumeLoop {
    fn resume(self: Arc<Self>) {
        let threads = self.threads.clone();
        let called = {
            let mut state = threads.state.lock();
            threads.make_ready(&mut state, self)
        };
        called.iter().for_each(|idle| idle.call());
    }
}
