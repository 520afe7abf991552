//! The options of a FUSE door. Not here: its fixed limits (`limits`), and the check of values
//! (`server`).

use std::ffi::OsString;
use std::path::PathBuf;

/// The options of one FUSE door.
#[derive(Clone, Debug)]
pub struct FuseOptions {
    /// An empty folder, in which the volume appears while the door is open.
    pub mountpoint: PathBuf,
    /// The name of the one file in it: 1 to 255 bytes, without `/`, not `.` or `..`.
    pub file_name: String,
    /// Threads that take requests: 1 to 64. None of them waits for the device.
    pub workers: usize,
    /// Whether other users than the one who mounts can reach the file, as far as its mode allows.
    pub allow_other: bool,
    /// The file's permissions.
    pub mode: u32,
    /// Also attach a loop device, so that the volume is a block device of the kernel. Requires
    /// root.
    pub attach_loop: bool,
    /// The mount holder that holds the mount while no server runs; without it, the mount dies with
    /// the server.
    pub mount_holder: Option<MountHolderOptions>,
}

/// How the mount holder of a mount is found and started: see [`crate::mount_holder`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountHolderOptions {
    /// Its socket, in a folder that only its user can access. At most 107 bytes.
    pub socket: PathBuf,
    /// The program that calls [`crate::mount_holder::keep`], and its arguments.
    pub command: Vec<OsString>,
}

impl FuseOptions {
    /// The defaults: two workers, for the mounting user only, no loop device, no mount holder.
    #[must_use]
    pub fn new(mountpoint: impl Into<PathBuf>, file_name: impl Into<String>) -> Self {
        FuseOptions {
            mountpoint: mountpoint.into(),
            file_name: file_name.into(),
            workers: 2,
            allow_other: false,
            mode: 0o600,
            attach_loop: false,
            mount_holder: None,
        }
    }
}
