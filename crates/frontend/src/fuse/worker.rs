//! One worker: takes requests from the kernel, answers those that need no device, and submits the
//! rest to it.
//!
//! Invariant: a worker never waits for the device, and never accesses a file of any file system.
//!
//! Not here: the device's answer (`ticket`, `seek`), the parser of requests (`protocol`).

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use rustix::buffer::spare_capacity;
use rustix::event::epoll;
use rustix::fs::OFlags;
use rustix::io::Errno;
use sawmill_device::{BlockDevice, Flags, Operation as Asked, Request};

use super::answer::{self, Attributes};
use super::channel::{KernelChannel, ReadOutcome};
use super::limits::{COPY_BYTES_MAX, NAME_BYTES_MAX};
use super::metrics::count;
use super::protocol::{
    FILE, Malformed, Message, Operation, RESENT, ROOT, SEEK_DATA, SEEK_HOLE, WRITE_HEAD_BYTES,
    allocate, change, parse,
};
use super::seek::Seek;
use super::ticket::{Body, Ticket};

/// The served file and its attributes.
pub(super) struct FuseFile {
    pub(super) device: Arc<dyn BlockDevice>,
    pub(super) name: String,
    pub(super) mode: u32,
    pub(super) user: u32,
    pub(super) group: u32,
    /// When the server started, in seconds of Unix time.
    pub(super) time_s: u64,
}

impl FuseFile {
    fn size_bytes(&self) -> u64 {
        self.device.geometry().size_bytes
    }

    fn attributes(&self) -> Attributes {
        Attributes {
            size_bytes: self.size_bytes(),
            mode: self.mode,
            user: self.user,
            group: self.group,
            time_s: self.time_s,
        }
    }
}

/// Works until the channel ends, on a thread of its own.
pub(super) fn work(channel: &Arc<KernelChannel>, file: &FuseFile) {
    // Otherwise an allocation here may wait for memory that the kernel frees by writing to this
    // very file system.
    if let Err(error) = sawmill_sys::reclaim::set_io_flusher() {
        tracing::debug!(%error, "fuse: no CAP_SYS_RESOURCE: a worker may deadlock with memory \
            reclaim");
    }
    match channel.epoll() {
        Ok(epoll) => take_all(channel, file, &epoll),
        Err(error) => {
            tracing::error!(%error, "fuse: a worker cannot wait for requests");
            channel.finish();
        }
    }
    channel.worker_left();
}

fn take_all(channel: &Arc<KernelChannel>, file: &FuseFile, epoll: &impl std::os::fd::AsFd) {
    let mut buffer = channel.buffer();
    while channel.may_take() {
        match channel.take(&mut buffer) {
            ReadOutcome::Request(0) => (),
            ReadOutcome::Request(length) => buffer = handle(channel, file, buffer, length),
            ReadOutcome::Nothing => {
                let mut events = Vec::with_capacity(2);
                let _ = epoll::wait(epoll, spare_capacity(&mut events), None);
            }
            ReadOutcome::Gone => channel.finish(),
        }
    }
}

/// Handles the request in `buffer`, and returns a buffer for the next one.
fn handle(
    channel: &Arc<KernelChannel>,
    file: &FuseFile,
    buffer: Vec<u8>,
    length: usize,
) -> Vec<u8> {
    let message = match parse(&buffer[..length]) {
        Ok(message) => message,
        Err(error) => {
            count(&channel.counters.malformed);
            tracing::warn!(?error, length, "fuse: cannot parse a request of the kernel");
            if let Malformed::Arguments { unique, .. } = error {
                channel.send_status(unique, Errno::INVAL.raw_os_error());
            }
            return buffer;
        }
    };
    if message.unique & RESENT != 0 {
        count(&channel.counters.resent);
    }
    if let Operation::Write { offset, open_flags, payload } = message.operation {
        let (unique, node, bytes) = (message.unique, message.node, payload.len());
        return write(channel, file, buffer, &Write { unique, node, offset, open_flags, bytes });
    }
    answer(channel, file, &message);
    buffer
}

/// The facts of a write besides its payload.
struct Write {
    unique: u64,
    node: u64,
    offset: u64,
    open_flags: u32,
    bytes: usize,
}

