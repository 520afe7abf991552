//! A process that serves a disk must not wait for that disk when it asks for memory.
//!
//! When memory is short the kernel writes dirty pages out to make room, and a thread that allocates
//! memory may have to do that or wait for it. If those pages belong to a disk that this process
//! serves, it would wait for itself. Two measures prevent that: [`set_io_flusher`], and
//! [`lock_memory`], which keeps memory from being swapped out.
//!
//! Not here: which threads are on the path of a write.

use std::io;

use rustix::mm::MlockAllFlags;

/// From now on the calling thread, and every thread it starts afterward, gets memory without
/// writing to any disk for it, and is not slowed down for dirtying pages. Needs `CAP_SYS_RESOURCE`;
/// `PermissionDenied` without.
pub fn set_io_flusher() -> io::Result<()> {
    Ok(rustix::process::configure_io_flusher_behavior(true)?)
}

/// Whether [`set_io_flusher`] holds for the calling thread. Needs `CAP_SYS_RESOURCE` too.
pub fn is_io_flusher() -> io::Result<bool> {
    Ok(rustix::process::is_io_flusher()?)
}

/// From now on memory of this process that was touched once stays in memory. Needs `CAP_IPC_LOCK`
/// or a limit (`RLIMIT_MEMLOCK`) that is large enough for all of it.
pub fn lock_memory() -> io::Result<()> {
    let touched = MlockAllFlags::CURRENT | MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT;
    Ok(rustix::mm::mlockall(touched)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_io_flusher_passes_this_on_to_the_threads_it_starts_alone() {
        let before = is_io_flusher();
        let inside = std::thread::spawn(|| {
            set_io_flusher()?;
            let started = std::thread::spawn(is_io_flusher);
            Ok::<_, io::Error>((is_io_flusher()?, started.join().expect("no panic")?))
        });
        match inside.join().expect("no panic") {
            Ok(are_flushers) => {
                assert_eq!(are_flushers, (true, true));
                assert!(!before.expect("allowed above"));
                assert!(
                    !is_io_flusher().expect("allowed above"),
                    "the thread that started it is none"
                );
            }
            Err(error) => assert_eq!(error.kind(), io::ErrorKind::PermissionDenied, "{error}"),
        }
    }
}
