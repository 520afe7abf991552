//! A file system on a volume: `nbdfuse` shows the export as a file, a loop device makes a disk of it.

use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};

use crate::machine::{self, command, run};

/// An export shown as a loop device. Taken down when dropped.
pub struct Bridge {
    folder: tempfile::TempDir,
    fuse: Child,
    device: Option<PathBuf>,
    mounted: bool,
}

impl Bridge {
    /// Builds the bridge to `uri`.
    #[must_use]
    pub fn new(uri: &str) -> Self {
        let folder = tempfile::Builder::new().prefix("sawmill-bridge-").tempdir();
        let folder = folder.expect("a temporary folder");
        let file = folder.path().join("nbd");
        std::fs::create_dir(folder.path().join("mnt")).expect("a folder to mount at");
        std::fs::write(&file, "").expect("a file to show the volume at");
        let fuse =
            command("nbdfuse").arg(&file).arg(uri).stderr(Stdio::inherit()).spawn().expect("nbdfuse starts");
        let mut bridge = Bridge { folder, fuse, device: None, mounted: false };
        machine::wait_until("nbdfuse shows the volume", || {
            let shown = std::fs::metadata(&file).is_ok_and(|found| found.len() > 0);
            let ended = bridge.fuse.try_wait().ok().flatten();
            assert!(ended.is_none(), "nbdfuse ended at once: {ended:?}");
            shown.then_some(())
        });
        let device = run(command("losetup").args(["--find", "--show", "--direct-io=on"]).arg(&file));
        bridge.device = Some(PathBuf::from(device.trim()));
        bridge
    }

    /// The loop device.
    ///
    /// # Panics
    /// Never: it is there from the start to the end.
    #[must_use]
    pub fn device(&self) -> &Path {
        self.device.as_deref().expect("the loop device is there until the bridge is dropped")
    }

    /// Where [`Bridge::mount`] mounts.
    #[must_use]
    pub fn root(&self) -> PathBuf {
        self.folder.path().join("mnt")
    }

    /// Mounts the file system on the device.
    pub fn mount(&mut self) -> PathBuf {
        run(command("mount").arg(self.device()).arg(self.root()));
        self.mounted = true;
        self.root()
    }

    /// Unmounts it.
    pub fn unmount(&mut self) {
        run(command("umount").arg(self.root()));
        self.mounted = false;
    }
}

impl Drop for Bridge {
    fn drop(&mut self) {
        // Each step may fail when an earlier one did; what can be taken down is.
        if self.mounted {
            let _ = command("umount").arg("-l").arg(self.root()).output();
        }
        if let Some(device) = &self.device {
            let _ = command("losetup").arg("-d").arg(device).output();
        }
        let _ = command("fusermount3").arg("-u").arg(self.folder.path().join("nbd")).output();
        let _ = self.fuse.wait();
    }
}
