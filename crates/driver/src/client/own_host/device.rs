//! The device of a driver that is its own host, as doors and its host see it.
//!
//! Invariants: it has two sides and one caller, so that all requests together make no more calls at
//! once than the options allow. A device that ends accepts nothing new on either side.
//!
//! Not here: the calls (`caller`).

use std::sync::Arc;

use sawmill_device::{BlockDevice, Error, Geometry, Request, Result};

use crate::client::caller::Caller;
use crate::client::in_process::InProcess;
use crate::request_holder::{HolderStatus, RequestHolder, StateCell};

/// For its host, and for doors whose threads must not wait in `submit`: the calls are made by
/// threads of the device.
pub(super) struct OwnDevice {
    device: InProcess,
    caller: Arc<Caller>,
    state: Arc<StateCell>,
}

/// For doors with a thread for each queue: that thread makes the call. It does not know of blocks
/// that another door changes in part (`sawmill_device::layer::Align`).
pub(super) struct QueueDevice {
    geometry: Geometry,
    caller: Arc<Caller>,
    state: Arc<StateCell>,
}

impl OwnDevice {
    pub(super) fn start(caller: &Arc<Caller>, geometry: Geometry, threads: usize) -> Result<Self> {
        // One more than calls at once: while all calls hang, it answers what is refused.
        let device = InProcess::start(caller, geometry, threads.saturating_add(1))?;
        let (caller, state) = (Arc::clone(caller), Arc::new(StateCell::new()));
        Ok(OwnDevice { device, caller, state })
    }

    pub(super) fn of_queues(&self) -> QueueDevice {
        QueueDevice {
            geometry: self.geometry(),
            caller: Arc::clone(&self.caller),
            state: Arc::clone(&self.state),
        }
    }
}

/// Answers a request that is not accepted. A wrong one is `Invalid` in every state (D6).
fn refuse(request: Request, geometry: &Geometry, error: Error) {
    match request.check(geometry) {
        Err(wrong) => request.fail(wrong),
        Ok(()) => request.fail(error),
    }
}

impl BlockDevice for OwnDevice {
    fn geometry(&self) -> Geometry {
        self.device.geometry()
    }

    fn submit(&self, request: Request) {
        match self.state.refusal() {
            None => self.device.submit(request),
            Some(error) => refuse(request, &self.geometry(), error),
        }
    }
}

impl BlockDevice for QueueDevice {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn submit(&self, request: Request) {
        match (request.check(&self.geometry), self.state.refusal()) {
            (Err(wrong), _) => request.fail(wrong),
            (Ok(()), Some(error)) => request.fail(error),
            (Ok(()), None) => self.caller.carry_out(request),
        }
    }
}

impl RequestHolder for OwnDevice {
    fn start(&self) -> Result<()> {
        self.state.start()
    }

    fn pause(&self) {
        self.state.pause();
    }

    fn recover(&self) -> Result<()> {
        Ok(())
    }

    fn begin_end(&self) {
        self.state.end();
    }

    // Nothing waits for a driver here.
    fn fail_waiting(&self, _error: &Error) {}

    fn end_now(&self, error: &Error) {
        self.state.set_ended();
        self.caller.refuse(error.clone());
    }

    fn status(&self) -> HolderStatus {
        // The doors are closed before the end, and a door that has closed has its answers.
        HolderStatus { state: self.state.state(), is_drained: true, oldest_fetched_at: None }
    }
}
