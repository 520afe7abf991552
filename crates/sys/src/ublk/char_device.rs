//! The character device behind a ublk device: the bytes of requests, and the list that describes
//! them.
//!
//! Invariant: while a [`CharDevice`] or [`Descriptors`] of it exists, no other process can open the
//! node, so no other process serves the device. Not here: when a request may be touched.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::OnceLock;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::abi::{self, IoDescriptor};
use super::control::{Control, char_path};

/// `/dev/ublkcN`, open for the one server of the device.
pub struct CharDevice {
    file: File,
    id: u32,
    request_bytes_max: OnceLock<u32>,
}

impl CharDevice {
    /// Opens the node of device `id`. `ResourceBusy` when another server has it; `NotFound` where
    /// the node is not there (yet).
    pub fn open(id: u32) -> io::Result<Self> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        let file = File::from(rustix::fs::open(char_path(id), flags, Mode::empty())?);
        Ok(CharDevice { file, id, request_bytes_max: OnceLock::new() })
    }

    /// The longest read or write, as the driver itself says: it copies no more into a buffer.
    pub(super) fn request_bytes_max(&self) -> io::Result<u32> {
        if let Some(request_bytes_max) = self.request_bytes_max.get() {
            return Ok(*request_bytes_max);
        }
        let request_bytes_max = Control::open()?.info(self.id)?.request_bytes_max;
        Ok(*self.request_bytes_max.get_or_init(|| request_bytes_max))
    }

    /// Fills `into` with the payload of a write, from byte `offset` of the payload on.
    ///
    /// Errors: `InvalidInput` or `PermissionDenied` when no write with this tag is being served;
    /// `UnexpectedEof` when the payload is shorter.
    pub fn read_payload(
        &self,
        queue: u16,
        tag: u16,
        offset: u64,
        into: &mut [u8],
    ) -> io::Result<()> {
        let start = abi::payload_offset(queue, tag) + offset;
        let mut done = 0;
        while done < into.len() {
            match rustix::io::pread(&self.file, &mut into[done..], start + done as u64) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(length) => done += length,
                Err(Errno::INTR) => (),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Gives the data of a read, from its first byte on. Errors: as for
    /// [`CharDevice::read_payload`].
    pub fn write_data(&self, queue: u16, tag: u16, data: &[u8]) -> io::Result<()> {
        let start = abi::payload_offset(queue, tag);
        let mut done = 0;
        while done < data.len() {
            match rustix::io::pwrite(&self.file, &data[done..], start + done as u64) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(length) => done += length,
                Err(Errno::INTR) => (),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// The descriptors of one queue.
    pub fn descriptors(&self, queue: u16, queue_depth: u16) -> io::Result<Descriptors> {
        let page_bytes = rustix::param::page_size();
        let length = abi::descriptors_bytes(queue_depth, page_bytes);
        let offset = abi::descriptors_offset(queue, page_bytes);
        let null = std::ptr::null_mut();
        // SAFETY: a null hint lets the kernel choose an unused range; nothing existing is replaced.
        let start =
            unsafe { mmap(null, length, ProtFlags::READ, MapFlags::SHARED, &self.file, offset)? };
        let start = NonNull::new(start.cast())
            .ok_or_else(|| io::Error::other("the kernel mapped descriptors at address zero"))?;
        Ok(Descriptors { start, mapped_bytes: length, queue_depth })
    }
}

impl AsFd for CharDevice {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// The requests of one queue by tag, in memory that the kernel writes.
pub struct Descriptors {
    start: NonNull<IoDescriptor>,
    mapped_bytes: usize,
    queue_depth: u16,
}

impl Descriptors {
    /// What the request with this tag asks for; `None` for a tag that the queue does not have. It
    /// stays as it is from the moment the request is delivered until it is answered.
    #[must_use]
    pub fn get(&self, tag: u16) -> Option<IoDescriptor> {
        if tag >= self.queue_depth {
            return None;
        }
        let at = self.start.as_ptr().wrapping_add(usize::from(tag));
        // SAFETY: the tag lies below the depth for which the mapping was made, and any bytes are a
        // descriptor. Volatile, because the kernel writes there.
        Some(unsafe { at.read_volatile() })
    }
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by us and no reference into it is ever given out. A failure
        // would only leak address space.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.mapped_bytes) };
    }
}

// SAFETY: the mapping is valid on every thread until it is dropped, which its owner alone does; it
// is read by volatile copies, so a thread has no reference into it.
unsafe impl Send for Descriptors {}
