//! A port of a BUSE device: a character device of our kernel module (`kernel/buse`), and its
//! memory.
//!
//! Invariant: the interface is that of `docs/format/buse_device.md`. Not here: what a packet means.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;

use rustix::fs::OFlags;
use rustix::ioctl::{Opcode, Setter, ioctl};

use crate::attached::AttachedMemory;

/// `BUSE_ACK_WITH_ERRNO`, of `kernel/buse/buse_abi.h`.
const ACK_WITH_ERRNO: Opcode = 0x4004_BE01;

/// One open port. It is closed when this and all pieces of its memory are dropped.
pub struct BusePort {
    file: File,
    memory: Arc<AttachedMemory>,
}

impl BusePort {
    /// Opens a port whose memory has this many bytes; acknowledgements carry an error.
    pub fn open(path: &Path, memory_bytes: usize) -> io::Result<Self> {
        let flags = OFlags::NONBLOCK.bits() as i32;
        let file = OpenOptions::new().read(true).write(true).custom_flags(flags).open(path)?;
        // SAFETY: the ioctl reads one `u32`, and touches nothing else of this process.
        unsafe { ioctl(&file, Setter::<ACK_WITH_ERRNO, u32>::new(1)) }?;
        let memory = AttachedMemory::of_device(&file, memory_bytes)?;
        Ok(BusePort { file, memory })
    }

    /// The memory that this port shares with the kernel.
    #[must_use]
    pub fn memory(&self) -> &Arc<AttachedMemory> {
        &self.memory
    }

    /// Fetches a packet of exactly this length. Returns `false` if none is there.
    pub fn fetch(&self, packet: &mut [u8]) -> io::Result<bool> {
        match rustix::io::read(&self.file, &mut *packet) {
            Ok(bytes) if bytes == packet.len() => Ok(true),
            Ok(_) => Err(io::ErrorKind::UnexpectedEof.into()),
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Acknowledges a packet.
    pub fn acknowledge(&self, acknowledgement: &[u8]) -> io::Result<()> {
        rustix::io::write(&self.file, acknowledgement)?;
        Ok(())
    }
}

impl AsFd for BusePort {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}
