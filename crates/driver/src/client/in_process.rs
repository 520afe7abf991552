//! A driver as a device of this process, for programs that open doors themselves.
//!
//! Invariant: dropping the device waits for accepted requests, unless an answer on a thread of its
//! own drops it.
//!
//! Not here: hosts; whole blocks from arbitrary bytes (`sawmill_device::layer::Align`, for a driver
//! that requires blocks).

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};

use parking_lot::Mutex;
use sawmill_device::{
    BlockDevice, Error, ErrorKind, Geometry, Operation, Operations, Reply, Request, Result,
};

use super::driver::{Abilities, Driver, errno};

/// A driver as a device in this process, with threads of its own.
pub struct InProcess {
    geometry: Geometry,
    /// `None` during the end.
    requests: Option<Sender<Request>>,
    workers: Vec<JoinHandle<()>>,
}

/// What the workers share.
struct WorkerContext {
    driver: Box<dyn Driver>,
    abilities: Abilities,
    requests: Mutex<Receiver<Request>>,
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
        // Bounded by what the doors admit at the same time.
        let (send, receive) = channel();
        let shared = Arc::new(WorkerContext {
            driver: Box::new(driver),
            abilities,
            requests: Mutex::new(receive),
        });
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
        let mut device = InProcess { geometry, requests: Some(send), workers: Vec::new() };
        for _ in 0..threads.max(1) {
            let shared = Arc::clone(&shared);
            let builder = thread::Builder::new().name("sawmill-driver".to_owned());
            let worker = builder.spawn(move || shared.work()).map_err(|error| {
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

impl WorkerContext {
    fn work(&self) {
        loop {
            // The lock is held while waiting, by one thread at a time, and is free while a request
            // is executed.
            let received = self.requests.lock().recv();
            let Ok(mut request) = received else { return };
            // A panic of the driver fails one request. Without this, the thread would be gone, and
            // later requests would wait forever.
            let outcome = catch_unwind(AssertUnwindSafe(|| self.handle(&mut request)));
            request.complete(match outcome {
                Ok(Ok(())) => Ok(Reply::Done),
                Ok(Err(error)) => Err(device_error(error)),
                Err(_) => Err(Error::new(ErrorKind::Internal, "the driver panicked")),
            });
        }
    }

    fn handle(&self, request: &mut Request) -> io::Result<()> {
        let (address, length) = (request.address, request.length);
        match request.operation {
            Operation::Read => self.driver.read(address, request.buffer()),
            Operation::Write => {
                let mut bytes = vec![0; length as usize];
                request.fill(0, &mut bytes);
                self.write(address, &bytes, request.flags.fua)
            }
            Operation::Flush => self.flush(),
            Operation::Discard => self.driver.discard(address, length),
            Operation::WriteZeroes => {
                self.driver.write_zeroes(address, length, request.flags.no_unmap)?;
                if request.flags.fua { self.flush() } else { Ok(()) }
            }
            Operation::Prefetch | Operation::Allocation => Ok(()),
        }
    }

    fn write(&self, address: u64, bytes: &[u8], fua: bool) -> io::Result<()> {
        let by_itself = fua && self.abilities.fua;
        self.driver.write(address, bytes, by_itself)?;
        // A flush after the write makes the write durable as well, and all others with it.
        if fua && !by_itself { self.flush() } else { Ok(()) }
    }

    fn flush(&self) -> io::Result<()> {
        if self.abilities.flush { self.driver.flush() } else { Ok(()) }
    }
}

fn device_error(error: io::Error) -> Error {
    Error::caused(ErrorKind::of_driver(errno(&error)), "the driver failed", error)
}
