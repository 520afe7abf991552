//! What the threads of a device do: serve, rest, or leave; and what is in flight.
//!
//! Invariant: a device rests only when both of its threads do and nothing is in flight. Not here:
//! the threads (`service`).

use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::DoorCounts;

/// The threads of a device: one for each port.
pub(super) const THREADS: usize = 2;

/// What a thread is to do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Course {
    #[default]
    Serve,
    Rest,
    /// Serve to the end: nothing stops it any more.
    Finish,
    /// The same, and the kernel keeps nothing for a next server any more.
    PowerOff,
    Leave,
}

#[derive(Default)]
struct GateState {
    course: Course,
    resting: usize,
    ended: usize,
    /// A thread has ended because of an error, before its port had.
    has_failed: bool,
    /// What is not acknowledged is left to the next server.
    is_abandoned: bool,
    counts: DoorCounts,
}

impl GateState {
    fn is_quiet(&self) -> bool {
        self.resting + self.ended == THREADS && self.counts.in_flight == 0
    }
}

/// How a wait for quiet ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Quiet {
    Yes,
    /// Something is still in flight.
    TooLate,
    /// The device is gone.
    Ended,
}

/// The course of a device, its counters, and the requests in flight.
#[derive(Default)]
pub(super) struct Gate {
    state: Mutex<GateState>,
    changed: Condvar,
}

impl Gate {
    /// Waits while the device rests. Returns whether the calling thread is to serve.
    pub(super) fn pass(&self) -> bool {
        let mut state = self.state.lock();
        if state.course == Course::Rest {
            state.resting += 1;
            self.changed.notify_all();
            while state.course == Course::Rest {
                self.changed.wait(&mut state);
            }
            state.resting -= 1;
        }
        !matches!(state.course, Course::Rest | Course::Leave) && !state.is_abandoned
    }

    /// A thread has ended.
    pub(super) fn ended(&self) {
        self.state.lock().ended += 1;
        self.changed.notify_all();
    }

    /// The calling thread ends because of an error.
    pub(super) fn failed(&self) {
        self.state.lock().has_failed = true;
    }

    /// From now on nothing is acknowledged, and the threads end: the next server gets it all again.
    /// `false`: the power goes off already, so there will be none.
    pub(super) fn abandon(&self) -> bool {
        let mut state = self.state.lock();
        state.is_abandoned |= state.course != Course::PowerOff;
        state.is_abandoned
    }

    /// The power goes off. `false`: everything was left to the next server before.
    pub(super) fn power_off(&self) -> bool {
        let mut state = self.state.lock();
        if !state.is_abandoned && state.course != Course::Leave {
            state.course = Course::PowerOff;
        }
        !state.is_abandoned
    }

    pub(super) fn rest(&self) {
        self.turn(Course::Rest);
    }

    pub(super) fn serve(&self) {
        self.turn(Course::Serve);
    }

    pub(super) fn finish(&self) {
        self.turn(Course::Finish);
    }

    pub(super) fn leave(&self) {
        self.turn(Course::Leave);
    }

    fn turn(&self, course: Course) {
        let mut state = self.state.lock();
        let is_final = match state.course {
            Course::Serve | Course::Rest => false,
            Course::Finish => matches!(course, Course::Serve | Course::Rest),
            Course::PowerOff => course != Course::Leave,
            Course::Leave => true,
        };
        if !is_final {
            state.course = course;
        }
        self.changed.notify_all();
    }

    pub(super) fn is_abandoned(&self) -> bool {
        self.state.lock().is_abandoned
    }

    pub(super) fn has_failed(&self) -> bool {
        self.state.lock().has_failed
    }

    pub(super) fn is_quiet(&self) -> bool {
        let state = self.state.lock();
        state.course == Course::Rest && state.is_quiet()
    }

    pub(super) fn wait_quiet(&self, patience: Duration) -> Quiet {
        let began = Instant::now();
        let mut state = self.state.lock();
        while !state.is_quiet() {
            let remaining_time = patience.saturating_sub(began.elapsed());
            if self.changed.wait_for(&mut state, remaining_time).timed_out() && !state.is_quiet() {
                return Quiet::TooLate;
            }
        }
        if state.ended > 0 { Quiet::Ended } else { Quiet::Yes }
    }

    /// Counts a request that was taken; `count` adds what it is.
    pub(super) fn taken(&self, count: impl FnOnce(&mut DoorCounts)) {
        let counts = &mut self.state.lock().counts;
        counts.in_flight += 1;
        count(counts);
    }

    /// Counts an answer.
    pub(super) fn answered(&self, errno: i32, read_bytes: u64) {
        let mut state = self.state.lock();
        state.counts.in_flight -= 1;
        state.counts.bytes_out += read_bytes;
        state.counts.errors += u64::from(errno != 0);
        if state.counts.in_flight == 0 && state.course == Course::Rest {
            self.changed.notify_all();
        }
    }

    /// Counts what the kernel should never send.
    pub(super) fn violated(&self) {
        self.state.lock().counts.protocol_violations += 1;
    }

    pub(super) fn counts(&self) -> DoorCounts {
        let state = self.state.lock();
        let connections = (THREADS - state.ended.min(THREADS)) as u64;
        DoorCounts { connections, connections_total: THREADS as u64, ..state.counts }
    }
}
