//! Devices that answer late, elsewhere, or with errors.

use std::sync::Mutex;
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;

use sawmill_device::{BlockDevice, Error, ErrorKind, Geometry, MemoryDevice, Request};

/// Holds back every request until a test releases it.
pub(crate) struct HoldDevice {
    inner: MemoryDevice,
    /// The requests held, or `None` once all are let through.
    held: Mutex<Option<Vec<Request>>>,
}

impl HoldDevice {
    pub(crate) fn new(size_bytes: u64) -> Self {
        HoldDevice { inner: MemoryDevice::new(size_bytes), held: Mutex::new(Some(Vec::new())) }
    }

    pub(crate) fn count(&self) -> usize {
        self.held.lock().expect("not poisoned").as_ref().map_or(0, Vec::len)
    }

    /// Releases the requests held now.
    pub(crate) fn release(&self) {
        let batch = self.held.lock().expect("not poisoned").as_mut().map(std::mem::take);
        batch.into_iter().flatten().for_each(|request| self.inner.submit(request));
    }

    /// Releases the requests held now, and holds none from now on.
    pub(crate) fn stop_holding(&self) {
        let batch = self.held.lock().expect("not poisoned").take();
        batch.into_iter().flatten().for_each(|request| self.inner.submit(request));
    }

    pub(crate) fn inner(&self) -> &MemoryDevice {
        &self.inner
    }
}

impl BlockDevice for HoldDevice {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn submit(&self, request: Request) {
        let mut held = self.held.lock().expect("not poisoned");
        match &mut *held {
            Some(requests) => requests.push(request),
            None => {
                drop(held);
                self.inner.submit(request);
            }
        }
    }
}

/// Carries requests out on threads of its own, several at a time and in any order.
pub(crate) struct ThreadDevice {
    geometry: Geometry,
    queue: Mutex<Option<Sender<Request>>>,
    threads: Vec<JoinHandle<()>>,
}

impl ThreadDevice {
    pub(crate) fn new(size_bytes: u64) -> Self {
        let inner = std::sync::Arc::new(MemoryDevice::new(size_bytes));
        let (send, receive) = channel::<Request>();
        let receive = std::sync::Arc::new(Mutex::new(receive));
        let geometry = inner.geometry();
        let threads = (0..3).map(|_| {
            let (inner, receive) = (inner.clone(), receive.clone());
            std::thread::spawn(move || {
                loop {
                    let next = receive.lock().expect("not poisoned").recv();
                    let Ok(request) = next else { return };
                    inner.submit(request);
                }
            })
        });
        ThreadDevice { geometry, threads: threads.collect(), queue: Mutex::new(Some(send)) }
    }
}

impl BlockDevice for ThreadDevice {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn submit(&self, request: Request) {
        let queue = self.queue.lock().expect("not poisoned");
        queue.as_ref().expect("open").send(request).expect("the threads run");
    }
}

impl Drop for ThreadDevice {
    fn drop(&mut self) {
        self.queue.lock().expect("not poisoned").take();
        for thread in self.threads.drain(..) {
            thread.join().expect("no panic");
        }
    }
}

/// Answers every request with an error of one kind.
pub(crate) struct ErrorDevice {
    geometry: Geometry,
    kind: ErrorKind,
}

impl ErrorDevice {
    pub(crate) fn new(kind: ErrorKind) -> Self {
        ErrorDevice { geometry: MemoryDevice::new(1 << 20).geometry(), kind }
    }
}

impl BlockDevice for ErrorDevice {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn submit(&self, request: Request) {
        request.fail(Error::new(self.kind, format!("{:?} for a test", self.kind)));
    }
}
