//! The threads that run the loops of all volumes of a process. A loop has a thread while it has
//! something to do; a resting one has none.
//!
//! A thread that finds no loop to run ends after some time. A step may wait for a local disk, so
//! more threads start while all of them are in a step. One thread more, the clock, resumes the
//! loops whose rest has a limit, and looks after those that find no thread.
//!
//! Invariants:
//! 1. A loop is in one place: ready, run by one thread, parked in its [`Wake`], or ended.
//! 2. At most [`THREADS_MAX`] threads run loops, beside those that are stuck (in one step for
//!    longer than [`STUCK_AFTER`]) and one for each group that would have none. So a disk that
//!    hangs or is slow leaves threads to the volumes of other disks, however many do, up to
//!    [`ALL_THREADS_MAX`] threads.
//! 3. While loops wait that may run, as many threads are about to look for one, or as many run as
//!    there may be, or the clock looks again within [`LOOK_EVERY`]. So a thread that could not be
//!    started is tried again.
//! 4. A thread that runs a loop takes turns: after [`TURN_TIME_MAX`], loops that wait come first.
//! 5. A loop that panics ends, even if what handles its panic panics too: nothing waits for it.
//! 6. With `state` locked, no thread is started or called, and nothing is logged.
//!
//! Modules: [`ready`] (the loops that wait for a thread, in order), [`turn`] (a loop on its
//! thread), [`state`] (how many threads loops may have), [`clock`] (ends rests, starts threads).
//!
//! Not here: what a loop does and how long it may rest (`threads`).

mod clock;
mod ready;
#[cfg(all(test, feature = "shuttle"))]
mod schedules;
mod state;
#[cfg(all(test, not(feature = "shuttle")))]
mod tests;
mod turn;

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use sawmill_sys::sync::{AtomicBool, AtomicU64, Condvar, Mutex, MutexGuard, ThreadId, thread_id};

pub(super) use self::ready::{LoopGroup, LoopKind};
use self::state::{LoopLimits, State};
use super::wake::Wake;
use crate::{Error, ErrorKind, Result};

/// The most threads that run loops, beside those that are stuck and one for each group.
const THREADS_MAX: usize = 32;
/// The most threads, those that are stuck included. Then loops wait for a step that ends.
const ALL_THREADS_MAX: usize = 512;
/// The most threads that run loops of one group.
const GROUP_THREADS_MAX: usize = THREADS_MAX * 3 / 4;
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
    /// Held while a loop is added, because that may start threads.
    adding: Mutex<()>,
    /// What wakes the threads that are asleep with their loop. Bounded by `sleepers_max`.
    sleepers: Mutex<Vec<Arc<Wake>>>,
    /// Loops wait that may run, and no thread is free.
    is_short: AtomicBool,
    /// A thread writes to the log for the clock.
    is_saying: AtomicBool,
    limits: LoopLimits,
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

/// What is known of a thread.
#[derive(Default)]
struct Seat {
    thread: Mutex<Option<ThreadId>>,
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

/// Threads to call when `state` is free.
#[derive(Default)]
struct Calls {
    idle: Option<Arc<IdleThread>>,
    /// Asleep with loops that others need the threads of. At most `sleepers_max`.
    sleepers: Vec<Arc<Wake>>,
}

/// The place of a thread that is being started; given back if it never runs.
struct NewThread {
    threads: Arc<LoopThreads>,
    seat: Arc<Seat>,
    has_arrived: bool,
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
        let spawn: Spawn =
            |name, work| std::thread::Builder::new().name(name.into()).spawn(work).map(drop);
        Self::with(LoopLimits::default(), spawn)
    }
}

