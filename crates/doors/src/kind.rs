//! A kind of door as the rest of this crate sees it: an entry of the table [`super::plan::KINDS`],
//! and a type for the doors that users request, with [`RequestedDoor`].
//!
//! Invariant: only the file of a kind knows its peculiarities. What doors of one kind share in a
//! process is the exception: `lib.rs` keeps it for them (memory of NBD clients, threads of ublk
//! devices, ublk devices without a server). Not here: the kinds.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use sawmill_device::{Error, ErrorKind, Result};
use sawmill_frontend::{Door, DoorPiece, QuietDoor};
use sawmill_sys::FileLock;

use super::DoorContext;

/// A kind of door.
pub(super) struct DoorKind {
    /// The keywords that a text form may begin with, before the `=`. The first is also the name of
    /// the option that requests such a door.
    pub(super) keywords: &'static [&'static str],
    /// The text forms, for the error about an invalid one.
    pub(super) forms: &'static [&'static str],
    /// Examples of the text form, for help.
    pub(super) examples: &'static [&'static str],
    /// Reads the text form: one of `keywords`, and what follows the `=`, empty without one.
    pub(super) parse: fn(&str, &str) -> Result<Box<dyn RequestedDoor>>,
}

/// A requested door. `Display` writes its text form, which travels to other processes: paths in it
/// are absolute, and [`DoorKind::parse`] reads it.
pub(super) trait RequestedDoor: fmt::Display + Send + Sync {
    /// Returns a usage error if the request makes no sense for this many volumes.
    fn check(&self, volumes: usize) -> Result<()>;

    /// Returns `InUse` if another process has the address. Called before anything is opened or
    /// fenced.
    fn check_free(&self) -> Result<()>;

    /// The same door for one volume of several: paths are below a folder, by the volume's name.
    /// `None`: one door serves all of them.
    fn of_volume(&self, name: &str) -> Option<Box<dyn RequestedDoor>>;

    /// The request that opens this door again for the same users, now that its address is known.
    /// `None`: this one does.
    fn reopened_at(&self, address: &str) -> Option<Box<dyn RequestedDoor>>;

    /// Opens a new door.
    fn open(&self, context: &DoorContext<'_>) -> Result<DoorInstance>;

    /// Takes over the door of another process, which has released it. The door may still be quiet.
    fn take_over(&self, pieces: Vec<DoorPiece>, context: &DoorContext<'_>) -> Result<DoorInstance>;
}

/// A door, as its kind opened it.
pub(super) struct DoorInstance {
    pub(super) door: Arc<dyn Door>,
    /// The same door, if it is quiet.
    pub(super) quiet: Option<Box<dyn QuietDoor>>,
    /// Held as long as this process serves the door: only the process with this lock may serve it.
    pub(super) claim: Option<FileLock>,
}

impl DoorInstance {
    pub(super) fn new(door: impl Door + 'static) -> Self {
        DoorInstance { door: Arc::new(door), quiet: None, claim: None }
    }
}

/// The same path, valid in another process.
pub(super) fn absolute(path: &Path) -> PathBuf {
    // Fails for an empty path and without a current folder; opening then tells that.
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

/// Creates the folder that a socket or mount point is in, for this user only.
pub(super) fn make_parent(path: &Path) -> Result<()> {
    let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) else {
        return Ok(());
    };
    sawmill_sys::make_folder(folder).map_err(|error| cannot_make(folder, error))
}

/// The error of a folder that cannot be made.
pub(super) fn cannot_make(folder: &Path, error: std::io::Error) -> Error {
    let what = format!("cannot make the folder {}", folder.display());
    Error::caused(ErrorKind::of_io(&error), what, error)
}

/// A kernel that writes memory to a device of ours must not wait until our own memory is read back
/// in.
pub(super) fn hold_memory() {
    // Not an error: it takes a right or a high limit, and the door works while memory suffices.
    if let Err(error) = sawmill_sys::reclaim::lock_memory() {
        tracing::warn!(
            "cannot lock memory, so the kernel may swap this process out to a disk that it serves: \
            {error}"
        );
    }
}
