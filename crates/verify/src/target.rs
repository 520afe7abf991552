//! Somebody's disk as a device to record: a file, a block device, or an NBD export.
//!
//! Invariant: submitting never waits; a file's requests are carried out by threads of its own, an export's by
//! its server.

use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread;

use sawmill_device::{
    BlockDevice, Error as DeviceError, ErrorKind, Geometry, Operation, Operations, Reply, Request,
};

use crate::nbd::{Client, Command, Dialect, flag};
use crate::{Error, Result};

/// Threads that work for a file.
const WORKERS: usize = 2;
const REQUEST_BYTES_MAX: u32 = 32 << 20;

fn geometry(size_bytes: u64, discard: bool, write_zeroes: bool) -> Geometry {
    Geometry {
        size_bytes,
        block_bytes: 512,
        preferred_bytes: 64 << 10,
        request_bytes_max: REQUEST_BYTES_MAX,
        read_only: false,
        shared_cache: false,
        operations: Operations { discard, write_zeroes, allocation: false },
    }
}

/// A file or a block device. No discards: what they leave differs too much.
pub struct FileTarget {
    geometry: Geometry,
    tell: std::sync::mpsc::Sender<Request>,
}

impl FileTarget {
    /// Opens it for reading and writing.
    pub fn open(path: &Path) -> Result<Self> {
        let failed = |error: std::io::Error| Error::io("cannot open", path, &error);
        let mut file = File::options().read(true).write(true).open(path).map_err(failed)?;
        let size_bytes = file.seek(SeekFrom::End(0)).map_err(failed)?;
        let (tell, hear) = std::sync::mpsc::channel::<Request>();
        let (file, hear) = (Arc::new(file), Arc::new(Mutex::new(hear)));
        for _ in 0..WORKERS {
            let (file, hear) = (Arc::clone(&file), Arc::clone(&hear));
            let work = move || {
                loop {
                    let next = hear.lock().map(|hear| hear.recv());
                    let Ok(Ok(mut request)) = next else { return };
                    let done = carry_out(&file, &mut request);
                    let failed = |error: std::io::Error| {
                        DeviceError::new(ErrorKind::Unavailable, format!("the target: {error}"))
                    };
                    request.complete(done.map(|()| Reply::Done).map_err(failed));
                }
            };
            thread::Builder::new().name("target".into()).spawn(work).map_err(failed)?;
        }
        Ok(FileTarget { geometry: geometry(size_bytes, false, false), tell })
    }
}

fn carry_out(file: &File, request: &mut Request) -> std::io::Result<()> {
    match request.operation {
        Operation::Read => {
            let address = request.address;
            file.read_exact_at(request.buffer(), address)
        }
        Operation::Write => {
            let mut bytes = vec![0; request.length as usize];
            request.fill(0, &mut bytes);
            file.write_all_at(&bytes, request.address)?;
            if request.flags.fua { file.sync_data() } else { Ok(()) }
        }
        Operation::Flush => file.sync_data(),
        _ => Ok(()),
    }
}

impl BlockDevice for FileTarget {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn submit(&self, request: Request) {
        match request.check(&self.geometry) {
            // A request that cannot be sent is dropped, and so answers itself.
            Ok(()) => drop(self.tell.send(request)),
            Err(error) => request.fail(error),
        }
    }
}

/// An export of an NBD server.
pub struct NbdTarget {
    geometry: Geometry,
    client: Client,
}

impl NbdTarget {
    /// Connects to `uri`.
    pub fn connect(uri: &str) -> Result<Self> {
        let connected = Client::connect(uri, Dialect::Structured);
        let client =
            connected.map_err(|source| Error::Io { what: format!("cannot connect to {uri}"), source })?;
        let export = client.export();
        let able = |flag: u16| export.flags & flag != 0;
        if !able(flag::SEND_FLUSH) || able(flag::READ_ONLY) {
            return Err(Error::Usage(format!("{uri} cannot be written, or cannot be flushed")));
        }
        let geometry = geometry(export.size_bytes, able(flag::SEND_TRIM), able(flag::SEND_WRITE_ZEROES));
        Ok(NbdTarget { geometry, client })
    }
}

impl BlockDevice for NbdTarget {
    fn geometry(&self) -> &Geometry {
        &self.geometry
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
            Operation::Discard => Command::Trim { offset, length },
            Operation::WriteZeroes => Command::WriteZeroes { offset, length },
            Operation::Prefetch | Operation::Allocation => return request.done(),
        };
        self.client.submit_then(&command, move |outcome| match outcome {
            Ok(reply) => {
                if request.operation == Operation::Read {
                    request.buffer().copy_from_slice(&reply.bytes);
                }
                request.done();
            }
            Err(failure) => {
                let text = format!("the target: {failure}");
                request.fail(DeviceError::new(ErrorKind::Unavailable, text));
            }
        });
    }
}
