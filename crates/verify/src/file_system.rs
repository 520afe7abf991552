//! File systems as judges: made on a device, mounted after a crash (which replays their journal),
//! checked.
//!
//! Invariants: a check runs only after the unmount, and changes nothing. The inner error of
//! [`FileSystem::inspect`] is a finding; the outer one means that nothing was judged.
//!
//! Not here: loop devices and mounting (`bridge`), the files in it (`files`).

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use crate::bridge::{FileSystemMount, LoopDevice};
use crate::program;
use crate::{Error, Result};

/// A file system that this module can make and check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileSystem {
    /// ext4, judged by `e2fsck`.
    Ext4,
    /// XFS, judged by `xfs_repair`.
    Xfs,
    /// btrfs, judged by `btrfs check`.
    Btrfs,
}

impl FileSystem {
    /// Its name on command lines.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            FileSystem::Ext4 => "ext4",
            FileSystem::Xfs => "xfs",
            FileSystem::Btrfs => "btrfs",
        }
    }

    const fn make_words(self) -> &'static [&'static str] {
        match self {
            FileSystem::Ext4 => {
                // Without lazy initialization: the kernel would otherwise write to the device on
                // its own for a while after the mount.
                &["mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0"]
            }
            FileSystem::Xfs => &["mkfs.xfs", "-q", "-f"],
            FileSystem::Btrfs => &["mkfs.btrfs", "-q", "-f"],
        }
    }

    const fn check_words(self) -> &'static [&'static str] {
        match self {
            FileSystem::Ext4 => &["e2fsck", "-fn"],
            FileSystem::Xfs => &["xfs_repair", "-n"],
            FileSystem::Btrfs => &["btrfs", "check", "--readonly"],
        }
    }

    /// Fails unless its programs are installed.
    pub fn require_programs(self) -> Result<()> {
        [self.make_words()[0], self.check_words()[0]]
            .iter()
            .try_for_each(|name| program::find(name).map(drop))
    }

    /// Makes one on a block device.
    pub fn make(self, device: &Path) -> Result<()> {
        let words = self.make_words();
        program::run(program::command(words[0])?.args(&words[1..]).arg(device)).map(drop)
    }

    /// Mounts the file system on the file or device `of`, calls `verify` with its root, unmounts
    /// it, and runs its check. The inner error is the text of a finding.
    pub fn inspect(
        self,
        of: &Path,
        folder: &Path,
        verify: impl FnOnce(&Path) -> Result<(), String>,
    ) -> Result<Result<(), String>> {
        let device = LoopDevice::new(of)?;
        let mounted = match self.mount(&device, folder) {
            Ok(mounted) => mounted,
            // The programs are there and did run, so the failure is the device's.
            Err(why @ (Error::Subject(_) | Error::Device(_))) => {
                return Ok(Err(format!("it cannot be mounted: {why}")));
            }
            Err(error) => return Err(error),
        };
        let verified = verify(mounted.root());
        // The check needs a file system that nobody changes. The mount before it has replayed the
        // journal.
        mounted.unmount()?;
        if let Err(what) = verified {
            return Ok(Err(what));
        }
        let words = self.check_words();
        let checked =
            program::finish(program::command(words[0])?.args(&words[1..]).arg(device.path()))?;
        if checked.status.success() {
            return Ok(Ok(()));
        }
        let (status, output) = (checked.status, program::last_lines(&checked.output));
        Ok(Err(format!("after its journal was replayed {} says ({status}): {output}", words[0])))
    }

    /// Mounts it below `folder`.
    pub fn mount(self, device: &LoopDevice, folder: &Path) -> Result<FileSystemMount> {
        // Two images of one file system may be mounted at once.
        let options = if self == FileSystem::Xfs { "nouuid" } else { "" };
        FileSystemMount::new(device.path(), &folder.join("mnt"), options)
    }
}

impl fmt::Display for FileSystem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for FileSystem {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let known = [FileSystem::Ext4, FileSystem::Xfs, FileSystem::Btrfs];
        let found = known.into_iter().find(|kind| kind.name() == text);
        found.ok_or_else(|| format!("'{text}' is not a known file system; use ext4, xfs or btrfs"))
    }
}
