//! A driver as a device of this process, for programs that open doors themselves.
//!
//! Invariant: dropping the device waits for accepted requests, unless an answer on a thread of its
//! own drops it.
//!
//! Not here: the calls (`caller`); hosts; whole blocks from arbitrary bytes
//! (`sawmill_device::layer::Align`, for a driver that requires blocks).

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};

use parking_lot::Mutex;
use sawmill_device::{BlockDevice, Error, ErrorKind, Geometry, Operations, Request, Result};

use super::caller::Caller;
use super::driver::Driver;

/// What the main thread of a program has, and its functions may count on.
const STACK_BYTES: usize = 8 << 20;

/// A driver as a device in this process, with threads of its own.
pub struct InProcess {
    geometry: Geometry,
    /// `None` during the end.
    requests: Option<Sender<Request>>,
    workers: Vec<JoinHandle<()>>,
}

impl InProcess {
    /// A device of `size_bytes`, in blocks of 512 or 4096, with this many threads. The driver gets
    /// requests as they come: unless it accepts any byte, wrap the device in
    /// [`sawmill_device::layer::Align`].
    ///
    /// # Errors
    /// `Invalid` for impossible sizes; `Full` if there are no more threads.
    pub fn new(
        driver: impl Driver + 'static,
        size_bytes: u64,
        block_bytes: u32,
        threads: usize,
    ) -> Result<Self> {
        let abilities = driver.abilities();
        let is_block = matches!(block_bytes, 512 | 4096);
        if !is_block || size_bytes == 0 || !size_bytes.is_multiple_of(u64::from(block_bytes)) {
            let text =
                format!("a device cannot have {size_bytes} bytes in blocks of {block_bytes}");
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        let operations = Operations {
            discard: abilities.write && abilities.discard,
            write_zeroes: abilities.write && abilities.write_zeroes,
            allocation: false,
        };
        let geometry = Geometry {
            size_bytes,
            block_bytes,
            preferred_bytes: 64 << 10,
            request_bytes_max: 1 << 20,
            read_only: !abilities.write,
            shared_cache: true,
            operations,
        };
        InProcess::start(&Arc::new(Caller::new(driver, None)), geometry, threads)
    }

    /// A device of this geometry, with threads of its own that call.
    pub(super) fn start(caller: &Arc<Caller>, geometry: Geometry, threads: usize) -> Result<Self> {
        // Bounded by what the doors admit at the same time.
        let (send, receive) = channel();
        let requests = Arc::new(Mutex::new(receive));
        let mut device = InProcess { geometry, requests: Some(send), workers: Vec::new() };
        for _ in 0..threads.max(1) {
            let (caller, requests) = (Arc::clone(caller), Arc::clone(&requests));
            let builder = thread::Builder::new().name("sawmill-driver".to_owned());
            let worker = builder.stack_size(STACK_BYTES).spawn(move || work(&caller, &requests));
            let worker = worker.map_err(|error| {
                Error::caused(ErrorKind::Full, "cannot start a thread for the driver", error)
            })?;
            device.workers.push(worker);
        }
        Ok(device)
    }
}

impl BlockDevice for InProcess {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn submit(&self, request: Request) {
        match (request.check(&self.geometry), &self.requests) {
            (Err(error), _) => request.fail(error),
            // A request that no thread receives answers itself.
            (Ok(()), Some(requests)) => drop(requests.send(request)),
            (Ok(()), None) => request.fail(Error::new(ErrorKind::Closed, "the device is closed")),
        }
    }
}

impl Drop for InProcess {
    fn drop(&mut self) {
        // Ends the workers' wait, once they have taken all that was accepted.
        self.requests = None;
        for worker in self.workers.drain(..) {
            // The thread handles panics of drivers itself.
            let _ = sawmill_sys::join_unless_own(worker);
        }
    }
}

fn work(caller: &Caller, requests: &Mutex<Receiver<Request>>) {
    loop {
        // The lock is held while waiting, by one thread at a time, and is free while a request is
        // executed.
        let received = requests.lock().recv();
        let Ok(request) = received else { return };
        caller.carry_out(request);
    }
}
