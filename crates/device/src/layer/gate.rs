//! A device that can be exchanged while doors hold it.
//!
//! A gate is open or shut. While it is shut, no request is inside: requests wait in order, and go
//! to the device when the gate opens; meanwhile [`Gate::replace`] can replace the device. The queue
//! is at most what the doors have in flight, which they bound.
//!
//! Each thread goes through one of a few stripes, so that threads on several cores share no lock
//! and no counter. The `Arc` of a stripe's [`InFlightGuard`] counts the requests inside, and its
//! last holder notifies the waiter.
//!
//! Invariants: a request that passed is answered before `shut` returns; no request reaches a device
//! that was replaced. Not here: whether two devices are the same disk, which the caller of
//! `replace` knows.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, RwLock};

use crate::{BlockDevice, Error, ErrorKind, Geometry, Request, Result};

const STRIPES: usize = 16;

/// A device around a device that can be shut, exchanged and opened again.
pub struct Gate {
    stripes: [Stripe; STRIPES],
    state: Mutex<GateState>,
    in_flight: Arc<InFlightCount>,
}

/// A stripe has a cache line of its own (two, as CPUs fetch them).
#[repr(align(128))]
#[derive(Default)]
struct Stripe(RwLock<Option<Arc<OpenDevice>>>);

/// The way to the device while the gate is open, one for each stripe.
struct OpenDevice {
    // Dropped first, so that the waiter is notified only after that.
    device: Arc<dyn BlockDevice>,
    guard: Arc<InFlightGuard>,
}

/// Held by every request inside, and by its submitter.
struct InFlightGuard(Arc<InFlightCount>);

#[derive(Default)]
struct InFlightCount {
    /// How many [`InFlightGuard`] are left.
    count: Mutex<usize>,
    none_left: Condvar,
}

/// The device behind the gate, and the requests that wait for it.
struct GateState {
    device: Arc<dyn BlockDevice>,
    /// What doors see while the gate is shut.
    geometry: Geometry,
    /// Some way to the device, while the gate is open.
    open_device: Option<Arc<OpenDevice>>,
    /// Bounded by the requests that callers have in flight.
    waiting: Vec<Request>,
}

impl Gate {
    /// An open gate in front of `device`.
    #[must_use]
    pub fn new(device: Arc<dyn BlockDevice>) -> Self {
        let geometry = device.geometry();
        let state =
            Mutex::new(GateState { device, geometry, open_device: None, waiting: Vec::new() });
        let gate = Gate { stripes: Default::default(), state, in_flight: Arc::default() };
        gate.open();
        gate
    }

    /// Lets no request in from now on and waits until those inside are answered.
    ///
    /// Errors: `Unavailable` when they are not after `time_max`; the gate is open again then.
    pub fn shut(&self, time_max: Duration) -> Result<()> {
        {
            let mut state = self.state.lock();
            state.geometry = state.device.geometry();
            state.open_device = None;
            self.stripes.iter().for_each(|stripe| *stripe.0.write() = None);
        }
        let deadline = Instant::now() + time_max;
        let mut count = self.in_flight.count.lock();
        while *count > 0 {
            if self.in_flight.none_left.wait_until(&mut count, deadline).timed_out() && *count > 0 {
                drop(count);
                self.open();
                let text = format!(
                    "gate: requests inside are not answered after {time_max:?}; it is open again"
                );
                return Err(Error::new(ErrorKind::Unavailable, text));
            }
        }
        Ok(())
    }

    /// Replaces the device behind a shut gate, and returns the old one.
    ///
    /// Errors: `Invalid` if the gate is open, or the new device lacks what doors rely on: the same
    /// block size, at least the size and the longest request, and every ability of the old one.
    /// Nothing has changed then.
    pub fn replace(&self, device: Arc<dyn BlockDevice>) -> Result<Arc<dyn BlockDevice>> {
        let mut state = self.state.lock();
        let invalid = |text: String| Err(Error::new(ErrorKind::Invalid, format!("gate: {text}")));
        if state.open_device.is_some() || *self.in_flight.count.lock() > 0 {
            return invalid("a device is replaced behind a shut gate only".into());
        }
        if let Some(reason) = unfit(state.geometry, device.geometry()) {
            return invalid(format!("the new device cannot take the old one's place: {reason}"));
        }
        state.geometry = device.geometry();
        Ok(std::mem::replace(&mut state.device, device))
    }

