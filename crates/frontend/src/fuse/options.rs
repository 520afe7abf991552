//! The options of a FUSE door, and its fixed limits.
//!
//! Invariant: every number that users of the kernel could increase has its limit here.

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

/// The longest name of a file on Linux.
pub(super) const NAME_BYTES_MAX: usize = 255;
/// More threads than this do not help.
pub(super) const WORKERS_MAX: usize = 64;
/// The longest read or write in one request: what the kernel allows by default.
pub(super) const REQUEST_BYTES_MAX: u32 = 1 << 20;
/// The smallest limit on requests that a device may have: the kernel's page.
pub(super) const REQUEST_BYTES_MIN: u32 = 4096;
/// Background requests that the kernel may have in flight.
pub(super) const REQUESTS_MAX: u16 = 512;
/// Payload and data in flight; above it no request is taken.
pub(super) const IN_FLIGHT_BYTES_MAX: u64 = 128 << 20;
const _: () = assert!(IN_FLIGHT_BYTES_MAX >= 2 * REQUEST_BYTES_MAX as u64);
/// A payload up to this length is copied out of its receive buffer; a longer one keeps the buffer.
pub(super) const COPY_BYTES_MAX: usize = 64 << 10;
/// Idle receive buffers that are kept.
pub(super) const SPARE_BUFFERS_MAX: usize = 16;
/// The range of one allocation query during a seek.
pub(super) const SEEK_BYTES: u64 = 1 << 30;
