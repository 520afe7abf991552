//! From an NBD export to a file (`nbdfuse`), to a block device (`losetup`), to a mounted file
//! system.
//!
//! Each part is taken down when dropped, in the right order: whoever holds a [`Mounted`] drops it
//! before its [`LoopDevice`], and that before its [`FusedFile`].
//!
//! Not here: which file system (`file_system`), how a program is started and ended (`program`).

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::process::geteuid;

use crate::program::{self, Process};
use crate::{Error, Result};

/// How long a mount may be busy with others than us, and how often to look.
const BUSY_MAX: Duration = Duration::from_secs(20);
const BUSY_LOOK_EVERY: Duration = Duration::from_millis(50);

/// Whether an export can be shown as a file here.
pub fn can_fuse() -> Result<()> {
    program::find("nbdfuse")?;
    program::find("fusermount3")?;
    let advice = "load the fuse module, in a container add --device /dev/fuse, or run as root";
    openable(Path::new("/dev/fuse"), advice)
}

/// Whether file systems can be mounted here.
pub fn can_mount() -> Result<()> {
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
pub struct FusedFile {
    path: PathBuf,
    process: Process,
}

impl FusedFile {
    /// Shows the export `uri` as the file `path`.
    pub fn new(uri: &str, path: &Path) -> Result<Self> {
        can_fuse()?;
        std::fs::write(path, "").map_err(|error| Error::io("cannot make", path, error))?;
        let mut command = program::command("nbdfuse")?;
        let said = path.with_extension("nbdfuse.said");
        let mut process = Process::start(command.arg(path).arg(uri), &said)?;
        process.wait_for("the export is to be shown as a file", || {
            std::fs::metadata(path).is_ok_and(|found| found.len() > 0).then_some(())
        })?;
        Ok(FusedFile { path: path.to_owned(), process })
    }

    /// The file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for FusedFile {
    fn drop(&mut self) {
        if let Ok(mut command) = program::command("fusermount3") {
            // Busy, or gone already: then lazily.
            let unmounted = program::run(command.arg("-u").arg(&self.path));
            if unmounted.is_err()
                && let Ok(mut command) = program::command("fusermount3")
            {
                let _ = program::finish(command.args(["-u", "-z"]).arg(&self.path));
            }
        }
        self.process.await_end(Duration::from_secs(10));
    }
}

/// A block device over a file.
#[derive(Debug)]
pub struct LoopDevice(PathBuf);

impl LoopDevice {
    /// Makes one over `file`, around the page cache where the file can do that.
    pub fn new(file: &Path) -> Result<Self> {
        can_mount()?;
        let losetup = |more: &[&str]| {
            let mut command = program::command("losetup")?;
            program::run(command.args(["--find", "--show"]).args(more).arg(file))
        };
        let device = losetup(&["--direct-io=on"]).or_else(|_| losetup(&[]))?;
        Ok(LoopDevice(PathBuf::from(device.trim())))
    }

    /// The block device.
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
pub struct Mounted {
    root: PathBuf,
    mounted: bool,
}

impl Mounted {
    /// Mounts `device` at `root`, a folder that is made.
    pub fn new(device: &Path, root: &Path, options: &str) -> Result<Self> {
        std::fs::create_dir_all(root).map_err(|error| Error::io("cannot make", root, error))?;
        let mut command = program::command("mount")?;
        if !options.is_empty() {
            command.args(["-o", options]);
        }
        program::run(command.arg(device).arg(root))?;
        Ok(Mounted { root: root.to_owned(), mounted: true })
    }

    /// The root folder.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Unmounts it, and says when that fails. Programs that look at every new mount may keep it
    /// busy for a moment.
    pub fn unmount(mut self) -> Result<()> {
        let deadline = Instant::now() + BUSY_MAX;
        loop {
            let mut command = program::command("umount")?;
            match program::run(command.arg(&self.root)) {
                Err(error) if error.to_string().contains("busy") && Instant::now() < deadline => {
                    std::thread::sleep(BUSY_LOOK_EVERY);
                }
                outcome => {
                    self.mounted = false;
                    return outcome.map(drop);
                }
            }
        }
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if self.mounted
            && let Ok(mut command) = program::command("umount")
        {
            let _ = program::finish(command.arg("-l").arg(&self.root));
        }
    }
}
