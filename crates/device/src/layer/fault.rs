//! Injected faults: a closure decides for each request whether it passes, fails, is held or is
//! dropped.
//!
//! For tests of the code above a device.
//!
//! Invariants: the device inside receives a request only if it passes or is released. No request is
//! lost: one that is still held when the layer is dropped answers itself (D2).
//!
//! Not here: faults of a store (`sawmill_store::FaultStore`), and of a journal's disk
//! (`crates/sim`).

use parking_lot::Mutex;

use crate::{BlockDevice, Error, Geometry, Request};

/// What happens to one request.
#[derive(Clone, Debug)]
pub enum Decision {
    /// It goes to the device.
    Pass,
    /// It is answered with this error and never reaches the device.
    Fail(Error),
    /// It is held back from the device until [`Fault::release`] or [`Fault::take_held`].
    Hold,
    /// It is dropped unanswered, and so answers itself.
    Drop,
}

/// The device `D` with the faults that `decide` chooses.
pub struct Fault<D, F> {
    inner: D,
    decide: F,
    /// Bounded by the requests that the test in front has in flight.
    held_requests: Mutex<Vec<Request>>,
}

impl<D: BlockDevice, F: Fn(&Request) -> Decision + Send + Sync> Fault<D, F> {
    /// A layer that calls `decide` for every request, possibly from several threads at once.
    #[must_use]
    pub fn new(inner: D, decide: F) -> Self {
        Fault { inner, decide, held_requests: Mutex::default() }
    }

    /// The number of held requests.
    #[must_use]
    pub fn held(&self) -> usize {
        self.held_requests.lock().len()
    }

    /// Submits all held requests to the device, oldest first, without calling `decide` again.
    /// Returns their number.
    pub fn release(&self) -> usize {
        let requests = self.take_held();
        let count = requests.len();
        requests.into_iter().for_each(|request| self.inner.submit(request));
        count
    }

    /// Returns all held requests, oldest first, for a test that needs another order or outcome.
    #[must_use = "a request that is dropped answers itself with an error"]
    pub fn take_held(&self) -> Vec<Request> {
        std::mem::take(&mut *self.held_requests.lock())
    }

    /// The device inside.
    pub fn inner(&self) -> &D {
        &self.inner
    }
}

impl<D: BlockDevice, F: Fn(&Request) -> Decision + Send + Sync> BlockDevice for Fault<D, F> {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn submit(&self, request: Request) {
        match (self.decide)(&request) {
            Decision::Pass => self.inner.submit(request),
            Decision::Fail(error) => request.fail(error),
            Decision::Hold => self.held_requests.lock().push(request),
            Decision::Drop => drop(request),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::thread;

    use super::*;
    use crate::{BlockDeviceExt, ErrorKind, MemoryDevice, Operation};

    #[test]
    fn a_failed_and_a_dropped_request_are_answered_and_change_nothing() {
        let device =
            Fault::new(MemoryDevice::new(1 << 20), |request: &Request| match request.address {
                1 => Decision::Fail(Error::new(ErrorKind::Full, "no space")),
                2 => Decision::Drop,
                _ => Decision::Pass,
            });
        let kind = |address| device.write_at(address, b"x").map_err(|error| error.kind());
        assert_eq!(kind(0), Ok(()));
        assert_eq!(kind(1), Err(ErrorKind::Full));
        assert_eq!(kind(2), Err(ErrorKind::Internal));
        assert_eq!(device.read_at(0, 4).expect("passes"), b"x\0\0\0");
    }

    #[test]
    fn a_held_request_reaches_the_device_when_released_and_not_before() {
        let device = Arc::new(Fault::new(MemoryDevice::new(1 << 20), |request: &Request| {
            if request.operation == Operation::Write { Decision::Hold } else { Decision::Pass }
        }));
        let writer = thread::spawn({
            let device = Arc::clone(&device);
            move || device.write_at(7, b"late")
        });
        while device.held() == 0 {
            thread::yield_now();
        }
        assert_eq!(device.read_at(7, 4).expect("passes"), [0; 4]);
        assert_eq!(device.release(), 1);
        writer.join().expect("no panic").expect("released");
        assert_eq!(device.read_at(7, 4).expect("passes"), b"late");
    }
}
