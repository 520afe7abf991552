//! Holds the requests of a device until a driver has answered them: one by one (`plain`) or in
//! chunks (`batch`).
//!
//! A *lane* is one socket of a driver: commands go one way, answers the other. Invariants: commands
//! of a lane are fetched in order and answered in any order. Nothing is fetched between
//! [`RequestHolder::recover`] and [`RequestHolder::start`]. The threads of a driver's sockets see
//! [`CommandLanes`] only: they cannot start or end a device. Not here: sockets, whether a driver is
//! connected (`host`).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::Instant;

use sawmill_device::{BlockDevice, Error, ErrorKind, Result};
use sawmill_sys::Arena;

use crate::protocol::Command;

/// A device that keeps its requests until a driver has answered them: `Plain` or `Batch`. What
/// happens to it when drivers come and go, and at its end.
pub(crate) trait RequestHolder: BlockDevice {
    /// A driver is connected. Errors: `InUse`, `Closed`.
    fn start(&self) -> Result<()>;

    /// Stops fetching until the next start: threads blocked in [`CommandLanes::fetch`] return.
    fn pause(&self);

    /// The driver is gone: commands without an answer are fetched again, before everything else.
    fn recover(&self) -> Result<()>;

    /// Begins the end: accepts nothing new; accepted requests still go to the driver.
    fn begin_end(&self);

    /// Fails what waits for a driver; the device stays.
    fn fail_waiting(&self, error: &Error);

    /// Ends the device; what waits fails.
    fn end_now(&self, error: &Error);

    /// The state of the device, and what it still holds.
    fn status(&self) -> HolderStatus;
}

/// The same device for the threads that carry its commands and answers between it and the sockets
/// of a driver.
pub(crate) trait CommandLanes: Send + Sync {
    /// The number of lanes per queue.
    fn lanes_per_queue(&self) -> usize;

    /// Pins this thread to the core of a queue, if the options of the device say so.
    fn pin_thread(&self, queue: usize);

    /// The memory that the commands of a lane refer to, for a driver that is about to start.
    fn memory(&self, lane: usize) -> Arc<Arena>;

    /// Moves the commands of a lane into `commands`, at most `most`. Blocks until there is
    /// something.
    fn fetch(&self, lane: usize, commands: &mut Vec<Command>, most: usize) -> FetchState;

    /// The driver has completed a command. Returns `Invalid` if the driver has no command of that
    /// number.
    fn answer(&self, lane: usize, number: u64, outcome: Result<()>) -> Result<()>;

    /// Whether the driver has commands of a lane.
    fn has_commands(&self, lane: usize) -> bool;
}

/// What a device that holds requests is doing.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HolderStatus {
    /// The state of the device.
    pub(crate) state: State,
    /// Whether everything accepted was answered.
    pub(crate) is_drained: bool,
    /// When the oldest command that the driver has was fetched; `None` if it has none.
    pub(crate) oldest_fetched_at: Option<Instant>,
}

/// The result of fetching from a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FetchState {
    /// Commands.
    Commands,
    /// Nothing more for this driver: its threads must stop.
    Paused,
    /// Nothing more, ever.
    Ended,
}

/// The states of a device (BUSE thesis, figure 4.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// No driver is connected. Accepted requests are kept; new ones wait or fail (the host
    /// decides).
    Waiting,
    /// A driver is connected.
    Running,
    /// Nothing new is accepted; the driver finishes what there is.
    Ending,
    /// The device has ended.
    Ended,
}

/// The state of a device, which every request checks.
pub(crate) struct StateCell {
    state: AtomicU8,
    /// Nothing may be fetched.
    is_paused: AtomicBool,
}

impl StateCell {
    pub(crate) fn new() -> Self {
        StateCell { state: AtomicU8::new(State::Waiting as u8), is_paused: AtomicBool::new(true) }
    }

    pub(crate) fn state(&self) -> State {
        state_of(self.state.load(Ordering::SeqCst))
    }

    /// Changes the state to what `next` returns.
    pub(crate) fn turn(&self, next: impl Fn(State) -> Result<State>) -> Result<()> {
        let mut now = self.state.load(Ordering::SeqCst);
        loop {
            // The rule is applied to the state that is replaced: two threads may turn it at once,
            // for example a death and an end.
            let then = next(state_of(now))? as u8;
            match self.state.compare_exchange(now, then, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) => return Ok(()),
                Err(other) => now = other,
            }
        }
    }

    /// The error for new requests, if none are accepted.
    pub(crate) fn refusal(&self) -> Option<Error> {
        let closed = || Error::new(ErrorKind::Closed, "the device is being removed");
        matches!(self.state(), State::Ending | State::Ended).then(closed)
    }

    /// A driver has connected.
    pub(crate) fn start(&self) -> Result<()> {
        self.turn(|state| match state {
            State::Waiting => Ok(State::Running),
            State::Running => Err(Error::new(ErrorKind::InUse, "the device has a driver already")),
            // The new driver finishes what the last one left.
            State::Ending => Ok(State::Ending),
            State::Ended => Err(Error::new(ErrorKind::Closed, "the device has ended")),
        })?;
        self.is_paused.store(false, Ordering::SeqCst);
        Ok(())
    }

    /// Whether fetching threads must return.
    pub(crate) fn is_paused(&self) -> bool {
        self.is_paused.load(Ordering::SeqCst)
    }

    /// The driver is gone. An ending device stays in that state: the next driver finishes it.
    pub(crate) fn pause(&self) {
        self.is_paused.store(true, Ordering::SeqCst);
        let _ = self.turn(|state| Ok(if state == State::Running { State::Waiting } else { state }));
    }

    /// Accepts nothing new.
    pub(crate) fn end(&self) {
        let _ =
            self.turn(|state| Ok(if state == State::Ended { State::Ended } else { State::Ending }));
    }

    /// Records that the device has ended.
    pub(crate) fn set_ended(&self) {
        let _ = self.turn(|_| Ok(State::Ended));
    }
}

fn state_of(number: u8) -> State {
    let all = [State::Waiting, State::Running, State::Ending];
    // No other number is ever stored. If one were, a device that accepts nothing is the safe
    // reading.
    all.into_iter().find(|state| *state as u8 == number).unwrap_or(State::Ended)
}
