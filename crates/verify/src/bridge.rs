//! Shows an NBD export as a file (`nbdfuse`), a file as a block device (`losetup`), and mounts its
//! file system.
//!
//! Invariant: each part is taken down when it is dropped, at the latest. Its owner keeps the order:
//! a [`FileSystemMount`] is dropped before its [`LoopDevice`], and that before its [`NbdFile`].
//!
//! Not here: making and checking file systems (`file_system`), starting and ending programs
//! (`program`).

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::process::geteuid;

use crate::program::{self, Process};
use crate::{Error, Result};

/// How long a mount may be kept busy by other processes, and the interval of retries.
const BUSY_TIME_MAX: Duration = Duration::from_secs(20);
const BUSY_CHECK_EVERY: Duration = Duration::from_millis(50);

/// Fails unless this machine can show an export as a file.
pub fn require_fuse() -> Result<()> {
    program::find("nbdfuse")?;
    program::find("fusermount3")?;
    let advice = "load the fuse module, in a container add --device /dev/fuse, or run as root";
    openable(Path::new("/dev/fuse"), advice)
}

/// Fails unless this process can mount file systems.
pub fn require_mount() -> Result<()> {
    if !geteuid().is_root() {
        let what = "mounting needs root; run this as root (sudo)".to_owned();
        return Err(Error::Io { what, source: std::io::ErrorKind::PermissionDenied.into() });
    }
    ["losetup", "mount", "umount"]
        .into_iter()
        .try_for_each(|name| program::find(name).map(drop))?;
    openable(
        Path::new("/dev/loop-control"),
        "load the loop module, or in a container add the device",
    )
}

fn openable(path: &Path, advice: &'static str) -> Result<()> {
    let opened = std::fs::OpenOptions::new().read(true).write(true).open(path);
    let what = path.display().to_string();
    opened.map(drop).map_err(|source| Error::Unopened { what, source, advice })
}

/// An NBD export shown as a file: a sync of the file is a flush of the export.
#[derive(Debug)]
pub struct NbdFile {
    path: PathBuf,
    process: Process,
}

impl NbdFile {
    /// Shows the export `uri` as the file `path`.
    pub fn new(uri: &str, path: &Path) -> Result<Self> {
        require_fuse()?;
        // `nbdfuse` mounts itself over a file, which must exist.
        std::fs::write(path, "").map_err(|error| Error::io("cannot make", path, error))?;
        let mut command = program::command("nbdfuse")?;
        let output_path = path.with_extension("nbdfuse.output");
        let mut process = Process::start(command.arg(path).arg(uri), &output_path)?;
        process.wait_for("the export is to be shown as a file", || {
            // Until the mount is there, the path is the empty file below it.
            std::fs::metadata(path).is_ok_and(|found| found.len() > 0).then_some(())
        })?;
        Ok(NbdFile { path: path.to_owned(), process })
    }

    /// The file through which programs use the export.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for NbdFile {
    fn drop(&mut self) {
        if let Ok(mut command) = program::command("fusermount3") {
            // If it is busy or already gone, unmount it lazily.
            let unmounted = program::run(command.arg("-u").arg(&self.path));
            if unmounted.is_err()
                && let Ok(mut command) = program::command("fusermount3")
            {
                let _ = program::finish(command.args(["-u", "-z"]).arg(&self.path));
            }
        }
        // It ends by itself after the unmount, when its last requests are answered.
        self.process.await_end(Duration::from_secs(10));
    }
}

/// A block device over a file.
#[derive(Debug)]
pub struct LoopDevice(PathBuf);

impl LoopDevice {
    /// Makes one over `file`, without the page cache where the file supports that.
    pub fn new(file: &Path) -> Result<Self> {
        require_mount()?;
        let losetup = |more: &[&str]| {
            let mut command = program::command("losetup")?;
            program::run(command.args(["--find", "--show"]).args(more).arg(file))
        };
        // Not every file supports direct I/O, and a loop device without it serves the same purpose.
        let device = losetup(&["--direct-io=on"]).or_else(|_| losetup(&[]))?;
        Ok(LoopDevice(PathBuf::from(device.trim())))
    }

    /// The node of the block device, `/dev/loopN`.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        if let Ok(mut command) = program::command("losetup") {
            let _ = program::finish(command.arg("-d").arg(&self.0));
        }
    }
}

/// A mounted file system.
#[derive(Debug)]
pub struct FileSystemMount {
    root: PathBuf,
    mounted: bool,
}

impl FileSystemMount {
    /// Mounts `device` at the folder `root`, which is made if absent.
    pub fn new(device: &Path, root: &Path, options: &str) -> Result<Self> {
        std::fs::create_dir_all(root).map_err(|error| Error::io("cannot make", root, error))?;
        let mut command = program::command("mount")?;
        if !options.is_empty() {
            command.args(["-o", options]);
        }
        program::run(command.arg(device).arg(root))?;
        Ok(FileSystemMount { root: root.to_owned(), mounted: true })
    }

    /// The root folder of the mounted file system.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Unmounts it, and returns the error if that fails. Programs that scan every new mount may
    /// keep it busy for a short time, so a busy mount is retried.
    pub fn unmount(mut self) -> Result<()> {
        let deadline = Instant::now() + BUSY_TIME_MAX;
        loop {
            let mut command = program::command("umount")?;
            match program::run(command.arg(&self.root)) {
                Err(error) if error.to_string().contains("busy") && Instant::now() < deadline => {
                    std::thread::sleep(BUSY_CHECK_EVERY);
                }
                // What is still mounted is left to `drop`.
                Err(error) => return Err(error),
                Ok(_) => {
                    self.mounted = false;
                    return Ok(());
                }
            }
        }
    }
}

impl Drop for FileSystemMount {
    fn drop(&mut self) {
        if self.mounted
            && let Ok(mut command) = program::command("umount")
        {
            let _ = program::finish(command.arg("-l").arg(&self.root));
        }
    }
}
