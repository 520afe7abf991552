//! A disk of the user as a device to record or to crash: a file, a block device, or an NBD export.
//!
//! Invariants: the threads of a [`FileTarget`] execute its requests, so submitting to it never
//! waits; submitting to an [`NbdTarget`] waits only for its socket. A write that a target of
//! [`FileTarget::direct`] answered has reached the device, not only the page cache. A change with
//! FUA is answered when it is durable, on an export also where the server does not support FUA.
//!
//! Not here: the NBD client (`crates/nbd-client`), the recorder (`recorder`), the load (`load`).

use std::fs::File;
use std::io::{self, IoSlice, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, Mutex, Weak};
use std::thread;

use rustix::fs::OFlags;
use rustix::io::{ReadWriteFlags, pwritev2};
use sawmill_device::{
    BlockDevice, Error as DeviceError, ErrorKind, Geometry, Operation, Operations, Reply, Request,
};
use sawmill_sys::{AlignedBytes, discard, logical_block_bytes, write_zeroes};

use crate::nbd::{Client, Command, Failure, Style, flag};
use crate::{Error, Result};

/// The threads of a file, which limit its requests in flight.
const WORKERS_MAX: usize = 2;
const WORKERS_DIRECT_MAX: usize = 32;
const REQUEST_BYTES_MAX: u32 = 32 << 20;

fn geometry(size_bytes: u64, operations: Operations) -> Geometry {
    Geometry {
        size_bytes,
        block_bytes: 512,
        preferred_bytes: 64 << 10,
        request_bytes_max: REQUEST_BYTES_MAX,
        read_only: false,
        shared_cache: false,
        operations,
    }
}

/// A file or a block device.
pub struct FileTarget {
    geometry: Geometry,
    sender: Sender<Request>,
}

impl FileTarget {
    /// Opens it for reading and writing through the page cache, without discards, because their
    /// effect differs too much between files.
    pub fn open(path: &Path) -> Result<Self> {
        let failed = |error: io::Error| Error::io("cannot open", path, error);
        let mut file = File::options().read(true).write(true).open(path).map_err(failed)?;
        let size_bytes = file.seek(SeekFrom::End(0)).map_err(failed)?;
        let operations = Operations { discard: false, write_zeroes: false, allocation: false };
        let geometry = geometry(size_bytes, operations);
        Self::serve(file, path, geometry, WORKERS_MAX).map_err(failed)
    }

    /// Opens it for reading and writing without the page cache, with many requests in flight.
    /// Requests are multiples of the geometry's block.
    ///
    /// Fails also where the file does not support direct I/O.
    pub fn direct(path: &Path) -> Result<Self> {
        let failed = |error: io::Error| Error::io("cannot open around the page cache", path, error);
        let flags = OFlags::DIRECT.bits().cast_signed();
        let mut options = File::options();
        let mut file =
            options.read(true).write(true).custom_flags(flags).open(path).map_err(failed)?;
        let size_bytes = file.seek(SeekFrom::End(0)).map_err(failed)?;
        let block_bytes = logical_block_bytes(&file).map_err(failed)?;
        let operations = Operations { discard: true, write_zeroes: true, allocation: false };
        let geometry = Geometry { block_bytes, ..geometry(size_bytes, operations) };
        Self::serve(file, path, geometry, WORKERS_DIRECT_MAX).map_err(failed)
    }

    fn serve(file: File, path: &Path, geometry: Geometry, workers: usize) -> io::Result<Self> {
        // Bounded by the requests that the load has in flight.
        let (sender, receiver) = std::sync::mpsc::channel::<Request>();
        let (file, receiver) = (Arc::new(file), Arc::new(Mutex::new(receiver)));
        for _ in 0..workers {
            let (file, receiver) = (Arc::clone(&file), Arc::clone(&receiver));
            let path = path.to_owned();
            let work = move || {
                loop {
                    // The lock is free again before the request is carried out, so that the threads
                    // work at the same time.
                    let next = receiver.lock().map(|receiver| receiver.recv());
                    let Ok(Ok(mut request)) = next else { return };
                    let done = carry_out(&file, &mut request);
                    let failed = |error: io::Error| {
                        let text = format!("cannot read or write the target {}", path.display());
                        DeviceError::caused(ErrorKind::Unavailable, text, error)
                    };
                    request.complete(done.map(|()| Reply::Done).map_err(failed));
                }
            };
            thread::Builder::new().name("target".into()).spawn(work)?;
        }
        Ok(FileTarget { geometry, sender })
    }
}

fn carry_out(file: &File, request: &mut Request) -> io::Result<()> {
    let (address, length) = (request.address, request.length);
    let fua = request.flags.fua;
    // A hole is metadata, which no flag of the call makes durable.
    let durably =
        |done: io::Result<()>| done.and_then(|()| if fua { file.sync_data() } else { Ok(()) });
    match request.operation {
        Operation::Read => {
            let mut bytes = AlignedBytes::zeroed(length as usize);
            file.read_exact_at(&mut bytes, address)?;
            request.buffer().copy_from_slice(&bytes);
            Ok(())
        }
        Operation::Write => {
            let mut bytes = AlignedBytes::zeroed(length as usize);
            request.fill(0, &mut bytes);
            let flags = if fua { ReadWriteFlags::DSYNC } else { ReadWriteFlags::empty() };
            // One call, because the rest of a short write would be another request.
            match pwritev2(file, &[IoSlice::new(&bytes)], address, flags)? {
                written if written == bytes.len() => Ok(()),
                written => {
                    Err(io::Error::other(format!("took {written} bytes of {}", bytes.len())))
                }
            }
        }
        Operation::Flush => file.sync_data(),
        Operation::Discard => durably(discard(file, address, length)),
        Operation::WriteZeroes => durably(write_zeroes(file, address, length)),
        Operation::Prefetch | Operation::Allocation => Ok(()),
    }
}

