//! The doors that `sawmill conform` can test a device through, and how it uses a device there.
//!
//! Invariant: a door whose users are not programs of this machine has no row (vhost-user: virtual
//! machines).
//!
//! Not here: the doors (`sawmill_doors`), the devices behind files and sockets (`file_device`,
//! `nbd_device`).

use std::path::Path;
use std::sync::Arc;

use sawmill_console::exit::Result;
use sawmill_device::{BlockDevice, Geometry};

use crate::file_device::FileDevice;
use crate::nbd_device::NbdDevice;

/// How a device is used through a door.
pub(super) struct Trial {
    /// The value of `--door`, and its help.
    pub(super) name: &'static str,
    pub(super) help: &'static str,
    /// The text form of a door with all its files in this folder.
    pub(super) line: fn(&Path) -> String,
    /// Opens the device at the address of the door. The geometry is the one behind the door, for
    /// what the door does not report.
    pub(super) connect: fn(&str, &Geometry) -> Result<Arc<dyn BlockDevice>>,
    /// The kernel checks requests, so that invalid ones do not reach the door.
    pub(super) kernel_checks: bool,
}

/// All of them.
pub(super) static TRIALS: [Trial; 4] = [
    Trial {
        name: "nbd",
        help: "An NBD socket with an NBD client",
        line: |folder| format!("nbd=unix:{}", folder.join("nbd.sock").display()),
        connect: |uri, behind| Ok(Arc::new(NbdDevice::connect(uri, behind)?)),
        kernel_checks: false,
    },
    Trial {
        name: "ublk",
        help: "A ublk device (needs privileges and the kernel module ublk_drv)",
        line: |_| "ublk".to_owned(),
        connect: open_file,
        kernel_checks: true,
    },
    Trial {
        name: "fuse",
        help: "A file through FUSE (may need privileges)",
        line: |folder| format!("fuse={}", folder.join("mount").display()),
        connect: open_file,
        kernel_checks: true,
    },
    Trial {
        name: "loop",
        help: "A loop device on a FUSE file (needs privileges)",
        line: |folder| format!("loop={}", folder.join("mount").display()),
        connect: open_file,
        kernel_checks: true,
    },
];

fn open_file(path: &str, behind: &Geometry) -> Result<Arc<dyn BlockDevice>> {
    Ok(Arc::new(FileDevice::open(Path::new(path), behind)?))
}
