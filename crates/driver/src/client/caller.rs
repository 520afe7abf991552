//! Calls the functions of a driver for the requests of a device in this process.
//!
//! Invariants: every request is answered, also if the driver panics. No more calls run at once than
//! the driver allows. A closed caller calls its driver no more.
//!
//! Not here: the threads that call (`in_process`, the doors).

use std::cell::Cell;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;
use std::time::Duration;

use parking_lot::{Condvar, Mutex, RwLock, RwLockWriteGuard};
use sawmill_device::{Error, ErrorKind, Operation, Reply, Request, Result};

use super::driver::{Driver, errno};
use crate::options::DeviceOptions;

/// A driver, and how it is called.
pub(super) struct Caller {
    /// Held for reading during a call; `None` once it is closed.
    driver: RwLock<Option<Box<dyn Driver>>>,
    /// Flushes go to the driver; otherwise everything it answered is durable.
    can_flush: bool,
    /// A single write can be durable.
    can_fua: bool,
    /// Requests get this error from now on.
    refusal: OnceLock<Error>,
    turns: Option<Turns>,
}

/// While it lives, no call is under way and none begins.
pub(super) struct HeldDriver<'a>(RwLockWriteGuard<'a, Option<Box<dyn Driver>>>);

impl HeldDriver<'_> {
    /// Drops the driver: what waits for a call is refused.
    pub(super) fn close(mut self) {
        *self.0 = None;
    }
}

/// The calls that may still begin.
struct Turns {
    state: Mutex<TurnState>,
    changed: Condvar,
}

struct TurnState {
    free: usize,
    /// No more calls: who waits gives up.
    is_closed: bool,
}

/// A call under way.
struct Turn<'a>(&'a Turns);

