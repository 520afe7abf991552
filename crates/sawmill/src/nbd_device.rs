//! A device behind an NBD door, as its users see it.
//!
//! Invariant: every request that NBD can express goes to the door, even an invalid one, because the
//! door must answer it (D6, D7). Not here: files and block devices (`file_device`), what is tested.

use std::sync::{Arc, Weak};

use sawmill_device::{
    Allocation, BlockDevice, Error, ErrorKind, Geometry, Operation, Operations, Reply, Request,
};
use sawmill_nbd_client::{Client, Command, Failure as NbdFailure, Style, flag};

use sawmill_console::exit::{Failure, Result};

/// An export of an NBD server.
pub(crate) struct NbdDevice {
    client: Arc<Client>,
    geometry: Geometry,
    /// What a request of this client can express.
    askable: Geometry,
}

impl NbdDevice {
    /// Connects to the export. `inner` is the geometry behind the door, for what NBD does not say.
    pub(crate) fn connect(uri: &str, inner: &Geometry) -> Result<Self> {
        let failed = |error| Failure::io(format!("cannot connect to {uri}"), &error);
        // Extended headers: the contract has requests of more than 4 GiB.
        let client = Client::connect(uri, Style::Extended).map_err(failed)?;
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
        // Bounds and read-only are left to the door: its refusals are what the tests look at.
        let askable = Geometry { size_bytes: u64::MAX, read_only: false, ..geometry };
        Ok(NbdDevice { client: Arc::new(client), geometry, askable })
    }
}

impl BlockDevice for NbdDevice {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn submit(&self, mut request: Request) {
        if let Err(error) = request.check(&self.askable) {
            return request.fail(error);
        }
        let (offset, length) = (request.address, request.length);
        let (fua, no_hole) = (request.flags.fua, request.flags.no_unmap);
        let command = match request.operation {
            Operation::Read => Command::Read { offset, length: length as u32 },
            Operation::Write => {
                let mut bytes = vec![0; length as usize];
                request.fill(0, &mut bytes);
                Command::Write { offset, bytes, fua }
            }
            Operation::Flush => Command::Flush,
            Operation::Discard => Command::Trim { offset, length, fua },
            Operation::WriteZeroes => Command::WriteZeroes { offset, length, fua, no_hole },
            Operation::Allocation => Command::BlockStatus { offset, length },
            // NBD has this command; this client does not.
            Operation::Prefetch => {
                let checked = request.check(&self.geometry);
                return request.complete(checked.map(|()| Reply::Done));
            }
        };
        let size_bytes = self.geometry.size_bytes;
        // Weak: a request in flight must not keep the connection of a dropped device open.
        let client = Arc::downgrade(&self.client);
        self.client.submit_then(&command, move |outcome| match outcome {
            Ok(reply) => complete_request(request, reply),
            Err(failure) => {
                let error = error_of(&failure, &request, size_bytes, &client);
                request.fail(error);
            }
        });
    }
}

/// The kind of an NBD server's error number, for a request inside the device.
pub(crate) fn kind_of(errno: u32) -> ErrorKind {
    match errno {
        1 | 30 => ErrorKind::ReadOnly, // EPERM, EROFS
        22 | 95 => ErrorKind::Invalid, // EINVAL, ENOTSUP
        28 => ErrorKind::Full,         // ENOSPC
        _ => ErrorKind::Unavailable,
    }
}

fn error_of(
    failure: &NbdFailure,
    request: &Request,
    size_bytes: u64,
    client: &Weak<Client>,
) -> Error {
    match *failure {
        NbdFailure::Gone => {
            let what = "the NBD connection ended";
            match client.upgrade().and_then(|client| client.why_gone()) {
                Some(why) => Error::caused(ErrorKind::Closed, what, why),
                None => Error::new(ErrorKind::Closed, what),
            }
        }
        NbdFailure::Errno(errno) => {
            let kind = match kind_of(errno) {
                // NBD's error for a write past the end.
                ErrorKind::Full if request.end().is_none_or(|end| end > size_bytes) => {
                    ErrorKind::Invalid
                }
                kind => kind,
            };
            Error::new(kind, format!("the NBD server answered with errno {errno}"))
        }
    }
}

