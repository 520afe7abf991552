//! What can be set for a FUSE door, and the limits that cannot.
//!
//! Invariant: every number that the kernel's users could grow has its bound here.

use std::ffi::OsString;
use std::path::PathBuf;

/// The settings of one FUSE door.
#[derive(Clone, Debug)]
pub struct FuseOptions {
    /// An empty folder, which shows the volume while the door is open.
    pub mountpoint: PathBuf,
    /// The name of the one file in it: 1 to 255 bytes, without `/`, not `.` or `..`.
    pub file_name: String,
    /// Threads that take requests: 1 to 64. None of them ever waits for the device.
    pub workers: usize,
    /// Other users than the one who mounts may reach the file, as far as its mode lets them.
    pub allow_other: bool,
    /// The file's permissions.
    pub mode: u32,
    /// Also attach a loop device, so that the volume is a block device of the kernel. For root.
    pub attach_loop: bool,
    /// Who holds the mount while no server runs; without it, the mount dies with the server.
    pub mount_holder: Option<MountHolderOptions>,
}

/// How the mount holder of a mount is found and started: see [`crate::mount_holder`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountHolderOptions {
    /// Its socket, in a folder that is its user's alone. At most 107 bytes.
    pub socket: PathBuf,
    /// The program that ends up in [`crate::mount_holder::keep`], and its arguments.
    pub command: Vec<OsString>,
}

impl FuseOptions {
    /// The defaults: two workers, for the one who mounts alone, no loop device, no mount holder.
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

/// The longest name of a file on Linux.
pub(super) const NAME_BYTES_MAX: usize = 255;
/// More threads than this bring nothing.
pub(super) const WORKERS_MAX: usize = 64;
/// The longest write or read that is asked for in one request: what the kernel allows without being told to.
pub(super) const REQUEST_BYTES_MAX: u32 = 1 << 20;
/// The shortest longest request of a device that can be served: the kernel's page.
pub(super) const REQUEST_BYTES_MIN: u32 = 4096;
/// Requests that the kernel may have under way without anybody waiting for each.
pub(super) const REQUESTS_MAX: u16 = 512;
/// Payload and data in flight; beyond it nothing more is taken.
pub(super) const IN_FLIGHT_BYTES_MAX: u64 = 128 << 20;
const _: () = assert!(IN_FLIGHT_BYTES_MAX >= 2 * REQUEST_BYTES_MAX as u64);
/// A payload up to this is copied out of the buffer it came in; a longer one takes the buffer with it.
pub(super) const COPY_BYTES_MAX: usize = 64 << 10;
/// Idle receive buffers kept for later.
pub(super) const SPARE_BUFFERS_MAX: usize = 16;
/// What one look for data or a hole asks the device at a time.
pub(super) const SEEK_BYTES: u64 = 1 << 30;