impl BlockDevice for FileTarget {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn submit(&self, request: Request) {
        match request.check(&self.geometry) {
            // A request that cannot be sent is dropped, and so answers itself.
            Ok(()) => drop(self.sender.send(request)),
            Err(error) => request.fail(error),
        }
    }
}

/// An export of an NBD server.
pub struct NbdTarget {
    geometry: Geometry,
    client: Arc<Client>,
    /// Changes with FUA that are complete but may not be durable.
    flush: Sender<Request>,
}

impl NbdTarget {
    /// Connects to the export at `uri`, which can be written and flushed.
    pub fn connect(uri: &str) -> Result<Self> {
        let failed = |source| Error::Io { what: format!("cannot connect to {uri}"), source };
        let client = Arc::new(Client::connect(uri, Style::Structured).map_err(failed)?);
        let export = client.export();
        let able = |flag: u16| export.flags & flag != 0;
        // Without flushes there is no promise to check.
        if !able(flag::SEND_FLUSH) || able(flag::READ_ONLY) {
            return Err(Error::Usage(format!("{uri} cannot be written, or cannot be flushed")));
        }
        let operations = Operations {
            discard: able(flag::SEND_TRIM),
            write_zeroes: able(flag::SEND_WRITE_ZEROES),
            allocation: false,
        };
        let usual = geometry(export.size_bytes, operations);
        let longest = match export.block_bytes_max {
            0 => usual.request_bytes_max,
            block_bytes_max => block_bytes_max.min(usual.request_bytes_max),
        };
        let geometry = Geometry {
            request_bytes_max: longest,
            preferred_bytes: usual.preferred_bytes.min(longest),
            ..usual
        };
        // Bounded by the requests that its user has in flight.
        let (flush, receiver) = std::sync::mpsc::channel();
        let work = {
            // Weak: this thread must not keep the connection open after its user has dropped the
            // target.
            let client = Arc::downgrade(&client);
            move || flush_each(&client, &receiver)
        };
        thread::Builder::new().name("target".into()).spawn(work).map_err(failed)?;
        Ok(NbdTarget { geometry, client, flush })
    }
}

/// Flushes before it answers each request. It runs on a thread of its own, because the thread that
/// receives answers must not wait for space to send a request.
fn flush_each(client: &Weak<Client>, receiver: &Receiver<Request>) {
    for request in receiver {
        match client.upgrade() {
            Some(client) => client.submit_then(&Command::Flush, move |outcome| match outcome {
                Ok(_) => request.done(),
                Err(failure) => request.fail(explained(failure)),
            }),
            None => request.fail(explained(Failure::Gone)),
        }
    }
}

fn explained(failure: Failure) -> DeviceError {
    let kind = match failure {
        Failure::Gone => ErrorKind::Closed,
        Failure::Errno(_) => ErrorKind::Unavailable,
    };
    DeviceError::caused(kind, "the NBD target failed a request", failure)
}

impl BlockDevice for NbdTarget {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn submit(&self, mut request: Request) {
        if let Err(error) = request.check(&self.geometry) {
            return request.fail(error);
        }
        let (offset, length) = (request.address, request.length);
        let fua = request.flags.fua && self.client.export().flags & flag::SEND_FUA != 0;
        let command = match request.operation {
            Operation::Read => Command::Read { offset, length: length as u32 },
            Operation::Write => {
                let mut bytes = vec![0; length as usize];
                request.fill(0, &mut bytes);
                Command::Write { offset, bytes, fua }
            }
            Operation::Flush => Command::Flush,
            // A flush follows where these must be durable: not every server honors FUA for them.
            Operation::Discard => Command::Trim { offset, length, fua: false },
            Operation::WriteZeroes => {
                let no_hole = request.flags.no_unmap;
                Command::WriteZeroes { offset, length, fua: false, no_hole }
            }
            Operation::Prefetch | Operation::Allocation => return request.done(),
        };
        let is_durable = match request.operation {
            Operation::Write => fua || !request.flags.fua,
            Operation::Discard | Operation::WriteZeroes => !request.flags.fua,
            _ => true,
        };
        let flush = (!is_durable).then(|| self.flush.clone());
        self.client.submit_then(&command, move |outcome| match (outcome, flush) {
            (Err(failure), _) => request.fail(explained(failure)),
            // A request that cannot be sent is dropped, and so answers itself.
            (Ok(_), Some(flush)) => drop(flush.send(request)),
            (Ok(reply), None) => {
                if request.operation == Operation::Read {
                    request.buffer().copy_from_slice(&reply.bytes);
                }
                request.done();
            }
        });
    }
}
