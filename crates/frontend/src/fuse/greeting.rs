//! The kernel's first request (INIT) after a mount, and the agreement on features.
//!
//! Invariant: it happens once in the life of a mount, before anything else; a process that takes
//! over a mount gets the result. Not here: later requests (`worker`).

use std::os::fd::OwnedFd;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use sawmill_device::{Error, ErrorKind, Result};

use super::answer::{self, InitParameters};
use super::channel::{KernelChannel, ReadOutcome};
use super::limits::REQUESTS_MAX;
use super::protocol::{MAJOR, MINOR_MAX, MINOR_MIN, Message, Operation, init, parse};

/// Time for the kernel to send its first request after the mount.
const GREETING_TIME_MAX: Timespec = Timespec { tv_sec: 10, tv_nsec: 0 };

/// Receives the kernel's first request and answers it.
pub(super) fn greet(kernel: &OwnedFd, bytes_max: u32) -> Result<InitParameters> {
    let failed = |text: String| {
        Error::new(ErrorKind::Unavailable, format!("fuse: the kernel's INIT request: {text}"))
    };
    let caused = |error: std::io::Error| failed(error.to_string()).with_source(error);
    let kernel =
        // A duplicate, because this channel ends with the greeting and the door makes one of its
        // own with its workers.
        rustix::io::fcntl_dupfd_cloexec(kernel, 3).map_err(|error| caused(error.into()))?;
    let channel = KernelChannel::new(kernel, 0).map_err(caused)?;
    let mut buffer = channel.buffer();
    loop {
        let mut fds = [PollFd::new(&channel.kernel, PollFlags::IN)];
        match poll(&mut fds, Some(&GREETING_TIME_MAX)) {
            Ok(0) => return Err(failed("it did not arrive".into())),
            Ok(_) | Err(Errno::INTR) => (),
            Err(error) => return Err(caused(error.into())),
        }
        let length = match channel.take(&mut buffer) {
            ReadOutcome::Request(length) => length,
            ReadOutcome::Nothing => continue,
            ReadOutcome::Gone => return Err(failed("the mount is gone".into())),
        };
        if length == 0 {
            continue;
        }
        match parse(&buffer[..length]) {
            Ok(Message { unique, operation: Operation::Init { major, .. }, .. })
                if major > MAJOR =>
            {
                channel.send(&[&answer::init_other_major(unique)]);
            }
            Ok(Message {
                unique,
                operation: Operation::Init { minor, readahead_bytes_max, flags, .. },
                ..
            }) => {
                if minor < MINOR_MIN || flags & init::MAX_PAGES == 0 {
                    return Err(failed(format!(
                        "it has protocol 7.{minor}; 7.{MINOR_MIN} (Linux 4.20) or later is required"
                    )));
                }
                // The write-back cache stays off: with it, the kernel would answer writes that the
                // device does not have. Asynchronous direct I/O lets a loop device have many
                // requests in flight.
                let supported_flags = init::ASYNC_READ
                    | init::BIG_WRITES
                    | init::ASYNC_DIRECT_IO
                    | init::PARALLEL_FOLDERS
                    | init::MAX_PAGES
                    | init::EXTENDED
                    | init::RESEND;
                // Both sides use the fields of the older version. A newer kernel must not expect
                // answers that are longer than those made here.
                let minor = minor.min(MINOR_MAX);
                let agreed = InitParameters {
                    minor,
                    flags: flags & supported_flags,
                    write_bytes_max: bytes_max,
                };
                channel.send(&[&answer::init(unique, &agreed, readahead_bytes_max, REQUESTS_MAX)]);
                return Ok(agreed);
            }
            other => return Err(failed(format!("another request came first: {other:?}"))),
        }
    }
}