impl LoopThreads {
    fn with(limits: LoopLimits, spawn: Spawn) -> Self {
        LoopThreads {
            state: Mutex::new(State::new(limits)),
            earlier: Condvar::default(),
            adding: Mutex::default(),
            sleepers: Mutex::default(),
            is_short: AtomicBool::new(false),
            is_saying: AtomicBool::new(false),
            limits,
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
        let adding = self.adding.lock();
        let number = self.begin_loop().map_err(|error| {
            let what = "a thread for the loops of volumes cannot be started";
            Error::caused(ErrorKind::Unavailable, what, error)
        })?;
        drop(adding);
        let started = Arc::new(VolumeLoop {
            threads: self.clone(),
            number,
            group,
            wake,
            stepped: Mutex::new(Some(stepped)),
            due_at: Mutex::default(),
            was_quiet: AtomicBool::new(false),
            run: Mutex::default(),
            ended: Condvar::default(),
        });
        let calls = self.make_ready(&mut self.state.lock(), started.clone());
        calls.call();
        Ok(started)
    }

    /// Counts one more loop, and starts the clock and the first thread if there are none.
    fn begin_loop(self: &Arc<Self>) -> io::Result<u64> {
        let mut state = self.state.lock();
        // From now on those that are there stay.
        state.loops += 1;
        state.last_number += 1;
        let (number, has_clock) = (state.last_number, state.has_clock);
        let first = state.seats.is_empty().then(|| self.take_seat(&mut state));
        drop(state);
        let mut started = Ok(());
        if !has_clock {
            let threads = self.clone();
            // Before it starts, because it may end at once.
            self.state.lock().has_clock = true;
            started = (self.spawn)("volume-clock", Box::new(move || threads.keep_time()));
            if started.is_err() {
                self.state.lock().has_clock = false;
            }
        }
        if let Some(first) = first
            && started.is_ok()
        {
            started = self.start_thread(first);
        }
        if let Err(error) = started {
            self.end_loop(self.state.lock());
            return Err(error);
        }
        Ok(number)
    }

    /// How many threads there are.
    #[must_use]
    pub fn counts(&self) -> LoopThreadCounts {
        let (state, now_ns) = (self.state.lock(), self.now_ns());
        let stuck_after = self.limits.stuck_after;
        let stuck =
            state.seats.iter().filter(|seat| seat.is_in_long_step(now_ns, stuck_after)).count();
        LoopThreadCounts { threads: state.seats.len() as u64, stuck: stuck as u64 }
    }

    fn now_ns(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    fn take_seat(self: &Arc<Self>, state: &mut State) -> NewThread {
        let seat = Arc::<Seat>::default();
        state.seats.push(seat.clone());
        state.arriving += 1;
        NewThread { threads: self.clone(), seat, has_arrived: false }
    }

    /// Starts a thread, without the lock. Only the clock does, except for the first: a thread
    /// inherits priority and cores of the one that starts it, and those of a collector or of a door
    /// are not for the loops of all volumes.
    fn start_thread(&self, mut new: NewThread) -> io::Result<()> {
        let work = move || {
            new.has_arrived = true;
            new.threads.work(&new.seat);
        };
        (self.spawn)("volume", Box::new(work))
    }

    /// Makes a loop ready, and finds a thread for it if it may have one.
    fn make_ready(self: &Arc<Self>, state: &mut State, ready: Arc<VolumeLoop>) -> Calls {
        if let Some(at) = ready.due_at.lock().take() {
            state.due.remove(&(at, ready.number));
        }
        state.ready.push(ready.group, ready);
        self.find_thread(state)
    }

    /// Sees to it that a thread comes for one more loop, if more may run than threads come; after
    /// each change that can make that so. The caller calls what is returned, without the lock.
    fn find_thread(&self, state: &mut State) -> Calls {
        if state.ready.open() <= state.arriving {
            self.is_short.store(false, Ordering::Relaxed);
            return Calls::default();
        }
        match state.call_idle() {
            None => Calls { idle: None, sleepers: self.look_soon(state) },
            idle => Calls { idle, sleepers: Vec::new() },
        }
    }

    /// A thread: runs loops until there have been none for some time.
    fn work(self: &Arc<Self>, seat: &Arc<Seat>) {
        *seat.thread.lock() = Some(thread_id());
        while let Some(ready) = self.next(seat) {
            // Only a bug of this file panics here; it must not cost the thread too.
            let _ = catch_unwind(AssertUnwindSafe(|| ready.run(seat)));
        }
    }

    /// The next loop to run; `None`: this thread ends.
    fn next(self: &Arc<Self>, seat: &Arc<Seat>) -> Option<Arc<VolumeLoop>> {
        let mut state = self.state.lock();
        seat.leave_step();
        state.count_again(seat);
        loop {
            state.arriving = state.arriving.saturating_sub(1);
            if state.loops == 0 {
                break;
            }
            let taken = state.take();
            let calls = self.find_thread(&mut state);
            if taken.is_some() {
                drop(state);
                calls.call();
                return taken;
            }
            // Others took its place while it was stuck, or it was there for one group. One stays
            // for a group that has none.
            let is_needed = state.working() <= self.limits.threads_max || state.idle.is_empty();
            if !is_needed {
                state.end_seat(seat);
                drop(state);
                calls.call();
                return None;
            }
            let idle = Arc::<IdleThread>::default();
            state.idle.push(idle.clone());
            drop(state);
            calls.call();
            idle.wait(self.limits.idle_time_max);
            state = self.state.lock();
            // If it was called, there may be a loop. One thread stays, because it may be that no
            // other can be started.
            if let Some(at) = state.idle.iter().position(|other| Arc::ptr_eq(other, &idle)) {
                state.idle.remove(at);
                if !state.idle.is_empty() && state.wanted() == 0 {
                    break;
                }
                state.arriving += 1;
            }
        }
        state.end_seat(seat);
        None
    }

    /// A loop has left its thread, until the end of a rest if it has one.
    fn leave(self: &Arc<Self>, left: &Arc<VolumeLoop>, rest_limit: Option<Duration>) {
        // A rest so long that it never ends.
        let due_at = rest_limit.and_then(|limit| Instant::now().checked_add(limit));
        let mut state = self.state.lock();
        state.leave(left.group);
        if let Some(at) = due_at {
            *left.due_at.lock() = Some(at);
            state.due.insert((at, left.number), left.clone());
            self.wake_clock(&mut state, at);
        }
    }

    /// A loop has left its thread to others that wait.
    fn leave_to_others(self: &Arc<Self>, left: &Arc<VolumeLoop>) {
        let mut state = self.state.lock();
        state.leave(left.group);
        // This thread takes the next one.
        state.ready.push(left.group, left.clone());
    }

    /// A loop has ended.
    fn forget(&self, ended: &VolumeLoop) {
        let mut state = self.state.lock();
        state.leave(ended.group);
        self.end_loop(state);
    }

    /// There is one loop less. With the last one, the threads end.
    fn end_loop(&self, mut state: MutexGuard<'_, State>) {
        state.loops -= 1;
        if state.loops == 0 {
            self.earlier.notify_all();
            let idle = std::mem::take(&mut state.idle);
            state.arriving += idle.len();
            drop(state);
            idle.iter().for_each(|idle| idle.call());
        }
    }

    /// Whether this thread may sleep with its loop.
    fn begin_sleep(&self, wake: &Arc<Wake>) -> bool {
        let mut sleepers = self.sleepers.lock();
        if sleepers.len() >= self.limits.sleepers_max {
            return false;
        }
        sleepers.push(wake.clone());
        drop(sleepers);
        // Others may have begun to wait before they could see it among those to wake.
        let may_sleep = !self.is_short.load(Ordering::Relaxed);
        if !may_sleep {
            self.end_sleep(wake);
        }
        may_sleep
    }

    fn end_sleep(&self, wake: &Arc<Wake>) {
        self.sleepers.lock().retain(|other| !Arc::ptr_eq(other, wake));
    }

    /// The seat of the thread that calls this, if it is one of these.
    fn own_seat(&self) -> Option<Arc<Seat>> {
        let state = self.state.lock();
        state.seats.iter().find(|seat| *seat.thread.lock() == Some(thread_id())).cloned()
    }

    /// Takes a ready loop out of its turn, to run it in the step of another that waits for it.
    fn take_awaited(&self, awaited: &Arc<VolumeLoop>) -> bool {
        let is_it = |other: &Arc<VolumeLoop>| Arc::ptr_eq(other, awaited);
        self.state.lock().ready.take_if(awaited.group, is_it)
    }

    /// The awaited loop has left this thread, which does not look for another.
    fn end_awaited(&self) {
        let mut state = self.state.lock();
        state.arriving = state.arriving.saturating_sub(1);
        let calls = self.find_thread(&mut state);
        drop(state);
        calls.call();
    }
}

impl Seat {
    fn is_in_long_step(&self, now_ns: u64, stuck_after: Duration) -> bool {
        let began_ns = self.step_began_ns.load(Ordering::Relaxed);
        began_ns > 0 && u128::from(now_ns.saturating_sub(began_ns)) > stuck_after.as_nanos()
    }

    fn leave_step(&self) {
        self.step_began_ns.store(0, Ordering::Relaxed);
    }
}

impl Calls {
    fn call(self) {
        self.idle.iter().for_each(|idle| idle.call());
        self.sleepers.iter().for_each(|wake| wake.notify());
    }
}

impl Drop for NewThread {
    fn drop(&mut self) {
        if !self.has_arrived {
            let mut state = self.threads.state.lock();
            state.arriving = state.arriving.saturating_sub(1);
            state.end_seat(&self.seat);
        }
    }
}

impl IdleThread {
    fn call(&self) {
        *self.is_called.lock() = true;
        self.called.notify_one();
    }

    fn wait(&self, limit: Duration) {
        let mut is_called = self.is_called.lock();
        if !*is_called {
            self.called.wait_for(&mut is_called, limit);
        }
    }
}
