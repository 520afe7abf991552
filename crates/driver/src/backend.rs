//! What holds a device's requests until a driver has answered them: request by request (`plain`) or in chunks
//! (`batch`).
//!
//! A *lane* is what one socket of a driver carries: orders one way, answers the other. Invariants: what is
//! fetched from a lane comes in order and is answered in any; between [`Backend::recover`] and
//! [`Backend::start`] nothing is fetched. Not here: sockets, whether a driver is there (`host`).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::Instant;

use sawmill_device::{BlockDevice, Error, ErrorKind, Result};
use sawmill_sys::Arena;

use crate::protocol::Order;

/// See the head of this file.
pub(crate) trait Backend: BlockDevice {
    /// Lanes of a queue.
    fn lanes_per_queue(&self) -> usize;

    /// Keeps this thread on the core of a queue, if the device's threads are to stay there.
    fn tie(&self, queue: usize);

    /// The memory that the orders of a lane point into, for a driver that is about to start.
    fn memory(&self, lane: usize) -> Arc<Arena>;

    /// Puts what a lane has for the driver into `orders`, at most `most`. Waits for something.
    fn fetch(&self, lane: usize, orders: &mut Vec<Order>, most: usize) -> Next;

    /// The driver has done with an order. Errors: `Invalid` for a number that is not with it.
    fn answer(&self, lane: usize, number: u64, outcome: Result<()>) -> Result<()>;

    /// A driver is there. Errors: `InUse`, `Closed`.
    fn start(&self) -> Result<()>;

    /// Nothing more is fetched until the next start: whoever waits in `fetch` is sent away.
    fn pause(&self);

    /// The driver is gone: what it did not answer is fetched again, before everything else.
    fn recover(&self) -> Result<()>;

    /// Nothing new is accepted; what there is goes to the driver.
    fn end(&self);

    /// Everything that waits fails; the device stays.
    fn fail_pending(&self, error: &Error);

    /// Everything that waits fails, and the device has ended.
    fn fail(&self, error: &Error);

    /// Whether everything accepted was answered.
    fn is_drained(&self) -> bool;

    /// Whether orders of a lane are with the driver.
    fn is_owed(&self, lane: usize) -> bool;

    /// When the oldest order that is with the driver was fetched.
    fn oldest(&self) -> Option<Instant>;

    /// Where the device is in its life.
    fn state(&self) -> State;
}

/// What a lane has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// Orders.
    Orders,
    /// Nothing for this driver: it is to go.
    Paused,
    /// Nothing ever.
    Ended,
}

/// Where a device is in its life (thesis figure 4.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// No driver is there. What was accepted is kept, and new requests wait or fail (the host decides).
    Waiting,
    /// A driver is there.
    Running,
    /// Nothing new is accepted; the driver is to finish what there is.
    Ending,
    /// Over.
    Ended,
}

/// A state that every request looks at.
pub(crate) struct Life {
    state: AtomicU8,
    /// Nobody is to fetch anything.
    is_paused: AtomicBool,
}

impl Life {
    pub(crate) fn new() -> Self {
        Life { state: AtomicU8::new(State::Waiting as u8), is_paused: AtomicBool::new(true) }
    }

    pub(crate) fn state(&self) -> State {
        state_of(self.state.load(Ordering::SeqCst))
    }

    /// Goes on as `next` says.
    pub(crate) fn turn(&self, next: impl Fn(State) -> Result<State>) -> Result<()> {
        let mut now = self.state.load(Ordering::SeqCst);
        loop {
            let then = next(state_of(now))? as u8;
            match self.state.compare_exchange(now, then, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) => return Ok(()),
                Err(other) => now = other,
            }
        }
    }

    /// Why nothing new is accepted, if so.
    pub(crate) fn refusal(&self) -> Option<Error> {
        let closed = || Error::new(ErrorKind::Closed, "the device is being removed");
        matches!(self.state(), State::Ending | State::Ended).then(closed)
    }

    /// A driver has come.
    pub(crate) fn start(&self) -> Result<()> {
        self.turn(|state| match state {
            State::Waiting => Ok(State::Running),
            State::Running => Err(Error::new(ErrorKind::InUse, "the device has a driver already")),
            // It finishes what the last one left.
            State::Ending => Ok(State::Ending),
            State::Ended => Err(Error::new(ErrorKind::Closed, "the device has ended")),
        })?;
        self.is_paused.store(false, Ordering::SeqCst);
        Ok(())
    }

    /// Whether whoever fetches is to go away.
    pub(crate) fn is_paused(&self) -> bool {
        self.is_paused.load(Ordering::SeqCst)
    }

    /// It has gone. Ending stays ending: the next one finishes.
    pub(crate) fn pause(&self) {
        self.is_paused.store(true, Ordering::SeqCst);
        let _ = self.turn(|state| Ok(if state == State::Running { State::Waiting } else { state }));
    }

    /// Nothing new.
    pub(crate) fn end(&self) {
        let _ = self.turn(|state| Ok(if state == State::Ended { State::Ended } else { State::Ending }));
    }

    /// Over.
    pub(crate) fn ended(&self) {
        let _ = self.turn(|_| Ok(State::Ended));
    }
}

fn state_of(number: u8) -> State {
    let all = [State::Waiting, State::Running, State::Ending];
    all.into_iter().find(|state| *state as u8 == number).unwrap_or(State::Ended)
}
