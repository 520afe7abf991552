//! A loop and its turn on a thread: it steps until it rests, ends or others wait.
//!
//! Invariants: while a loop has its thread, nothing else can see its steps. A loop that ends, by
//! itself or by a panic, is seen to have ended only when what it held is free.
//!
//! Not here: which loop has a turn, and the end of rests (`loops`, `clock`).

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use sawmill_sys::sync::thread_id;

use super::{Rest, Seat, SteppedLoop, TURN_TIME_MAX, VolumeLoop};
use crate::threads::wake::ParkedLoop;

/// How often a thread that waits for the end of a loop looks whether it has to run it itself.
const AWAITED_EVERY: Duration = Duration::from_millis(5);

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
    pub(super) fn run(self: &Arc<Self>, seat: &Seat) {
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
        let is_short = || threads.is_short.load(Ordering::Relaxed);
        let mut was_quiet = self.was_quiet.swap(false, Ordering::AcqRel);
        let mut has_stepped = false;
        let turn_began_ns = threads.now_ns();
        let turn_ns = TURN_TIME_MAX.as_nanos() as u64;
        loop {
            let now_ns = threads.now_ns().max(1);
            if has_stepped && is_short() && now_ns - turn_began_ns > turn_ns {
                // A step that says what it did last is not lost: it is asked again.
                self.was_quiet.store(was_quiet, Ordering::Release);
                return Rest::No;
            }
            seat.step_began_ns.store(now_ns, Ordering::Relaxed);
            let rest = stepped.step(std::mem::take(&mut was_quiet));
            has_stepped = true;
            seat.leave_step();
            if seat.is_stuck.load(Ordering::Relaxed) {
                threads.state.lock().count_again(seat);
            }
            match rest {
                Rest::No => {}
                Rest::Short { watch, sleep } if !is_short() => {
                    self.wake.watch(watch);
                    if !threads.begin_sleep(&self.wake) {
                        return Rest::Short { watch, sleep };
                    }
                    was_quiet = !self.wake.sleep(Some(sleep));
                    threads.end_sleep(&self.wake);
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
    pub(super) fn end_rest(&self) {
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
    pub(in crate::threads) fn wait_ended(self: &Arc<Self>) {
        self.wake.notify();
        let own_seat = self.threads.own_seat();
        let mut run = self.run.lock();
        while !run.has_ended && run.runner != Some(thread_id()) {
            let Some(seat) = &own_seat else {
                self.ended.wait(&mut run);
                continue;
            };
            // This is a step of another loop, perhaps on the only thread that there is.
            drop(run);
            if self.threads.take_awaited(self) {
                self.run(seat);
                self.threads.end_awaited();
                self.wake.notify();
            }
            run = self.run.lock();
            if !run.has_ended {
                self.ended.wait_for(&mut run, AWAITED_EVERY);
            }
        }
    }
}

impl ParkedLoop for VolumeLoop {
    fn resume(self: Arc<Self>) {
        let threads = self.threads.clone();
        let calls = {
            let mut state = threads.state.lock();
            threads.make_ready(&mut state, self)
        };
        calls.call();
    }
}
