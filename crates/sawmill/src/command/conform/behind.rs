//! Devices behind doors, as their users have them: an NBD export, and a file or block device of the kernel.
//!
//! Invariants: what a door can be asked goes to the door, also when it is wrong (D6, D7 are the door's to
//! answer); reads and writes of a file go around the page cache where that is possible, so that they reach
//! the driver. Not here: what is tested.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;

use parking_lot::{Condvar, Mutex};
use rustix::fs::OFlags;
use sawmill_device::layer::Align;
use sawmill_device::{
    Allocation, BlockDevice, Error, ErrorKind, Geometry, Operation, Operations, Outcome, Reply, Request,
};
use sawmill_nbd_client::{Client, Command, Dialect, Failure as NbdFailure, flag};
use sawmill_sys::AlignedBytes;

use crate::exit::{Failure, Result};

/// Requests of a file that are under way at a time.
const THREADS: usize = 8;

/// An export of an NBD server.
pub(super) struct NbdDevice {
    client: Client,
    geometry: Geometry,
    /// What the client can put into a request at all.
    askable: Geometry,
}

impl NbdDevice {
    /// `inner` is the geometry behind the door, for what NBD does not say.
    pub(super) fn connect(uri: &str, inner: &Geometry) -> Result<Self> {
        let failed = |error| Failure::io(format!("cannot connect to {uri}"), &error);
        let client = Client::connect(uri, Dialect::Extended).map_err(failed)?;
        let export = client.export();
        let has = |bit| export.flags & bit != 0;
        let longest = export.block_bytes_max.min(inner.request_bytes_max);
        let geometry = Geometry {
            size_bytes: export.size_bytes,
            request_bytes_max: longest,
            preferred_bytes: inner.preferred_bytes.min(longest),
            read_only: has(flag::READ_ONLY),
            shared_cache: has(flag::CAN_MULTI_CONN),
            operations: Operations {
                discard: has(flag::SEND_TRIM),
                write_zeroes: has(flag::SEND_WRITE_ZEROES),
                allocation: export.allocation_context.is_some(),
            },
            ..*inner
        };
        let askable = Geometry { size_bytes: u64::MAX, read_only: false, ..geometry };
        Ok(NbdDevice { client, geometry, askable })
    }
}

impl BlockDevice for NbdDevice {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn submit(&self, mut request: Request) {
        if let Err(error) = request.check(&self.askable) {
            return request.fail(error);
        }
        let (offset, length) = (request.address, request.length);
        let command = match request.operation {
            Operation::Read => Command::Read { offset, length: length as u32 },
            Operation::Write => {
                let mut bytes = vec![0; length as usize];
                request.fill(0, &mut bytes);
                Command::Write { offset, bytes, fua: request.flags.fua }
            }
            Operation::Flush => Command::Flush,
            Operation::Discard => Command::Trim { offset, length },
            Operation::WriteZeroes => Command::WriteZeroes { offset, length },
            Operation::Allocation => Command::BlockStatus { offset, length },
            // NBD has it, this client has not.
            Operation::Prefetch => {
                let checked = request.check(&self.geometry);
                return request.complete(checked.map(|()| Reply::Done));
            }
        };
        let size_bytes = self.geometry.size_bytes;
        self.client.submit_then(&command, move |outcome| hear(request, size_bytes, outcome));
    }
}

fn hear(mut request: Request, size_bytes: u64, outcome: Result<sawmill_nbd_client::Reply, NbdFailure>) {
    let reply = match outcome {
        Ok(reply) => reply,
        Err(NbdFailure::Gone) => {
            return request.fail(Error::new(ErrorKind::Closed, "the NBD connection ended"));
        }
        Err(NbdFailure::Errno(errno)) => {
            let kind = match errno {
                1 | 30 => ErrorKind::ReadOnly,
                22 | 95 => ErrorKind::Invalid,
                // What NBD has for a write past the end.
                28 if request.end().is_none_or(|end| end > size_bytes) => ErrorKind::Invalid,
                28 => ErrorKind::Full,
                _ => ErrorKind::Unavailable,
            };
            return request.fail(Error::new(kind, format!("the NBD server answered with errno {errno}")));
        }
    };
    match request.operation {
        Operation::Read => match request.buffer() {
            buffer if buffer.len() == reply.bytes.len() => buffer.copy_from_slice(&reply.bytes),
            _ => return request.fail(Error::new(ErrorKind::Internal, "an NBD read of another length")),
        },
        Operation::Allocation => {
            let run = |extent: &sawmill_nbd_client::Extent| Allocation {
                length: extent.length,
                data: extent.flags & 1 == 0,
            };
            let mut runs: Vec<Allocation> = reply.extents.iter().map(run).collect();
            // A server may tell less than it was asked; data is the careful guess for the rest.
            let told: u64 = runs.iter().map(|run| run.length).sum();
            if told < request.length {
                runs.push(Allocation { length: request.length - told, data: true });
            }
            return request.complete(Ok(Reply::Allocation(runs)));
        }
        _ => {}
    }
    request.done();
}

