//! Folders that this program makes for itself. Not here: where they are (`config`).

use std::path::Path;

use crate::config;
use sawmill_console::exit::{Failure, Result};

/// Creates a folder and its parents, for this user only.
pub(crate) fn make_folder(path: &Path) -> Result<()> {
    sawmill_sys::make_folder(path)
        .map_err(|error| Failure::io(format!("cannot make the folder {}", path.display()), &error))
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
