//! Folders that this program makes for itself. Not here: where they are (`config`).

use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;

use crate::config;
use sawmill_console::exit::{Failure, Result};

/// Creates a folder and its parents, for this user only.
pub(crate) fn make_folder(path: &Path) -> Result<()> {
    let outcome = DirBuilder::new().recursive(true).mode(0o700).create(path);
    outcome
        .map_err(|error| Failure::io(format!("cannot make the folder {}", path.display()), &error))
}

/// Creates the folder that a socket or mount point is in.
pub(crate) fn make_parent(path: &Path) -> Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    folder.map_or(Ok(()), make_folder)
}

/// Creates a volume's folder and notes its store in it: a volume and its replica have the same id.
pub(crate) fn make_volume_folder(path: &Path, store_url: &str) -> Result<()> {
    make_folder(path)?;
    let word = path.join(config::STORE_FILE);
    if word.exists() {
        return Ok(());
    }
    let written = std::fs::write(&word, store_url);
    written.map_err(|error| Failure::io(format!("cannot write {}", word.display()), &error))
}