/// A file, or a block device.
pub(super) struct FileDevice(Align<Threads>);

impl FileDevice {
    /// `inner` is the geometry behind the door, for what the kernel does not say.
    pub(super) fn open(path: &Path, inner: &Geometry) -> Result<Self> {
        let failed = |error: &std::io::Error| Failure::io(format!("cannot open {}", path.display()), error);
        let open = |flags: OFlags| {
            let flags = flags.bits().cast_signed();
            OpenOptions::new().read(true).write(!inner.read_only).custom_flags(flags).open(path)
        };
        // A file system may have no direct I/O.
        let file = open(OFlags::DIRECT).or_else(|_| open(OFlags::empty())).map_err(|error| failed(&error))?;
        let unit_bytes = sawmill_sys::logical_block_bytes(&file).map_err(|error| failed(&error))?;
        let geometry = Geometry {
            request_bytes_max: 1 << 20,
            preferred_bytes: 64 << 10,
            operations: Operations { allocation: false, ..inner.operations },
            ..*inner
        };
        Ok(FileDevice(Align::new(Threads::start(file, geometry)?, unit_bytes)?))
    }
}

impl BlockDevice for FileDevice {
    fn geometry(&self) -> &Geometry {
        self.0.geometry()
    }

    fn submit(&self, request: Request) {
        self.0.submit(request);
    }
}

/// Threads that wait for the kernel.
struct Threads {
    geometry: Geometry,
    queue: Arc<Queue>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Default)]
struct Queue {
    /// What is to be done, and whether more can come.
    waiting: Mutex<(VecDeque<Request>, bool)>,
    changed: Condvar,
}

impl Threads {
    fn start(file: File, geometry: Geometry) -> Result<Self> {
        let (queue, file) = (Arc::<Queue>::default(), Arc::new(file));
        let mut all = Threads { geometry, queue, threads: Vec::new() };
        for _ in 0..THREADS {
            let (queue, file) = (Arc::clone(&all.queue), Arc::clone(&file));
            let started = std::thread::Builder::new().name("file".into()).spawn(move || queue.work(&file));
            all.threads.push(started.map_err(|error| Failure::io("cannot start a thread", &error))?);
        }
        Ok(all)
    }
}

impl BlockDevice for Threads {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn submit(&self, request: Request) {
        if let Err(error) = request.check(&self.geometry) {
            return request.fail(error);
        }
        self.queue.waiting.lock().0.push_back(request);
        self.queue.changed.notify_one();
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.queue.waiting.lock().1 = true;
        self.queue.changed.notify_all();
        let own = std::thread::current().id();
        // An answer on one of them may be what lets go of this device.
        for thread in self.threads.drain(..).filter(|thread| thread.thread().id() != own) {
            let _ = thread.join();
        }
    }
}

impl Queue {
    fn work(&self, file: &File) {
        loop {
            let mut waiting = self.waiting.lock();
            let mut request = loop {
                match waiting.0.pop_front() {
                    Some(request) => break request,
                    None if waiting.1 => return,
                    None => self.changed.wait(&mut waiting),
                }
            };
            drop(waiting);
            let outcome = carry_out(file, &mut request);
            request.complete(outcome);
        }
    }
}

fn carry_out(file: &File, request: &mut Request) -> Outcome {
    let (address, length) = (request.address, request.length);
    let done = match request.operation {
        Operation::Read => {
            let mut bytes = AlignedBytes::zeroed(length as usize);
            let read = file.read_exact_at(&mut bytes, address);
            if read.is_ok() {
                request.buffer().copy_from_slice(&bytes);
            }
            read
        }
        Operation::Write => {
            let mut bytes = AlignedBytes::zeroed(length as usize);
            request.fill(0, &mut bytes);
            file.write_all_at(&bytes, address)
        }
        Operation::Flush => file.sync_data(),
        Operation::Discard => sawmill_sys::discard(file, address, length),
        Operation::WriteZeroes => sawmill_sys::write_zeroes(file, address, length),
        Operation::Prefetch | Operation::Allocation => Ok(()),
    };
    let done = match done {
        Ok(()) if request.flags.fua => file.sync_data(),
        done => done,
    };
    done.map(|()| Reply::Done).map_err(|error| {
        let text = format!("{:?} of {length} bytes at {address}: {error}", request.operation);
        Error::new(ErrorKind::Unavailable, text)
    })
}
