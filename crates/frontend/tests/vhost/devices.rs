//! Devices that show what a door does with them: one that keeps requests until it is told, one that
//! notes them.

use std::sync::Arc;

use parking_lot::{Condvar, Mutex};
use sawmill_device::{BlockDevice, Flags, Geometry, MemoryDevice, Operation, Request};

pub(crate) const SIZE_BYTES: u64 = 4 << 20;

/// A memory device in front of which requests may be kept, and are noted in any case.
pub(crate) struct Gate {
    pub(crate) memory: Arc<MemoryDevice>,
    inside: Mutex<Inside>,
    came: Condvar,
}

#[derive(Default)]
struct Inside {
    closed: bool,
    kept: Vec<Request>,
    seen: Vec<(Operation, u64, Flags)>,
}

impl Gate {
    pub(crate) fn open() -> Arc<Self> {
        Self::before(Arc::new(MemoryDevice::new(SIZE_BYTES)))
    }

    pub(crate) fn before(memory: Arc<MemoryDevice>) -> Arc<Self> {
        Arc::new(Gate { memory, inside: Mutex::default(), came: Condvar::new() })
    }

    /// From now on requests are kept.
    pub(crate) fn close(&self) {
        self.inside.lock().closed = true;
    }

    /// Lets those of the kept through that have these numbers, the oldest being 0. The others stay
    /// kept.
    pub(crate) fn let_some_through(&self, numbers: &[usize]) {
        let (some, others) = {
            let mut inside = self.inside.lock();
            let kept = std::mem::take(&mut inside.kept).into_iter().enumerate();
            kept.partition::<Vec<_>, _>(|(number, _)| numbers.contains(number))
        };
        self.inside.lock().kept = others.into_iter().map(|(_, request)| request).collect();
        some.into_iter().for_each(|(_, request)| self.memory.submit(request));
    }

    /// Lets those through that come from now on; what was kept stays.
    pub(crate) fn let_newer_through(&self) {
        self.inside.lock().closed = false;
    }

    /// Lets all that were kept through, and all that come.
    pub(crate) fn let_through(&self) {
        let kept = {
            let mut inside = self.inside.lock();
            inside.closed = false;
            std::mem::take(&mut inside.kept)
        };
        kept.into_iter().for_each(|request| self.memory.submit(request));
    }

    /// Waits until so many requests have come in all; they are what is returned.
    pub(crate) fn seen(&self, count: usize) -> Vec<(Operation, u64, Flags)> {
        let mut inside = self.inside.lock();
        while inside.seen.len() < count {
            self.came.wait(&mut inside);
        }
        inside.seen.clone()
    }

    /// How many have come so far.
    pub(crate) fn count(&self) -> usize {
        self.inside.lock().seen.len()
    }
}

impl BlockDevice for Gate {
    fn geometry(&self) -> Geometry {
        self.memory.geometry()
    }

    fn submit(&self, request: Request) {
        let mut inside = self.inside.lock();
        inside.seen.push((request.operation, request.address, request.flags));
        self.came.notify_all();
        if inside.closed {
            return inside.kept.push(request);
        }
        drop(inside);
        self.memory.submit(request);
    }
}
