//! The process becomes a daemon: the original process exits with 0, and a child in a session of its
//! own continues.
//!
//! Invariant: it is called while this process has one thread of ours; the child inherits
//! connections and shared memory. Not here: when (`driver`: the device is available, and nothing
//! but the calling thread serves it yet).

use std::fs::OpenOptions;
use std::os::fd::{AsRawFd, IntoRawFd};

use super::fault::Fault;

/// Returns only in the daemon.
pub(super) fn begin() -> Result<(), Fault> {
    // What the program has buffered is written now; else both processes would write it.
    // SAFETY: `fflush` takes null, which means all open streams, and keeps no pointer.
    unsafe { libc::fflush(std::ptr::null_mut()) };
    fork()?;
    // SAFETY: a system call without arguments; a new child leads no group, so it cannot fail.
    unsafe { libc::setsid() };
    // The daemon does not lead a session, so it cannot acquire a terminal.
    fork()?;
    let null = OpenOptions::new().read(true).write(true).open("/dev/null")?;
    for standard in 0..3 {
        // SAFETY: a system call on numbers; no Rust object owns a standard descriptor. `null` has
        // another number, or is that one, which stays open below.
        if unsafe { libc::dup2(null.as_raw_fd(), standard) } < 0 {
            return Err(std::io::Error::last_os_error().into());
        }
    }
    if null.as_raw_fd() < 3 {
        // It was opened in the place of a closed standard descriptor.
        let _ = null.into_raw_fd();
    }
    Ok(())
}

/// Continues in the child.
fn fork() -> Result<(), Fault> {
    // SAFETY: the library has no other thread now, and `bdus.h` tells programs to have none; the
    // parent only exits, without running exit handlers.
    match unsafe { libc::fork() } {
        -1 => Err(std::io::Error::last_os_error().into()),
        0 => Ok(()),
        // SAFETY: `_exit` takes a number, does not return, and runs no exit handler of the program.
        _ => unsafe { libc::_exit(0) },
    }
}