    /// Lets requests in again, those that wait first.
    pub fn open(&self) {
        let (open_device, waiting) = {
            let mut state = self.state.lock();
            if state.open_device.is_some() {
                return;
            }
            let open_devices: [Arc<OpenDevice>; STRIPES] = std::array::from_fn(|_| {
                Arc::new(OpenDevice {
                    device: state.device.clone(),
                    guard: Arc::new(InFlightGuard::new(&self.in_flight)),
                })
            });
            let first = open_devices[0].clone();
            state.open_device = Some(first.clone());
            self.stripes
                .iter()
                .zip(open_devices)
                .for_each(|(stripe, device)| *stripe.0.write() = Some(device));
            (first, std::mem::take(&mut state.waiting))
        };
        // All of them are in flight at the same time as what comes in now, so either may be first.
        waiting.into_iter().for_each(|request| open_device.enter(request));
    }

    /// How many requests wait.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.state.lock().waiting.len()
    }

    fn wait_in_line(&self, request: Request) {
        let open_device = {
            let mut state = self.state.lock();
            match &state.open_device {
                // It has opened in between.
                Some(open_device) => open_device.clone(),
                None => return state.waiting.push(request),
            }
        };
        open_device.enter(request);
    }
}

impl BlockDevice for Gate {
    fn geometry(&self) -> Geometry {
        let open_device = stripe_of(&self.stripes).0.read().clone();
        match open_device {
            Some(open_device) => open_device.device.geometry(),
            None => self.state.lock().geometry,
        }
    }

    fn submit(&self, request: Request) {
        // The stripe's lock is not held during `enter`: an answer may submit again and come back
        // here.
        let open_device = stripe_of(&self.stripes).0.read().clone();
        match open_device {
            Some(open_device) => open_device.enter(request),
            None => self.wait_in_line(request),
        }
    }
}

/// The stripe of this thread.
fn stripe_of(stripes: &[Stripe; STRIPES]) -> &Stripe {
    static THREADS: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static NUMBER: Cell<usize> = Cell::new(THREADS.fetch_add(1, Relaxed));
    }
    // Answers may come while a thread ends, when its own number is gone.
    let number = NUMBER.try_with(Cell::get).unwrap_or_default();
    &stripes[number % STRIPES]
}

impl OpenDevice {
    fn enter(&self, request: Request) {
        let inside = self.guard.clone();
        self.device.submit(request.then(move |outcome, asker| {
            asker.complete(outcome);
            // The waiter is notified only after the answer was delivered.
            drop(inside);
        }));
    }
}

impl InFlightGuard {
    fn new(in_flight: &Arc<InFlightCount>) -> Self {
        *in_flight.count.lock() += 1;
        InFlightGuard(in_flight.clone())
    }
}

impl Drop for InFlightGuard {
    fn drop(&mut self) {
        let mut count = self.0.count.lock();
        *count -= 1;
        if *count == 0 {
            self.0.none_left.notify_all();
        }
    }
}

/// Why doors that were shown `old` cannot continue with `new`.
fn unfit(old: Geometry, new: Geometry) -> Option<String> {
    let lost_ability =
        |had: bool, has: bool, what: &str| (had && !has).then(|| format!("it {what}"));
    let smaller = |what: &str, had: u64, has: u64| {
        (has < had).then(|| format!("its {what} shrank from {had} to {has}"))
    };
    let (could, can) = (old.operations, new.operations);
    let blocks = (old.block_bytes != new.block_bytes)
        .then(|| format!("its blocks have {} bytes and had {}", new.block_bytes, old.block_bytes));
    blocks
        .or_else(|| smaller("size in bytes", old.size_bytes, new.size_bytes))
        .or_else(|| {
            smaller("longest request", old.request_bytes_max.into(), new.request_bytes_max.into())
        })
        .or_else(|| lost_ability(!old.read_only, !new.read_only, "is read-only"))
        .or_else(|| {
            lost_ability(
                old.shared_cache,
                new.shared_cache,
                "does not share its cache between doors",
            )
        })
        .or_else(|| lost_ability(could.discard, can.discard, "cannot discard"))
        .or_else(|| lost_ability(could.write_zeroes, can.write_zeroes, "cannot write zeroes"))
        .or_else(|| lost_ability(could.allocation, can.allocation, "does not tell its allocation"))
}
