//! The process becomes a daemon: the original process exits with 0, and a child in a session of its
//! own continues.
//!
//! Invariant: it is called while this process has one thread of ours; the child inherits
//! connections and shared memory. Not here: when (`driver`: the device is available, and nothing
//! but the calling thread serves it yet).

use super::fault::Fault;

/// Returns only in the daemon.
pub(super) fn begin() -> Result<(), Fault> {
    // SAFETY: what the program has buffered is written, so that it is not written twice; null means
    // all.
    unsafe { libc::fflush(std::ptr::null_mut()) };
    fork()?;
    // SAFETY: a system call without arguments; a new child leads no group, so it cannot fail.
    unsafe { libc::setsid() };
    // The daemon does not lead a session, so it cannot acquire a terminal.
    fork()?;
    // SAFETY: system calls on descriptors; the string ends with NUL.
    unsafe {
        let null = libc::open(c"/dev/null".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC);
        if null < 0 {
            return Err(std::io::Error::last_os_error().into());
        }
        for standard in 0..3 {
            libc::dup2(null, standard);
        }
        if null > 2 {
            libc::close(null);
        }
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
        // SAFETY: ends this process immediately.
        _ => unsafe { libc::_exit(0) },
    }
}
