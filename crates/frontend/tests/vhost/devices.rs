//! A device that shows what a door does with it: it records requests, and can hold them back.

use std::sync::Arc;

use parking_lot::{Condvar, Mutex};
use sawmill_device::{BlockDevice, Flags, Geometry, MemoryDevice, Operation, Request};

pub(crate) const SIZE_BYTES: u64 = 4 << 20;

/// A memory device that records all requests and may hold them back.
pub(crate) struct PausableDevice {
    pub(crate) memory: Arc<MemoryDevice>,
    state: Mutex<DeviceState>,
    came: Condvar,
}

#[derive(Default)]
struct DeviceState {
    closed: bool,
    kept: Vec<Request>,
    requests: Vec<(Operation, u64, Flags)>,
}

impl PausableDevice {
    pub(crate) fn open() -> Arc<Self> {
        Self::before(Arc::new(MemoryDevice::new(SIZE_BYTES)))
    }

    pub(crate) fn before(memory: Arc<MemoryDevice>) -> Arc<Self> {
        Arc::new(PausableDevice { memory, state: Mutex::default(), came: Condvar::new() })
    }

    /// Holds requests back from now on.
    pub(crate) fn close(&self) {
        self.state.lock().closed = true;
    }

    /// Releases the held requests with these numbers; the oldest one is 0. The others stay held.
    pub(crate) fn release_some(&self, numbers: &[usize]) {
        let (some, others) = {
            let mut state = self.state.lock();
            let kept = std::mem::take(&mut state.kept).into_iter().enumerate();
            kept.partition::<Vec<_>, _>(|(number, _)| numbers.contains(number))
        };
        self.state.lock().kept = others.into_iter().map(|(_, request)| request).collect();
        some.into_iter().for_each(|(_, request)| self.memory.submit(request));
    }

    /// Passes new requests from now on; held ones stay held.
    pub(crate) fn pass_newer(&self) {
        self.state.lock().closed = false;
    }

    /// Releases all held requests, and passes all new ones.
    pub(crate) fn release_all(&self) {
        let kept = {
            let mut state = self.state.lock();
            state.closed = false;
            std::mem::take(&mut state.kept)
        };
        kept.into_iter().for_each(|request| self.memory.submit(request));
    }

    /// Waits until this many requests have arrived in total, and returns them.
    pub(crate) fn requests(&self, count: usize) -> Vec<(Operation, u64, Flags)> {
        let mut state = self.state.lock();
        while state.requests.len() < count {
            self.came.wait(&mut state);
        }
        state.requests.clone()
    }

    /// The number of requests so far.
    pub(crate) fn count(&self) -> usize {
        self.state.lock().requests.len()
    }
}

impl BlockDevice for PausableDevice {
    fn geometry(&self) -> Geometry {
        self.memory.geometry()
    }

    fn submit(&self, request: Request) {
        let mut state = self.state.lock();
        state.requests.push((request.operation, request.address, request.flags));
        self.came.notify_all();
        if state.closed {
            return state.kept.push(request);
        }
        drop(state);
        self.memory.submit(request);
    }
}