impl Turns {
    fn new(calls_max: usize) -> Self {
        let state = TurnState { free: calls_max.max(1), is_closed: false };
        Turns { state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Waits for a turn; `None` once there are no more.
    fn take(&self) -> Option<Turn<'_>> {
        let mut state = self.state.lock();
        while state.free == 0 && !state.is_closed {
            self.changed.wait(&mut state);
        }
        if state.is_closed {
            return None;
        }
        state.free -= 1;
        Some(Turn(self))
    }

    fn close(&self) {
        self.state.lock().is_closed = true;
        self.changed.notify_all();
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.state.lock().free += 1;
        self.0.changed.notify_one();
    }
}

thread_local! {
    /// The bytes of a write, while the driver has them. Kept, because a request would otherwise
    /// cost an allocation and zeroed pages.
    static PAYLOAD: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

/// More memory than this is given back after a request.
const PAYLOAD_BYTES_KEPT: usize = 1 << 20;

impl Caller {
    /// Calls as many functions at once as there are threads, or at most `calls_max`.
    pub(super) fn new(driver: impl Driver + 'static, calls_max: Option<usize>) -> Self {
        let abilities = driver.abilities();
        let turns = calls_max.map(Turns::new);
        Caller {
            driver: RwLock::new(Some(Box::new(driver))),
            can_flush: abilities.flush,
            can_fua: abilities.fua,
            refusal: OnceLock::new(),
            turns,
        }
    }

    /// As [`new`](Self::new), for a device with these options.
    pub(super) fn of_device(
        driver: impl Driver + 'static,
        options: &DeviceOptions,
        calls_max: usize,
    ) -> Self {
        let caller = Caller::new(driver, Some(calls_max));
        // An option gives the driver no ability.
        let can_fua = options.can_fua && caller.can_fua;
        Caller { can_flush: options.can_flush, can_fua, ..caller }
    }

    /// Requests fail from now on. Calls under way go on.
    pub(super) fn refuse(&self, error: Error) {
        // The first reason counts.
        let _ = self.refusal.set(error);
        if let Some(turns) = &self.turns {
            turns.close();
        }
    }

    /// Refuses requests, and drops the driver when nothing calls it any more.
    pub(super) fn close(&self) {
        self.refuse(Error::new(ErrorKind::Closed, "the device has ended"));
        *self.driver.write() = None;
    }

    /// Waits for the calls under way, so long at most, and lets no other begin.
    pub(super) fn hold(&self, time_max: Duration) -> Result<HeldDriver<'_>> {
        self.driver.try_write_for(time_max).map(HeldDriver).ok_or_else(|| {
            let text = format!("a call of the driver takes longer than {time_max:?}");
            Error::new(ErrorKind::TimedOut, text)
        })
    }

    /// Calls the driver in its turn for something that is no request.
    pub(super) fn call(&self, what: impl FnOnce(&dyn Driver)) {
        let driver = self.driver.read_recursive();
        let turn = self.turns.as_ref().map(Turns::take);
        if let (Some(driver), None | Some(Some(_))) = (driver.as_deref(), &turn) {
            what(driver);
        }
    }

    /// Carries a request out and answers it.
    pub(super) fn carry_out(&self, mut request: Request) {
        // Recursively: a driver may use a device whose driver uses this one.
        let guard = self.driver.read_recursive();
        let turn = self.turns.as_ref().map(Turns::take);
        let driver = match (guard.as_deref(), self.refusal.get()) {
            (Some(driver), None) => driver,
            (_, refusal) => {
                let closed = || Error::new(ErrorKind::Closed, "the device has ended");
                return request.fail(refusal.cloned().unwrap_or_else(closed));
            }
        };
        // A panic of the driver fails one request. Without this, the thread would be gone, and
        // later requests would wait forever.
        let (operation, address, length) = (request.operation, request.address, request.length);
        let outcome = catch_unwind(AssertUnwindSafe(|| self.handle(driver, &mut request)));
        // Before the answer, which may close the device.
        drop((turn, guard));
        request.complete(match outcome {
            Ok(Ok(())) => Ok(Reply::Done),
            Ok(Err(error)) => Err(device_error(error)),
            Err(_) => {
                tracing::error!(
                    "the driver panicked in a {operation:?} of {length} bytes at {address}"
                );
                Err(Error::new(ErrorKind::Internal, "the driver panicked"))
            }
        });
    }

    fn handle(&self, driver: &dyn Driver, request: &mut Request) -> io::Result<()> {
        let (address, length) = (request.address, request.length);
        match request.operation {
            Operation::Read => driver.read(address, request.buffer()),
            Operation::Write => self.store(driver, request),
            Operation::Flush => self.flush(driver),
            Operation::Discard => {
                driver.discard(address, length)?;
                if request.flags.fua { self.flush(driver) } else { Ok(()) }
            }
            Operation::WriteZeroes => {
                driver.write_zeroes(address, length, request.flags.no_unmap)?;
                if request.flags.fua { self.flush(driver) } else { Ok(()) }
            }
            Operation::Prefetch | Operation::Allocation => Ok(()),
        }
    }

    fn store(&self, driver: &dyn Driver, request: &mut Request) -> io::Result<()> {
        // A driver that submits a write to another device of this kind finds an empty one here.
        let mut bytes = PAYLOAD.take();
        let length = request.length as usize;
        if bytes.len() < length {
            bytes.resize(length, 0);
        }
        request.fill(0, &mut bytes[..length]);
        let stored = self.write(driver, request, &bytes[..length]);
        if bytes.len() <= PAYLOAD_BYTES_KEPT {
            PAYLOAD.set(bytes);
        }
        stored
    }

    fn write(&self, driver: &dyn Driver, request: &Request, bytes: &[u8]) -> io::Result<()> {
        let fua = request.flags.fua;
        let by_itself = fua && self.can_fua;
        driver.write(request.address, bytes, by_itself)?;
        // A flush after the write makes the write durable as well, and all others with it.
        if fua && !by_itself { self.flush(driver) } else { Ok(()) }
    }

    fn flush(&self, driver: &dyn Driver) -> io::Result<()> {
        if self.can_flush { driver.flush() } else { Ok(()) }
    }
}

fn device_error(error: io::Error) -> Error {
    Error::caused(ErrorKind::of_driver(errno(&error)), "the driver failed", error)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
    use std::thread;

    use sawmill_device::Flags;

    use super::super::driver::Abilities;
    use super::*;

    /// Counts calls that overlap, and waits in `flush` until it is let go.
    #[derive(Default)]
    struct Calls {
        now: AtomicUsize,
        most: AtomicUsize,
        flushes: AtomicUsize,
        flush: Mutex<Option<(SyncSender<()>, Receiver<()>)>>,
    }

    impl Driver for Arc<Calls> {
        fn abilities(&self) -> Abilities {
            Abilities { discard: true, ..Abilities::default() }
        }
        fn read(&self, _offset: u64, into: &mut [u8]) -> io::Result<()> {
            let now = self.now.fetch_add(1, Ordering::SeqCst) + 1;
            self.most.fetch_max(now, Ordering::SeqCst);
            thread::yield_now();
            into.fill(0);
            self.now.fetch_sub(1, Ordering::SeqCst);
            Ok(())
        }
        fn write(&self, _offset: u64, _bytes: &[u8], fua: bool) -> io::Result<()> {
            assert!(!fua, "it cannot make a single write durable");
            Ok(())
        }
        fn discard(&self, _offset: u64, _length: u64) -> io::Result<()> {
            Ok(())
        }
        fn flush(&self) -> io::Result<()> {
            self.flushes.fetch_add(1, Ordering::SeqCst);
            let Some((entered, leave)) = self.flush.lock().take() else { return Ok(()) };
            entered.send(()).map_err(io::Error::other)?;
            leave.recv().map_err(io::Error::other)
        }
    }

    /// A driver whose flush says that it has begun, and waits until it is let go.
    fn with_waiting_flush() -> (Arc<Calls>, Receiver<()>, SyncSender<()>) {
        let calls = Arc::new(Calls::default());
        let (entered, was_entered) = sync_channel(1);
        let (let_go, leave) = sync_channel(1);
        *calls.flush.lock() = Some((entered, leave));
        (calls, was_entered, let_go)
    }

    fn request(operation: Operation, fua: bool) -> (Request, Receiver<sawmill_device::Outcome>) {
        let (sender, outcome): (Sender<_>, _) = channel();
        let flags = Flags { fua, ..Flags::default() };
        let answer = move |outcome, _| sender.send(outcome).unwrap();
        let mut request = Request::with_bytes(Operation::Read, 0, flags, vec![1; 512], answer);
        request.operation = operation;
        (request, outcome)
    }

    fn outcome_of(caller: &Caller, operation: Operation, fua: bool) -> sawmill_device::Outcome {
        let (request, outcome) = request(operation, fua);
        caller.carry_out(request);
        outcome.recv().unwrap()
    }

    #[test]
    fn no_more_calls_run_at_once_than_are_allowed() {
        for (calls_max, most) in [(Some(1), 1), (Some(2), 2), (None, 8)] {
            let calls = Arc::new(Calls::default());
            let caller = Caller::new(Arc::clone(&calls), calls_max);
            let read = |_| outcome_of(&caller, Operation::Read, false).unwrap();
            thread::scope(|scope| {
                for _ in 0..8 {
                    scope.spawn(|| (0..500).map(read).for_each(drop));
                }
            });
            assert!(calls.most.load(Ordering::SeqCst) <= most);
        }
    }

    #[test]
    fn a_caller_that_closes_waits_for_the_call_under_way_and_makes_no_other() {
        let (calls, was_entered, let_go) = with_waiting_flush();
        let caller = Caller::new(Arc::clone(&calls), None);
        thread::scope(|scope| {
            let flush = scope.spawn(|| outcome_of(&caller, Operation::Flush, false));
            was_entered.recv().unwrap();
            let close = scope.spawn(|| caller.close());
            assert!(!close.is_finished(), "the driver still has a call");
            let_go.send(()).unwrap();
            close.join().unwrap();
            flush.join().unwrap().unwrap();
        });
        assert_eq!(Arc::strong_count(&calls), 1, "the driver is dropped");
        let error = outcome_of(&caller, Operation::Read, false).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Closed);
    }

