//! A door on a folder of its own, and what tests look at.

use std::fs::{File, OpenOptions};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::Mutex;

use rustix::fs::{FallocateFlags, OFlags, SeekFrom, fallocate, seek};
use rustix::io::Errno;
use sawmill_device::{BlockDevice, Flags, Geometry, MemoryDevice, Operation, Request};
use sawmill_frontend::fuse::{FuseDoor, FuseOptions};
use tempfile::TempDir;

pub(crate) const SIZE: u64 = 16 << 20;

/// Skips the test on a machine that cannot mount.
macro_rules! needs_mounts {
    () => {
        if let Err(why) = crate::setting::require_mount() {
            sawmill_testkit::skip(&why);
            return;
        }
    };
}
pub(crate) use needs_mounts;

/// `Err` with the reason if this machine cannot mount.
pub(crate) fn require_mount() -> Result<(), String> {
    if !rustix::process::geteuid().is_root() {
        return Err("mounting needs root".to_owned());
    }
    for device in ["/dev/fuse", "/dev/loop-control"] {
        let opened = OpenOptions::new().read(true).write(true).open(device);
        opened.map_err(|error| format!("mounting needs {device}: {error}"))?;
    }
    Ok(())
}

pub(crate) use sawmill_testkit::wait_until;

/// Runs a program to its end and returns its output.
pub(crate) fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).env("PATH", PATHS).output();
    let output = output
        .unwrap_or_else(|error| panic!("{program}: {error}: run tests/setup/prepare.sh test"));
    let text = format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(output.status.success(), "{program} {arguments:?}: {}: {text}", output.status);
    text
}

/// Where the programs of file systems are.
const PATHS: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// A door and the folder it shows its device in. Dropped in this order.
pub(crate) struct FuseScene {
    pub(crate) door: FuseDoor,
    pub(crate) folder: TempDir,
}

pub(crate) fn show(device: Arc<dyn BlockDevice>) -> FuseScene {
    show_with(device, |_| ())
}

pub(crate) fn show_with(
    device: Arc<dyn BlockDevice>,
    change: impl FnOnce(&mut FuseOptions),
) -> FuseScene {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut options = FuseOptions::new(folder.path(), "disk");
    change(&mut options);
    let door = FuseDoor::mount(options, device).expect("it mounts");
    FuseScene { door, folder }
}

pub(crate) fn memory() -> Arc<MemoryDevice> {
    Arc::new(MemoryDevice::new(SIZE))
}

impl FuseScene {
    pub(crate) fn path(&self) -> PathBuf {
        self.door.file()
    }

    pub(crate) fn open(&self) -> File {
        self.open_with(OFlags::empty())
    }

    pub(crate) fn open_with(&self, flags: OFlags) -> File {
        let mut options = OpenOptions::new();
        options.read(true).write(true).custom_flags(flags.bits().cast_signed());
        options.open(self.path()).expect("it opens")
    }
}

/// The errno of a call that must fail.
pub(crate) fn errno<T>(result: std::io::Result<T>) -> Errno {
    let error = result.err().expect("this must fail");
    Errno::from_io_error(&error).expect("an error of the system")
}

pub(crate) fn allocate(
    file: &File,
    flags: FallocateFlags,
    offset: u64,
    length: u64,
) -> std::io::Result<()> {
    Ok(fallocate(file, flags, offset, length)?)
}

pub(crate) fn data_from(file: impl AsFd, offset: u64) -> std::io::Result<u64> {
    Ok(seek(file, SeekFrom::Data(offset))?)
}

pub(crate) fn hole_from(file: impl AsFd, offset: u64) -> std::io::Result<u64> {
    Ok(seek(file, SeekFrom::Hole(offset))?)
}

/// Bytes that depend on their position.
pub(crate) fn pattern(seed: u64, length: usize) -> Vec<u8> {
    (0..length as u64)
        .map(|n| (n.wrapping_mul(2_654_435_761).wrapping_add(seed) >> 7) as u8)
        .collect()
}

/// Records the requests.
pub(crate) struct RecordingDevice {
    inner: MemoryDevice,
    requests: Mutex<Vec<(Operation, Flags)>>,
}

impl RecordingDevice {
    pub(crate) fn new(geometry: Geometry) -> Self {
        RecordingDevice { inner: MemoryDevice::with_geometry(geometry), requests: Mutex::default() }
    }

    pub(crate) fn requests(&self) -> Vec<(Operation, Flags)> {
        self.requests.lock().expect("not poisoned").clone()
    }
}

impl BlockDevice for RecordingDevice {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn submit(&self, request: Request) {
        self.requests.lock().expect("not poisoned").push((request.operation, request.flags));
        self.inner.submit(request);
    }
}
