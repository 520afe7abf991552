//! A file system on a volume: the bridge of the crash checker, with a test's demands. Not here: the
//! programs that build it (`sawmill_verify::bridge`), a database on it (`postgres`).

use std::path::{Path, PathBuf};

use sawmill_verify::bridge::{FileSystemMount, LoopDevice, NbdFile};

/// An export shown as a loop device. Taken down when dropped: its fields in this order.
pub struct Bridge {
    mounted: Option<FileSystemMount>,
    device: LoopDevice,
    _file: NbdFile,
    folder: tempfile::TempDir,
}

impl Bridge {
    /// Builds the bridge to `uri`.
    ///
    /// # Panics
    /// When a part of it is missing.
    #[must_use]
    pub fn new(uri: &str) -> Self {
        let folder = tempfile::Builder::new().prefix("sawmill-bridge-").tempdir();
        let folder = folder.expect("a temporary folder");
        let file = NbdFile::new(uri, &folder.path().join("nbd")).expect("nbdfuse shows the volume");
        let device = LoopDevice::new(file.path()).expect("a loop device");
        Bridge { mounted: None, device, _file: file, folder }
    }

    /// The loop device.
    #[must_use]
    pub fn device(&self) -> &Path {
        self.device.path()
    }

    /// Where [`Bridge::mount`] mounts.
    #[must_use]
    pub fn root(&self) -> PathBuf {
        self.folder.path().join("mnt")
    }

    /// Mounts the file system on the device.
    ///
    /// # Panics
    /// When it cannot be mounted.
    pub fn mount(&mut self) -> PathBuf {
        self.mounted = Some(
            FileSystemMount::new(self.device.path(), &self.root(), "").expect("it can be mounted"),
        );
        self.root()
    }

    /// Unmounts it.
    ///
    /// # Panics
    /// When it cannot be unmounted.
    pub fn unmount(&mut self) {
        if let Some(mounted) = self.mounted.take() {
            mounted.unmount().expect("it can be unmounted");
        }
    }
}