fn write(
    channel: &Arc<KernelChannel>,
    file: &FuseFile,
    mut buffer: Vec<u8>,
    write: &Write,
) -> Vec<u8> {
    count(&channel.counters.writes);
    let room = file.size_bytes().saturating_sub(write.offset);
    // Bytes past the end are not written; the count in the answer excludes them.
    let length = usize::try_from(room).map_or(write.bytes, |room| room.min(write.bytes));
    if write.node != FILE || length == 0 {
        let errno = match (write.node, write.bytes) {
            (FILE, 0) => return answered(channel, &answer::written(write.unique, 0), buffer),
            (FILE, _) => Errno::NOSPC,
            _ => Errno::ISDIR,
        };
        channel.send_status(write.unique, errno.raw_os_error());
        return buffer;
    }
    channel.counters.bytes_in.fetch_add(length as u64, Relaxed);
    let start = WRITE_HEAD_BYTES;
    // A receive buffer has more than 1 MiB. A short payload that kept one would hold much more
    // memory than it is charged for.
    let body = if length <= COPY_BYTES_MAX {
        Body::Write { bytes: buffer[start..start + length].to_vec(), start: 0, length }
    } else {
        Body::Write { bytes: std::mem::replace(&mut buffer, channel.buffer()), start, length }
    };
    let synchronous = OFlags::SYNC | OFlags::DSYNC;
    // A synchronous write is durable when it is answered (P60).
    let fua = OFlags::from_bits_retain(write.open_flags).intersects(synchronous);
    let flags = Flags { fua, no_unmap: false };
    let ticket = Ticket::new(channel, write.unique, body);
    file.device.submit(Request::new(Asked::Write, write.offset, length as u64, flags, ticket));
    buffer
}

fn answered(channel: &KernelChannel, answer: &[u8], buffer: Vec<u8>) -> Vec<u8> {
    channel.send(&[answer]);
    buffer
}

/// Answers everything except writes.
fn answer(channel: &Arc<KernelChannel>, file: &FuseFile, message: &Message<'_>) {
    let Message { unique, node, operation } = *message;
    match operation {
        Operation::Read { offset, length } => return read(channel, file, unique, offset, length),
        Operation::Fsync if node == FILE => {
            count(&channel.counters.flushes);
            let ticket = Ticket::new(channel, unique, Body::Empty);
            return file.device.submit(Request::new(Asked::Flush, 0, 0, Flags::default(), ticket));
        }
        Operation::Allocate { offset, length, mode } => {
            return allocate_range(channel, file, unique, offset, length, mode);
        }
        _ => count(&channel.counters.others),
    }
    match operation {
        // These need no answer.
        Operation::Forget | Operation::BatchForget => (),
        Operation::Lookup { name } if node == ROOT && name == file.name.as_bytes() => {
            channel.send(&[&answer::entry(unique, &file.attributes())]);
        }
        Operation::Lookup { .. } => channel.send_status(unique, Errno::NOENT.raw_os_error()),
        Operation::GetAttributes => {
            channel.send(&[&answer::attributes_of(unique, node, &file.attributes())]);
        }
        Operation::SetAttributes { change, size_bytes } => {
            set_attributes(channel, file, (unique, node), change, size_bytes);
        }
        Operation::Open => channel.send(&[&answer::opened(unique)]),
        Operation::OpenFolder => channel.send(&[&answer::opened_folder(unique)]),
        Operation::ReadFolder { offset, length } => {
            channel.send(&[&answer::folder(unique, offset, length, file.name.as_bytes())]);
        }
        Operation::StatFs => {
            channel.send(&[&answer::stat_fs(unique, file.size_bytes(), NAME_BYTES_MAX as u32)]);
        }
        Operation::Seek { offset, whence } => seek(channel, file, unique, offset, whence),
        // Only fsync makes data durable; closing a file does not.
        Operation::Release
        | Operation::ReleaseFolder
        | Operation::Fsync
        | Operation::FsyncFolder
        | Operation::Access
        | Operation::Destroy => channel.send_status(unique, 0),
        // An interrupted request is answered when it is done, because a device completes what it
        // has started. And closing a file must not wait for a server that may be down (that wait
        // cannot be interrupted). After this answer, the kernel sends no more of these.
        Operation::Interrupt | Operation::Flush | Operation::Unknown { .. } => {
            channel.send_status(unique, Errno::NOSYS.raw_os_error());
        }
        Operation::Init { .. }
        | Operation::Read { .. }
        | Operation::Write { .. }
        | Operation::Allocate { .. } => {
            channel.send_status(unique, Errno::INVAL.raw_os_error());
        }
    }
}