    #[test]
    fn a_driver_is_held_only_when_no_call_is_under_way_and_then_none_begins() {
        let (calls, was_entered, let_go) = with_waiting_flush();
        let caller = Caller::new(Arc::clone(&calls), None);
        thread::scope(|scope| {
            let flush = scope.spawn(|| outcome_of(&caller, Operation::Flush, false));
            was_entered.recv().unwrap();
            assert!(caller.hold(Duration::from_millis(1)).is_err());
            let_go.send(()).unwrap();
            flush.join().unwrap().unwrap();
            let held = caller.hold(Duration::from_secs(60)).unwrap();
            let read = scope.spawn(|| outcome_of(&caller, Operation::Read, false));
            assert!(!read.is_finished());
            held.close();
            assert_eq!(read.join().unwrap().unwrap_err().kind(), ErrorKind::Closed);
        });
        assert_eq!(Arc::strong_count(&calls), 1, "the driver is dropped");
    }

    #[test]
    fn a_durable_change_of_any_kind_is_flushed_by_a_driver_that_cannot_make_it_so() {
        for operation in [Operation::Write, Operation::Discard] {
            let calls = Arc::new(Calls::default());
            let caller = Caller::new(Arc::clone(&calls), None);
            outcome_of(&caller, operation, false).unwrap();
            assert_eq!(calls.flushes.load(Ordering::SeqCst), 0);
            outcome_of(&caller, operation, true).unwrap();
            assert_eq!(calls.flushes.load(Ordering::SeqCst), 1, "{operation:?}");
        }
    }

    #[test]
    fn a_device_that_failed_makes_no_call_and_says_why() {
        let caller = Caller::new(Arc::new(Calls::default()), None);
        caller.refuse(Error::new(ErrorKind::Unavailable, "the first reason"));
        caller.refuse(Error::new(ErrorKind::Unavailable, "another one"));
        let error = outcome_of(&caller, Operation::Read, false).unwrap_err();
        assert_eq!(error.to_string(), "the first reason");
    }

    #[test]
    fn an_option_gives_a_driver_no_ability() {
        let calls = Arc::new(Calls::default());
        let options = DeviceOptions { can_fua: true, ..DeviceOptions::default() };
        let caller = Caller::of_device(Arc::clone(&calls), &options, 1);
        outcome_of(&caller, Operation::Write, true).unwrap();
        assert_eq!(calls.flushes.load(Ordering::SeqCst), 1, "it is durable by its flush");
    }

    #[test]
    fn who_waits_for_its_turn_is_refused_when_the_device_fails() {
        let (calls, was_entered, let_go) = with_waiting_flush();
        let caller = Caller::new(Arc::clone(&calls), Some(1));
        thread::scope(|scope| {
            let flush = scope.spawn(|| outcome_of(&caller, Operation::Flush, false));
            was_entered.recv().unwrap();
            let read = scope.spawn(|| outcome_of(&caller, Operation::Read, false));
            caller.refuse(Error::new(ErrorKind::Unavailable, "it hangs"));
            let error = read.join().unwrap().unwrap_err();
            assert_eq!(error.to_string(), "it hangs");
            let_go.send(()).unwrap();
            flush.join().unwrap().unwrap();
        });
    }
}
