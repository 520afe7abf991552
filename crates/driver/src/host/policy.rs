//! Without a driver, requests wait or fail; with a driver, it must answer in time.
//!
//! Invariant: while requests are refused, none waits for long: the next check finds one that
//! arrived in between. Not here: ending a process that hangs (the program).

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use sawmill_device::{BlockDevice, Error, ErrorKind, Geometry, Request};

use super::attached_driver::AttachedDriver;
use super::{DeclaredDevice, Event, Host};
use crate::request_holder::{RequestHolder, State};

/// Interval of checks for waiting requests and hung drivers.
const LOOK_EVERY: Duration = Duration::from_millis(25);

/// A device around one that holds requests. It refuses requests if no driver will come.
pub(super) struct Policy {
    holder: Arc<dyn RequestHolder>,
    is_refusing: AtomicBool,
    error: Mutex<Option<Error>>,
}

impl Policy {
    pub(super) fn new(holder: Arc<dyn RequestHolder>) -> Arc<Self> {
        Arc::new(Policy { holder, is_refusing: AtomicBool::new(false), error: Mutex::default() })
    }

    /// From now on requests fail, including those that wait.
    pub(super) fn refuse(&self, error: Error) {
        // Before the flag, so that whoever sees the flag finds the error.
        *self.error.lock() = Some(error.clone());
        self.is_refusing.store(true, Ordering::SeqCst);
        self.holder.fail_waiting(&error);
    }

    /// A driver is connected.
    pub(super) fn accept(&self) {
        self.is_refusing.store(false, Ordering::SeqCst);
    }

    fn refusal(&self) -> Option<Error> {
        self.is_refusing.load(Ordering::SeqCst).then(|| self.error.lock().clone()).flatten()
    }
}

impl BlockDevice for Policy {
    fn geometry(&self) -> Geometry {
        self.holder.geometry()
    }

    fn submit(&self, request: Request) {
        match self.refusal() {
            None => self.holder.submit(request),
            // A wrong request is `Invalid` in every state of the device (D6).
            Some(error) => match request.check(&self.geometry()) {
                Err(wrong) => request.fail(wrong),
                Ok(()) => request.fail(error),
            },
        }
    }
}

/// Checks timeouts as long as the host exists.
pub(super) fn watch(host: &Weak<Host>) {
    while let Some(host) = host.upgrade() {
        if host.is_closed.load(Ordering::SeqCst) {
            return;
        }
        host.check();
        // Not held during the sleep: otherwise the host would outlive its owner by that time.
        drop(host);
        std::thread::sleep(LOOK_EVERY);
    }
}

impl Host {
    fn check(&self) {
        let Some(declared_device) = self.device.get() else { return };
        if declared_device.holder.status().state == State::Ended {
            // Requests that arrived while it ended.
            return declared_device
                .holder
                .end_now(&Error::new(ErrorKind::Closed, "the device has ended"));
        }
        let driver = self.state.lock().driver.clone();
        match driver {
            // Also while another driver waits for this one to finish.
            Some(driver) => self.check_driver(declared_device, &driver),
            None => self.check_without_driver(declared_device),
        }
    }

    fn check_without_driver(&self, device: &DeclaredDevice) {
        // A driver that connects just now must not find its requests failed.
        let Some(_no_driver_comes) = self.attaching.try_lock() else { return };
        let (is_alone, since) = {
            let state = self.state.lock();
            (state.driver.is_none(), state.since)
        };
        if !is_alone {
            return;
        }
        let patience = device.options.death_timeout;
        let is_over = !patience.is_zero() && since.is_some_and(|since| since.elapsed() >= patience);
        if let Some(error) = device.policy.refusal() {
            device.holder.fail_waiting(&error);
        } else if is_over {
            let text = format!(
                "no driver connected within {} s; start one, or raise death_timeout_s",
                patience.as_secs_f64()
            );
            device.policy.refuse(Error::new(ErrorKind::TimedOut, text));
        }
    }

    fn check_driver(&self, device: &DeclaredDevice, driver: &AttachedDriver) {
        let patience = device.options.request_timeout;
        let is_late = |oldest: Instant| oldest.elapsed() >= patience;
        if !patience.is_zero()
            && device.holder.status().oldest_fetched_at.is_some_and(is_late)
            && !driver.is_cut()
        {
            // Report the reason first: after the cut, another thread reports that the driver is
            // gone.
            (self.on_event)(Event::Hung { pid: driver.pid });
            driver.cut(&format!("it did not answer a command within {} s", patience.as_secs_f64()));
        }
    }
}
