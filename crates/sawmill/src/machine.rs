//! Checks what this machine offers for virtual disks: kernel interfaces, shared memory, space.
//!
//! Invariant: the checks change nothing. What cannot be checked counts as missing, with the reason.
//!
//! Not here: the checks of a store (`sawmill_store::doctor`), the report of all checks
//! (`command::tools::doctor`).

use std::fmt::Display;
use std::fs;
use std::path::Path;

use serde::Serialize;

use crate::config::Paths;
use crate::memory;
use crate::sizes::{self, nearest_existing};
use sawmill_console::exit::{Exit, Failure, Result};
use sawmill_console::units::human_size;

/// The least journal of a volume with the default segment size.
const JOURNAL_BYTES_MIN: u64 = 32 << 20;
/// Staging memory of one volume.
const STAGING_BYTES: u64 = 32 << 20;

/// The result of one check.
#[derive(Debug, Serialize)]
pub(crate) struct Finding {
    pub(crate) name: String,
    pub(crate) ok: bool,
    pub(crate) detail: String,
    /// What to do about it; empty when all is well.
    pub(crate) advice: String,
}

impl Finding {
    fn saying(mut self, note: &str) -> Self {
        self.detail = format!("{}; {note}", self.detail);
        self
    }
}

/// Runs all checks.
pub(crate) fn examine(paths: &Paths) -> Result<Vec<Finding>> {
    let state = paths.state_folder()?;
    let free = sizes::free_bytes(&state);
    let journal = sizes::journal(free, 1, JOURNAL_BYTES_MIN);
    let cache_path = paths.cache_path()?;
    let cache = sizes::cache_of(&cache_path, None);
    let cache_says = if cache_path.exists() { "the" } else { "a new" };
    Ok(vec![
        staging(),
        space(
            "space for journals",
            &state,
            JOURNAL_BYTES_MIN,
            "free some, set XDG_STATE_HOME, or give --journal",
        )
        .saying(&format!(
            "a new journal gets {}; the new journals of one `serve` share a quarter of what is \
             free, at most {} each",
            human_size(journal),
            human_size(sizes::JOURNAL_BYTES)
        )),
        space(
            "space for the read cache",
            &state,
            // The cache grows as it fills; the space that it has taken is not free any more.
            if cache_path.exists() { 0 } else { cache },
            "free some, set XDG_STATE_HOME, or give --cache, or a smaller --cache-bytes",
        )
        .saying(&format!(
            "{cache_says} cache takes up to {}, for all volumes of one `serve`",
            human_size(cache)
        )),
        descriptors(),
        nbd(),
        device(
            "FUSE",
            "/dev/fuse",
            "load the module (modprobe fuse), in a container add --device /dev/fuse; for the FUSE \
            door only",
        ),
        device(
            "ublk",
            "/dev/ublk-control",
            "needs Linux 6.5 and the module (modprobe ublk_drv), as root; needed for the ublk door \
            only",
        ),
        io_uring(),
    ])
}

fn finding(name: &str, outcome: Result<String, impl Display>, advice: &str) -> Finding {
    let ok = outcome.is_ok();
    let detail = outcome.unwrap_or_else(|why| why.to_string());
    let advice = if ok { String::new() } else { advice.to_owned() };
    Finding { name: name.to_owned(), ok, detail, advice }
}

fn device(name: &str, path: &str, advice: &str) -> Finding {
    // Opened and not just looked up: a node that exists may still refuse this user.
    let opened = fs::OpenOptions::new().read(true).write(true).open(path);
    let outcome = opened.map(|_| path.to_owned()).map_err(|error| Failure::io(path, &error));
    finding(name, outcome, advice)
}

fn nbd() -> Finding {
    let outcome = if Path::new("/sys/module/nbd").exists() {
        Ok("the kernel's NBD client is loaded".to_owned())
    } else {
        Err("the kernel's NBD client is not loaded".to_owned())
    };
    let advice = "modprobe nbd, to have a volume as /dev/nbd0; QEMU, nbdcopy and other NBD clients \
        need nothing";
    finding("kernel NBD client", outcome, advice)
}

