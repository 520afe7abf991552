//! The options of a ublk device, their defaults and their ranges.
//!
//! Invariant: a value outside its range is refused before anything is made.
//!
//! Not here: the fixed limits (`limits`), the kernel's own limits (`sawmill_sys::ublk`).

use std::path::PathBuf;
use std::time::Duration;

use sawmill_device::{Error, ErrorKind, Result};
use sawmill_sys::ublk::{QUEUE_DEPTH_MAX, REQUEST_BYTES_MAX};

use super::worker::UblkWorkers;

/// The options of one ublk device.
#[derive(Clone, Debug)]
pub struct UblkOptions {
    /// The number in `/dev/ublkbN`; `None` takes a free one.
    pub id: Option<u32>,
    /// The identity of the volume, not only its name. A device is taken over only for the volume
    /// for which it was made. Not empty.
    pub volume: String,
    /// The name of a symbolic link to the device's node in `symlink_folder`; `None` for none.
    pub symlink: Option<String>,
    /// Hardware queues, each with a thread of its own; `None` means one per core, at most 16, and 1
    /// with `workers`.
    pub queues: Option<u16>,
    /// The most requests in flight on one queue: 4 to 4095.
    pub queue_depth: u16,
    /// The longest read or write in bytes: 4 KiB to 32 MiB. The device's own limit applies too.
    pub request_bytes_max: u32,
    /// Pins the thread of each queue to the cores that fill the queue. No effect with `workers`.
    pub pin: bool,
    /// Serves the queues on these threads, shared with other devices, instead of threads of their
    /// own.
    pub workers: Option<UblkWorkers>,
    /// Makes a device without privileges: without recovery, and with two copies of each payload.
    pub unprivileged: bool,
    /// Whether the device waits for the next server when this one dies. Must be false for a device
    /// whose answered writes are lost with the server.
    pub recoverable: bool,
    /// The folder with the facts of each device; one folder for all servers of a machine.
    pub run_folder: PathBuf,
    /// The folder with the symbolic links to devices.
    pub symlink_folder: PathBuf,
    /// How long [`super::UblkDoor::recover`] waits until the kernel notices that the old server is
    /// gone.
    pub recovery_time_max: Duration,
}

/// The default number of queues of a device, at most.
const QUEUES_DEFAULT_MAX: usize = 16;
/// The most queues of one device: one shared ring has room for many times as many.
const QUEUES_MAX: u16 = 256;
/// The kernel allows no smaller queue.
const QUEUE_DEPTH_MIN: u16 = 4;
/// The smallest limit on requests: a page of any common machine.
const REQUEST_BYTES_MIN: u32 = 4096;
/// The longest name of a symbolic link, as for any file.
const SYMLINK_BYTES_MAX: usize = 255;

impl UblkOptions {
    /// The defaults for this volume: any number, no symbolic link, one queue of 128 requests per
    /// core, requests up to 1 MiB, threads pinned to cores, facts below `/run/sawmill/ublk`,
    /// symbolic links in `/dev/sawmill`.
    #[must_use]
    pub fn new(volume: impl Into<String>) -> Self {
        UblkOptions {
            id: None,
            volume: volume.into(),
            symlink: None,
            queues: None,
            queue_depth: 128,
            request_bytes_max: 1 << 20,
            pin: true,
            workers: None,
            unprivileged: false,
            recoverable: true,
            run_folder: "/run/sawmill/ublk".into(),
            symlink_folder: "/dev/sawmill".into(),
            recovery_time_max: Duration::from_secs(60),
        }
    }

    /// The number of queues to request from the kernel.
    pub(super) fn queue_count(&self) -> u16 {
        let cores = || {
            std::thread::available_parallelism().map_or(1, usize::from).min(QUEUES_DEFAULT_MAX)
                as u16
        };
        self.queues.unwrap_or_else(|| if self.workers.is_some() { 1 } else { cores() })
    }

    /// Refuses invalid options. Errors: `Invalid`.
    pub(super) fn check(&self) -> Result<()> {
        let refuse = |text: String| Err(Error::new(ErrorKind::Invalid, format!("ublk: {text}")));
        let within = |what: &str, value: u64, least: u64, most: u64| {
            if (least..=most).contains(&value) {
                return Ok(());
            }
            refuse(format!("{what} is {value}; it must be {least} to {most}"))
        };
        within("queues", self.queue_count().into(), 1, QUEUES_MAX.into())?;
        // The device gets one tag more than it has requests (`keep_one_tag_back`).
        let deepest = QUEUE_DEPTH_MAX - 1;
        within("queue_depth", self.queue_depth.into(), QUEUE_DEPTH_MIN.into(), deepest.into())?;
        let (shortest, longest) = (REQUEST_BYTES_MIN.into(), REQUEST_BYTES_MAX.into());
        within("request_bytes_max", self.request_bytes_max.into(), shortest, longest)?;
        if self.volume.is_empty() {
            return refuse(
                "the volume has no identity; without one, another volume's device could be taken \
                 over"
                    .into(),
            );
        }
        if let Some(name) = &self.symlink
            && !is_symlink_name(name)
        {
            let text =
                "must be 1 to 255 letters, digits or -._+=:@, and not start with a dot or a hyphen";
            return refuse(format!("the name of the link, {name:?}, {text}"));
        }
        Ok(())
    }
}

/// Whether this is a valid name of a symbolic link: safe in a folder, in a udev rule and in a
/// shell.
fn is_symlink_name(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._+=:@".contains(&byte);
    let first = name.bytes().next();
    name.len() <= SYMLINK_BYTES_MAX
        && name.bytes().all(plain)
        // A dot would hide it or name a folder; a hyphen would make it an option of commands.
        && first.is_some_and(|byte| !b".-".contains(&byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_outside_its_range_is_refused_by_name() {
        type Change = fn(&mut UblkOptions);
        let wrong: [(&str, Change); 8] = [
            ("queues is 0", |options| options.queues = Some(0)),
            ("queues is 257", |options| options.queues = Some(257)),
            ("queue_depth is 3", |options| options.queue_depth = 3),
            ("queue_depth is 4096", |options| options.queue_depth = 4096),
            ("request_bytes_max is 4095", |options| options.request_bytes_max = 4095),
            ("request_bytes_max is 33554433", |options| options.request_bytes_max = (32 << 20) + 1),
            ("no identity", |options| options.volume.clear()),
            ("the name of the link, \"../sda\"", |options| options.symlink = Some("../sda".into())),
        ];
        for (text, change) in wrong {
            let mut options = UblkOptions::new("volume 1");
            options.check().expect("the defaults are in range");
            change(&mut options);
            let error = options.check().expect_err(text);
            assert_eq!(error.kind(), ErrorKind::Invalid);
            assert!(error.to_string().contains(text), "{error}");
        }
    }

    #[test]
    fn a_symbolic_link_has_a_plain_file_name() {
        let long = "a".repeat(256);
        for name in ["disk1", "disk1@snap", "A-b_c.d", "a:b=c+d", &long[1..]] {
            assert!(is_symlink_name(name), "{name}");
        }
        for name in ["", ".", "..", ".hidden", "-rf", "a/b", "a b", "a\nb", "a$b", "ä", &long] {
            assert!(!is_symlink_name(name), "{name}");
        }
    }
}