fn read(channel: &Arc<KernelChannel>, file: &FuseFile, unique: u64, offset: u64, length: u32) {
    count(&channel.counters.reads);
    let length = file.size_bytes().saturating_sub(offset).min(u64::from(length));
    if length == 0 {
        // An empty answer is how a read meets the end of a file.
        return channel.send_status(unique, 0);
    }
    let ticket = Ticket::new(channel, unique, Body::Read { bytes: vec![0; length as usize] });
    file.device.submit(Request::new(Asked::Read, offset, length, Flags::default(), ticket));
}

fn set_attributes(
    channel: &KernelChannel,
    fuse_file: &FuseFile,
    of: (u64, u64),
    changes: u32,
    size_bytes: u64,
) {
    let (unique, node) = of;
    let owners = changes & (change::MODE | change::USER | change::GROUP) != 0;
    let size = changes & change::SIZE != 0 && size_bytes != fuse_file.size_bytes();
    if owners || size {
        if size {
            let (name, is) = (&fuse_file.name, fuse_file.size_bytes());
            tracing::warn!(
                name,
                is,
                asked = size_bytes,
                "fuse: the file has the size of the volume; resize the volume"
            );
        }
        return channel.send_status(unique, Errno::PERM.raw_os_error());
    }
    // Times are not stored.
    channel.send(&[&answer::attributes_of(unique, node, &fuse_file.attributes())]);
}

fn allocate_range(
    channel: &Arc<KernelChannel>,
    file: &FuseFile,
    unique: u64,
    offset: u64,
    length: u64,
    mode: u32,
) {
    let (punch, zero) = (mode & allocate::PUNCH_HOLE != 0, mode & allocate::ZERO_RANGE != 0);
    let keep_size = mode & allocate::KEEP_SIZE != 0;
    let known_flags =
        allocate::PUNCH_HOLE | allocate::ZERO_RANGE | allocate::KEEP_SIZE | allocate::UNSHARE;
    let geometry = file.device.geometry();
    count(match (punch, zero) {
        (true, _) => &channel.counters.discards,
        (_, true) => &channel.counters.write_zeroes,
        _ => &channel.counters.others,
    });
    let end = offset.saturating_add(length);
    // As fallocate(2) says: a hole is punched only with the size kept.
    let errno = if mode & !known_flags != 0 || (punch && zero) || (punch && !keep_size) {
        Some(Errno::OPNOTSUPP)
    } else if end > geometry.size_bytes && !keep_size {
        Some(Errno::NOSPC)
    } else if geometry.read_only {
        Some(Errno::ROFS)
    } else if (punch || zero) && !geometry.operations.write_zeroes {
        Some(Errno::OPNOTSUPP)
    } else {
        None
    };
    let length = end.min(geometry.size_bytes).saturating_sub(offset);
    // A range that is not zeroed needs no allocation.
    if errno.is_some() || !(punch || zero) || length == 0 {
        return channel.send_status(unique, errno.map_or(0, Errno::raw_os_error));
    }
    // A punched hole must read as zeroes, which a discard alone does not guarantee. A zeroed range
    // keeps its space, which the caller of fallocate(2) relies on for later writes.
    let flags = Flags { fua: false, no_unmap: zero };
    let ticket = Ticket::new(channel, unique, Body::Empty);
    file.device.submit(Request::new(Asked::WriteZeroes, offset, length, flags, ticket));
}

fn seek(channel: &Arc<KernelChannel>, file: &FuseFile, unique: u64, offset: u64, whence: u32) {
    let geometry = file.device.geometry();
    let size_bytes = geometry.size_bytes;
    if whence != SEEK_DATA && whence != SEEK_HOLE {
        return channel.send_status(unique, Errno::INVAL.raw_os_error());
    }
    if offset >= size_bytes {
        return channel.send_status(unique, Errno::NXIO.raw_os_error());
    }
    let data = whence == SEEK_DATA;
    if !geometry.operations.allocation {
        let position = if data { offset } else { size_bytes };
        return channel.send(&[&answer::sought(unique, position)]);
    }
    Seek { channel: channel.clone(), device: file.device.clone(), unique, data, size_bytes }
        .start(offset);
}