fn io_uring() -> Finding {
    // The switch is newer (Linux 6.6) than the interface (5.1), so its absence proves little.
    let outcome = match fs::read_to_string("/proc/sys/kernel/io_uring_disabled") {
        Ok(text) => match text.trim() {
            "0" => Ok("allowed by the kernel's settings".to_owned()),
            "1" => Err("kernel.io_uring_disabled is 1: allowed for one group only".to_owned()),
            other => Err(format!("kernel.io_uring_disabled is {other}: not allowed")),
        },
        Err(_) if kernel_version().is_some_and(|version| version >= (5, 1)) => {
            Ok("the kernel has it".to_owned())
        }
        Err(_) => Err("the kernel is older than 5.1".to_owned()),
    };
    finding("io_uring", outcome, "sysctl kernel.io_uring_disabled=0; needed for the ublk door only")
}

fn kernel_version() -> Option<(u32, u32)> {
    let name = rustix::system::uname();
    let release = name.release().to_str().ok()?;
    let mut numbers = release.split(['.', '-']).map(|part| part.parse::<u32>().ok());
    Some((numbers.next()??, numbers.next()??))
}

/// Memory that outlives the process: accepted writes pass through it on their way to the journal.
fn staging() -> Finding {
    let outcome = match memory::shared() {
        // Nothing is missing: memory beside the journal is mapped in the same way (`memory`).
        Err(why) => Ok(format!("beside each journal, as {why}")),
        Ok(folder) => match rustix::fs::statvfs(&folder) {
            Err(error) => Err(Failure::io(folder.display(), &error.into())),
            Ok(found) => {
                let free = found.f_bavail * found.f_frsize;
                let text = format!("{} free in {}", human_size(free), folder.display());
                if free >= STAGING_BYTES { Ok(text) } else { Err(Failure::new(Exit::Full, text)) }
            }
        },
    };
    finding(
        "memory for accepted writes",
        outcome,
        "free some, or give --staging and --staging-bytes",
    )
}

fn space(name: &str, folder: &Path, needed_bytes: u64, advice: &str) -> Finding {
    // The folder is made by the first command that needs it, and a check changes nothing.
    let existing = nearest_existing(folder);
    let writable = rustix::fs::access(&existing, rustix::fs::Access::WRITE_OK);
    let outcome = match (writable, rustix::fs::statvfs(&existing)) {
        (Err(error), _) => {
            let what = format!("{} cannot be written", existing.display());
            Err(Failure::io(what, &error.into()))
        }
        (_, Err(error)) => Err(Failure::io(existing.display(), &error.into())),
        (Ok(()), Ok(found)) => {
            let free = found.f_bavail * found.f_frsize;
            let text = format!("{} free at {}", human_size(free), folder.display());
            if free >= needed_bytes {
                Ok(text)
            } else {
                let text = format!("{text}, {} wanted", human_size(needed_bytes));
                Err(Failure::new(Exit::Full, text))
            }
        }
    };
    finding(name, outcome, advice)
}

fn descriptors() -> Finding {
    const DESCRIPTORS_MIN: u64 = 1024;
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    let outcome = match limit {
        None => Ok("no limit".to_owned()),
        Some(limit) if limit >= DESCRIPTORS_MIN => Ok(format!("{limit} allowed")),
        Some(limit) => Err(format!("{limit} allowed")),
    };
    finding("open files", outcome, "raise the limit: ulimit -n 4096, or LimitNOFILE= in the unit")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_that_does_not_exist_yet_is_judged_by_the_one_it_will_be_made_in() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(nearest_existing(&folder.path().join("a/b/c")), folder.path());
    }

    #[test]
    fn too_little_space_is_missing_and_comes_with_advice() {
        let folder = tempfile::tempdir().unwrap();
        let finding = space("space", folder.path(), u64::MAX, "free some");
        assert!(
            !finding.ok && finding.advice == "free some" && finding.detail.contains("wanted"),
            "{finding:?}"
        );
        let finding = space("space", folder.path(), 0, "free some");
        assert!(finding.ok && finding.advice.is_empty(), "{finding:?}");
    }

    #[test]
    fn a_device_that_is_not_there_is_missing() {
        let finding = device("x", "/dev/nonexistent-device", "get one");
        assert!(!finding.ok && finding.detail.contains("/dev/nonexistent-device"), "{finding:?}");
    }
}
