//! A disk of the soak: bytes in memory that never grow or shrink, answered by a thread of its own,
//! so that answers arrive after the submitting thread has gone on.
//!
//! Invariant: requests are carried out one after the other, in the order in which they came. Not
//! here: what was written (`worker`).

use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};

use sawmill_device::{BlockDevice, Geometry, Operation, Operations, Request};

/// A disk.
pub(crate) struct Disk {
    geometry: Geometry,
    /// Present until the disk is dropped, which ends the thread.
    sender: Option<Sender<Request>>,
    thread: Option<JoinHandle<()>>,
}

impl Disk {
    /// A disk of zeroes.
    pub(crate) fn new(size_bytes: u64) -> Self {
        let geometry = Geometry {
            size_bytes,
            block_bytes: 512,
            preferred_bytes: 4096,
            request_bytes_max: 1 << 20,
            read_only: false,
            shared_cache: true,
            operations: Operations { discard: true, write_zeroes: true, allocation: false },
        };
        let (sender, requests) = channel();
        // Written, so that all of its memory is allocated from the start.
        let bytes = (0..size_bytes).map(|_| 0).collect();
        let thread = thread::spawn(move || serve(bytes, &requests));
        Disk { geometry, sender: Some(sender), thread: Some(thread) }
    }
}

fn serve(mut bytes: Vec<u8>, requests: &Receiver<Request>) {
    for mut request in requests {
        let (start, end) = (request.address as usize, (request.address + request.length) as usize);
        match request.operation {
            Operation::Read => request.buffer().copy_from_slice(&bytes[start..end]),
            Operation::Write => request.fill(0, &mut bytes[start..end]),
            Operation::Discard | Operation::WriteZeroes => bytes[start..end].fill(0),
            Operation::Flush | Operation::Prefetch | Operation::Allocation => {}
        }
        request.done();
    }
}

impl BlockDevice for Disk {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn submit(&self, request: Request) {
        if let Err(error) = request.check(&self.geometry) {
            return request.fail(error);
        }
        if let Some(sender) = &self.sender {
            // A request that no thread receives fails when it is dropped.
            let _ = sender.send(request);
        }
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        drop(self.sender.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
