//! The root folder of a directory store, and whether it is still the one it was.
//!
//! Invariants: a root that was once seen, or made, is known by its device and inode, and is never
//! made again. If it is missing later, or another folder is in its place (an unmounted file system,
//! a folder moved away), the store is `Unavailable` until it is back.
//!
//! Not here: a root that was exchanged before it was first seen. Nothing in a folder identifies its
//! owner.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use parking_lot::Mutex;

use super::{failure, is_absent, make_folder, sync_folder};
use crate::{Result, StoreError, StoreErrorKind};

/// A root folder that may not exist yet.
pub(super) struct Root {
    path: PathBuf,
    /// `None` until it was first seen or made.
    first_seen: Mutex<Option<Identity>>,
}

/// Distinguishes a folder from another one at the same path.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Identity {
    device: u64,
    inode: u64,
}

impl Root {
    /// The root at `path`, which is not read yet.
    pub(super) fn new(path: PathBuf) -> Self {
        Root { path, first_seen: Mutex::default() }
    }

    /// The path that was asked for; another folder may be there by now.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Remembers the root, if it exists, before anything is looked up in it. Costs nothing once it
    /// is remembered.
    pub(super) fn remember(&self) -> Result<()> {
        if self.first_seen.lock().is_some() {
            return Ok(());
        }
        self.check()
    }

    /// Fails with `Unavailable` unless the root is the one first seen, or none was ever there.
    pub(super) fn check(&self) -> Result<()> {
        // In this order: a root that is created in between must not look like one that vanished.
        let before = *self.first_seen.lock();
        let now = folder_at(&self.path).map_err(|error| failure("look at", &self.path, error))?;
        let what = match (before, now) {
            // A store without its first put has no root yet, and no objects.
            (None, None) => return Ok(()),
            (before, Some(now)) => {
                if before.unwrap_or_else(|| *self.first_seen.lock().get_or_insert(now)) == now {
                    return Ok(());
                }
                "is not the folder it was"
            }
            (Some(_), None) => "has vanished",
        };
        let text = format!(
            "the store's root {} {what}; mount it or put it back, or restart to use what is there \
            now",
            self.path.display()
        );
        Err(StoreError::new(StoreErrorKind::Unavailable, text))
    }

    /// Makes the root durably, unless it was ever seen.
    pub(super) fn make(&self) -> io::Result<()> {
        // Held while the folder is made, so that two first puts agree on one root.
        let mut first_seen = self.first_seen.lock();
        if first_seen.is_none() {
            make_with_parents(&self.path)?;
            *first_seen = folder_at(&self.path)?;
        }
        Ok(())
    }
}

/// Which folder is at `path` now, if any.
fn folder_at(path: &Path) -> io::Result<Option<Identity>> {
    match fs::metadata(path) {
        Ok(about) => Ok(Some(Identity { device: about.dev(), inode: about.ino() })),
        Err(error) if is_absent(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Creates `folder`, and missing parents, durably. Existing folders are not ours to make durable,
/// and their parents not ours to open.
fn make_with_parents(folder: &Path) -> io::Result<()> {
    match folder.parent() {
        Some(parent) if !folder.is_dir() => {
            make_with_parents(parent)?;
            make_folder(folder)?;
            sync_folder(parent)
        }
        _ => Ok(()),
    }
}
