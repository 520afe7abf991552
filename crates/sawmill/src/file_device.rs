//! A file or block device of the kernel as a device: threads wait for the kernel, and
//! read-modify-write of the edges allows any alignment.
//!
//! Invariants: reads and writes bypass the page cache where possible. After a failed sync all later
//! syncs fail, because the kernel forgets what it could not write. Not here: who may open the file;
//! how a conformance test sees it.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use parking_lot::{Condvar, Mutex, RwLock};
use rustix::fs::OFlags;
use sawmill_device::layer::Align;
use sawmill_device::{
    BlockDevice, Error, ErrorKind, Geometry, Operation, Operations, Outcome, Reply, Request,
};
use sawmill_sys::AlignedBytes;

use sawmill_console::exit::{Exit, Failure, Result};

/// Requests of a file that are in flight at a time.
const REQUESTS_IN_FLIGHT_MAX: usize = 8;

/// The longest read or write of a file without a door's geometry.
const REQUEST_BYTES_MAX: u32 = 4 << 20;

/// What a device may do to its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FileAccess {
    ReadOnly,
    ReadWrite,
}

impl FileAccess {
    /// The access of a device that is, or is not, read-only.
    pub(crate) fn of(read_only: bool) -> Self {
        if read_only { FileAccess::ReadOnly } else { FileAccess::ReadWrite }
    }
}

/// A file, or a block device.
pub(crate) struct FileDevice(Align<Threads>);

impl FileDevice {
    /// Opens a file behind a door. `inner` is the geometry behind the door, for what the kernel
    /// does not report.
    pub(crate) fn open(path: &Path, inner: &Geometry) -> Result<Self> {
        let failed =
            |error: &io::Error| Failure::io(format!("cannot open {}", path.display()), error);
        let file = open(path, FileAccess::of(inner.read_only)).map_err(|error| failed(&error))?;
        let unit_bytes = sawmill_sys::logical_block_bytes(&file).map_err(|error| failed(&error))?;
        let geometry = Geometry {
            request_bytes_max: 1 << 20,
            preferred_bytes: 64 << 10,
            operations: Operations { allocation: false, ..inner.operations },
            ..*inner
        };
        Ok(FileDevice(Align::new(Threads::start(file, geometry)?, unit_bytes)?))
    }

    /// Opens a file or block device on its own: its geometry comes from its size.
    pub(crate) fn alone(path: &Path, access: FileAccess) -> Result<Self> {
        let failed =
            |error: &io::Error| Failure::io(format!("cannot open {}", path.display()), error);
        let mut file = open(path, access).map_err(|error| failed(&error))?;
        let is_disk =
            file.metadata().map_err(|error| failed(&error))?.file_type().is_block_device();
        // The metadata of a block device has no length.
        let size_bytes = file.seek(SeekFrom::End(0)).map_err(|error| failed(&error))?;
        let block_bytes =
            sawmill_sys::logical_block_bytes(&file).map_err(|error| failed(&error))?;
        if size_bytes == 0 {
            let text =
                format!("{} is empty; give it a size: truncate --size 10G FILE", path.display());
            return Err(Failure::new(Exit::Usage, text));
        }
        let geometry = Geometry {
            size_bytes,
            block_bytes,
            preferred_bytes: 64 << 10,
            request_bytes_max: REQUEST_BYTES_MAX,
            read_only: access == FileAccess::ReadOnly,
            shared_cache: true,
            // A disk may leave anything in discarded ranges, which D9 does not allow.
            operations: Operations { discard: !is_disk, write_zeroes: true, allocation: false },
        };
        Ok(FileDevice(Align::new(Threads::start(file, geometry)?, block_bytes)?))
    }
}

/// A file system may not support direct I/O.
fn open(path: &Path, access: FileAccess) -> io::Result<File> {
    let open = |flags: OFlags| {
        let flags = flags.bits().cast_signed();
        let writes = access == FileAccess::ReadWrite;
        OpenOptions::new().read(true).write(writes).custom_flags(flags).open(path)
    };
    open(OFlags::DIRECT).or_else(|_| open(OFlags::empty()))
}

impl BlockDevice for FileDevice {
    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }

    fn submit(&self, request: Request) {
        self.0.submit(request);
    }
}

/// The threads that wait for the kernel.
struct Threads {
    geometry: Geometry,
    queue: Arc<Queue>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Default)]
