//! The kernel's edge: the only crate with `unsafe` besides the C binding. It offers safe functions
//! only.
//!
//! Modules: [`AlignedBytes`] (memory that direct I/O accepts), [`DirectFile`] (a file or block
//! device, written around the page cache, and read around it where a read is aligned), [`staging`]
//! (memory that outlives the process, and the ring in it), [`SharedMemory`] (memory that another
//! process writes too), [`Arena`] (such memory, lent out in pieces), [`AttachedMemory`] (such
//! memory of another process), [`detach`] (a program that outlives its starter),
//! [`restrict`] (one that is not trusted), [`sync`] (locks and atomics, which a test can replace),
//! [`LoopDevice`] (a file as a block device), [`discard`](discard()) (and zeroes, on
//! files and block devices), [`ublk`] (the kernel's driver for block devices in user space),
//! [`BusePort`] (a part of a device of our own kernel module),
//! [`Spin`] (when to look for messages before a sleep),
//! [`reclaim`] (a server of disks must not wait for its own disk), [`CountingAllocator`] (for
//! tests).
//!
//! Not here: what the bytes mean; any policy but that of [`Spin`].
#![cfg_attr(not(test), warn(clippy::unwrap_used))]

mod aligned;
mod arena;
mod attached;
mod buse;
mod counting;
pub mod descriptors;
mod detached;
mod direct_file;
mod discard;
mod loop_device;
mod mapping;
pub mod net;
mod pages;
pub mod reclaim;
mod sandbox;
mod shared_memory;
mod spin;
pub mod staging;
pub mod sync;
pub mod ublk;
mod waker;

pub use aligned::AlignedBytes;
pub use arena::{Arena, ArenaPiece};
pub use attached::{AttachedMemory, MemoryPiece};
pub use buse::BusePort;
pub use counting::CountingAllocator;
pub use detached::detach;
pub use direct_file::{DirectFile, FileLock, OpenMode, rename_exclusive};
pub use discard::{discard, logical_block_bytes, write_zeroes};
pub use loop_device::{LoopAccess, LoopDevice};
pub use pages::Pages;
pub use sandbox::{Bounds, is_no_network, restrict};
pub use shared_memory::SharedMemory;
pub use spin::{Looker, Lookers, SPIN_TIME_MAX, Spin};
pub use staging::{Consumer, FillProof, ReserveError, Ring, Span, StagingFile, StagingSlot};
pub use waker::Waker;

/// The unit of direct I/O: every aligned offset, length and address is a multiple of it.
pub const BLOCK_BYTES: u64 = 4096;

/// Creates a folder and its parents, for this user only. A folder that exists stays as it is.
///
/// # Errors
/// Those of the system.
pub fn make_folder(path: &std::path::Path) -> std::io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path)
}

/// Gives the calling thread the lowest CPU priority from now on. A refusal is ignored: the thread
/// then runs at its old priority.
pub fn lower_cpu_priority() {
    // On Linux a priority belongs to a thread: "no process" means the calling one.
    let _ = rustix::process::setpriority_process(None, 19);
}

/// Waits for a thread, unless it is the calling one: an answer on a device's own thread may drop
/// the device, and no thread can wait for itself. Fails if the thread panicked.
pub fn join_unless_own<T>(thread: std::thread::JoinHandle<T>) -> std::thread::Result<Option<T>> {
    if thread.thread().id() == std::thread::current().id() {
        return Ok(None);
    }
    thread.join().map(Some)
}

/// The kernel's id of this boot: memory that outlives a process does not outlive a change of this.
pub fn boot_id() -> std::io::Result<[u8; 16]> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    let digits: Vec<u8> =
        text.bytes().filter_map(|b| (b as char).to_digit(16)).map(|digit| digit as u8).collect();
    let mut id = [0u8; 16];
    if digits.len() != 32 {
        return Err(std::io::Error::new(
            std::io::ErrorKind::InvalidData,
            "boot_id is not 32 hex digits",
        ));
    }
    for (byte, pair) in id.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = pair[0] << 4 | pair[1];
    }
    Ok(id)
}