fn complete_request(mut request: Request, reply: sawmill_nbd_client::Reply) {
    match request.operation {
        Operation::Read => match request.buffer() {
            // The contract promises all bytes of a read; a short one must not leave old bytes in
            // the buffer.
            buffer if buffer.len() == reply.bytes.len() => buffer.copy_from_slice(&reply.bytes),
            _ => {
                return request.fail(Error::new(
                    ErrorKind::Internal,
                    "the NBD server sent a read of the wrong length",
                ));
            }
        },
        Operation::Allocation => {
            let run = |extent: &sawmill_nbd_client::Extent| Allocation {
                length: extent.length,
                data: extent.flags & 1 == 0,
            };
            let mut runs: Vec<Allocation> = reply.extents.iter().map(run).collect();
            // A server may describe less than it was asked about; the rest counts as data, the safe
            // guess.
            let described_bytes = runs
                .iter()
                .fold(0u64, |described_bytes, run| described_bytes.saturating_add(run.length));
            if described_bytes < request.length {
                runs.push(Allocation { length: request.length - described_bytes, data: true });
            }
            return request.complete(Ok(Reply::Allocation(runs)));
        }
        _ => {}
    }
    request.done();
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;
    use sawmill_device::{BlockDeviceExt, Flags, MemoryDevice, conformance};
    use sawmill_frontend::nbd::{Export, Listen, NbdOptions, NbdServer};

    use super::*;

    /// A disk that remembers what it was asked for.
    struct Recorder {
        disk: MemoryDevice,
        requests: Mutex<Vec<(Operation, Flags)>>,
    }

    impl BlockDevice for Recorder {
        fn geometry(&self) -> Geometry {
            self.disk.geometry()
        }

        fn submit(&self, request: Request) {
            self.requests.lock().push((request.operation, request.flags));
            self.disk.submit(request);
        }
    }

    #[test]
    fn the_flags_of_a_change_reach_the_device_behind_the_door() {
        let disk = MemoryDevice::new(1 << 20);
        let recorder = Arc::new(Recorder { disk, requests: Mutex::default() });
        let folder = tempfile::tempdir().unwrap();
        let listen = Listen::Unix(folder.path().join("sock"));
        let server = NbdServer::start(NbdOptions::new(listen)).unwrap();
        let (name, description) = ("disk".to_owned(), String::new());
        let device = Arc::clone(&recorder) as Arc<dyn BlockDevice>;
        server.add_export(Export { name, description, device }).unwrap();
        let device = NbdDevice::connect(&server.uri("disk"), &recorder.geometry()).unwrap();
        let mut expected = Vec::new();
        for (fua, no_unmap) in [(false, false), (true, false), (false, true), (true, true)] {
            let flags = Flags { fua, no_unmap };
            device.call(Operation::WriteZeroes, 0, 4096, flags, Vec::new()).unwrap();
            expected.push((Operation::WriteZeroes, flags));
            let flags = Flags { fua, no_unmap: false };
            device.call(Operation::Discard, 0, 4096, flags, Vec::new()).unwrap();
            expected.push((Operation::Discard, flags));
        }
        assert_eq!(*recorder.requests.lock(), expected);
    }

    #[test]
    fn a_device_behind_a_door_keeps_the_contract() {
        let folder = tempfile::tempdir().unwrap();
        let servers = Mutex::new(Vec::new());
        conformance::all(&|| {
            let disk = Arc::new(MemoryDevice::new(conformance::SIZE_BYTES_MIN));
            let geometry = disk.geometry();
            let mut servers = servers.lock();
            let listen = Listen::Unix(folder.path().join(servers.len().to_string()));
            let server = NbdServer::start(NbdOptions::new(listen)).unwrap();
            let (name, description) = ("disk".to_owned(), String::new());
            server.add_export(Export { name, description, device: disk }).unwrap();
            let device = NbdDevice::connect(&server.uri("disk"), &geometry).unwrap();
            servers.push(server);
            Arc::new(device)
        });
    }

    #[test]
    fn a_request_after_the_end_of_the_connection_fails_with_why_it_ended() {
        let disk = Arc::new(MemoryDevice::new(1 << 20));
        let folder = tempfile::tempdir().unwrap();
        let server =
            NbdServer::start(NbdOptions::new(Listen::Unix(folder.path().join("sock")))).unwrap();
        let (name, description) = ("disk".to_owned(), String::new());
        let geometry = disk.geometry();
        server.add_export(Export { name, description, device: disk }).unwrap();
        let device = NbdDevice::connect(&server.uri("disk"), &geometry).unwrap();
        device.flush().unwrap();
        drop(server);
        let error = device.flush().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Closed);
        assert!(error.to_string().starts_with("the NBD connection ended: "), "{error}");
    }
}
