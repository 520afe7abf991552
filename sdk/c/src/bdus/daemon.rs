//! The process becomes a daemon: the one that was started ends with 0, a child in a session of its
//! own goes on.
//!
//! Invariant: it is called while this process has one thread of ours; connections and shared memory
//! go along. Not here: when (`driver`: the device is available, and nothing but the calling thread
//! serves it yet).

use super::fault::Fault;

/// Returns in the daemon alone.
pub(super) fn begin() -> Result<(), Fault> {
    // SAFETY: what the program has buffered is written, so that it is not written twice; null means
    // all.
    unsafe { libc::fflush(std::ptr::null_mut()) };
    fork()?;
    // SAFETY: a system call without arguments; a new child leads no group, so it cannot fail.
    unsafe { libc::setsid() };
    // Not the leader of a session: no terminal becomes its own.
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

/// Goes on in the child.
fn fork() -> Result<(), Fault> {
    // SAFETY: the library has no other thread now, and `bdus.h` tells programs to have none; the
    // parent does nothing but end, without running what it would at its end.
    match unsafe { libc::fork() } {
        -1 => Err(std::io::Error::last_os_error().into()),
        0 => Ok(()),
        // SAFETY: ends this process at once.
        _ => unsafe { libc::_exit(0) },
    }
}