struct Queue {
    /// The work to do, and whether more can come.
    /// Bounded by the requests that the doors admit.
    waiting: Mutex<(VecDeque<Request>, bool)>,
    changed: Condvar,
    sync: Syncs,
}

/// Runs syncs until one fails.
#[derive(Default)]
struct Syncs {
    failed: AtomicBool,
    /// Held by each sync in flight.
    going: RwLock<()>,
}

impl Syncs {
    fn run(&self, sync: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        let failure = || {
            io::Error::other(
                "a sync failed before: what was not durable then may be lost; reopen it",
            )
        };
        let going = self.going.read();
        // The kernel reports a failed write once: another sync would succeed without those bytes.
        if self.failed.load(Ordering::SeqCst) {
            return Err(failure());
        }
        let done = sync();
        if done.is_err() {
            self.failed.store(true, Ordering::SeqCst);
        }
        // Before the write lock below, which waits for every holder, this one included.
        drop(going);
        // The kernel reports an error to only one of several overlapping syncs, whichever bytes
        // were lost: wait for all of them.
        drop(self.going.write());
        if self.failed.load(Ordering::SeqCst) { done.and_then(|()| Err(failure())) } else { done }
    }
}

impl Threads {
    fn start(file: File, geometry: Geometry) -> Result<Self> {
        let (queue, file) = (Arc::<Queue>::default(), Arc::new(file));
        let mut all = Threads { geometry, queue, threads: Vec::new() };
        for _ in 0..REQUESTS_IN_FLIGHT_MAX {
            let (queue, file) = (Arc::clone(&all.queue), Arc::clone(&file));
            let started =
                std::thread::Builder::new().name("file".into()).spawn(move || queue.work(&file));
            all.threads
                .push(started.map_err(|error| Failure::io("cannot start a thread", &error))?);
        }
        Ok(all)
    }
}

impl BlockDevice for Threads {
    fn geometry(&self) -> Geometry {
        self.geometry
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
        for thread in self.threads.drain(..) {
            // A request that completes on one of these threads may drop the device.
            let _ = sawmill_sys::join_unless_own(thread);
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
            // Otherwise the threads would work one after the other.
            drop(waiting);
            let outcome = carry_out(file, &self.sync, &mut request);
            request.complete(outcome);
        }
    }
}

