//! A process that serves a disk must not wait for that disk when it asks for memory.
//!
//! When memory is short the kernel writes dirty pages out to make room, and a thread that allocates
//! memory may have to do that or wait for it. If those pages belong to a disk that this process
//! serves, it would wait for itself. Two measures prevent that: [`mark_thread`], and
//! [`lock_memory`], which keeps memory from being swapped out.
//!
//! Not here: which threads are on the path of a write.

use std::io;

use rustix::mm::MlockAllFlags;

/// From now on the calling thread, and every thread it starts afterwards, gets memory without
/// writing to any disk for it, and is not slowed down for dirtying pages. Needs `CAP_SYS_RESOURCE`;
/// `PermissionDenied` without.
pub fn mark_thread() -> io::Result<()> {
    Ok(rustix::process::configure_io_flusher_behavior(true)?)
}

/// Whether [`mark_thread`] holds for the calling thread. Needs `CAP_SYS_RESOURCE` too.
pub fn is_thread_marked() -> io::Result<bool> {
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
    fn a_marked_thread_marks_those_it_starts_and_no_others() {
        let before = is_thread_marked();
        let inside = std::thread::spawn(|| {
            mark_thread()?;
            let started = std::thread::spawn(is_thread_marked);
            Ok::<_, io::Error>((is_thread_marked()?, started.join().expect("no panic")?))
        });
        match inside.join().expect("no panic") {
            Ok(marked) => {
                assert_eq!(marked, (true, true));
                assert!(!before.expect("allowed above"));
                assert!(
                    !is_thread_marked().expect("allowed above"),
                    "the mark stays with its thread"
                );
            }
            Err(error) => assert_eq!(error.kind(), io::ErrorKind::PermissionDenied, "{error}"),
        }
    }
}
