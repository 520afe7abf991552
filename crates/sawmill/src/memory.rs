//! The default place of memory that outlives the process: a folder in shared memory that belongs to
//! this user only, otherwise the journal's folder.
//!
//! Invariant: shared memory is chosen only where it lasts as long as the machine runs. It does not
//! in a container, because its /dev/shm ends with the container, nor for a user who logs in,
//! because systemd removes that user's files there at logout (`RemoveIPC=`). A file beside the
//! journal is mapped in the same way, but the kernel writes it back to the disk now and then.
//!
//! Not here: what is in it (`sawmill_volume`), and where it was left: the journal knows that.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use clap::Args;
use sawmill_console::exit::{Exit, Failure, Result};

const SHARED: &str = "/dev/shm";
const TMPFS_MAGIC: u64 = 0x0102_1994;
/// The kernel's own numbers of the namespaces that the machine started with.
const INITIAL_PID: &str = "pid:[4026531836]";
const INITIAL_IPC: &str = "ipc:[4026531839]";
/// Users from this id on may log in (systemd's boundary), or exist for one service
/// (`DynamicUser=`).
const FIRST_LOGIN_UID: u32 = 1000;

/// Where memory that outlives the process is, as an option of a command.
#[derive(Args, Default)]
pub(crate) struct StagingOption {
    /// Folder for memory that outlives the process: accepted writes that are not in the journal
    /// yet. Default: /dev/shm/sawmill-UID if it lasts until the machine reboots; otherwise (in a
    /// container, or for a user who logs in) the folder of the journal.
    #[arg(long, value_name = "FOLDER")]
    staging: Option<PathBuf>,
}

impl StagingOption {
    /// The chosen folder. Without one the path is empty: [`folder`] chooses when the journal is
    /// known.
    pub(crate) fn folder(&self) -> PathBuf {
        self.staging.clone().unwrap_or_default()
    }
}

/// The folder for the memory of the journal at `journal`.
pub(crate) fn folder(journal: &Path) -> PathBuf {
    match shared() {
        Ok(folder) => folder,
        Err(why) => {
            tracing::debug!("memory lies beside the journal: {why}");
            beside(journal)
        }
    }
}

/// The journal's folder. For a journal on a block device: the folder of temporary files that
/// survive restarts.
fn beside(journal: &Path) -> PathBuf {
    let parent =
        journal.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if parent.starts_with("/dev") { PathBuf::from("/var/tmp") } else { parent.to_path_buf() }
}

/// This user's folder in shared memory, created if needed; or the reason not to use it.
pub(crate) fn shared() -> Result<PathBuf> {
    for (kind, initial) in [("pid", INITIAL_PID), ("ipc", INITIAL_IPC)] {
        let namespace = fs::read_link(format!("/proc/self/ns/{kind}"));
        // Without /proc nothing shows that this is no container, so it counts as one.
        if !namespace.is_ok_and(|name| name.as_os_str() == initial) {
            return Err(unfit(format!(
                "this is a container (a {kind} namespace of its own): its {SHARED} ends with it"
            )));
        }
    }
    let uid = rustix::process::geteuid().as_raw();
    if uid >= FIRST_LOGIN_UID {
        return Err(unfit(format!("files of user {uid} in {SHARED} may be removed at logout")));
    }
    let found = rustix::fs::statfs(SHARED).map_err(|error| Failure::io(SHARED, &error.into()))?;
    if found.f_type as u64 != TMPFS_MAGIC {
        return Err(unfit(format!("{SHARED} is not a file system in memory")));
    }
    private(Path::new(SHARED), uid)
}

fn unfit(why: String) -> Failure {
    Failure::new(Exit::Refused, why)
}

/// A folder in `shared` that only `uid` can access. Any user can create one with that name there.
fn private(shared: &Path, uid: u32) -> Result<PathBuf> {
    let folder = shared.join(format!("sawmill-{uid}"));
    let at = folder.display();
    match fs::DirBuilder::new().mode(0o700).create(&folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            return Err(Failure::io(at, &error));
        }
        _ => {}
    }
    // The link itself is judged: followed, it would lead the memory to a place of another user.
    let about = fs::symlink_metadata(&folder).map_err(|error| Failure::io(&at, &error))?;
    if !about.is_dir() || about.uid() != uid || about.mode() & 0o077 != 0 {
        return Err(unfit(format!(
            "{at} is not a folder of user {uid} alone: another user may have made it"
        )));
    }
    Ok(folder)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_folder_that_others_can_look_into_or_that_is_a_link_is_not_used() {
        let shared = tempfile::tempdir().unwrap();
        let uid = rustix::process::geteuid().as_raw();
        let folder = private(shared.path(), uid).unwrap();
        assert_eq!(private(shared.path(), uid).unwrap(), folder, "and found again");
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o755)).unwrap();
        assert!(private(shared.path(), uid).is_err(), "others may look");
        fs::remove_dir(&folder).unwrap();
        let elsewhere = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink(elsewhere.path(), &folder).unwrap();
        assert!(private(shared.path(), uid).is_err(), "a link leads elsewhere");
        fs::remove_file(&folder).unwrap();
        private(shared.path(), uid).unwrap();
        assert!(private(shared.path(), uid + 1).is_err() || uid + 1 == 0, "made for another user");
    }

    #[test]
    fn memory_beside_a_device_is_no_file_in_dev() {
        assert_eq!(beside(Path::new("/data/journals/oak")), Path::new("/data/journals"));
        assert_eq!(beside(Path::new("journal")), Path::new("."));
        assert_eq!(beside(Path::new("/dev/nvme0n1p3")), Path::new("/var/tmp"));
    }
}