fn carry_out(file: &File, sync: &Syncs, request: &mut Request) -> Outcome {
    let (address, length) = (request.address, request.length);
    let done = match request.operation {
        Operation::Read => {
            // Direct I/O needs aligned memory, which the request's buffer need not be.
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
        Operation::Flush => sync.run(|| file.sync_data()),
        // D9 allows a discard that does nothing.
        Operation::Discard => or_else(sawmill_sys::discard(file, address, length), || Ok(())),
        Operation::WriteZeroes => write_zeroes(file, address, length),
        Operation::Prefetch | Operation::Allocation => Ok(()),
    };
    let done = match done {
        // Through `Syncs` like a flush, so that a failed one is not forgotten either.
        Ok(()) if request.flags.fua => sync.run(|| file.sync_data()),
        done => done,
    };
    let what = || format!("{:?} of {length} bytes at {address}", request.operation);
    done.map(|()| Reply::Done).map_err(|error| refused(&what(), error))
}

/// The file system's error, for users.
fn refused(what: &str, error: io::Error) -> Error {
    let kind = match error.kind() {
        // The file is open for writing, so this is about the device and not about permission.
        io::ErrorKind::ReadOnlyFilesystem | io::ErrorKind::PermissionDenied => ErrorKind::ReadOnly,
        _ => ErrorKind::of_io(&error),
    };
    Error::caused(kind, what, error)
}

/// Falls back to `otherwise` where the kernel does not support the call.
fn or_else(done: io::Result<()>, otherwise: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
    match done {
        Err(error) if error.kind() == io::ErrorKind::Unsupported => otherwise(),
        done => done,
    }
}

fn write_zeroes(file: &File, address: u64, length: u64) -> io::Result<()> {
    or_else(sawmill_sys::write_zeroes(file, address, length), || {
        let zeroes = AlignedBytes::zeroed(length.min(REQUEST_BYTES_MAX.into()) as usize);
        let mut done = 0;
        while done < length {
            let part = (length - done).min(zeroes.len() as u64);
            file.write_all_at(&zeroes[..part as usize], address + done)?;
            done += part;
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use sawmill_device::{BlockDeviceExt, Flags, conformance};

    use super::*;

    #[test]
    fn a_file_keeps_the_contract() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        conformance::all(&|| {
            // Each time the file is created again, full of zeroes.
            File::create(&path).unwrap().set_len(64 << 20).unwrap();
            Arc::new(FileDevice::alone(&path, FileAccess::ReadWrite).unwrap())
        });
        conformance::read_only(&|| {
            Arc::new(FileDevice::alone(&path, FileAccess::ReadOnly).unwrap())
        });
    }

    #[test]
    fn a_file_system_without_room_is_full_and_one_that_became_read_only_is_read_only() {
        let kind = |errno| refused("a write", io::Error::from_raw_os_error(errno)).kind();
        assert_eq!([28, 122].map(kind), [ErrorKind::Full; 2], "ENOSPC and EDQUOT");
        assert_eq!([30, 1].map(kind), [ErrorKind::ReadOnly; 2], "EROFS; EPERM of a disk");
        assert_eq!(kind(5), ErrorKind::Unavailable, "EIO");
    }

    #[test]
    fn what_is_no_disk_is_refused_with_what_to_do() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        let refusal = |path: &Path| FileDevice::alone(path, FileAccess::ReadWrite).err().unwrap();
        assert_eq!(refusal(&path).exit(), Exit::NotFound);
        File::create(&path).unwrap();
        assert!(refusal(&path).to_string().contains("truncate"));
        File::create(&path).unwrap().set_len(1000).unwrap();
        assert!(refusal(&path).to_string().contains("whole blocks"));
    }

    #[test]
    fn a_flush_and_a_write_with_fua_sync_the_file() {
        // It takes writes, and the kernel refuses to sync it.
        let null = OpenOptions::new().write(true).open("/dev/null").unwrap();
        let carry_out = |operation, fua| {
            let flags = Flags { fua, ..Flags::default() };
            let mut request = Request::with_bytes(operation, 0, flags, vec![1; 512], |_, _| ());
            let outcome = carry_out(&null, &Syncs::default(), &mut request);
            request.done();
            outcome.is_ok()
        };
        assert!(carry_out(Operation::Write, false));
        assert!(!carry_out(Operation::Write, true));
        assert!(!carry_out(Operation::Flush, false));
    }

    #[test]
    fn overlapping_writes_end_the_same_when_the_file_is_opened_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        File::create(&path).unwrap().set_len(1 << 20).unwrap();
        let open = || FileDevice::alone(&path, FileAccess::ReadWrite).unwrap();
        let device = open();
        let (sender, answers) = channel();
        for writer in 0..16u8 {
            let sender = sender.clone();
            let answered = move |outcome: Outcome, _| sender.send(outcome.is_ok()).unwrap();
            let (address, bytes) = (u64::from(writer) * 1000, vec![writer + 1; 20_000]);
            let flags = Flags::default();
            device.submit(Request::with_bytes(Operation::Write, address, flags, bytes, answered));
        }
        drop(sender);
        assert_eq!(answers.iter().filter(|is_ok| *is_ok).count(), 16);
        let before = device.read_at(0, 64 << 10).unwrap();
        drop(device);
        assert_eq!(open().read_at(0, 64 << 10).unwrap(), before);
    }

    #[test]
    fn a_sync_that_failed_is_never_tried_again() {
        let sync = Syncs::default();
        assert!(sync.run(|| Ok(())).is_ok());
        assert!(sync.run(|| Err(io::Error::other("the disk"))).is_err());
        let later = sync.run(|| panic!("it was tried again"));
        assert!(later.expect_err("what was lost stays lost").to_string().contains("failed before"));
    }

    #[test]
    fn a_sync_that_overlapped_one_that_failed_has_failed() {
        let (sync, (begun, wait), (passed, pass)) = (Syncs::default(), channel(), channel());
        std::thread::scope(|scope| {
            let failing = move || {
                begun.send(()).unwrap();
                pass.recv().unwrap();
                // The kernel reports the error to this sync; the other sync has already completed.
                Err(io::Error::other("the disk"))
            };
            let failing = scope.spawn(|| sync.run(failing));
            let passing = sync.run(|| {
                wait.recv().unwrap();
                passed.send(()).map_err(io::Error::other)
            });
            assert!(passing.is_err(), "what it was for may be lost");
            assert!(failing.join().unwrap().is_err());
        });
    }
}
